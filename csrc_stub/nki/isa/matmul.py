"""Tensor Engine: nisa.nc_matmul and nisa.nc_transpose (their API pages)."""

import torch

from ..errors import check
from ..tensor import itemsize
from .enums import engine, matmul_perf_mode
from .operands import as_float32, begin, flat, in_buffers, write

_perf = matmul_perf_mode
_engines = engine
BANK_BYTES = 2048


def _one_bank(name, dst):
    row = dst._row_elements()
    first = dst.offset % row * itemsize(dst.dtype)
    last = (
        first
        + (sum((n - 1) * s for n, s in zip(dst.shape[1:], dst.strides[1:], strict=True)) + 1) * itemsize(dst.dtype)
        - 1
    )
    check(
        first // BANK_BYTES == last // BANK_BYTES,
        f"{name}: dst spans bytes {first} to {last} of a PSUM partition; accepted is one bank of {BANK_BYTES} bytes",
    )


def nc_matmul(
    dst,
    stationary,
    moving,
    is_stationary_onezero=False,
    is_moving_onezero=False,
    is_transpose=False,
    accumulate=None,
    tile_position=(),
    tile_size=(),
    perf_mode=matmul_perf_mode.none,
    name=None,
):
    """dst = stationary.T @ moving, products of the operands summed in float32."""
    begin("nc_matmul", dst=dst, stationary=stationary, moving=moving)
    in_buffers("nc_matmul", ("sbuf",), stationary=stationary, moving=moving)
    in_buffers("nc_matmul", ("psum",), dst=dst)
    check(
        not tile_position and not tile_size and perf_mode is _perf.none,
        "nc_matmul: tiling and fp8 modes are not simulated",
    )
    check(not is_transpose, "nc_matmul: is_transpose is not simulated; use nc_transpose")
    for argument, tile in (("stationary", stationary), ("moving", moving)):
        check(
            tile.dtype in ("float32", "bfloat16", "float16"),
            f"nc_matmul: {argument} has dtype {tile.dtype}; accepted are float32, bfloat16 and float16",
        )
    check(
        (stationary.dtype == "float32") == (moving.dtype == "float32"),
        f"nc_matmul: stationary has dtype {stationary.dtype}, moving {moving.dtype}; accepted with float32 is float32",
    )
    check(dst.dtype == "float32", f"nc_matmul: dst has dtype {dst.dtype}; accepted is float32")
    left, right = as_float32(stationary), as_float32(moving)
    check(
        left.shape[0] == right.shape[0],
        f"nc_matmul: stationary has {left.shape[0]} partitions, moving {right.shape[0]}; accepted are equal numbers",
    )
    check(left.shape[1] <= 128, f"nc_matmul: stationary has {left.shape[1]} columns; accepted are up to 128")
    check(right.shape[1] <= 512, f"nc_matmul: moving has {right.shape[1]} columns; accepted are up to 512")
    check(
        dst.shape[0] == left.shape[1] and dst.size == left.shape[1] * right.shape[1],
        f"nc_matmul: dst has shape {dst.shape}; accepted is {(left.shape[1], right.shape[1])}",
    )
    _one_bank("nc_matmul", dst)
    for flag, argument, values in ((is_stationary_onezero, "stationary", left), (is_moving_onezero, "moving", right)):
        check(
            not flag or bool(((values == 0) | (values == 1)).all()),
            f"nc_matmul: is_{argument}_onezero is True, but {argument} holds other numbers",
        )
    written = dst.storage.from_matmul.as_strided(dst.shape, dst.strides, dst.offset)
    if accumulate is None:
        fresh, matmul = bool((written == 0).all()), bool((written == 1).all())
        check(fresh or matmul, "nc_matmul: dst was written by something else; accumulating onto it is undefined")
        accumulate = matmul
    elif accumulate:
        check(bool((written == 1).all()), "nc_matmul: accumulate is True, but no matmul started dst")
    result = left.t() @ right
    write("nc_matmul", dst, as_float32(dst) + result if accumulate else result, by_matmul=True)


def nc_transpose(dst, data, engine=engine.unknown, name=None):
    """Exact transposition of [partitions, elements]."""
    begin("nc_transpose", dst=dst, data=data)
    values = flat(data)
    on_vector = engine is _engines.vector or (engine is _engines.unknown and dst.buffer == "sbuf")
    check(engine in (_engines.unknown, _engines.tensor, _engines.vector), f"nc_transpose: engine is {engine.name}")
    if on_vector:
        in_buffers("nc_transpose", ("sbuf", "psum"), dst=dst, data=data)
    else:
        in_buffers("nc_transpose", ("sbuf",), data=data)
        in_buffers("nc_transpose", ("psum",), dst=dst)
    limit = 32 if on_vector else 128
    check(
        max(values.shape) <= limit,
        f"nc_transpose: data has shape {tuple(values.shape)}; accepted are up to {limit} each way",
    )
    check(dst.dtype == data.dtype, f"nc_transpose: dst has dtype {dst.dtype}, data {data.dtype}; accepted is one dtype")
    check(dst.shape == (values.shape[1], values.shape[0]), f"nc_transpose: dst has shape {dst.shape}")
    write("nc_transpose", dst, torch.as_tensor(values.t()))
