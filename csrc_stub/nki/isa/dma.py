"""DMA: nisa.dma_copy and nisa.dma_compute (their API pages; "NKI Access Patterns"; "Descriptor Generation Engine Reference")."""

import torch

from .. import language as nl
from .. import launch
from ..errors import check
from ..tensor import NkiTensor
from .enums import dge_mode, engine, oob_mode
from .operands import begin

_DMA_BUFFERS = ("sbuf", "hbm", "private_hbm", "shared_hbm")
_copy_engine = engine


def _in_dma_buffers(name, **tiles):
    for argument, tile in tiles.items():
        check(
            tile.buffer in _DMA_BUFFERS, f"{name}: {argument} is in {tile.buffer}; accepted are tiles in HBM and SBUF"
        )


def _resolve(name, view, mode):
    """Rows of an indirect view: (row numbers, which of them are in range, the tensor as [rows, ...] in the view's pattern)."""
    offsets, unit, rows = view._indirect
    index = offsets.elements().reshape(-1)
    index = index.to(torch.int64)
    valid = (index >= 0) & (index < rows)
    if mode is oob_mode.error and not bool(valid.all()):
        position = int((~valid).nonzero()[0])
        raise IndexError(
            f"{name}: index {int(index[position])} at position {position}; accepted is 0 <= index < {rows}"
        )
    flat = view.storage.flat
    base = flat.as_strided((rows, *view.shape[1:]), (unit, *view.strides[1:]), flat.storage_offset() + view.offset)
    return index, valid, base


def _cast(values, dtype):
    """Through float32 where dtypes differ, as DMA engines convert."""
    return values if values.dtype == dtype else values.to(torch.float32).to(dtype)


def _store_order(count):
    """Rows of one indirect store land in any order: a seeded permutation."""
    return torch.randperm(count, generator=launch.current().generator)


def _scatter(base, index, values):
    """base[index] = values row by row in a random order; of a repeated row the last to land stays."""
    order = _store_order(index.numel())
    index, values = index[order], values[order]
    if index.unique().numel() == index.numel():
        base.index_copy_(0, index, values)
        return
    last = {row: position for position, row in enumerate(index.tolist())}
    rows = torch.tensor(list(last), dtype=torch.int64)
    base.index_copy_(0, rows, values[torch.tensor(list(last.values()))])


def dma_copy(
    dst,
    src,
    priority=None,
    oob_mode=oob_mode.error,
    dge_mode=dge_mode.unknown,
    engine=engine.unknown,
    name=None,
):
    begin("dma_copy", dst=dst, src=src)
    _in_dma_buffers("dma_copy", dst=dst, src=src)
    check(priority is None, "dma_copy: priority is given; accepted on NeuronCore-v4 only")
    check(dst.size == src.size, f"dma_copy: dst has {dst.size} elements, src {src.size}; accepted are equal numbers")
    modes = type(dge_mode)
    check(
        engine is _copy_engine.unknown
        or (dge_mode is modes.hwdge and engine in (_copy_engine.sync, _copy_engine.scalar)),
        f"dma_copy: engine is {engine}; accepted are sync and scalar, with dge_mode hwdge",
    )
    indirect = [tile for tile in (dst, src) if tile.is_indirect()]
    check(len(indirect) < 2, "dma_copy: dst and src are both indirect; accepted is one")
    if not indirect:
        values = src.elements()
        target = dst.elements()
        target.copy_(_cast(values, target.dtype).reshape(target.shape))
        return
    check(
        dge_mode in (modes.unknown, modes.swdge),
        f"dma_copy: dge_mode is {dge_mode.name} with a vector_offset; accepted are swdge and unknown",
    )
    index, valid, base = _resolve("dma_copy", indirect[0], oob_mode)
    everything = bool(valid.all())
    if indirect[0] is src:
        target = dst.elements()
        check(dst.shape[0] == index.numel(), f"dma_copy: dst has {dst.shape[0]} partitions for {index.numel()} indices")
        if everything:
            target.copy_(_cast(base.index_select(0, index), target.dtype).reshape(target.shape))
        elif bool(valid.any()):
            rows = _cast(base.index_select(0, index[valid]), target.dtype)
            target[valid] = rows.reshape(-1, *target.shape[1:])
        return
    values = src.elements()
    check(src.shape[0] == index.numel(), f"dma_copy: src has {src.shape[0]} partitions for {index.numel()} indices")
    if not everything:
        index, values = index[valid], values[valid]
    if index.numel():
        _scatter(base, index, _cast(values, base.dtype).reshape(-1, *base.shape[1:]))


def dma_compute(dst, srcs, reduce_op, scales=None, unique_indices=True, oob_mode=oob_mode.error, name=None):
    begin("dma_compute", dst=dst, **{f"srcs[{number}]": tile for number, tile in enumerate(srcs)})
    _in_dma_buffers("dma_compute", dst=dst, **{f"srcs[{number}]": tile for number, tile in enumerate(srcs)})
    check(reduce_op is nl.add, f"dma_compute: reduce_op is {reduce_op}; accepted is nl.add")
    check(scales is None or all(scale == 1.0 for scale in scales), f"dma_compute: scales is {scales}; accepted are 1.0")
    check(1 <= len(srcs) <= 16, f"dma_compute: {len(srcs)} srcs; accepted are 1 to 16")
    for tile in srcs:
        check(tile.size == dst.size, f"dma_compute: a source has {tile.size} elements, dst {dst.size}")
    indirect = [tile for tile in srcs if tile.is_indirect()]
    if not indirect and not dst.is_indirect():
        total = sum(tile.elements().to(torch.float32).reshape(-1) for tile in srcs)
        dst.elements().copy_(total.reshape(dst.shape).to(dst.elements().dtype))
        return
    check(len(srcs) == 2, f"dma_compute: {len(srcs)} srcs with a vector_offset; accepted are 2")
    check(unique_indices is True, "dma_compute: unique_indices is False; accepted with a vector_offset is True")
    check(len(indirect) == 1, f"dma_compute: {len(indirect)} srcs are indirect; accepted is one")
    index, valid, base = _resolve("dma_compute", indirect[0], oob_mode)
    kept = index[valid]
    check(kept.unique().numel() == kept.numel(), "dma_compute: an index repeats; accepted are unique indices")
    (other,) = (tile for tile in srcs if tile is not indirect[0])
    if dst.is_indirect():
        check(_same(dst, indirect[0]), "dma_compute: the indirect source of a scatter must be dst itself")
        addend = other.elements().to(torch.float32).reshape(-1, *base.shape[1:])[valid]
        base.index_copy_(0, kept, (base.index_select(0, kept).to(torch.float32) + addend).to(base.dtype))
        return
    check(_same(dst, other), "dma_compute: the direct source of a gather must be dst itself")
    target = dst.elements()
    rows = base.index_select(0, kept).to(torch.float32).reshape(-1, *target.shape[1:])
    target[valid] = (target[valid].to(torch.float32) + rows).to(target.dtype)


def _same(first: NkiTensor, second: NkiTensor):
    return (
        first.storage is second.storage
        and first.shape == second.shape
        and first.offset == second.offset
        and first.strides[1:] == second.strides[1:]
    )
