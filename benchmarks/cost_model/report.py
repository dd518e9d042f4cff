"""From a recording to a modelled time, and what it is made of."""

import collections
import dataclasses
import json
import weakref

from . import critical_path, dependencies, dma_cost
from .assumptions import Settings
from .schedule import RESOURCES, Simulation
from .steps import step

# A resource that is busy for a smaller share of the time does not bound it.
BOUND_SHARE = 0.75

_prepared = weakref.WeakKeyDictionary()


class Schedule:
    """A modelled launch: figures of its slowest program, bytes and instructions of all.

    total_us: from the first instruction to the last result; the launch itself is not in it.
    busy_us: resource -> us; "dma" is the mean of the 16 DMA engines, "dma_busiest" the busiest, "hwdge" the mean of
        its instances.
    program_instructions: instructions that one core's program holds, those of a hardware loop's body once.
    bytes: kind -> bytes in HBM, kinds as dma_cost.KINDS; a scatter's read-modify-write counts read and write.
    longest_chain_us: the longest chain of dependencies with every resource free.
    sbuf_peak, psum_peak: most bytes a partition of tiles that are between their first and their last use at once.
        The simulator refuses a kernel that declares too much; this also sees tiles that are used after their Python
        variable is gone.
    """

    def __init__(self, simulations, settings):
        self.settings = settings
        self.programs = simulations
        self._slowest = max(simulations, key=_total)
        slowest = self._slowest
        self.total_us = _total(slowest) / 1e3
        self.busy_us = {name: busy / 1e3 for name, busy in slowest.busy.items()}
        self.busy_us["dma"] = float(slowest.engines.busy.mean()) / 1e3
        self.busy_us["dma_busiest"] = float(slowest.engines.busy.max()) / 1e3
        self.bytes = dict.fromkeys(dma_cost.KINDS, 0)
        for simulation in simulations:
            for dma in simulation.dmas.values():
                for kind, count in dma.hbm_bytes.items():
                    self.bytes[kind] += count
        self.dma_bytes = sum(self.bytes.values())
        self.instructions = sum(len(simulation.steps) for simulation in simulations)
        self.program_instructions = sum(not step.repeats for step in slowest.steps)
        self.longest_chain_us = slowest.longest_chain_ns() / 1e3
        self.sbuf_peak, self.psum_peak = _peak_bytes(slowest, "sbuf"), _peak_bytes(slowest, "psum")

    @property
    def bound_by(self):
        """The resource with the largest busy share, or "latency" where none is busy for BOUND_SHARE of the time."""
        shares = {name: self.busy_us[name] for name in RESOURCES} | {"dma": self.busy_us["dma_busiest"]}
        name = max(shares, key=shares.get)
        return name if shares[name] >= BOUND_SHARE * self.total_us else "latency"

    @property
    def critical_path(self):
        """List of critical_path.Wait of the slowest program, in order."""
        return critical_path.trace(self._slowest)

    def critical_time_us(self):
        """What the critical path is spent on: instruction name -> us, until it let the next element go on."""
        spent, before = collections.Counter(), 0.0
        for wait in self.critical_path:
            spent[wait.step.split(" ")[0]] += wait.until_us - before
            before = wait.until_us
        return dict(spent.most_common())

    def summary(self):
        return {
            "total_us": self.total_us,
            "bound_by": self.bound_by,
            "busy_us": self.busy_us,
            "longest_chain_us": self.longest_chain_us,
            "bytes": self.bytes,
            "dma_bytes": self.dma_bytes,
            "instructions": self.instructions,
            "sbuf_peak_bytes": self.sbuf_peak,
            "psum_peak_bytes": self.psum_peak,
            "programs_us": [_total(simulation) / 1e3 for simulation in self.programs],
            "settings": dataclasses.asdict(self.settings),
        }

    def to_json(self):
        """`summary` and the critical path."""
        return json.dumps(
            self.summary() | {"critical_path": [dataclasses.asdict(wait) for wait in self.critical_path]}, indent=1
        )

    def plot(self, path):
        """Write the slowest program's timeline as a PNG: one lane an engine, one a DMA engine."""
        from .timeline import plot

        plot(self, self._slowest, path)


def model(recording, settings=None):
    """Schedule of a recorded launch under Settings, by default the middle ones.

    recording: from `record` of this package, or of nki.simulator. Programs of a launch have a core each and
    do not wait for each other; the launch takes as long as the slowest.
    """
    settings = settings or Settings.middle()
    return Schedule([Simulation(*program, settings).run() for program in _programs(recording, settings)], settings)


def _programs(recording, settings):
    """(steps, dependencies) of each program; kept, since only hbm_order changes them."""
    count, kept = _prepared.get(recording, (None, {}))
    if count != len(recording.instructions):
        count, kept = len(recording.instructions), {}
        _prepared[recording] = (count, kept)
    key = bool(settings.hbm_order)
    if key not in kept:
        programs = collections.defaultdict(list)
        for instruction in recording.instructions:
            programs[instruction.program].append(step(instruction))
        if not programs:
            raise ValueError("the recording holds no instructions; accepted are recordings of one launch or more")
        kept[key] = [(steps, dependencies.find(steps, key)) for _, steps in sorted(programs.items())]
    return kept[key]


def _total(simulation):
    return max((timing.end for timing in simulation.timings), default=0.0)


def _peak_bytes(simulation, buffer):
    sizes, first, last = {}, {}, {}
    for instruction, timing in zip(simulation.steps, simulation.timings, strict=True):
        buffers = {id(tile.place) for tile in _tiles(instruction) if tile.buffer == buffer}
        for access in instruction.accesses:
            place = id(access.place)
            if place in buffers:
                sizes[place] = max(sizes.get(place, 0), access.stop)
                first[place] = min(first.get(place, timing.start), timing.start)
                last[place] = max(last.get(place, 0.0), timing.end)
    changes = sorted([(first[p], 1, sizes[p]) for p in sizes] + [(last[p], 0, -sizes[p]) for p in sizes])
    held = peak = 0
    for _, _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def _tiles(instruction):
    for value in instruction.operands.values():
        for tile in value if isinstance(value, (list, tuple)) else (value,):
            if hasattr(tile, "free_size"):
                yield tile
