"""The kernels that benchmarks compare with, in the simulator. Results here are simulated."""

import importlib

import pytest
import torch
from conftest import requires_neuron
from reference import assert_right, bits_equal

pytestmark = requires_neuron

MODULES = {"gather_add_store": "gather_add_store", "one_row_a_tile": "one_row", "tile_combine": "tile_combine"}
REPEATS_RIGHT = ["one_row_a_tile", "tile_combine"]


def launch(name, lnc, input, index, src):
    """The kernel's result; input is left as it was."""
    module = importlib.import_module(f"benchmarks.reference_kernels.{MODULES[name]}")
    destination = input.clone()
    result = getattr(module, name)[lnc](destination, index.to(torch.int32), src)
    assert result is destination
    return destination


@pytest.mark.parametrize("name,expected", [
    ("gather_add_store", [1, 1, 1, 0]),
    ("one_row_a_tile", [2, 1, 3, 0]),
    ("tile_combine", [2, 1, 3, 0]),
])  # fmt: skip
@pytest.mark.parametrize("lnc", [1, 2])
def test_the_example(name, expected, lnc):
    index = torch.tensor([0, 0, 1, 2, 2, 2])
    result = launch(name, lnc, torch.zeros(4, 2), index, torch.ones(6, 2))
    assert result.tolist() == [[value, value] for value in expected]


@pytest.mark.parametrize("name", REPEATS_RIGHT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lnc,count,rows,columns", [
    (1, 1, 3, 4),
    (1, 300, 20, 1),
    (2, 300, 20, 2),
    (1, 128, 7, 514),
    (2, 129, 40, 2600),
    (1, 150, 40, 2600),
])  # fmt: skip
def test_repeats_accumulate(name, dtype, lnc, count, rows, columns):
    torch.manual_seed(count + columns)
    input, src = torch.randn(rows, columns).to(dtype), torch.randn(count, columns).to(dtype)
    index = torch.randint(0, rows, (count,))
    assert_right(launch(name, lnc, input, index, src), input, index, src)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lnc,columns", [(1, 1), (1, 2600), (2, 2600)])
def test_unique_indices(name, dtype, lnc, columns):
    torch.manual_seed(columns)
    input, src = torch.randn(200, columns).to(dtype), torch.randn(150, columns).to(dtype)
    index = torch.randperm(200)[:150]
    result = launch(name, lnc, input, index, src)
    assert bits_equal(result, torch.index_add(input, 0, index, src))


@pytest.mark.parametrize("name", REPEATS_RIGHT)
def test_a_narrower_src_is_added_to_float32(name):
    torch.manual_seed(0)
    input, src = torch.randn(9, 6), torch.randn(140, 6).to(torch.bfloat16)
    index = torch.randint(0, 9, (140,))
    assert_right(launch(name, 2, input, index, src), input, index, src)


@pytest.mark.parametrize("name", REPEATS_RIGHT)
def test_the_order_in_which_rows_are_stored_does_not_matter(name):
    import nki

    torch.manual_seed(0)
    input, src, index = torch.randn(5, 4), torch.randn(140, 4), torch.randint(0, 5, (140,))
    results = []
    for seed in range(10):
        with nki.simulator.seed(seed):
            results.append(launch(name, 1, input, index, src))
    assert all(bits_equal(results[0], result) for result in results[1:])


def test_one_row_a_tile_keeps_the_order_of_rows_out_of_order():
    """Its gathers wait for the stores before them through the tile that both use."""
    import nki

    index, src = torch.tensor([0, 0, 1, 2, 2, 2]), torch.ones(6, 2)
    for seed in range(20):
        with nki.simulator.strict(seed):
            result = launch("one_row_a_tile", 2, torch.zeros(4, 2), index, src)
        assert result[:, 0].tolist() == [2, 1, 3, 0] and bits_equal(result[:, 0], result[:, 1])


def test_tile_combine_does_not_tell_rows_above_two_to_the_24_apart():
    """What the product's kernel is compared with it for: 2**24 and 2**24 + 1 are one number in float32."""
    index = torch.tensor([2**24, 2**24 + 1])
    result = launch("tile_combine", 1, torch.zeros(2**24 + 2, 1), index, torch.tensor([[1.0], [2.0]]))
    assert result[-2:].flatten().tolist() == [3, 3]


def test_tile_combine_spreads_nan_over_its_tile():
    src = torch.tensor([[1.0], [float("nan")]])
    assert launch("tile_combine", 1, torch.zeros(3, 1), torch.tensor([0, 1]), src)[:2].isnan().all()
