"""What the last result waited for, back to the first instruction."""

import dataclasses


@dataclasses.dataclass
class Wait:
    """One element of the critical path.

    start_us: when the instruction was issued. until_us: when it let the next element go on; of the last, its result.
    waits_for: what held it up last.
    """

    step: str
    start_us: float
    until_us: float
    waits_for: str


def trace(simulation):
    """List of Wait of a simulated program, from the first instruction to the last that finishes."""
    steps, timings = simulation.steps, simulation.timings
    number = max(range(len(steps)), key=lambda number: timings[number].end)
    until, piece, path = timings[number].end, timings[number].last_piece, []
    while True:
        cause = timings[number].waited_for
        if piece is not None and piece.behind is not None:
            why, earlier, then = f"DMA engine {piece.engine} busy", piece.behind.number, piece.behind.end
            piece = piece.behind
        else:
            why, earlier, then = cause.why, cause.number, cause.time
            # A wait for a result is a wait for a DMA's last piece; a wait for its trigger is not.
            piece = timings[earlier].last_piece if cause.is_result else None
        text = why if earlier is None else f"{why} {steps[earlier]} #{earlier}"
        path.append(Wait(f"{steps[number]} #{number}", timings[number].start / 1e3, until / 1e3, text))
        if earlier is None:
            return path[::-1]
        number, until = earlier, then
