"""Which engine runs a compute instruction, and how long it keeps it.

Not in the documentation and not modelled: instruction fetch, SBUF and PSUM bank conflicts.
"""

import dataclasses

from . import figures

COMPUTE = ("tensor", "vector", "scalar", "gpsimd")
_GHZ = {"vector": figures.VECTOR_GHZ, "scalar": figures.SCALAR_GHZ, "gpsimd": figures.GPSIMD_GHZ}
_HALF_FLOATS = ("bfloat16", "float16")
_ON_GPSIMD = ("iota", "affine_select")
_TWO_TILES = ("tensor_tensor", "scalar_tensor_tensor")
_REGISTERS = ("register_load", "register_store")


@dataclasses.dataclass(frozen=True)
class Cost:
    """busy_ns: until the engine takes its next instruction. latency_ns: from then until others see the result.

    stationary_ns: loading a matmul's stationary tile, where the engine does not hold it yet.
    """

    busy_ns: float
    latency_ns: float = 0.0
    stationary_ns: float = 0.0


def engine_of(step):
    """The engine that the instruction names, else the one that its page (nki.isa) says or, of several, Vector Engine."""
    chosen = getattr(step.operands.get("engine"), "name", "unknown")
    if chosen != "unknown":
        return chosen
    if step.name in _REGISTERS:
        return "sync"
    if step.name == "nc_matmul" or (step.name == "nc_transpose" and step.operands["dst"].buffer == "psum"):
        return "tensor"
    if step.name == "activation":
        return "scalar"
    if step.name in _ON_GPSIMD or _is_integer_tensor_tensor(step):
        return "gpsimd"
    return "vector"


def _is_integer_tensor_tensor(step):
    if step.name != "tensor_tensor" or step.operands["op"].kind == "bitvec":
        return False
    return all(
        step.operands[name].dtype in ("int32", "uint32") and step.operands[name].buffer == "sbuf"
        for name in ("dst", "data1", "data2")
    )


def cost(step, engine, settings):
    if step.name in _REGISTERS:
        return Cost(settings.register_ns)
    if engine == "tensor":
        return _matmul(step, settings)
    if engine not in _GHZ:
        raise ValueError(f"{step.name} on {engine}; modelled are {', '.join(COMPUTE)}")
    cycles = _elements(step) * _cycles_per_element(step, engine, settings) + figures.ACCESS_CYCLES.value
    if step.operands.get("reduce_res") is not None and engine == "scalar":
        cycles += figures.READ_ACCUMULATOR_CYCLES.value
    ghz = _GHZ[engine].value
    return Cost(cycles / ghz, (figures.DEPENDENT_CYCLES.value - figures.ACCESS_CYCLES.value) / ghz)


def _elements(step):
    """Elements a partition of the instruction's longest tile."""
    return max(tile.free_size for tile in _tiles(step))


def _tiles(step):
    return [value for value in step.operands.values() if hasattr(value, "free_size")]


def _is_two_tiles(step):
    return step.name in _TWO_TILES or (
        step.name == "tensor_copy_predicated" and hasattr(step.operands["src"], "free_size")
    )


def _cycles_per_element(step, engine, settings):
    tiles = figures.TWO_TILES_FACTOR.value if _is_two_tiles(step) else 1
    strided = 2 if any(_has_wide_stride(tile) for tile in _tiles(step)) else 1
    if engine == "gpsimd":
        return tiles * strided * settings.gpsimd_cycles_per_element
    if engine == "scalar":
        return tiles * strided
    return tiles * strided / (_performance_mode(step) or settings.vector_elements_per_cycle)


def _inner(tile):
    """(size, stride) of the innermost dimension that has more than one element."""
    for size, stride in zip(reversed(tile.shape[1:]), reversed(tile.strides[1:]), strict=True):
        if size > 1:
            return size, stride
    return 1, 1


def _has_wide_stride(tile):
    size, stride = _inner(tile)
    return size > 1 and abs(stride) * tile.itemsize > figures.WIDE_STRIDE_BYTES.value


def _performance_mode(step):
    """Vector Engine's speedup for 16-bit floats, None where it has none."""
    if step.name in ("tensor_copy", "tensor_scalar"):
        tiles = [step.operands["dst"], step.operands["src" if step.name == "tensor_copy" else "data"]]
        in_psum = sum(tile.buffer == "psum" for tile in tiles)
        contiguous = all(_inner(tile)[1] == 1 for tile in tiles)
        if any(tile.dtype not in _HALF_FLOATS for tile in tiles) or in_psum + (not contiguous) > 1:
            return None
        return figures.PERFORMANCE_MODE.value if in_psum == 0 and contiguous else figures.PERFORMANCE_MODE_HALF.value
    if step.name == "tensor_tensor":
        inputs = [step.operands["data1"], step.operands["data2"]]
        if all(tile.dtype in _HALF_FLOATS for tile in (*inputs, step.operands["dst"])) and all(
            tile.buffer == "sbuf" for tile in inputs
        ):
            return figures.PERFORMANCE_MODE_HALF.value
    return None


def _matmul(step, settings):
    """Interval to the next matmul; a transposition has the data as stationary and an identity as moving tile (its page)."""
    operands = step.operands
    if step.name == "nc_transpose":
        stationary, moving_columns = operands["data"], operands["data"].shape[0]
        speedup, is_fp32 = figures.TRANSPOSE_FP32_SPEEDUP.value, stationary.dtype == "float32"
    else:
        stationary, moving_columns = operands["stationary"], operands["moving"].free_size
        is_fp32 = "float32" in (stationary.dtype, operands["moving"].dtype)
        flagged = (operands["is_stationary_onezero"] and stationary.dtype == "float32") or (
            operands["is_moving_onezero"] and operands["moving"].dtype == "float32"
        )
        speedup = settings.onezero_speedup if flagged else 1
    factor = figures.MATMUL_FP32_FACTOR.value / speedup if is_fp32 else 1
    ghz = figures.TENSOR_GHZ.value
    return Cost(
        factor * max(moving_columns, figures.MATMUL_LEAST_CYCLES.value) / ghz,
        settings.tensor_latency_cycles / ghz,
        factor * stationary.free_size / figures.STATIONARY_COLUMNS_PER_CYCLE.value / ghz,
    )
