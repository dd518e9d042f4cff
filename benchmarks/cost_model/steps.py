"""What the model keeps of an instruction: shapes and places, no memory, so that a recording does not hold on to tiles."""

import contextlib
import dataclasses
import math

import numpy as np

_WRITTEN = ("dst", "reduce_res")
_ITEMSIZE = {"bool_": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4}
_ITEMSIZE |= {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class Tile:
    """A view, after NkiTensor. strides in elements; first_partition on-chip only.

    kept: bool [shape[0]], which rows of an indirect view are inside the tensor; None where all are, or where it is direct.
    """

    shape: tuple
    strides: tuple
    dtype: str
    buffer: str
    place: object
    first_partition: int = 0
    indirect: bool = False
    dynamic: bool = False
    kept: np.ndarray | None = None

    on_chip = property(lambda self: self.buffer in ("sbuf", "psum"))
    itemsize = property(lambda self: _ITEMSIZE[self.dtype])
    elements = property(lambda self: math.prod(self.shape))
    free_size = property(lambda self: math.prod(self.shape[1:]))


@dataclasses.dataclass(frozen=True)
class Access:
    """One place that a step reads or writes, after trace.Access.

    partitions (first, end) on-chip only; else rows: int64, rows of the HBM tensor. start, stop: bytes in a partition
    or in a row.
    """

    place: object
    write: bool
    start: int
    stop: int
    partitions: tuple | None = None
    rows: np.ndarray | None = None
    dynamic: bool = False


@dataclasses.dataclass
class Step:
    """One executed instruction. operands: argument name -> Tile, list of Tiles, or what else the kernel gave.

    repeats: whether a hardware loop's earlier iteration executed it before, so that the program holds it once.
    """

    name: str
    operands: dict
    accesses: list
    program: int
    repeats: bool = False

    def __repr__(self):
        label = self.operands.get("name")
        return f"{self.name}{f' {label!r}' if label else ''}"


class _Steps(list):
    def append(self, instruction):
        super().append(step(instruction))


@contextlib.contextmanager
def record():
    """Record launches inside as `nki.simulator.record` does, in Steps: yields a Recording.

    The simulator's own recording keeps every operand, so a loop that declares tiles soon exceeds the simulated SBUF.
    """
    from nki import simulator

    with simulator.record() as recording:
        recording.instructions = _Steps()
        yield recording


def step(instruction):
    """A Step from a recorded instruction; a Step as it is.

    Which rows of an indirect access are skipped is exact when called before the instruction runs, as `record` does.
    Later its index tile may hold other values, and the skipped rows are taken to be the last ones.
    """
    if isinstance(instruction, Step):
        return instruction
    rows = {id(access.place): access.rows for access in instruction.accesses if access.rows is not None}
    direct = {}
    for value in instruction.operands.values():
        for view in value if isinstance(value, (list, tuple)) else (value,):
            if hasattr(view, "storage") and not view.is_on_chip and not view.is_indirect():
                direct[id(view.storage.place), view.offset * _ITEMSIZE[view.dtype]] = view
    operands = {
        name: [_tile(view, rows) for view in value] if isinstance(value, (list, tuple)) else _tile(value, rows)
        for name, value in instruction.operands.items()
    }
    accesses = [_access(access, direct) for access in instruction.accesses]
    return Step(instruction.name, operands, accesses, instruction.program, instruction.repeats)


def _tile(value, rows):
    if not hasattr(value, "storage"):
        return value
    kept = None
    if value.is_indirect():
        offsets, _, count = value._indirect
        index = offsets.elements().reshape(-1).numpy().astype(np.int64)
        inside, wanted = (index >= 0) & (index < count), rows[id(value.storage.place)]
        if not np.array_equal(index[inside], wanted):
            inside = np.arange(index.size) < wanted.size
        kept = None if inside.all() else inside
    first = value.offset // value._row_elements() if value.is_on_chip else 0
    return Tile(
        value.shape,
        value.strides,
        value.dtype,
        value.buffer,
        value.storage.place,
        first,
        value.is_indirect(),
        value.dynamic,
        kept,
    )


def _access(access, direct):
    if access.register or access.partitions is not None:
        return Access(access.place, access.write, access.start, access.stop, access.partitions or (0, 1))
    if access.rows is not None:
        return Access(access.place, access.write, access.start, access.stop, None, np.unique(access.rows), True)
    view = direct[id(access.place), access.start]
    size = _ITEMSIZE[view.dtype]
    row_bytes = max(math.prod(view.storage.shape[1:]) * _ITEMSIZE[view.storage.dtype], 1)
    rows, start, stop = _rows(access, view, size, row_bytes)
    return Access(access.place, access.write, start, stop, None, rows, access.dynamic)


def _rows(access, view, size, row_bytes):
    """(rows, first byte, end byte in each row) that a direct view touches; whole rows if it is no block of columns."""
    start, inner = (
        access.start % row_bytes,
        sum((n - 1) * s for n, s in zip(view.shape[1:], view.strides[1:], strict=True)),
    )
    step, end = view.strides[0] * size, start + (inner + 1) * size
    if step % row_bytes == 0 and end <= row_bytes:
        first = access.start // row_bytes
        count = view.shape[0] if step else 1
        return first + np.arange(count, dtype=np.int64) * (step // row_bytes), start, end
    first, last = access.start // row_bytes, (access.stop - 1) // row_bytes
    if first == last:
        return np.array([first], dtype=np.int64), start, start + access.stop - access.start
    return np.arange(first, last + 1, dtype=np.int64), 0, row_bytes
