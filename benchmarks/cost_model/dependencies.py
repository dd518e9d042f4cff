"""Which earlier steps of one program a step has to wait for.

On-chip accesses meet where their partitions and bytes do. HBM accesses meet where their rows and the bytes in those
rows do, rows of indirect accesses as they were. Not seen: a register that gives a dynamic address or a loop's bound
(fori_loop's own register needs no wait, each engine's sequencer counts). A tile that no hardware loop declares has
its own memory, as in the recording.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Dependencies:
    """data: numbers of steps whose result a step reads. order: of steps that must have read or written before it writes.

    versions: id(place) -> how often it was written before, of what the step reads; tells one stationary tile from the next.
    """

    data: frozenset
    order: frozenset
    versions: dict


class _Intervals:
    """Accesses to one place that are told apart by partitions and bytes.

    What a later access stands for is dropped: an access inside a write that waits for it, and a read inside a later
    read that waits for a write that waits for the first.
    """

    def __init__(self):
        self.writers, self.readers, self.passed = [], [], set()

    def add(self, number, access, data, order):
        first, end = access.partitions or (0, 1)
        box = (first, end, access.start, access.stop)
        met = [other for other, other_box in self.writers if _meet(box, other_box)]
        if not access.write:
            data.update(met)
            if met and self.passed:
                gone = {entry for entry in self.passed if _inside(entry[1], box)}
                if gone:
                    self.readers = [entry for entry in self.readers if entry not in gone]
                    self.passed -= gone
            self.readers.append((number, box))
            return
        order.update(met)
        kept = []
        for entry in self.readers:
            if entry[0] != number and _meet(box, entry[1]):
                order.add(entry[0])
                if _inside(entry[1], box):
                    self.passed.discard(entry)
                    continue
                self.passed.add(entry)
            kept.append(entry)
        self.readers = kept
        self.writers = [entry for entry in self.writers if not _inside(entry[1], box)]
        self.writers.append((number, box))


def _meet(box, other):
    return box[0] < other[1] and other[0] < box[1] and box[2] < other[3] and other[2] < box[3]


def _inside(box, outer):
    return outer[0] <= box[0] and box[1] <= outer[1] and outer[2] <= box[2] and box[3] <= outer[3]


class _Rows:
    """Accesses to one HBM tensor, row by row, for each interval of bytes in a row that occurs.

    Readers of a row since it was last written are a linked list: last_read[row] is an entry, before[entry] the one
    before it.
    """

    def __init__(self, rows):
        self.rows, self.columns = rows, {}
        self.readers = np.empty(1024, dtype=np.int64)
        self.before = np.empty(1024, dtype=np.int64)
        self.entries = 0

    def add(self, number, access, data, order):
        interval = (access.start, access.stop)
        if interval not in self.columns:
            self.columns[interval] = [np.full(self.rows, -1, dtype=np.int64) for _ in range(2)]
        for (start, stop), (last_write, last_read) in self.columns.items():
            if start >= access.stop or access.start >= stop:
                continue
            (order if access.write else data).update(np.unique(last_write[access.rows]).tolist())
            if access.write:
                self._wait_for_readers(last_read[access.rows], order)
                if access.start <= start and stop <= access.stop:
                    last_read[access.rows] = -1
        last_write, last_read = self.columns[interval]
        if access.write:
            last_write[access.rows] = number
            return
        end = self.entries + access.rows.size
        while end > self.readers.size:
            self.readers, self.before = (np.concatenate([x, np.empty_like(x)]) for x in (self.readers, self.before))
        self.readers[self.entries : end] = number
        self.before[self.entries : end] = last_read[access.rows]
        last_read[access.rows] = np.arange(self.entries, end)
        self.entries = end

    def _wait_for_readers(self, entries, order):
        entries = entries[entries >= 0]
        while entries.size:
            order.update(np.unique(self.readers[entries]).tolist())
            entries = self.before[entries]
            entries = entries[entries >= 0]


class _Unseen:
    """_Rows, and for a compiler that orders dynamic accesses by their columns alone, those too."""

    def __init__(self, rows):
        self.by_row, self.by_columns = _Rows(rows), _Intervals()

    def add(self, number, access, data, order):
        self.by_row.add(number, access, data, order)
        if access.dynamic:
            self.by_columns.add(number, dataclasses.replace(access, rows=None), data, order)


def find(steps, hbm_order=0):
    """Dependencies of each of one program's steps, numbered from 0; hbm_order as in assumptions.py."""
    written, rows = set(), {}
    for step in steps:
        for access in step.accesses:
            if access.write:
                written.add(id(access.place))
            if access.rows is not None and access.rows.size:
                rows[id(access.place)] = max(rows.get(id(access.place), 0), int(access.rows.max()) + 1)
    places, versions, found = {}, {}, []
    for number, step in enumerate(steps):
        data, order = set(), set()
        seen = {id(access.place): versions.get(id(access.place), 0) for access in step.accesses if not access.write}
        # Reads first, so that a step that reads what it writes does not wait for itself.
        for access in sorted(step.accesses, key=lambda access: access.write):
            place = id(access.place)
            if place not in written:
                continue
            if place not in places:
                places[place] = _tracker(access, rows.get(place, 0), hbm_order)
            places[place].add(number, access, data, order)
            if access.write:
                versions[place] = versions.get(place, 0) + 1
        found.append(Dependencies(frozenset(data - {-1, number}), frozenset(order - data - {-1, number}), seen))
    return found


def _tracker(access, rows, hbm_order):
    if access.partitions is not None:
        return _Intervals()
    return _Unseen(rows) if hbm_order else _Rows(rows)
