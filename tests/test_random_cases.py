"""Twenty thousand seeded random calls on each device against torch and float64: shapes, dtypes, duplicates, special values.

A failure names its seed; `run_case(device, seed)` repeats it.
"""

import random

import pytest
import torch
from reference import assert_right

OPS = torch.ops.neuron
SHARDS, CASES_A_SHARD = 20, 1000
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-30, -65504.0, 3e38]


def pick_index(pick, generator, count, rows):
    kind = pick.choice(["uniform", "uniform", "equal", "few", "sorted", "unique"])
    if kind == "equal":
        return torch.full((count,), pick.randrange(rows))
    if kind == "few":
        return torch.randint(0, min(rows, 3), (count,), generator=generator)
    if kind == "sorted":
        return torch.randint(0, rows, (count,), generator=generator).sort().values
    if kind == "unique" and count <= rows:
        return torch.randperm(rows, generator=generator)[:count]
    return torch.randint(0, rows, (count,), generator=generator)


def run_case(device, seed):
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = pick.choice([torch.float32, torch.bfloat16, torch.float16])
    src_dtype = (
        pick.choice([torch.bfloat16, torch.float16]) if dtype == torch.float32 and pick.random() < 0.3 else dtype
    )
    rows, count = (
        pick.randint(1, 40),
        pick.choice([0, 1, 2, pick.randint(1, 20), pick.randint(1, 128), pick.randint(129, 300)]),
    )
    trailing = pick.choice([(), (1,), (pick.randint(1, 9),), (pick.randint(1, 4), pick.randint(1, 4))])
    index = pick_index(pick, generator, count, rows).to(pick.choice([torch.int32, torch.int64]))
    input = torch.randn(rows, *trailing, generator=generator).to(dtype)
    src = (torch.randn(count, *trailing, generator=generator) * pick.choice([1, 1, 100])).to(src_dtype)
    for tensor in (input, src):
        if pick.random() < 0.3 and tensor.numel():
            for _ in range(pick.randint(1, 4)):
                tensor.view(-1)[pick.randrange(tensor.numel())] = pick.choice(SPECIAL)
    alpha = pick.choice([1, 1, 1, 2, -0.5])
    options = {"alpha": alpha, "lnc": pick.choice([None, 1, 2])}
    if len(index.unique()) == count:
        options["unique_indices"] = pick.random() < 0.5
    dim = 0 if pick.random() < 0.9 else pick.randrange(input.dim())
    input_d, src_d = input.clone().movedim(0, dim).to(device), src.movedim(0, dim).to(device)
    if pick.random() < 0.5:
        result = OPS.scatter_add_(input_d, dim, index.to(device), src_d, **options)
        assert result is input_d
    else:
        result = OPS.scatter_add(input_d, dim, index.to(device), src_d, **options)
    assert_right(result, input.movedim(0, dim), index, src.movedim(0, dim), dim=dim, alpha=alpha)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_calls(device, shard):
    for seed in range(shard * CASES_A_SHARD, (shard + 1) * CASES_A_SHARD):
        try:
            run_case(device, seed)
        except Exception as error:
            raise AssertionError(f"run_case({device!r}, {seed}): {error}") from error
