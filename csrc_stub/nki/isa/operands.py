"""Checks and conversions that several instructions share."""

import math

import torch

from ..errors import check
from ..launch import record
from ..tensor import FLOATS, PARTITIONS, TORCH, NkiTensor

SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32}


def begin(name, **tiles):
    """Record an instruction and check that each operand is a direct NKI tensor."""
    record(name)
    for argument, tile in tiles.items():
        check(isinstance(tile, NkiTensor), f"{name}: {argument} is {type(tile).__name__}; accepted is an NKI tensor")


def in_buffers(name, buffers, **tiles):
    for argument, tile in tiles.items():
        check(
            tile.buffer in buffers,
            f"{name}: {argument} is in {tile.buffer}; accepted are tiles in {' and '.join(buffers)}",
        )
        check(not tile.is_indirect(), f"{name}: {argument} is an indirect view; accepted by DMA only")
        partitions, start = tile.shape[0], tile.offset // tile._row_elements()
        # Architecture guide, "start_partition": 0 for more than 64 partitions, 0 or 64 above 32, else a multiple of 32.
        allowed = (0,) if partitions > 64 else (0, 64) if partitions > 32 else (0, 32, 64, 96)
        check(
            start in allowed, f"{name}: {argument} of {partitions} partitions starts at {start}; accepted are {allowed}"
        )
        check(
            partitions <= PARTITIONS, f"{name}: {argument} has {partitions} partitions; accepted are up to {PARTITIONS}"
        )


def same_layout(name, dst, **tiles):
    """The same number of partitions, and of elements a partition, as dst."""
    for argument, tile in tiles.items():
        check(
            tile.shape[0] == dst.shape[0] and math.prod(tile.shape[1:]) == math.prod(dst.shape[1:]),
            f"{name}: {argument} has shape {tile.shape}, dst {dst.shape}; accepted are equal partitions and elements of each",
        )


def flat(tile):
    """[partitions, elements] of a tile, values as they are."""
    elements = tile.elements()
    return elements if elements.dim() == 2 else elements.reshape(elements.shape[0], -1)


def as_float32(tile):
    return flat(tile).to(torch.float32)


def bits(tile):
    """The tile as signed integers of its width: torch computes on those."""
    elements = flat(tile)
    return elements.view(SIGNED[elements.dtype]) if elements.dtype in SIGNED else elements


def write_bits(dst, values):
    """Store integers of dst's width as bit patterns, whatever the view's strides."""
    target = dst.elements()
    target = target.view(SIGNED[target.dtype]) if target.dtype in SIGNED else target
    target.copy_(values.reshape(target.shape))
    _mark_written(dst, by_matmul=False)


def _mark_written(dst, by_matmul):
    written = dst.storage.from_matmul
    if written is not None:
        written.as_strided(dst.shape, dst.strides, dst.offset).fill_(1 if by_matmul else 2)


def write(name, dst, values, by_matmul=False):
    """Store float32 or equal-dtype values into dst, casting as engines do.

    How an engine rounds a float to an integer is not documented, so a value that is no integer of dst's dtype is refused.
    """
    target = dst.elements()
    values = values.reshape(target.shape)
    if dst.dtype not in FLOATS and values.dtype.is_floating_point:
        info = torch.iinfo(TORCH[dst.dtype])
        whole = (values == values.trunc()) & (values >= info.min) & (values <= info.max)
        check(
            bool(whole.all()),
            f"{name}: a result is no whole number that {dst.dtype} holds; the rounding is not documented",
        )
        values = values.to(torch.int64)
        if target.dtype in SIGNED:
            width = 8 * target.dtype.itemsize
            values = torch.where(values >= 2 ** (width - 1), values - 2**width, values).to(SIGNED[target.dtype])
            target = target.view(SIGNED[target.dtype])
    target.copy_(values)
    _mark_written(dst, by_matmul)
