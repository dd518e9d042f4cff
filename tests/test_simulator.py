"""The NKI simulator by itself: semantics and refusals the documentation states, and the signatures it documents."""

import inspect

import pytest
import torch
from conftest import requires_neuron
from expecttest import assert_expected_inline
from threads import run_in_threads

pytestmark = requires_neuron

nki = nisa = nl = None


@pytest.fixture(autouse=True, scope="module")
def names():
    global nki, nisa, nl
    import nki as package
    import nki.isa as isa
    import nki.language as language

    nki, nisa, nl = package, isa, language


def launch(body, *args, lnc=1, **kwargs):
    return nki.jit(body)[lnc](*args, **kwargs)


def sbuf(shape, dtype="float32"):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def psum(shape):
    return nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)


# Facts of the NKI 0.6 API pages: names, order and defaults; an enumeration's member stands for itself.
SIGNATURES = {
    "dma_copy": "dst, src, priority=None, oob_mode=error, dge_mode=unknown, engine=unknown, name=None",
    "dma_compute": "dst, srcs, reduce_op, scales=None, unique_indices=True, oob_mode=error, name=None",
    "tensor_copy": "dst, src, engine=unknown, name=None",
    "memset": "dst, value, engine=unknown, name=None",
    "tensor_copy_predicated": "dst, src, predicate, reverse_pred=False, name=None",
    "tensor_tensor": "dst, data1, data2, op, engine=unknown, name=None",
    "tensor_scalar": "dst, data, op0, operand0, reverse0=False, op1=None, operand1=None, reverse1=False, engine=unknown, name=None",
    "scalar_tensor_tensor": "dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, name=None",
    "tensor_reduce": "dst, op, data, axis, negate=False, keepdims=False, name=None",
    "iota": "dst, pattern, offset=0, channel_multiplier=0, name=None",
    "affine_select": "dst, pattern, channel_multiplier, on_true_tile, on_false_value, cmp_op=nl.equal, offset=0, name=None",
    "nc_matmul": "dst, stationary, moving, is_stationary_onezero=False, is_moving_onezero=False, is_transpose=False, "
    "accumulate=None, tile_position=(), tile_size=(), perf_mode=none, name=None",
    "nc_transpose": "dst, data, engine=unknown, name=None",
    "register_alloc": "x=None",
    "register_move": "dst, src",
    "register_load": "dst, src",
    "register_store": "dst, src",
    "core_barrier": "data, cores, engine=gpsimd, name=None",
}


@pytest.mark.parametrize("instruction", SIGNATURES)
def test_signatures_are_the_documented_ones(instruction):
    def default(value):
        return getattr(value, "name", None) if hasattr(value, "value") else repr(value)

    parameters = inspect.signature(getattr(nisa, instruction)).parameters.values()
    found = ", ".join(p.name if p.default is p.empty else f"{p.name}={default(p.default)}" for p in parameters)
    assert found == SIGNATURES[instruction]


def test_language_signatures_are_the_documented_ones():
    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(nl.ndarray) == ["shape", "dtype", "buffer", "name", "address"]
    assert names(nl.fori_loop) == ["lower", "upper", "body_fun", "step"]
    assert names(nl.program_id) == ["axis"] and names(nl.num_programs) == ["axes"]


def test_fresh_memory_is_nan_or_no_row_number():
    def kernel(out, out_int):
        nisa.dma_copy(dst=out, src=sbuf((4, 3)))
        nisa.dma_copy(dst=out_int, src=sbuf((4, 3), nl.int32))

    floats, integers = torch.zeros(4, 3), torch.zeros(4, 3, dtype=torch.int32)
    launch(kernel, floats, integers)
    assert floats.isnan().all() and (integers > 2**30).all()


def scatter(input, index, src, mode="error"):
    rows, columns = src.shape
    target, tile = sbuf((rows, 1), nl.int32), sbuf((rows, columns))
    nisa.dma_copy(dst=target, src=index.ap(pattern=[[1, rows], [1, 1]]))
    nisa.dma_copy(dst=tile, src=src)
    nisa.dma_copy(
        dst=input.ap(pattern=[[columns, rows], [1, columns]], vector_offset=target, indirect_dim=0),
        src=tile,
        oob_mode=nisa.oob_mode[mode],
    )


def test_rows_of_one_store_land_in_an_order_of_the_seed():
    index, src = torch.tensor([1, 1], dtype=torch.int32), torch.tensor([[1.0], [2.0]])
    outcomes = set()
    for seed in range(20):
        input = torch.zeros(3, 1)
        with nki.simulator.seed(seed):
            launch(scatter, input, index, src)
        outcomes.add(input[1].item())
    assert outcomes == {1.0, 2.0}


