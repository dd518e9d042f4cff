"""What runs where on device neuron: launches, fallbacks by reason, the choice of kernel, LNC, and no host access."""

import dataclasses
import sys

import pytest
import torch
from conftest import requires_neuron
from expecttest import assert_expected_inline
from reference import assert_right

import torch_neuron_scatter as tns
from torch_neuron_scatter import dispatch, kernel_choice

pytestmark = requires_neuron
OP = torch.ops.neuron.scatter_add_


def call(input, index, src, device="neuron", **options):
    result = OP(input.to(device), 0, index.to(device), src.to(device), **options)
    assert_right(result, input, index, src, alpha=options.get("alpha", 1))
    return result


def test_the_kernel_is_what_ran():
    """One launch, nothing handed back to torch, no operator of the device fallen back to the CPU.

    The stand-in's device memory is protected: host code that touched it would have ended this process.
    """
    import torch_neuronx

    input, index, src = torch.zeros(9, 4, device="neuron"), torch.tensor([1, 1, 8]), torch.ones(3, 4, device="neuron")
    index = index.to("neuron", torch.int32)
    torch_neuronx.clear_op_tracking()
    OP(input, 0, index, src)
    assert tns.stats() == {"kernel": 1, "fallback": 0}
    assert not torch_neuronx.get_fallback_ops()
    assert input[:, 0].tolist() == [0, 2, 0, 0, 0, 0, 0, 0, 1]


def test_the_check_of_what_ran_can_fail():
    """The same assertions must notice a call that torch served."""
    import torch_neuronx

    input = torch.zeros(9, 4, device="neuron")
    torch_neuronx.clear_op_tracking()
    input.index_add_(0, torch.tensor([1], device="neuron"), torch.ones(1, 4, device="neuron"))
    assert tns.stats()["kernel"] == 0
    assert any("index_add" in name for name in torch_neuronx.get_fallback_ops())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.float64, torch.complex64], ids=str)
def test_dtypes_no_kernel_takes_fall_back_and_are_counted(dtype):
    input, src = torch.ones(4, 2, device="neuron").to(dtype), torch.ones(3, 2, device="neuron").to(dtype)
    index = torch.tensor([0, 0, 3], device="neuron")
    OP(input, 0, index, src)
    expected = torch.ones(4, 2).to(dtype).index_add(0, index.cpu(), torch.ones(3, 2).to(dtype))
    assert torch.equal(input.cpu(), expected)
    assert tns.stats() == {"kernel": 0, "fallback": 1, "fallback:dtype": 1}


def test_integers_beyond_float_stay_exact():
    value = 2**62 + 1
    input = torch.tensor([[value]], device="neuron")
    OP(input, 0, torch.tensor([0, 0], device="neuron"), torch.tensor([[1], [1]], device="neuron"))
    assert input.item() == value + 2


def test_other_dims_fall_back_and_are_counted():
    input = torch.zeros(2, 4, device="neuron")
    OP(input, 1, torch.tensor([0, 0], device="neuron"), torch.ones(2, 2, device="neuron"))
    assert input.cpu().tolist() == [[2, 0, 0, 0]] * 2
    assert tns.stats() == {"kernel": 0, "fallback": 1, "fallback:dim": 1}


def test_a_dim_behind_dimensions_of_size_one_is_dim_zero():
    input = torch.zeros(1, 4, 2, device="neuron")
    assert OP(input, 1, torch.tensor([3, 3], device="neuron"), torch.ones(1, 2, 2, device="neuron")) is input
    assert input[0, :, 0].tolist() == [0, 0, 0, 2]
    assert tns.stats() == {"kernel": 1, "fallback": 0}


@pytest.mark.parametrize(
    "lnc,columns,expected",
    [
        (None, 4, 2),
        (None, 3, 1),
        (1, 4, 1),
        (2, 4, 2),
        (2, 3, 1),
        (2, 1, 1),
    ],
)
def test_lnc_falls_to_one_where_it_does_not_divide_the_columns(monkeypatch, lnc, columns, expected):
    monkeypatch.setenv(dispatch.LNC_VARIABLE, "2")
    assert dispatch.launch_lnc(lnc, columns) == expected
    monkeypatch.setenv(dispatch.LNC_VARIABLE, "1")
    assert dispatch.launch_lnc(None, columns) == 1


def test_a_wrong_lnc_configuration_is_named(monkeypatch):
    monkeypatch.setenv(dispatch.LNC_VARIABLE, "four")
    input = torch.zeros(4, 2, device="neuron")
    with pytest.raises(ValueError) as caught:
        OP(input, 0, torch.tensor([0], device="neuron"), torch.ones(1, 2, device="neuron"))
    assert_expected_inline(str(caught.value), """NEURON_LOGICAL_NC_CONFIG is 'four'; accepted are 1 and 2""")
    assert not input.cpu().any()


