"""The 16 DMA engines: each does one transfer at a time, in order within a queue and in turns between queues.

Source: nki-dma-overview.rst, DMA Queues (round robin for NeuronCore-v3). A turn is all that one DMA moves on that engine.
"""

import collections
import dataclasses

import numpy as np

from .dma_cost import ENGINES


@dataclasses.dataclass
class Piece:
    """What one DMA moves on one engine, times in ns.

    behind: the Piece that was served before it, None where it came to an idle engine.
    """

    number: int
    engine: int
    duration: float
    start: float = 0.0
    end: float = 0.0
    behind: "Piece | None" = None


class DmaEngines:
    """pieces: all that were served, in order of their starts. busy: [16] ns."""

    def __init__(self, queues):
        self.pieces, self.busy = [], np.zeros(ENGINES)
        self._waiting = [{queue: collections.deque() for queue in queues} for _ in range(ENGINES)]
        self._served = [None] * ENGINES
        self._left = {}

    def arrive(self, number, queue, engine_ns, time):
        """A DMA's descriptors are in the queue. Returns pieces that start now; none at all where it moves nothing."""
        engines = np.flatnonzero(engine_ns).tolist()
        self._left[number] = len(engines)
        started = []
        for engine in engines:
            self._waiting[engine][queue].append(Piece(number, engine, float(engine_ns[engine])))
            if self._served[engine] is None:
                started.append(self._next(engine, time, None))
        return started

    def finish(self, engine, time):
        """An engine's piece ends. Returns (the piece, whether it was its DMA's last, the piece that starts now or None)."""
        piece, self._served[engine] = self._served[engine], None
        self._left[piece.number] -= 1
        return piece, self._left[piece.number] == 0, self._next(engine, time, piece)

    def _next(self, engine, time, behind):
        waiting = self._waiting[engine]
        queue = next((queue for queue, pieces in waiting.items() if pieces), None)
        if queue is None:
            return None
        piece = waiting[queue].popleft()
        # The queue that was served goes to the end of the line.
        waiting[queue] = waiting.pop(queue)
        piece.start, piece.end, piece.behind = time, time + piece.duration, behind
        self._served[engine] = piece
        self.busy[engine] += piece.duration
        self.pieces.append(piece)
        return piece
