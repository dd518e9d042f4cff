"""Every shape of the product's targets, in float32 and bfloat16, on every device. On the stand-in the results are simulated."""

import pytest
import torch
from reference import assert_right

import torch_neuron_scatter as tns

# Destination rows, columns, sources a row: the kernels' own tests, their pull request and the Hub kernel.
BY_SOURCES_PER_ROW = [(128, 512, 4), (256, 2048, 8), (512, 1024, 4), (1024, 4096, 2), (4096, 2880, 4)]
# Rows, columns, K with duplicates everywhere.
DUPLICATES = [(16, 512, 64), (10, 256, 200), (64, 1024, 512)]


def check(device, dtype, rows, columns, index, src=None):
    torch.manual_seed(0)
    input = torch.randn(rows, columns).to(dtype)
    src = torch.randn(len(index), columns).to(dtype) if src is None else src
    result = tns.scatter_add_(input.clone().to(device), index.to(device), src.to(device))
    assert_right(result, input, index, src)
    assert tns.stats() == {"kernel": int(device == "neuron"), "fallback": 0}


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("rows,columns,sources", BY_SOURCES_PER_ROW)
def test_unique_within_a_tile(device, dtype, rows, columns, sources):
    generator = torch.Generator().manual_seed(1)
    index = torch.cat([torch.randperm(rows, generator=generator) for _ in range(sources)])
    check(device, dtype, rows, columns, index)


@DTYPES
@pytest.mark.parametrize("rows,columns,count", DUPLICATES)
def test_duplicates(device, dtype, rows, columns, count):
    check(device, dtype, rows, columns, torch.randint(0, rows, (count,), generator=torch.Generator().manual_seed(2)))


@DTYPES
def test_moe_combine(device, dtype):
    """Top-2 of 8 experts with static capacity: every token receives up to two rows."""
    tokens, hidden = 512, 2048
    index = torch.cat([torch.randperm(tokens, generator=torch.Generator().manual_seed(seed)) for seed in range(2)])
    check(device, dtype, tokens, hidden, index)


@DTYPES
@pytest.mark.parametrize("vocabulary", [32000, 128256])
def test_embedding_gradient_of_zipf_distributed_words(device, dtype, vocabulary):
    ranks = torch.arange(1, vocabulary + 1, dtype=torch.float64)
    words = torch.multinomial(1 / ranks, 8192, replacement=True, generator=torch.Generator().manual_seed(3))
    check(device, dtype, vocabulary, 64, words)


@DTYPES
def test_histogram(device, dtype):
    index = torch.randint(0, 1000, (4096,), generator=torch.Generator().manual_seed(4))
    input, src = torch.zeros(1000, dtype=dtype), torch.ones(4096, dtype=dtype)
    result = tns.scatter_add_(input.clone().to(device), index.to(device), src.to(device))
    assert_right(result, input, index, src)
