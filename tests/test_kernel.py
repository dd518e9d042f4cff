"""The NKI kernels alone, in the simulator: what only they can get wrong. Results here are simulated."""

import importlib

import pytest
import torch
from conftest import requires_neuron
from reference import assert_right, bits_equal

pytestmark = requires_neuron


KERNELS = {
    "tiled": ("scatter_add", "scatter_add"),
    "grouped": ("grouped", "grouped_scatter_add"),
    "stationary": ("stationary", "stationary_scatter_add"),
}


def load(name):
    module, function = KERNELS[name]
    return getattr(importlib.import_module(f"torch_neuron_scatter.kernels.{module}"), function)


@pytest.fixture(scope="module", params=KERNELS)
def kernel(request):
    return load(request.param)


@pytest.fixture(scope="module", params=["tiled", "grouped"])
def kernel_of_many_rows(request):
    return load(request.param)


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


def test_rows_above_two_to_the_24_are_told_apart(kernel_of_many_rows):
    """float32 cannot tell 2**24 from 2**24 + 1; a comparison of indices in float32 would add both to both."""
    rows = 2**24 + 8
    index = torch.tensor([2**24, 2**24 + 1, 2**24 + 1, 2**24 + 3, 2**24 - 1, rows - 1], dtype=torch.int32)
    src = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0], [32.0]])
    destination = torch.zeros(rows, 1)
    kernel_of_many_rows[1](destination, index, src)
    assert destination[-9:].flatten().tolist() == [16, 1, 6, 0, 8, 0, 0, 0, 32]
    assert int(destination.count_nonzero()) == 5


@pytest.mark.parametrize("value", [2**24 + 8, 2**24 + 9])
def test_out_of_range_just_above_two_to_the_24_is_refused(kernel_of_many_rows, value):
    destination = torch.zeros(2**24 + 8, 1)
    with pytest.raises(IndexError):
        kernel_of_many_rows[1](destination, torch.tensor([0, value], dtype=torch.int32), torch.ones(2, 1))
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


def test_unique_indices_skips_the_combine_and_a_false_promise_shows(kernel_of_many_rows):
    """The simulator makes a broken promise visible: two rows of one store, the last one to land wins."""
    destination = torch.zeros(4, 1)
    index = torch.tensor([0, 0, 1, 2, 2, 2], dtype=torch.int32)
    kernel_of_many_rows[1](destination, index, torch.ones(6, 1), unique_indices=True)
    assert destination.flatten().tolist() == [1, 1, 1, 0]


def static_instructions(kernel, lnc, *operands, **constants):
    """Instructions that the traced program of one core holds: those of a hardware loop's body once."""
    import nki

    with nki.simulator.record() as recording:
        kernel[lnc](*operands, **constants)
    return sum(not instruction.repeats for instruction in recording.instructions if instruction.program == 0)


@pytest.mark.parametrize("rows,columns", [(600, 4), (100, 4), (600, 1030)])
def test_the_program_does_not_grow_with_the_number_of_rows(rows, columns):
    from torch_neuron_scatter.kernels import planner

    plan = planner.plan(rows, columns, 4, 2, False)
    sizes = {
        static_instructions(
            load(plan.form),
            2,
            torch.zeros(rows, columns),
            torch.zeros(count, dtype=torch.int32),
            torch.zeros(count, columns),
            **plan.constants,
        )
        for count in (1024, 8192, 131072 if rows == 100 else 16384)
    }
    assert len(sizes) == 1, sizes


def test_a_heavily_repeated_row_is_closer_to_float64_than_torchs_sum_in_bfloat16():
    """torch's one-dimensional index_add_ rounds to bfloat16 after every row, the kernel after every 512."""
    torch.manual_seed(0)
    count, rows = 4096, 600
    index = torch.randint(0, 16, (count,), dtype=torch.int32)
    src = torch.randn(count, 1).to(torch.bfloat16)
    input = torch.zeros(rows, 1, dtype=torch.bfloat16)
    result = input.clone()
    load("grouped")[1](result, index, src, tiles_per_group=4)
    assert_right(result, input, index, src)
    exact = torch.zeros(rows, 1, dtype=torch.float64).index_add_(0, index.long(), src.double())
    torchs = input.flatten().index_add(0, index.long(), src.flatten())
    ours = (result.double() - exact).abs().sum()
    assert ours < (torchs.double() - exact.flatten()).abs().sum()


def special_values(input, src):
    src[3, 2], src[200, 5] = float("inf"), float("nan")
    src[130, 3], src[131, 3] = float("inf"), float("-inf")
    input[4, 4], input[:, 1], src[:, 1] = -float("inf"), -0.0, -0.0


@pytest.mark.parametrize("kernel_name", ["grouped", "stationary"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("special", [False, True])
def test_twenty_orders_of_instructions_give_the_same_bits(kernel_name, dtype, special):
    """Instructions run in a random order and DMAs late, as the simulator's strict mode has them, in two groups and two pieces."""
    import nki

    torch.manual_seed(1)
    input, src = torch.randn(40, 12).to(dtype), torch.randn(300, 12).to(dtype)
    if special:
        special_values(input, src)
    index = torch.randint(0, 40, (300,), dtype=torch.int32)
    constants = {"tiles_per_group": 1} | ({"piece_columns": 4, "piece_sets": 2} if kernel_name == "grouped" else {})
    results = []
    for seed in range(20):
        destination = input.clone()
        with nki.simulator.strict(seed):
            load(kernel_name)[1](destination, index, src, **constants)
        results.append(destination)
    assert all(bits_equal(results[0], result) for result in results[1:])
    assert_right(results[0], input, index, src)


def test_finite_rows_take_no_second_look():
    """The loops over special groups do not run where there is nothing special, and run where there is."""
    import nki

    def executed(input, src):
        with nki.simulator.record() as recording:
            load("grouped")[1](input, torch.arange(600, dtype=torch.int32) % 550, src, tiles_per_group=4)
        return len(recording.instructions)

    input, src = torch.ones(600, 2), torch.ones(600, 2)
    finite = executed(input.clone(), src)
    src[7, 1] = float("nan")
    assert executed(input.clone(), src) > finite + 100


@pytest.mark.parametrize("alpha", [None, 0.5])
@pytest.mark.parametrize("rows", [600, 200])
def test_special_values_in_rows_as_wide_as_the_planner_plans_for(rows, alpha):
    """All on-chip memory is in use then: what redoes a special group has to fit beside it."""
    from torch_neuron_scatter.kernels import planner

    torch.manual_seed(2)
    columns, count = 4100, 520
    input, src = torch.randn(rows, columns).to(torch.bfloat16), torch.randn(count, columns).to(torch.bfloat16)
    special_values(input, src)
    index = torch.randint(0, rows, (count,), dtype=torch.int32)
    plan = planner.plan(rows, columns, 2, 1, False)
    destination = input.clone()
    scale = None if alpha is None else torch.tensor([alpha])
    load(plan.form)[1](destination, index, src, scale, **plan.constants)
    assert_right(destination, input, index, src, alpha=alpha or 1, groups_of=128)
