"""nki.language: dtypes, memory regions, tile sizes, operators, allocation, loops and the grid.

Operators are tokens for the `op` arguments of instructions; the high-level math functions of the same names are not simulated.
"""

import torch

from . import launch, trace
from .errors import check
from .tensor import PARTITIONS, DynamicSlice, NkiTensor, VirtualRegister, allocate, scalar_value  # noqa: F401

bool_, uint8, int8, uint16, int16, uint32, int32 = "bool_", "uint8", "int8", "uint16", "int16", "uint32", "int32"
float16, bfloat16, float32 = "float16", "bfloat16", "float32"

sbuf, psum, hbm, private_hbm, shared_hbm = "sbuf", "psum", "private_hbm", "private_hbm", "shared_hbm"


class NKIObject:
    """Base class for classes that kernels declare."""


class tile_size:
    """Limits of the hardware, in elements and bytes (page nki.language.tile_size)."""

    pmax = PARTITIONS
    psum_bank_fmax = 512
    psum_bank_fmax_bytes = 2048
    psum_num_banks = 8
    gemm_stationary_fmax = 128
    gemm_moving_fmax = 512
    sbuf_fmax_bytes = launch.SBUF_BYTES
    sbuf_fmax = launch.SBUF_BYTES // 4


class Operator:
    """An ALU operator (table "Supported Math Operators by NKI ISA")."""

    def __init__(self, name, function, kind="arithmetic", reduction=None, unary=False):
        self.name, self.function, self.kind, self.reduction, self.unary = name, function, kind, reduction, unary

    def __repr__(self):
        return f"nl.{self.name}"

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"nl.{self.name}() as a function is not simulated; use the nki.isa instruction")


def _compare(function):
    return lambda x, y: function(x, y).to(torch.float32)


def _logical(function):
    return lambda x, y: function(_as_tensor(x) != 0, _as_tensor(y) != 0).to(torch.float32)


def _as_tensor(value):
    return value if isinstance(value, torch.Tensor) else torch.tensor(value)


add = Operator("add", torch.add, reduction=lambda x: x.sum(-1))
subtract = Operator("subtract", torch.sub, reduction=lambda x: x[..., 0] - x[..., 1:].sum(-1))
multiply = Operator("multiply", torch.mul, reduction=lambda x: x.prod(-1))
maximum = Operator("maximum", lambda x, y: torch.maximum(x, _as_tensor(y).to(x.dtype)), reduction=lambda x: x.amax(-1))
minimum = Operator("minimum", lambda x, y: torch.minimum(x, _as_tensor(y).to(x.dtype)), reduction=lambda x: x.amin(-1))
equal = Operator("equal", _compare(torch.eq))
not_equal = Operator("not_equal", _compare(torch.ne))
greater = Operator("greater", _compare(torch.gt))
greater_equal = Operator("greater_equal", _compare(torch.ge))
less = Operator("less", _compare(torch.lt))
less_equal = Operator("less_equal", _compare(torch.le))
logical_and = Operator("logical_and", _logical(torch.logical_and))
logical_or = Operator("logical_or", _logical(torch.logical_or))
logical_xor = Operator("logical_xor", _logical(torch.logical_xor))
abs = Operator("abs", lambda x, _: x.abs(), unary=True)
square = Operator("square", lambda x, _: x * x, unary=True)
relu = Operator("relu", lambda x, _: x.relu(), unary=True)
copy = Operator("copy", lambda x, _: x, unary=True)


def _fold(function):
    def reduce(x):
        result = x[..., 0].clone()
        for position in range(1, x.shape[-1]):
            result = function(result, x[..., position])
        return result

    return reduce


bitwise_and = Operator("bitwise_and", torch.bitwise_and, "bitvec", _fold(torch.bitwise_and))
bitwise_or = Operator("bitwise_or", torch.bitwise_or, "bitvec", _fold(torch.bitwise_or))
bitwise_xor = Operator("bitwise_xor", torch.bitwise_xor, "bitvec", _fold(torch.bitwise_xor))
invert = Operator("invert", lambda x, _: torch.bitwise_not(x), "bitvec", unary=True)


def is_hbm(buffer):
    return buffer in (private_hbm, shared_hbm, "hbm")


def is_sbuf(buffer):
    return buffer == sbuf


def is_psum(buffer):
    return buffer == psum


def is_on_chip(buffer):
    return buffer in (sbuf, psum)


def ndarray(shape, dtype, buffer=sbuf, name="", address=None):
    """A tensor in fresh memory (page nki.language.ndarray); addresses are not simulated."""
    check(
        buffer in (sbuf, psum, private_hbm, shared_hbm),
        f"ndarray: buffer is {buffer!r}; accepted are the memory regions",
    )
    check(address is None, "ndarray: address is given; the simulator allocates by itself")
    return allocate(shape, dtype, buffer)


def zeros(shape, dtype, buffer=sbuf, name=""):
    tensor = ndarray(shape, dtype, buffer, name)
    if is_on_chip(buffer):
        from . import isa

        isa.memset(dst=tensor, value=0)
    else:
        tensor.elements().zero_()
    return tensor


def ds(start, size):
    return DynamicSlice(start, size)


def static_range(start, stop=None, step=1):
    """An unrolled loop: Python's range (page nki.language.static_range)."""
    return range(start) if stop is None else range(start, stop, step)


affine_range = sequential_range = static_range


def dynamic_range(start, stop=None, step=1):
    raise TypeError("dynamic_range belongs to the parser frontend; kernels are traced, use nl.fori_loop")


def _bound(value):
    return value if isinstance(value, int) else scalar_value(value)


def fori_loop(lower, upper, body_fun, step=1):
    """A hardware loop: body_fun gets a register (page nki.language.fori_loop)."""
    check(
        isinstance(step, int) and step >= 1, f"fori_loop: step is {step!r}; accepted is a compile-time positive integer"
    )
    trace.branch(lower)
    trace.branch(upper)
    with launch.current().loop() as start_iteration:
        for value in range(_bound(lower), _bound(upper), step):
            start_iteration()
            body_fun(VirtualRegister(value, frozen=True))


def while_loop(init, body_fun):
    """Loops while the register that body_fun returns is not zero (page nki.language.while_loop)."""
    register = init
    with launch.current().loop() as start_iteration:
        while scalar_value(register) != 0:
            trace.branch(register)
            start_iteration()
            register = body_fun(register)


def program_id(axis=0):
    check(axis == 0, f"program_id: axis is {axis}; accepted is 0, a launch grid has one axis")
    return launch.current().program


def num_programs(axes=0):
    check(axes == 0, f"num_programs: axes is {axes}; accepted is 0, a launch grid has one axis")
    return launch.current().programs


def program_ndim():
    return 1
