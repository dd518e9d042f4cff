"""Which form of kernel serves a call, and with which tile sizes: plain Python over shapes, nothing of any tensor's data.

K is left out on purpose: the choice is made while a graph is traced, where K may be symbolic, and one choice has to hold for all.
The sizes were chosen with the cost model in benchmarks/ (modelled, not measured).
"""

import dataclasses

# Rows of input up to which it is kept on the chip: each 128 of them cost a matmul for every tile of src.
STATIONARY_ROWS = 512

# From 4 KiB a partition on a DMA reaches the bandwidth ("Guideline to Avoid Under-Utilizing DMA Bandwidth").
PIECE_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Plan:
    """form: 'stationary' or 'grouped'. constants: the kernel's compile-time arguments. reason: why this form, in words."""

    form: str
    constants: dict
    reason: str


def plan(rows, columns, itemsize, lnc, unique_indices):
    """Plan a call.

    Args:
        rows (int): N, rows of input.
        columns (int): D, columns of input.
        itemsize (int): bytes of an element of input.
        lnc (int): cores that share the launch, each with D / lnc columns.
        unique_indices (bool): whether the caller promises that no index repeats.

    Returns:
        Plan.
    """
    if rows <= STATIONARY_ROWS and not unique_indices:
        return Plan(
            "stationary",
            {"tiles_per_group": 8},
            f"input of {rows} rows stays on the chip, each of them is read and written once",
        )
    row_bytes = columns // lnc * itemsize
    piece = min(row_bytes, PIECE_BYTES)
    # Without sums a group has no matmuls that grow with the square of its tiles.
    tiles = 8 if unique_indices else 4
    # Two pieces in turn, where there are two: one works while the other waits for its stores.
    sets = 1 if unique_indices else 2
    return Plan(
        "grouped",
        {"tiles_per_group": tiles, "piece_columns": piece // itemsize, "piece_sets": sets},
        f"groups of {tiles * 128} rows in pieces of {piece} bytes, gathers and stores of a group side by side",
    )
