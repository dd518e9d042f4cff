"""Measured on this machine's CPU: neuron::scatter_add_ against torch.index_add_, from 1 MB of src up.

    python benchmarks/cpu_op.py

The goal is that the operator is never slower than 1.1 x torch. Both run in turns on the same tensors, for a second at least, since
another user of the machine can slow down a few milliseconds of it for one of them; each figure is the median over the turns. Exit
status 1 when a ratio is above the goal. Shapes and dtypes may be added.
"""

import argparse
import itertools
import statistics
import sys
import time

import torch
from tqdm import tqdm

import torch_neuron_scatter

GOAL = 1.1

# (N, K, D): src from 1 MB in bfloat16 up, with few and many rows, short and long ones.
SHAPES = ((128, 512, 512), (4096, 8192, 64), (1024, 2048, 256), (32000, 8192, 128), (16, 8192, 512), (4096, 8192, 2048))

DTYPES = (torch.float32, torch.bfloat16)
SMALLEST_SRC = 1e6
SECONDS_A_CASE = 1.0


def time_pair(rows, count, columns, dtype, turns):
    """Seconds a call for [rows, columns] input and [count, columns] src of `dtype`.

    Returns:
        (float, float): median seconds of torch.index_add_ and of neuron::scatter_add_ over `turns` turns or more.
    """
    generator = torch.Generator().manual_seed(0)
    input = torch.zeros(rows, columns, dtype=dtype)
    index = torch.randint(rows, (count,), generator=generator)
    src = torch.randn(count, columns, generator=generator).to(dtype)
    calls = (lambda: input.index_add_(0, index, src), lambda: torch_neuron_scatter.scatter_add_(input, index, src))
    seconds = ([], [])
    end = time.perf_counter() + SECONDS_A_CASE
    for turn in itertools.count():
        if turn > turns and time.perf_counter() > end:
            break
        for which in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            calls[which]()
            if turn:
                seconds[which].append(time.perf_counter() - start)
    return tuple(map(statistics.median, seconds))


def main(arguments=None):
    """Print a table of times and ratios; exit status 1 when a ratio is above the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=101, help="calls timed for each figure, at least")
    turns = parser.parse_args(arguments).turns
    cases = [
        ((rows, count, columns), dtype)
        for rows, count, columns in SHAPES
        for dtype in DTYPES
        if count * columns * dtype.itemsize >= SMALLEST_SRC
    ]
    lines, worst = [], 0.0
    for (rows, count, columns), dtype in tqdm(cases, desc="timing", leave=False, disable=None):
        before, after = time_pair(rows, count, columns, dtype, turns)
        worst = max(worst, after / before)
        megabytes = count * columns * dtype.itemsize / 1e6
        lines.append(
            f"{rows:>7}{count:>7}{columns:>7}  {str(dtype).removeprefix('torch.'):9}{megabytes:>7.1f}"
            f"{before * 1e3:>12.3f}{after * 1e3:>12.3f}{after / before:>8.2f}"
        )
    print(
        f"Measured on the CPU, torch {torch.__version__}, {torch.get_num_threads()} threads, median of {turns} turns or more"
    )
    print(f"{'N':>7}{'K':>7}{'D':>7}  {'dtype':9}{'src MB':>7}{'torch ms':>12}{'ours ms':>12}{'ratio':>8}")
    print("\n".join(lines))
    print(f"largest ratio {worst:.2f}, goal {GOAL:.2f}: {'met' if worst <= GOAL else 'MISSED'}")
    return 0 if worst <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