@pytest.mark.parametrize("value", [3, -1])
def test_an_index_out_of_range_raises_before_anything_is_written(value):
    input = torch.zeros(3, 1)
    with pytest.raises(IndexError) as caught:
        launch(scatter, input, torch.tensor([0, value], dtype=torch.int32), torch.ones(2, 1))
    assert str(caught.value) == f"dma_copy: index {value} at position 1; accepted is 0 <= index < 3"
    assert not input.any()


def test_an_index_out_of_range_is_skipped_where_asked():
    input = torch.zeros(3, 1)
    launch(scatter, input, torch.tensor([0, 7], dtype=torch.int32), torch.ones(2, 1), mode="skip")
    assert input.flatten().tolist() == [1, 0, 0]


def test_a_skipped_row_of_a_gather_keeps_what_was_there():
    def kernel(table, index, out):
        target, tile = sbuf((2, 1), nl.int32), sbuf((2, 1))
        nisa.dma_copy(dst=target, src=index.ap(pattern=[[1, 2], [1, 1]]))
        nisa.memset(dst=tile, value=5.0)
        view = table.ap(pattern=[[1, 2], [1, 1]], vector_offset=target, indirect_dim=0)
        nisa.dma_copy(dst=tile, src=view, oob_mode=nisa.oob_mode.skip)
        nisa.dma_copy(dst=out, src=tile)

    out = torch.zeros(2, 1)
    launch(kernel, torch.tensor([[1.0], [2.0]]), torch.tensor([9, 1], dtype=torch.int32), out)
    assert out.flatten().tolist() == [5, 2]


def test_matmul_spreads_nan_and_accumulates():
    def kernel(out):
        ones, moving, total, result = sbuf((2, 2)), sbuf((2, 2)), psum((2, 2)), sbuf((2, 2))
        nisa.iota(ones, [[1, 2]], 0, -1)
        nisa.tensor_scalar(dst=ones, data=ones, op0=nl.equal, operand0=0.0)
        nisa.memset(dst=moving, value=float("inf"))
        nisa.memset(dst=moving[0:1, :], value=1.0)
        nisa.nc_matmul(dst=total, stationary=ones, moving=moving)
        nisa.nc_matmul(dst=total, stationary=ones, moving=moving)
        nisa.tensor_copy(dst=result, src=total)
        nisa.dma_copy(dst=out, src=result)

    out = torch.zeros(2, 2)
    launch(kernel, out)
    assert out[0].isnan().all() and not out[1].isfinite().any()


def test_arithmetic_on_integers_loses_what_float32_loses_and_gpsimd_does_not():
    def kernel(out, engine):
        a, b = sbuf((1, 1), nl.int32), sbuf((1, 1), nl.int32)
        nisa.memset(dst=a, value=2**24 + 1)
        nisa.memset(dst=b, value=2**24)
        equal = sbuf((1, 1))
        nisa.tensor_tensor(dst=equal, data1=a, data2=b, op=nl.equal)
        exact = sbuf((1, 1), nl.int32)
        nisa.tensor_tensor(dst=exact, data1=a, data2=b, op=nl.subtract)
        nisa.dma_copy(dst=out[0:1, 0:1], src=equal)
        nisa.dma_copy(dst=out[0:1, 1:2], src=exact)

    out = torch.zeros(1, 2)
    launch(kernel, out, None)
    assert out.tolist() == [[1, 1]]


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int16", "uint16"])
def test_bit_patterns_reach_a_permuted_tile(dtype):
    """A permuted tile cannot be flattened as a view; what is written must land in it all the same."""

    def kernel(out):
        tile, ones = sbuf((2, 3, 4), dtype), sbuf((2, 4, 3), dtype)
        nisa.memset(dst=tile, value=1)
        nisa.memset(dst=ones, value=1)
        nisa.tensor_scalar(dst=tile.permute((0, 2, 1)), data=ones, op0=nl.bitwise_or, operand0=6)
        nisa.dma_copy(dst=out[0:2], src=tile)
        nisa.tensor_tensor(dst=tile.permute((0, 2, 1)), data1=ones, data2=ones, op=nl.bitwise_xor)
        nisa.dma_copy(dst=out[2:4], src=tile)

    out = torch.full((4, 3, 4), 9, dtype=getattr(torch, dtype))
    launch(kernel, out)
    assert out.view(-1).tolist() == [7] * 24 + [0] * 24


