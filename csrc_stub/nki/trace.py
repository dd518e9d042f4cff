"""What an instruction touches, and two ways to use that: a record in program order, and execution out of order.

NKI's programming model is sequential, and the compiler reorders what has no data dependency (NKI Language Guide). It sees an
on-chip tile and a static HBM address. Whether it sees that two *dynamic* addresses meet (a `vector_offset`, a `scalar_offset`) is
not documented, so `strict` takes it that it does not: such accesses are ordered only through on-chip tiles that both depend on.
There instructions run in a seeded random order, DMAs late, and two accesses to the same HBM row that nothing orders raise.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import threading

import numpy as np
import torch

from . import launch
from .errors import NkiValidationError
from .tensor import NkiTensor, VirtualRegister, itemsize

# Operands that an instruction writes; all others are read.
WRITTEN = ("dst", "reduce_res")

# Instructions waiting before `strict` runs some: enough for the DMAs of several 128-row tiles to be late.
WINDOW = 96


class HazardError(NkiValidationError):
    """Two accesses to the same HBM row, one of them a write, in an order that nothing determines."""


@dataclasses.dataclass(frozen=True)
class Access:
    """One operand's place in memory.

    place: identity of the memory, the same in every iteration of a hardware loop. partitions: (first, end), on-chip only.
    start, stop: bytes in a partition, in an HBM tensor, or, with rows, in each row of it. rows: int64 array of the HBM rows that
    an indirect access touches, skipped ones left out. runs: (sorted first bytes, length) of the contiguous runs of a direct
    access that leaves gaps. dynamic: an address that the compiler does not know.
    """

    place: object
    write: bool
    start: int
    stop: int
    partitions: tuple | None = None
    rows: np.ndarray | None = None
    row_bytes: int = 0
    runs: tuple | None = None
    dynamic: bool = False
    register: bool = False

    def meets(self, other):
        """Whether both touch a common byte; strided tiles on the chip count with the gaps between their elements."""
        if self.place is not other.place:
            return False
        if self.partitions is not None and (
            self.partitions[0] >= other.partitions[1] or other.partitions[0] >= self.partitions[1]
        ):
            return False
        if self.partitions is not None or self.register:
            return self.start < other.stop and other.start < self.stop
        # Runs of one access do not overlap, so only the last of the others that starts before a run's end can meet it.
        (starts, length), (others, other_length) = self._runs(), other._runs()
        if starts.size == 0 or others.size == 0:
            return False
        before = np.searchsorted(others, starts + length) - 1
        return bool(np.any((before >= 0) & (others[np.maximum(before, 0)] + other_length > starts)))

    def _runs(self):
        """(sorted first bytes, length) of the contiguous runs of an access to an HBM tensor."""
        if self.rows is not None:
            return np.sort(self.rows) * self.row_bytes + self.start, self.stop - self.start
        if self.runs is not None:
            return self.runs
        return np.array([self.start]), self.stop - self.start


@dataclasses.dataclass
class Instruction:
    """One executed instruction: its name, its arguments by parameter name, and its accesses (rows known once it ran)."""

    name: str
    operands: dict
    accesses: list = dataclasses.field(default_factory=list)
    program: int = 0
    repeats: bool = False

    def __repr__(self):
        label = self.operands.get("name")
        return f"{self.name}{f' {label!r}' if label else ''}"


def is_dma(name):
    return name.startswith("dma_")


def _tiles(operands):
    for name, value in operands.items():
        for tile in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tile, (NkiTensor, VirtualRegister)):
                yield name, tile


def _static_access(view, write):
    size = itemsize(view.dtype)
    if not view.is_on_chip:
        span = sum((count - 1) * stride for count, stride in zip(view.shape, view.strides, strict=True))
        start = view.offset * size
        return Access(
            view.storage.place, write, start, start + (span + 1) * size, runs=_runs_of(view), dynamic=view.dynamic
        )
    row = view._row_elements()
    span = sum((count - 1) * stride for count, stride in list(zip(view.shape, view.strides, strict=True))[1:])
    first, start = view.offset // row, view.offset % row * size
    return Access(view.storage.place, write, start, start + (span + 1) * size, (first, first + view.shape[0]))


def _runs_of(view):
    """Runs of a direct HBM view, or None where it is one run or has no runs of one length that do not overlap."""
    if view.size <= 1 or view.is_contiguous() or view.strides[-1] != 1 or min(view.strides) < 1:
        return None
    starts = np.zeros(1, dtype=np.int64)
    for count, stride in zip(view.shape[:-1], view.strides[:-1], strict=True):
        starts = (starts[:, None] + np.arange(count) * stride).reshape(-1)
    starts = np.sort(starts + view.offset)
    if np.any(np.diff(starts) < view.shape[-1]):
        return None
    size = itemsize(view.dtype)
    return starts * size, view.shape[-1] * size


def _indirect_access(view, write, rows):
    _, unit, _ = view._indirect
    size = itemsize(view.dtype)
    span = sum((count - 1) * stride for count, stride in list(zip(view.shape, view.strides, strict=True))[1:])
    start = view.offset * size
    return Access(
        view.storage.place, write, start, start + (span + 1) * size, rows=rows, row_bytes=unit * size, dynamic=True
    )


def known_accesses(operands):
    """Accesses known before the instruction runs: on-chip tiles, registers and direct HBM addresses."""
    accesses = []
    for name, tile in _tiles(operands):
        if isinstance(tile, VirtualRegister):
            accesses.append(Access(tile, name in WRITTEN, 0, 1, register=True))
        elif tile.is_indirect():
            accesses.append(_static_access(tile._indirect[0], False))
        else:
            accesses.append(_static_access(tile, name in WRITTEN))
    destination = operands.get("dst")
    if isinstance(destination, NkiTensor) and destination.buffer == "psum" and "accumulate" in operands:
        accesses.append(_static_access(destination, False))
    return accesses


def indirect_accesses(operands):
    """Accesses whose rows are read from an index tile, as it is now."""
    accesses = []
    for name, tile in _tiles(operands):
        if isinstance(tile, NkiTensor) and tile.is_indirect():
            offsets, _, count = tile._indirect
            rows = offsets.elements().reshape(-1).to(torch.int64)
            rows = rows[(rows >= 0) & (rows < count)].numpy().copy()
            accesses.append(_indirect_access(tile, name in WRITTEN, rows))
    return accesses


def _without_claim(value):
    """An operand to look at later, which does not hold on-chip memory that the kernel has dropped."""
    if isinstance(value, (list, tuple)):
        return type(value)(_without_claim(item) for item in value)
    if not isinstance(value, NkiTensor):
        return value
    kept = copy.copy(value)
    if value.is_on_chip:
        kept.storage = launch.Kept(value.storage)
    if value.is_indirect():
        kept._indirect = (_without_claim(value._indirect[0]), *value._indirect[1:])
    return kept


class _Mode(threading.local):
    watcher = None


_mode = _Mode()


class Recording:
    """Instructions in program order as they ran, with all their accesses."""

    def __init__(self):
        self.instructions = []

    def add(self, instruction, run):
        instruction.accesses = known_accesses(instruction.operands) + indirect_accesses(instruction.operands)
        self.instructions.append(instruction)
        run()
        instruction.operands = {name: _without_claim(value) for name, value in instruction.operands.items()}

    def settle(self, tile):
        return 0

    def branch(self, after):
        pass

    def settle_all(self):
        pass

    def finish(self):
        pass


class OutOfOrder:
    """Runs instructions in a random order that respects what the compiler sees, and looks for what it does not see."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.count = 0
        self.start_program()

    def start_program(self):
        self.base = self.count
        self.pending, self.ancestors = {}, {}
        self.places, self.hbm = {}, getattr(self, "hbm", {})
        self.control = self.waiting = 0

    def add(self, instruction, run):
        number, self.count = self.count, self.count + 1
        accesses = known_accesses(instruction.operands)
        before = self.control
        for access in accesses:
            earlier = self.places.setdefault(id(access.place), (access.place, []))[1]
            for position in range(len(earlier) - 1, -1, -1):
                other_number, other = earlier[position]
                unseen = access.partitions is None and not access.register and (access.dynamic or other.dynamic)
                if not unseen and (access.write or other.write) and access.meets(other):
                    before |= self.ancestors[other_number] | (1 << (other_number - self.base))
                    if access.write and _covers(access, other):
                        del earlier[position]
        for access in accesses:
            self.places[id(access.place)][1].append((number, access))
        self.ancestors[number] = before
        self.pending[number] = (instruction, accesses, run)
        self.waiting |= 1 << (number - self.base)
        if len(self.pending) >= WINDOW:
            self._run_some(WINDOW // 2)

    def _is_ready(self, number):
        return not self.ancestors[number] & self.waiting

    def _run_some(self, count):
        for _ in range(count):
            ready = [number for number in self.pending if self._is_ready(number)]
            # A DMA completes late: it is passed over most of the time while something else can run.
            soon = [number for number in ready if not is_dma(self.pending[number][0].name)]
            if soon and self.random.random() < 0.8:
                ready = soon
            self._run(ready[self.random.integers(len(ready))])

    def _run(self, number):
        instruction, accesses, run = self.pending.pop(number)
        self.waiting &= ~(1 << (number - self.base))
        instruction.accesses = accesses + indirect_accesses(instruction.operands)
        for access in instruction.accesses:
            if access.partitions is None and not access.register:
                self._look_for_hazard(number, instruction, access)
        run()

    def _look_for_hazard(self, number, instruction, access):
        if access.write and access.rows is not None and np.unique(access.rows).size < access.rows.size:
            values, counts = np.unique(access.rows, return_counts=True)
            raise HazardError(
                f"{instruction} writes row {values[counts > 1][0]} of an HBM tensor more than once, in an order that nothing "
                "determines; accepted are rows that differ"
            )
        _, earlier = self.hbm.setdefault(id(access.place), (access.place, []))
        for other_number, other_instruction, other in earlier:
            if not (access.write or other.write) or other_number == number:
                continue
            if self._is_ordered(number, other_number) or not access.meets(other):
                continue
            raise HazardError(
                f"{instruction} and {other_instruction} access the same row of an HBM tensor{_common_row(access, other)}, at "
                "least one of them writes, and nothing orders them; accepted is an order through on-chip tiles"
            )
        earlier.append((number, repr(instruction), access))

    def _is_ordered(self, first, second):
        if min(first, second) < self.base:
            return False
        first, second = min(first, second), max(first, second)
        return bool(self.ancestors[second] >> (first - self.base) & 1)

    def settle(self, tile):
        """Run what a tile's value depends on, before Python reads it; returns those instructions as a mask."""
        access, after = _static_access(tile, False), 0
        for number, other in list(self.places.get(id(access.place), (None, []))[1]):
            if other.write and access.meets(other):
                self._run_ancestors(number)
                after |= self.ancestors[number] | (1 << (number - self.base))
        return after

    def branch(self, after):
        """Every engine waits for the register that decides a loop, so what comes later is ordered after what gave its value."""
        self.control |= after

    def _run_ancestors(self, number):
        mask = self.ancestors[number] | (1 << (number - self.base))
        while wanted := [other for other in self.pending if mask >> (other - self.base) & 1]:
            ready = [other for other in wanted if self._is_ready(other)]
            self._run(ready[self.random.integers(len(ready))])

    def settle_all(self):
        self._run_some(len(self.pending))

    def finish(self):
        self.settle_all()
        self.start_program()


def _covers(access, other):
    if access.partitions is not None and not (
        access.partitions[0] <= other.partitions[0] and other.partitions[1] <= access.partitions[1]
    ):
        return False
    # Whoever must come after a read that lies inside this write's interval must come after the write, which comes after the read.
    return access.rows is None and access.start <= other.start and other.stop <= access.stop and not other.write


def _common_row(access, other):
    if access.rows is None or other.rows is None:
        return ""
    return f" (row {np.intersect1d(access.rows, other.rows)[0]})"


def instruction(function):
    """Make a function of nki.isa an instruction that recordings see and that `strict` may run later."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def issue(*args, **kwargs):
        watcher = _mode.watcher
        if watcher is None:
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        recorded = dict(bound.arguments)
        values = {
            name: VirtualRegister(value._value, value._frozen) if isinstance(value, VirtualRegister) else value
            for name, value in recorded.items()
        }
        current = launch.current()
        watcher.add(
            Instruction(function.__name__, recorded, program=current.program, repeats=current.repeats()),
            lambda: function(**values),
        )

    return issue


def settle_all():
    """On-chip memory is full: run what waits, since it holds tiles that the kernel has dropped."""
    if _mode.watcher is not None:
        _mode.watcher.settle_all()


def settle(tile):
    """Python is about to read a tile's value (a dynamic offset, a register): what it depends on has to have run.

    Returns:
        int: those instructions, as `branch` takes them from a register.
    """
    return _mode.watcher.settle(tile) if _mode.watcher is not None else 0


def branch(bound):
    """Control flow depends on a register, or on nothing when `bound` is an int."""
    if _mode.watcher is not None and isinstance(bound, VirtualRegister):
        _mode.watcher.branch(bound.after)


def drop_program():
    """A kernel raised: what it left waiting must not run in the next launch."""
    if isinstance(_mode.watcher, OutOfOrder):
        _mode.watcher.start_program()


def finish_program():
    if _mode.watcher is not None:
        _mode.watcher.finish()


@contextlib.contextmanager
def _watched(watcher):
    before, _mode.watcher = _mode.watcher, watcher
    try:
        yield watcher
    finally:
        _mode.watcher = before


def record():
    """Record this thread's launches inside: yields a Recording."""
    return _watched(Recording())


def strict(seed):
    """Run this thread's launches inside out of order, as `seed` (int) decides, and raise HazardError where order is missing."""
    return _watched(OutOfOrder(seed))
