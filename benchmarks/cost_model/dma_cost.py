"""How a DMA is triggered, and how long it keeps each DMA engine.

A descriptor element is one contiguous run of bytes; a run never crosses an SBUF partition, and rows that
`oob_mode.skip` leaves out cost nothing. A partition belongs to one DMA engine. HBM bandwidth is not a bound of its
own: eight cores at 368 GB/s are the 2.9 TB/s that trainium2_arch.rst gives the device (3 TB/s).
"""

import dataclasses
import functools
import math

import numpy as np

from . import figures

ENGINES = int(figures.DMA_ENGINES.value)
KINDS = ("direct_read", "direct_write", "indirect_read", "indirect_write", "rmw")


@dataclasses.dataclass(frozen=True)
class Dma:
    """queue: load, store, gpsimd (software DGE) or scalar. trigger_ns: of GpSimd, or of a hardware DGE instance.

    engine_ns: [16] time on each DMA engine. hbm_bytes: kind -> bytes read from or written to HBM.
    """

    queue: str
    trigger: str
    trigger_ns: float
    engine_ns: np.ndarray
    hbm_bytes: dict


def is_dma(step):
    return step.name.startswith("dma_")


def dma(step, settings):
    dst = step.operands["dst"]
    sources = step.operands["srcs"] if step.name == "dma_compute" else [step.operands["src"]]
    tiles = [dst, *sources]
    indirect = next((tile for tile in tiles if tile.indirect), None)
    queue, trigger, trigger_ns = _trigger(step, tiles, indirect, settings)
    return Dma(
        queue,
        trigger,
        trigger_ns,
        _engine_ns(step, tiles, indirect, settings),
        _hbm_bytes(step, dst, sources, indirect),
    )


def _trigger(step, tiles, indirect, settings):
    mode = getattr(step.operands.get("dge_mode"), "name", "unknown")
    if indirect is not None or mode == "swdge":
        rows = (indirect or tiles[0]).shape[0]
        return "gpsimd", "swdge", settings.swdge_ns_per_128_rows * (0.5 + 0.5 * rows / 128)
    queue = "store" if tiles[0].buffer != "sbuf" else "load"
    if mode == "hwdge" or (mode == "unknown" and any(tile.dynamic for tile in tiles)):
        on_scalar = getattr(step.operands.get("engine"), "name", "unknown") == "scalar"
        return "scalar" if on_scalar else queue, "hwdge", figures.HWDGE_NS.value
    return queue, "static", 0.0


def _run_elements(shape, strides):
    """Elements that lie one after another, from the innermost dimension outwards."""
    run = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if stride != run:
            break
        run *= size
    return run


@functools.lru_cache(maxsize=4096)
def run_ns(run_bytes, bytes_per_ns):
    """Time of one contiguous run on a DMA engine whose peak is bytes_per_ns."""
    return run_bytes / (figures.dma_efficiency(run_bytes) * bytes_per_ns)


def _engine_ns(step, tiles, indirect, settings):
    payload = max(tiles, key=lambda tile: tile.elements * tile.itemsize)
    on_chip = next((tile for tile in tiles if tile.on_chip), None)
    lines = on_chip.shape[0] if on_chip is not None else payload.shape[0]
    line_elements = payload.elements // lines
    run = min(_run_elements(*_line(tile, lines)) for tile in tiles)
    run = min(run, line_elements)
    line_bytes, run_bytes = line_elements * payload.itemsize, run * payload.itemsize
    rate, share = settings.dma_engine_bytes_per_ns, settings.run_overhead
    line_ns = share * line_elements / run * run_ns(run_bytes, rate) + (1 - share) * run_ns(line_bytes, rate)
    if step.name == "dma_compute":
        line_ns *= settings.dma_compute_passes
    if on_chip is None and indirect is None:
        # No partition decides the engine: the lines, and pieces of a long one, are spread over all of them.
        return np.full(ENGINES, line_ns * lines / ENGINES)
    first = on_chip.first_partition if on_chip is not None else 0
    kept = np.ones(lines, dtype=bool) if indirect is None or indirect.kept is None else indirect.kept
    engines = (first + np.flatnonzero(kept)) // int(figures.PARTITIONS_PER_DMA_ENGINE.value) % ENGINES
    return np.bincount(engines, minlength=ENGINES) * line_ns


def _line(tile, lines):
    """(shape, strides) of what one partition, or one row, moves; of all of a view that is cut in other lines."""
    return (tile.shape[1:], tile.strides[1:]) if tile.shape[0] == lines else (tile.shape, tile.strides)


def _hbm_bytes(step, dst, sources, indirect):
    """What crosses HBM, by kind."""
    moved = dict.fromkeys(KINDS, 0)
    for tile, direction in [(dst, "write"), *((source, "read") for source in sources)]:
        if tile.on_chip:
            continue
        kept = tile if indirect is None else indirect
        rows = kept.shape[0] if kept.kept is None else int(kept.kept.sum())
        size = math.prod((tile.elements, tile.itemsize, rows)) // kept.shape[0]
        kind = "rmw" if step.name == "dma_compute" else f"{'indirect' if tile.indirect else 'direct'}_{direction}"
        moved[kind] += size
    return moved