def test_a_hardware_loop_reads_its_register_as_an_offset():
    def kernel(src, out):
        def body(row):
            tile = sbuf((2, 3))
            nisa.dma_copy(dst=tile, src=src.ap(pattern=[[3, 2], [1, 3]], scalar_offset=row, indirect_dim=0))
            nisa.dma_copy(dst=out.ap(pattern=[[3, 2], [1, 3]], scalar_offset=row, indirect_dim=0), src=tile)

        nl.fori_loop(0, 6, body, step=2)

    src, out = torch.arange(18.0).view(6, 3), torch.zeros(6, 3)
    launch(kernel, src, out)
    assert torch.equal(src, out)


def test_a_register_cannot_decide_python_control_flow():
    with pytest.raises(TypeError, match="not known while the kernel is traced"):
        launch(lambda: nl.fori_loop(0, 1, lambda row: int(row)))


def test_memory_is_given_back_when_a_tile_is_dropped():
    def kernel():
        for _ in range(100):
            sbuf((128, 40000))

    launch(kernel)


def dma_compute_scatter(values):
    def kernel(input, index):
        rows = len(values)
        target, tile = sbuf((rows, 1), nl.int32), sbuf((rows, 1))
        nisa.dma_copy(dst=target, src=index.ap(pattern=[[1, rows], [1, 1]]))
        nisa.memset(dst=tile, value=1.0)
        view = input.ap(pattern=[[1, rows], [1, 1]], vector_offset=target, indirect_dim=0)
        nisa.dma_compute(dst=view, srcs=[view, tile], reduce_op=nl.add)

    input = torch.zeros(4, 1)
    launch(kernel, input, torch.tensor(values, dtype=torch.int32))
    return input.flatten().tolist()


def test_dma_compute_accumulates_unique_rows_and_refuses_repeats():
    assert dma_compute_scatter([0, 3]) == [1, 0, 0, 1]
    with pytest.raises(nisa.NkiValidationError, match="an index repeats"):
        dma_compute_scatter([3, 3])


REFUSED = {
    "129 partitions": lambda: sbuf((129, 1)),
    "one-dimensional tile": lambda: sbuf((4,)),
    "SBUF full": lambda: [sbuf((128, 30000)), sbuf((128, 30000))],
    "PSUM full": lambda: [psum((128, 512)) for _ in range(9)],
    "unknown dtype": lambda: sbuf((1, 1), "float64"),
    "matmul into SBUF": lambda: nisa.nc_matmul(dst=sbuf((2, 2)), stationary=sbuf((2, 2)), moving=sbuf((2, 2))),
    "moving of 513 columns": lambda: nisa.nc_matmul(dst=psum((2, 513)), stationary=sbuf((2, 2)), moving=sbuf((2, 513))),
    "stationary of 129 columns": lambda: nisa.nc_matmul(
        dst=psum((128, 2)), stationary=sbuf((2, 129)), moving=sbuf((2, 2))
    ),
    "mixed matmul dtypes": lambda: nisa.nc_matmul(
        dst=psum((2, 2)), stationary=sbuf((2, 2), nl.bfloat16), moving=sbuf((2, 2))
    ),
    "matmul across banks": lambda: nisa.nc_matmul(
        dst=psum((2, 1024))[:, 256:768], stationary=sbuf((2, 2)), moving=sbuf((2, 512))
    ),
    "accumulate on nothing": lambda: nisa.nc_matmul(
        dst=psum((2, 2)), stationary=sbuf((2, 2)), moving=sbuf((2, 2)), accumulate=True
    ),
    "onezero that is not": lambda: nisa.nc_matmul(
        dst=psum((2, 2)), stationary=sbuf((2, 2)), moving=sbuf((2, 2)), is_stationary_onezero=True
    ),
    "two PSUM inputs": lambda: nisa.tensor_tensor(dst=sbuf((2, 2)), data1=psum((2, 2)), data2=psum((2, 2)), op=nl.add),
    "GpSimd on PSUM": lambda: nisa.tensor_copy(dst=sbuf((2, 2)), src=psum((2, 2)), engine=nisa.engine.gpsimd),
    "bitvec on floats": lambda: nisa.tensor_scalar(dst=sbuf((2, 2)), data=sbuf((2, 2)), op0=nl.bitwise_and, operand0=1),
    "bitvec and arithmetic": lambda: nisa.tensor_scalar(
        dst=sbuf((2, 2), nl.int32),
        data=sbuf((2, 2), nl.int32),
        op0=nl.bitwise_and,
        operand0=1,
        op1=nl.add,
        operand1=1.0,
    ),
    "integer operand tile": lambda: nisa.tensor_scalar(
        dst=sbuf((2, 2)), data=sbuf((2, 2)), op0=nl.add, operand0=sbuf((2, 1), nl.int32)
    ),
    "other shapes": lambda: nisa.tensor_tensor(dst=sbuf((2, 2)), data1=sbuf((2, 3)), data2=sbuf((2, 2)), op=nl.add),
    "DMA from PSUM": lambda: nisa.dma_copy(dst=sbuf((2, 2)), src=psum((2, 2))),
    "DMA of other sizes": lambda: nisa.dma_copy(dst=sbuf((2, 2)), src=sbuf((2, 3))),
    "hardware DGE indirect": lambda: nisa.dma_copy(dst=sbuf((2, 1)), src=_indirect(), dge_mode=nisa.dge_mode.hwdge),
    "float index": lambda: _indirect(nl.float32),
    "partition step": lambda: sbuf((16, 32)).ap(pattern=[[64, 8], [1, 32]]),
    "start partition": lambda: nisa.memset(dst=sbuf((128, 2))[1:2, :], value=0.0),
    "reduction of partitions": lambda: nisa.tensor_reduce(dst=sbuf((1, 2)), op=nl.add, data=sbuf((2, 2)), axis=0),
    "undocumented rounding": lambda: _round_to_int(),
    "dynamic partition select": lambda: sbuf((4, 4)).ap(pattern=[[4, 1], [1, 4]], scalar_offset=nisa.register_alloc(0)),
}


