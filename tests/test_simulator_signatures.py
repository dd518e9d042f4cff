"""Every name the simulator offers in nki.isa and nki.language against the NKI 0.6 API pages.

Annotations are left out, and a default that is a member of an enumeration or a named value stands as its name.
"""

import enum
import inspect
import types

import pytest
import torch
from conftest import requires_neuron

pytestmark = requires_neuron

ISA = {
    "activation": "(dst, op, data, bias=None, scale=1.0, reduce_op=None, reduce_res=None, reduce_cmd=idle, name=None)",
    "affine_select": "(dst, pattern, channel_multiplier, on_true_tile, on_false_value, cmp_op=equal, offset=0, name=None)",
    "core_barrier": "(data, cores, engine=gpsimd, name=None)",
    "dma_compute": "(dst, srcs, reduce_op, scales=None, unique_indices=True, oob_mode=error, name=None)",
    "dma_copy": "(dst, src, priority=None, oob_mode=error, dge_mode=unknown, engine=unknown, name=None)",
    "get_nc_version": "()",
    "iota": "(dst, pattern, offset=0, channel_multiplier=0, name=None)",
    "memset": "(dst, value, engine=unknown, name=None)",
    "nc_matmul": "(dst, stationary, moving, is_stationary_onezero=False, is_moving_onezero=False, is_transpose=False, "
    "accumulate=None, tile_position=(), tile_size=(), perf_mode=none, name=None)",
    "nc_transpose": "(dst, data, engine=unknown, name=None)",
    "register_alloc": "(x=None)",
    "register_load": "(dst, src)",
    "register_move": "(dst, src)",
    "register_store": "(dst, src)",
    "scalar_tensor_tensor": "(dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, name=None)",
    "tensor_copy": "(dst, src, engine=unknown, name=None)",
    "tensor_copy_predicated": "(dst, src, predicate, reverse_pred=False, name=None)",
    "tensor_reduce": "(dst, op, data, axis, negate=False, keepdims=False, name=None)",
    "tensor_scalar": "(dst, data, op0, operand0, reverse0=False, op1=None, operand1=None, reverse1=False, engine=unknown, "
    "name=None)",
    "tensor_scalar_reduce": "(dst, data, op0, operand0, reduce_op, reduce_res=None, reverse0=False, "
    "reduce_cmd=reset_reduce, reduce_init=None, reduce_res_negate=False, name=None)",
    "tensor_tensor": "(dst, data1, data2, op, engine=unknown, name=None)",
}

ENUMERATIONS = {
    "dge_mode": {"unknown": 0, "swdge": 1, "hwdge": 2, "none": 3},
    "engine": {"unknown": 0, "tensor": 1, "scalar": 2, "gpsimd": 3, "dma": 4, "vector": 5, "sync": 6},
    "matmul_perf_mode": {"none": "none", "double_row": "double_row"},
    "nc_version": {"gen2": 2, "gen3": 3, "gen4": 4},
    "oob_mode": {"error": 0, "skip": 1},
    "reduce_cmd": {"idle": 0, "reset": 1, "reduce": 2, "reset_reduce": 3, "load_reduce": 4},
}

ISA_CLASSES = {"NkiValidationError", "VirtualRegister"}

# Operators, which are also functions in the documentation.
UNARY, BINARY = "(x, dtype=None)", "(x, y, dtype=None)"

LANGUAGE = {
    "abs": UNARY,
    "add": BINARY,
    "affine_range": "(start, stop=None, step=1)",
    "bitwise_and": BINARY,
    "bitwise_or": BINARY,
    "bitwise_xor": BINARY,
    "copy": UNARY,
    "ds": "(start, size)",
    "dynamic_range": "(start, stop=None, step=1)",
    "equal": BINARY,
    "fori_loop": "(lower, upper, body_fun, step=1)",
    "greater": BINARY,
    "greater_equal": BINARY,
    "invert": UNARY,
    "is_hbm": "(buffer)",
    "is_on_chip": "(buffer)",
    "is_psum": "(buffer)",
    "is_sbuf": "(buffer)",
    "less": BINARY,
    "less_equal": BINARY,
    "logical_and": BINARY,
    "logical_or": BINARY,
    "logical_xor": BINARY,
    "maximum": BINARY,
    "minimum": BINARY,
    "multiply": BINARY,
    "ndarray": "(shape, dtype, buffer=sbuf, name='', address=None)",
    "not_equal": BINARY,
    "num_programs": "(axes=0)",
    "program_id": "(axis=0)",
    "program_ndim": "()",
    "relu": UNARY,
    "sequential_range": "(start, stop=None, step=1)",
    "square": UNARY,
    "static_range": "(start, stop=None, step=1)",
    "subtract": BINARY,
    "while_loop": "(init, body_fun)",
    "zeros": "(shape, dtype, buffer=sbuf, name='')",
}

