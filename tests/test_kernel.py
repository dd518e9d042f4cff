"""The NKI kernel alone, in the simulator: what only it can get wrong. Results here are simulated."""

import importlib

import pytest
import torch
from conftest import requires_neuron
from reference import assert_right, bits_equal

pytestmark = requires_neuron


@pytest.fixture(scope="module")
def kernel():
    return importlib.import_module("torch_neuron_scatter.kernels.scatter_add").scatter_add


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize(
    "dtype,src_dtype",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 128, 385])
def test_dtypes_counts_and_cores(kernel, lnc, dtype, src_dtype, count):
    torch.manual_seed(count)
    input, src = torch.randn(50, 6).to(dtype), torch.randn(count, 6).to(src_dtype)
    index = torch.randint(0, 50, (count,), dtype=torch.int32)
    destination = input.clone()
    kernel[lnc](destination, index, src)
    assert_right(destination, input, index, src)


def test_rows_above_two_to_the_24_are_told_apart(kernel):
    """float32 cannot tell 2**24 from 2**24 + 1; a comparison of indices in float32 would add both to both."""
    rows = 2**24 + 8
    index = torch.tensor([2**24, 2**24 + 1, 2**24 + 1, 2**24 + 3, 2**24 - 1, rows - 1], dtype=torch.int32)
    src = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0], [32.0]])
    destination = torch.zeros(rows, 1)
    kernel[1](destination, index, src)
    assert destination[-9:].flatten().tolist() == [16, 1, 6, 0, 8, 0, 0, 0, 32]
    assert int(destination.count_nonzero()) == 5


@pytest.mark.parametrize("value", [2**24 + 8, 2**24 + 9])
def test_out_of_range_just_above_two_to_the_24_is_refused(kernel, value):
    destination = torch.zeros(2**24 + 8, 1)
    with pytest.raises(IndexError):
        kernel[1](destination, torch.tensor([0, value], dtype=torch.int32), torch.ones(2, 1))
    assert not destination.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_order_in_which_rows_are_stored_does_not_matter(kernel, dtype):
    import nki

    torch.manual_seed(0)
    input, src = torch.randn(20, 40).to(dtype), torch.randn(300, 40).to(dtype)
    index = torch.randint(0, 20, (300,), dtype=torch.int32)
    results = []
    for seed in range(20):
        destination = input.clone()
        with nki.simulator.seed(seed):
            kernel[2](destination, index, src)
        results.append(destination)
    assert all(bits_equal(results[0], result) for result in results[1:])
    assert_right(results[0], input, index, src)


@pytest.mark.parametrize("unique_indices", [False, True])
def test_alpha_is_applied_in_float32(kernel, unique_indices):
    input, src = torch.zeros(4, 3, dtype=torch.bfloat16), torch.full((4, 3), 3.0, dtype=torch.bfloat16)
    index = torch.arange(4, dtype=torch.int32)
    kernel[1](input, index, src, torch.tensor([1 / 3]), unique_indices=unique_indices)
    assert input.unique().tolist() == [1.0]


def test_unique_indices_skips_the_combine_and_a_false_promise_shows(kernel):
    """The simulator makes a broken promise visible: two rows of one store, the last one to land wins."""
    destination = torch.zeros(4, 1)
    index = torch.tensor([0, 0, 1, 2, 2, 2], dtype=torch.int32)
    kernel[1](destination, index, torch.ones(6, 1), unique_indices=True)
    assert destination.flatten().tolist() == [1, 1, 1, 0]
