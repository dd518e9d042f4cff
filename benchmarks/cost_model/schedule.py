"""Event-driven simulation of one program on one NeuronCore.

Each compute engine and each DMA queue takes its instructions in program order (`issue_window` loosens that) and waits
for what the oldest depends on. A DMA then waits for its descriptors (hardware DGE, GpSimd), for the fixed latency,
and for its turn on each DMA engine. The three add up, since no page says that they overlap. Triggering a DMA costs
Sync Engine nothing, since no page gives a time, and the depth of a queue has no bound. A gather or scatter starts to
write descriptors once its index and its data are there.
"""

import dataclasses
import heapq
import itertools

from . import compute_cost, dma_cost, figures
from .dma_engines import DmaEngines

# At one time, a DMA engine is free before the next DMA arrives, and a result is there before what it lets go on.
_DONE, _ARRIVE, _ISSUE = 0, 1, 2
_FIXED_NS = figures.DMA_FIXED_NS.value
LANES = ("tensor", "vector", "scalar", "gpsimd", "sync", "load", "store")
_DMA_QUEUES = ("load", "store", "gpsimd", "scalar")
RESOURCES = ("tensor", "vector", "scalar", "gpsimd", "sync", "hwdge", "dma")


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a step did not start before `time`, ns.

    is_result: it waited for all of step `number`, else for what that step kept busy.
    """

    why: str
    number: int | None
    time: float
    is_result: bool = False


_START = Cause("the start", None, 0.0)


@dataclasses.dataclass
class Timing:
    """When a step ran, ns. free: its engine, or what writes its descriptors, is. end: its result is visible.

    last_piece: of a DMA, the Piece that finished last.
    """

    start: float = 0.0
    free: float = 0.0
    end: float = 0.0
    waited_for: Cause = _START
    last_piece: object = None


class _Lane:
    """An engine's or a queue's instructions that wait, in program order."""

    def __init__(self):
        self.waiting, self.free, self.last, self.version = [], 0.0, None, 0
        self.last_start, self.stationary, self.last_arrival = 0.0, None, 0.0


class Simulation:
    """One run. Afterwards: timings, busy (ns by resource), engines (the DMA engines' pieces and busy times)."""

    def __init__(self, steps, dependencies, settings):
        self.steps, self.dependencies, self.settings = steps, dependencies, settings
        self.dmas, self.costs, self.lane_of = {}, {}, []
        for number, step in enumerate(steps):
            if dma_cost.is_dma(step):
                self.dmas[number] = dma_cost.dma(step, settings)
                self.lane_of.append(self.dmas[number].queue)
            else:
                engine = compute_cost.engine_of(step)
                self.costs[number] = compute_cost.cost(step, engine, settings)
                self.lane_of.append(engine)
        self.timings = [Timing() for _ in steps]
        self.busy = dict.fromkeys(RESOURCES, 0.0)
        self.engines = DmaEngines(_DMA_QUEUES)
        self._hwdge_free = [0.0] * int(figures.HWDGE_INSTANCES.value)
        self._hwdge_last = [None] * len(self._hwdge_free)
        self._heap, self._lanes = [], {name: _Lane() for name in LANES}

    def run(self):
        self._followers = [[] for _ in self.steps]
        self._unmet = []
        self._ready = [_START] * len(self.steps)
        for number, needs in enumerate(self.dependencies):
            self._unmet.append(len(needs.data) + len(needs.order))
            for kind in (needs.data, needs.order):
                for earlier in kind:
                    self._followers[earlier].append((number, kind is needs.data))
            self._lanes[self.lane_of[number]].waiting.append(number)
        for lane in self._lanes.values():
            # Taken from the end: the oldest instruction is the last.
            lane.waiting.reverse()
            self._offer(lane)
        while self._heap:
            time, kind, number, version = heapq.heappop(self._heap)
            if kind == _DONE:
                self._done(number, time)
            elif kind == _ARRIVE:
                self._arrive(number, time)
            elif self._lanes[self.lane_of[number]].version == version:
                self._issue(number, time)
        return self

    def _offer(self, lane):
        """Put the instruction of the lane's window that can start first on the heap."""
        lane.version += 1
        best = None
        for number in lane.waiting[: -int(self.settings.issue_window) - 1 : -1]:
            if self._unmet[number] == 0:
                start = max(lane.free, self._ready[number].time, self._stationary_end(lane, number))
                if best is None or start < best[0]:
                    best = (start, number)
        if best is not None:
            heapq.heappush(self._heap, (best[0], _ISSUE, best[1], lane.version))

    def _stationary_end(self, lane, number):
        """When the stationary tile is loaded: behind the matmul before, where the operands are there early enough."""
        key = self._stationary(number)
        if key is None or key == lane.stationary:
            return 0.0
        return max(lane.last_start, self._ready[number].time) + self.costs[number].stationary_ns

    def _stationary(self, number):
        operands = self.steps[number].operands
        tile = operands.get("stationary") or (operands["data"] if self.lane_of[number] == "tensor" else None)
        if tile is None:
            return None
        place = id(tile.place)
        return place, tile.first_partition, tile.shape, tile.strides, self.dependencies[number].versions.get(place)

    def _issue(self, number, time):
        name = self.lane_of[number]
        lane, timing = self._lanes[name], self.timings[number]
        offset = next(offset for offset in itertools.count(1) if lane.waiting[-offset] == number)
        del lane.waiting[-offset]
        ready = self._ready[number]
        timing.waited_for = Cause(f"{name} busy", lane.last, lane.free) if lane.free > ready.time else ready
        timing.start = time
        lane.last, lane.last_start = number, time
        if number in self.dmas:
            self._trigger(number, time, lane)
        else:
            cost = self.costs[number]
            lane.stationary = self._stationary(number)
            timing.free = lane.free = time + cost.busy_ns
            timing.end = timing.free + cost.latency_ns
            self.busy[name] += cost.busy_ns
            self._finish(number)
        self._offer(lane)

    def _trigger(self, number, time, lane):
        dma = self.dmas[number]
        described, lane.free = time + dma.trigger_ns, time
        if dma.trigger == "swdge":
            lane.free = described
            self.busy["gpsimd"] += dma.trigger_ns
        elif dma.trigger == "hwdge":
            instance = min(range(len(self._hwdge_free)), key=self._hwdge_free.__getitem__)
            if self._hwdge_free[instance] > time:
                described = self._hwdge_free[instance] + dma.trigger_ns
                self.timings[number].waited_for = Cause(
                    "hwdge busy", self._hwdge_last[instance], self._hwdge_free[instance]
                )
            self._hwdge_free[instance], self._hwdge_last[instance] = described, number
            self.busy["hwdge"] += dma.trigger_ns / len(self._hwdge_free)
        self.timings[number].free = described
        arrival = max(described + _FIXED_NS, lane.last_arrival)
        lane.last_arrival = arrival
        heapq.heappush(self._heap, (arrival, _ARRIVE, number, 0))

    def _arrive(self, number, time):
        dma = self.dmas[number]
        for piece in self.engines.arrive(number, dma.queue, dma.engine_ns, time):
            heapq.heappush(self._heap, (piece.end, _DONE, piece.engine, 0))
        if not dma.engine_ns.any():
            self._complete(number, time)

    def _done(self, engine, time):
        piece, is_last, following = self.engines.finish(engine, time)
        if following is not None:
            heapq.heappush(self._heap, (following.end, _DONE, engine, 0))
        if is_last:
            self.timings[piece.number].last_piece = piece
            self._complete(piece.number, time)

    def _complete(self, number, time):
        self.timings[number].end = time + self.settings.dma_completion_ns
        self._finish(number)

    def _finish(self, number):
        lanes = set()
        for follower, is_data in self._followers[number]:
            time = self._available(number, follower, is_data)
            if time >= self._ready[follower].time:
                self._ready[follower] = Cause("the result of" if is_data else "the end of", number, time, True)
            self._unmet[follower] -= 1
            if self._unmet[follower] == 0:
                lanes.add(self.lane_of[follower])
        for name in sorted(lanes):
            self._offer(self._lanes[name])

    def _available(self, number, follower, is_data):
        """When `follower` may start, as far as step `number` is concerned."""
        timing, lane, other = self.timings[number], self.lane_of[number], self.lane_of[follower]
        if number in self.dmas:
            return timing.end
        if lane == other and (not is_data or lane == "tensor"):
            # One engine works in order, and matmuls accumulate in PSUM without a wait.
            return timing.free
        if lane == other or (follower in self.dmas and other != "gpsimd"):
            return timing.end
        return timing.end + self.settings.semaphore_ns

    def longest_chain_ns(self):
        """Time of the longest chain of dependencies, if every engine, queue and DMA engine were free all the time."""
        actual, self.timings = self.timings, [Timing() for _ in self.steps]
        try:
            for number, needs in enumerate(self.dependencies):
                waits = [self._available(earlier, number, True) for earlier in needs.data]
                waits += [self._available(earlier, number, False) for earlier in needs.order]
                timing = self.timings[number]
                timing.start = max(waits, default=0.0)
                if number in self.dmas:
                    dma = self.dmas[number]
                    moved = timing.start + dma.trigger_ns + _FIXED_NS + float(dma.engine_ns.max())
                    timing.end = moved + self.settings.dma_completion_ns
                else:
                    timing.free = timing.start + self.costs[number].busy_ns
                    timing.end = timing.free + self.costs[number].latency_ns
            return max((timing.end for timing in self.timings), default=0.0)
        finally:
            self.timings = actual