def _indirect(dtype=None):
    index = sbuf((2, 1), dtype or nl.int32)
    nisa.memset(dst=index, value=0)
    return nl.zeros((4, 1), nl.float32, nl.private_hbm).ap(pattern=[[1, 2], [1, 1]], vector_offset=index)


def _round_to_int():
    half, integer = sbuf((1, 1)), sbuf((1, 1), nl.int32)
    nisa.memset(dst=half, value=0.5)
    nisa.tensor_copy(dst=integer, src=half)


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_documentation_refuses(what):
    with pytest.raises(nisa.NkiValidationError):
        launch(lambda: REFUSED[what]() and None)


def test_what_is_allowed_beside_each_refusal():
    """The same calls inside the limits, so that a refusal of everything would show."""

    def kernel():
        a, b, total = sbuf((128, 128)), sbuf((128, 512)), psum((128, 512))
        nisa.memset(dst=a, value=1.0)
        nisa.memset(dst=b, value=1.0)
        nisa.nc_matmul(dst=total, stationary=a, moving=b, is_stationary_onezero=True, accumulate=False)
        nisa.nc_matmul(dst=total, stationary=a, moving=b, accumulate=True)
        nisa.tensor_tensor(dst=b, data1=total, data2=b, op=nl.add)
        nisa.memset(dst=sbuf((128, 2))[32:64, :], value=0.0)
        nisa.dma_copy(dst=sbuf((2, 1)), src=_indirect())
        sbuf((16, 32)).ap(pattern=[[32, 8], [1, 32]])

    launch(kernel)


def test_a_refusal_names_instruction_argument_and_what_is_accepted():
    with pytest.raises(nisa.NkiValidationError) as caught:
        launch(lambda: REFUSED["moving of 513 columns"]())
    assert_expected_inline(
        str(caught.value),
        """nc_matmul: moving has 513 columns; accepted are up to 512""",
    )


@pytest.mark.parametrize("access", [
    lambda: sbuf((4, 4))[:, 0:5],
    lambda: sbuf((4, 4)).ap(pattern=[[4, 4], [1, 5]]),
    lambda: nl.zeros((4, 4), nl.float32, nl.private_hbm).ap(pattern=[[4, 5], [1, 4]]),
])  # fmt: skip
def test_static_access_outside_a_tensor_is_refused(access):
    with pytest.raises(IndexError):
        launch(lambda: access() and None)


def test_two_launches_in_two_threads_do_not_share_state():
    def work(number):
        for _ in range(20):
            input = torch.zeros(4, 1)
            launch(scatter, input, torch.tensor([0, 1], dtype=torch.int32), torch.ones(2, 1))
            assert input.flatten().tolist() == [1, 1, 0, 0]

    run_in_threads(4, work)


def test_the_plain_kernel_loses_repeats():
    from benchmarks.reference_kernels.gather_add_store import gather_add_store

    input = torch.zeros(4, 1)
    gather_add_store[1](input, torch.tensor([0, 0, 1, 2, 2, 2], dtype=torch.int32), torch.ones(6, 1))
    assert input.flatten().tolist() == [1, 1, 1, 0]
