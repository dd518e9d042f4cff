"""Seeded random launches of the kernels alone, out of order: shapes, tile sizes, dtypes, duplicates, special values.

The number of cases is that of the environment variable KERNEL_CASES, else some hundreds; `run_case(seed)` repeats one.
"""

import os
import random

import pytest
import torch
from conftest import requires_neuron
from reference import assert_right, bits_equal
from test_kernel import load
from test_random_cases import SPECIAL, pick_index

pytestmark = requires_neuron

SHARDS = 10
CASES_A_SHARD = int(os.environ.get("KERNEL_CASES", "200")) // SHARDS


def run_case(seed, orders=1):
    """One launch in `orders` orders of its instructions, compared with float64."""
    import nki

    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    name = pick.choice(["grouped", "grouped", "stationary"])
    dtype = pick.choice([torch.float32, torch.bfloat16, torch.float16])
    narrow = dtype == torch.float32 and pick.random() < 0.3
    src_dtype = pick.choice([torch.bfloat16, torch.float16]) if narrow else dtype
    many = 2**24 + 3 if pick.random() < 0.01 else 70000
    rows = pick.choice([pick.randint(1, 40), pick.randint(100, 300), many])
    rows = min(rows, 300) if name == "stationary" else rows
    count = pick.choice([1, pick.randint(2, 127), 128, pick.randint(129, 400)])
    columns = pick.choice([1, pick.randint(2, 9), pick.randint(10, 30)]) if rows < 10**6 else 1
    lnc = 2 if columns % 2 == 0 and pick.random() < 0.5 else 1
    index = pick_index(pick, generator, count, rows).int()
    if rows > 1000 and pick.random() < 0.5:
        index = rows - 1 - index % 40
    input = torch.randn(min(rows, 1000), columns, generator=generator).to(dtype)
    input = input.repeat(-(-rows // len(input)), 1)[:rows].contiguous()
    src = (torch.randn(count, columns, generator=generator) * pick.choice([1, 1, 100])).to(src_dtype)
    if pick.random() < 0.3:
        for tensor in (input, src):
            for _ in range(pick.randint(0, 3)):
                tensor.view(-1)[pick.randrange(tensor.numel())] = pick.choice(SPECIAL)
    alpha = pick.choice([None, None, None, 2.0, -0.5])
    constants = {"tiles_per_group": pick.choice([1, 2, 4])}
    if name == "grouped":
        constants["piece_columns"] = pick.choice([3, 8, 1024])
        constants["piece_sets"] = pick.choice([1, 2])
        constants["unique_indices"] = len(index.unique()) == count and pick.random() < 0.5
    results = []
    for order in range(orders):
        result = input.clone()
        with nki.simulator.strict(seed + order):
            load(name)[lnc](result, index, src, None if alpha is None else torch.tensor([alpha]), **constants)
        results.append(result)
    assert all(bits_equal(results[0], result) for result in results[1:])
    assert_right(results[0], input, index, src, alpha=1 if alpha is None else alpha, groups_of=128)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_launches_out_of_order(shard):
    for seed in range(shard * CASES_A_SHARD, (shard + 1) * CASES_A_SHARD):
        try:
            # Of every hundred one runs in twenty orders.
            run_case(seed, orders=20 if seed % 100 == 0 else 1)
        except Exception as error:
            raise AssertionError(f"run_case({seed}): {error}") from error