def test_both_devices():
    for name in ("neuron:0", "neuron:1"):
        input = torch.zeros(4, 2, device=name)
        OP(input, 0, torch.tensor([1, 1], device=name), torch.ones(2, 2, device=name))
        assert input.device == torch.device(name) and input[1].tolist() == [2, 2]


CALL = kernel_choice.Call(
    rows=10, columns=4, dtype=torch.float32, src_dtype=torch.float32, has_alpha=False, unique_indices=False, lnc=1
)


def test_the_choice_of_kernel_can_be_overridden_and_is_explained(monkeypatch):
    monkeypatch.delenv(kernel_choice.ENVIRONMENT_VARIABLE, raising=False)
    assert kernel_choice.choose(CALL)[0].name == "stationary"
    assert kernel_choice.choose(dataclasses.replace(CALL, rows=100_000))[0].name == "grouped"
    assert kernel_choice.choose(dataclasses.replace(CALL, unique_indices=True))[0].name == "grouped"
    for name in ("tiled", "grouped"):
        monkeypatch.setenv(kernel_choice.ENVIRONMENT_VARIABLE, name)
        assert kernel_choice.choose(CALL)[0].name == name
    monkeypatch.setenv(kernel_choice.ENVIRONMENT_VARIABLE, "fastest")
    with pytest.raises(ValueError) as caught:
        kernel_choice.choose(CALL)
    assert_expected_inline(
        str(caught.value),
        """TORCH_NEURON_SCATTER_KERNEL is 'fastest'; accepted are 'auto' and 'stationary', 'grouped', 'tiled', 'nkilib'""",
    )
    input = torch.zeros(4, 2, device="neuron")
    with pytest.raises(ValueError):
        OP(input, 0, torch.tensor([0], device="neuron"), torch.ones(1, 2, device="neuron"))
    assert not input.cpu().any()


def test_nki_librarys_kernel_absent(monkeypatch):
    monkeypatch.setenv(kernel_choice.ENVIRONMENT_VARIABLE, "nkilib")
    kernel_choice._load_nkilib.cache_clear()
    kernel, why = kernel_choice.choose(CALL)
    assert kernel.name == "stationary"
    assert_expected_inline(
        why,
        """few rows: input stays on the chip, and every row of it is read and written once; nkilib was passed over: nki-library's scatter_add with unique_indices is not installed (Neuron SDK 2.33 or newer has it)""",  # noqa: E501
    )


def test_a_missing_or_placeholder_package_is_named_at_the_first_launch(monkeypatch):
    from torch_neuron_scatter import neuron_packages

    monkeypatch.setitem(sys.modules, "torch_neuronx", None)
    monkeypatch.setattr(
        neuron_packages,
        "inspect_packages",
        lambda: (
            neuron_packages.Package("torch-neuronx", "torch_neuronx", "0.0.1", "placeholder"),
            neuron_packages.Package("nki", "nki", None, "absent"),
        ),
    )
    dispatch._caller.cache_clear()
    input = torch.zeros(4, 2, device="neuron")
    with pytest.raises(ImportError) as caught:
        OP(input, 0, torch.tensor([0], device="neuron"), torch.ones(1, 2, device="neuron"))
    assert_expected_inline(
        str(caught.value),
        """the kernel cannot be loaded: torch-neuronx is placeholder, nki is absent; accepted are the packages of the AWS Neuron package index, Neuron SDK 2.33 or newer""",  # noqa: E501
    )
    assert not input.cpu().any()


@pytest.mark.parametrize(
    "view", [lambda x: x, lambda x: x.t().contiguous().t(), lambda x: x[None]], ids=["plain", "strided", "dim"]
)
def test_a_launcher_that_returns_memory_of_its_own_is_copied_back(monkeypatch, view):
    """Whether a result that aliases an operand is that operand's memory is the launcher's to decide."""

    kernel, _ = kernel_choice.choose(CALL)

    def launch(caller, input, *others):
        return kernel.launch(caller, input.clone(), *others)

    elsewhere = dataclasses.replace(kernel, launch=launch)
    monkeypatch.setattr(kernel_choice, "KERNELS", (elsewhere,))
    input = view(torch.zeros(4, 2)).to("neuron")
    src = view(torch.ones(6, 2)).to("neuron")
    result = OP(input, input.dim() - 2, torch.tensor([0, 0, 1, 2, 2, 2], device="neuron"), src)
    assert result is input and input.cpu().reshape(4, 2)[:, 0].tolist() == [2, 1, 3, 0]