DTYPES = {"bool_", "uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "bfloat16", "float32"}

REGIONS = {"sbuf", "psum", "hbm", "private_hbm", "shared_hbm"}

LANGUAGE_CLASSES = {"NKIObject", "NkiTensor"}

TILE_SIZE = {
    "pmax",
    "psum_fmax",
    "psum_bank_fmax",
    "psum_bank_fmax_bytes",
    "psum_num_banks",
    "psum_min_align",
    "gemm_stationary_fmax",
    "gemm_moving_fmax",
    "bn_stats_fmax",
    "sbuf_size_bytes",
    "sbuf_fmax",
    "sbuf_fmax_bytes",
    "sbuf_min_align",
    "total_available_sbuf_size",
}

TENSOR = {
    "ap": "(self, pattern, offset=None, scalar_offset=None, vector_offset=None, indirect_dim=0, dtype=None)",
    "broadcast": "(self, dim, size)",
    "expand_dim": "(self, dim)",
    "get_pattern": "(self)",
    "is_contiguous": "(self)",
    "is_indirect": "(self)",
    "permute": "(self, dims)",
    "reshape": "(self, shape)",
    "select": "(self, dim, index)",
    "slice": "(self, dim, start, end, step=1)",
    "squeeze_dim": "(self, dim)",
    "vector_select": "(self, dim, vector_offset)",
    "view": "(self, dtype)",
}

TENSOR_ATTRIBUTES = {"shape", "strides", "offset", "name", "dtype", "buffer", "ndim", "size"}

# What the simulator keeps in these modules for itself.
PRIVATE = {"DynamicSlice", "Operator", "PARTITIONS", "VirtualRegister", "allocate", "check", "scalar_value"}
PRIVATE_OF_TENSORS = {"dynamic", "elements", "is_on_chip", "storage"}


@pytest.fixture
def nisa():
    import nki.isa

    return nki.isa


@pytest.fixture
def nl():
    import nki.language

    return nki.language


def public(names):
    return {name for name in names if not name.startswith("_")}


def signature(function):
    """As in the tables; an operator's is that of the function of its name."""
    import nki.language

    if isinstance(function, nki.language.Operator):
        return UNARY if function.unary else BINARY

    def shown(parameter):
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        default = parameter.default
        if default is parameter.empty:
            return parameter.name
        if isinstance(default, (enum.Enum, nki.language.Operator)):
            return f"{parameter.name}={default.name}"
        if parameter.name == "buffer":
            return f"{parameter.name}={default}"
        return f"{parameter.name}={default!r}"

    return f"({', '.join(shown(parameter) for parameter in inspect.signature(function).parameters.values())})"


@pytest.mark.parametrize("name", ISA)
def test_instructions(nisa, name):
    assert signature(getattr(nisa, name)) == ISA[name]


@pytest.mark.parametrize("name", ENUMERATIONS)
def test_enumerations(nisa, name):
    found = getattr(nisa, name)
    assert issubclass(found, enum.Enum)
    assert {member.name: member.value for member in found} == ENUMERATIONS[name]


@pytest.mark.parametrize("name", LANGUAGE)
def test_language(nl, name):
    assert signature(getattr(nl, name)) == LANGUAGE[name]


@pytest.mark.parametrize("name", TENSOR)
def test_tensor_methods(nl, name):
    assert signature(getattr(nl.NkiTensor, name)) == TENSOR[name]


def test_isa_offers_nothing_else(nisa):
    assert set(nisa.__all__) == ISA.keys() | ENUMERATIONS.keys() | ISA_CLASSES
    assert all(inspect.isclass(getattr(nisa, name)) for name in ISA_CLASSES)


def test_language_offers_nothing_else(nl):
    found = {name for name in public(vars(nl)) if not isinstance(getattr(nl, name), types.ModuleType)}
    assert found - PRIVATE == LANGUAGE.keys() | DTYPES | REGIONS | LANGUAGE_CLASSES | {"tile_size"}


def test_tile_size_offers_nothing_else(nl):
    assert public(vars(nl.tile_size)) <= TILE_SIZE


def test_tensors_offer_nothing_else(nl):
    import nki

    def kernel(argument):
        for tensor in (argument, nl.ndarray((2, 2), dtype=nl.float32, buffer=nl.sbuf)):
            assert public(dir(tensor)) - PRIVATE_OF_TENSORS == TENSOR.keys() | TENSOR_ATTRIBUTES

    nki.jit(kernel)[1](torch.zeros(2, 2))


@pytest.mark.parametrize("name", [name for name, documented in LANGUAGE.items() if documented in (UNARY, BINARY)])
def test_an_operator_is_no_function_here(nl, name):
    with pytest.raises(NotImplementedError):
        getattr(nl, name)(None)
