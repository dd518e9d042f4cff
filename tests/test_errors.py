"""Every bad input: the type and text of the error, and a destination that is bit for bit what it was."""

import pytest
import torch
from expecttest import assert_expected_inline
from reference import bits_equal

import torch_neuron_scatter as tns

OP = torch.ops.neuron.scatter_add_


def refused(device, input=None, dim=0, index=None, src=None, **options):
    """Run the call; return "Type: text" after checking that nothing was written."""
    input = torch.arange(12.0).reshape(4, 3) if input is None else input
    index = torch.tensor([0, 1]) if index is None else index
    src = torch.ones(2, 3) if src is None else src
    input, index, src = (t if t.device.type == device else t.to(device) for t in (input, index, src))
    before = input.cpu().clone()
    with pytest.raises(Exception) as caught:
        OP(input, dim, index, src, **options)
    assert bits_equal(input.cpu(), before), "something was written"
    return f"{type(caught.value).__name__}: {caught.value}"


def test_src_dtype(device):
    assert_expected_inline(
        refused(device, src=torch.ones(2, 3, dtype=torch.float64)),
        """RuntimeError: scatter_add_(): src has dtype torch.float64; accepted for an input of torch.float32: torch.float32 or torch.bfloat16 or torch.float16""",  # noqa: E501
    )


def test_src_wider_than_a_bf16_input(device):
    assert_expected_inline(
        refused(device, input=torch.zeros(4, 3, dtype=torch.bfloat16)),
        """RuntimeError: scatter_add_(): src has dtype torch.float32; accepted for an input of torch.bfloat16: torch.bfloat16""",
    )


def test_index_dtype(device):
    assert_expected_inline(
        refused(device, index=torch.tensor([0, 1], dtype=torch.int16)),
        """RuntimeError: scatter_add_(): index has dtype torch.int16; accepted are torch.int32 and torch.int64""",
    )


def test_index_rank(device):
    assert_expected_inline(
        refused(device, index=torch.tensor([[0, 1]])),
        """IndexError: scatter_add_(): index has 2 dimensions; accepted is one, of length K""",
    )


def test_index_length(device):
    assert_expected_inline(
        refused(device, index=torch.tensor([0, 1, 2])),
        """RuntimeError: scatter_add_(): index has 3 elements; accepted is the size of src in dim 0, 2""",
    )


def test_src_rank(device):
    assert_expected_inline(
        refused(device, src=torch.ones(2, 3, 1)),
        """RuntimeError: scatter_add_(): src has 3 dimensions; accepted is input's number of dimensions, 2""",
    )


def test_src_trailing_size(device):
    assert_expected_inline(
        refused(device, src=torch.ones(2, 4)),
        """RuntimeError: scatter_add_(): src has shape [2, 4], input [4, 3]; accepted are equal sizes in every dimension but dim 0, and dimension 1 differs""",  # noqa: E501
    )


@pytest.mark.parametrize("dim", [2, -3])
def test_dim(device, dim):
    assert refused(device, dim=dim) == (
        f"IndexError: scatter_add_(): dim is {dim}; accepted for an input of 2 dimensions: -2 to 1"
    )


@pytest.mark.parametrize("lnc", [0, 3, -1])
def test_lnc(device, lnc):
    assert refused(device, lnc=lnc) == (
        f"ValueError: scatter_add_(): lnc is {lnc}; accepted are 1, 2 or None (what the runtime is configured for)"
    )


@pytest.mark.parametrize("value", [4, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_index_out_of_range(device, value, dtype):
    index = torch.tensor([0, value], dtype=dtype)
    assert refused(device, index=index) == (
        f"IndexError: scatter_add_(): index[1] is {value}; accepted is 0 <= index < 4"
    )


@pytest.mark.parametrize("value", [2**31, 2**32, 2**32 + 1, -(2**32), 2**63 - 1])
def test_an_index_that_int32_would_wrap_into_range(device, value):
    assert refused(device, index=torch.tensor([0, value])) == (
        f"IndexError: scatter_add_(): index[1] is {value}; accepted is 0 <= index < 4"
    )


@pytest.mark.parametrize("position", [0, 127, 128, 200, 8191, 8192, 8199, 9999])
def test_one_bad_index_late_in_a_long_list_writes_nothing(device, position):
    index = torch.zeros(10000, dtype=torch.int32)
    index[position] = 4
    assert refused(device, index=index, src=torch.ones(10000, 3)) == (
        f"IndexError: scatter_add_(): index[{position}] is 4; accepted is 0 <= index < 4"
    )


def test_a_bad_index_with_unique_indices_promised(device):
    assert_expected_inline(
        refused(device, index=torch.tensor([7, 1]), unique_indices=True),
        """IndexError: scatter_add_(): index[0] is 7; accepted is 0 <= index < 4""",
    )


def test_any_index_into_no_rows(device):
    assert_expected_inline(
        refused(device, input=torch.zeros(0, 3)),
        """IndexError: scatter_add_(): index[0] is 0; accepted is no index at all, since input has no rows""",
    )


def test_a_bad_index_into_no_columns(device):
    assert_expected_inline(
        refused(device, input=torch.zeros(4, 0), index=torch.tensor([0, 9]), src=torch.zeros(2, 0)),
        """IndexError: scatter_add_(): index[1] is 9; accepted is 0 <= index < 4""",
    )


def test_expanded_input(device):
    assert_expected_inline(
        refused(device, input=torch.zeros(1, 3, device=device).expand(4, 3)),
        """RuntimeError: scatter_add_(): input overlaps itself in memory (an expanded dimension); accepted is a destination whose elements are distinct, clone() it first""",  # noqa: E501
    )


def test_src_in_inputs_memory(device):
    input = torch.arange(12.0).reshape(4, 3).to(device)
    assert_expected_inline(
        refused(device, input=input, src=input[1:3]),
        """RuntimeError: scatter_add_(): src shares memory with input; accepted is src in memory of its own, clone() it first""",
    )


def test_index_in_inputs_memory(device):
    input = torch.arange(4).to(device)
    assert_expected_inline(
        refused(device, input=input, index=input[:2], src=torch.ones(2, dtype=torch.int64)),
        """RuntimeError: scatter_add_(): index shares memory with input; accepted is index in memory of its own, clone() it first""",  # noqa: E501
    )


def test_src_beside_input_in_one_buffer_is_not_refused(device):
    """Interleaved columns share a storage and no element."""
    buffer = torch.arange(24.0).reshape(4, 6).to(device)
    src = buffer[:, 3:].cpu()
    OP(buffer[:, :3], 0, torch.tensor([0, 0, 1, 3], device=device), buffer[:, 3:])
    expected = torch.arange(24.0).reshape(4, 6)[:, :3].index_add(0, torch.tensor([0, 0, 1, 3]), src)
    assert torch.equal(buffer[:, :3].cpu(), expected)


def test_src_on_another_device(neuron):
    with pytest.raises(RuntimeError) as caught:
        OP(torch.zeros(4, 3, device=neuron), 0, torch.tensor([0, 1], device=neuron), torch.ones(2, 3))
    assert "cpu" in str(caught.value) and "neuron" in str(caught.value)


def test_a_leaf_that_requires_grad_in_torchs_words(device):
    leaf = torch.zeros(4, 3, device=device, requires_grad=True)
    index, src = torch.tensor([0, 1], device=device), torch.ones(2, 3, device=device)
    with pytest.raises(RuntimeError) as expected:
        leaf.index_add_(0, index, src)
    with pytest.raises(RuntimeError) as caught:
        OP(leaf, 0, index, src)
    assert str(caught.value) == str(expected.value)
    assert_expected_inline(
        str(caught.value), """a leaf Variable that requires grad is being used in an in-place operation."""
    )
    assert not leaf.detach().cpu().any()


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda leaf: leaf[1:], id="view_of_a_leaf"),
        pytest.param(lambda leaf: (leaf * 1).unbind(0)[0], id="one_of_several_views"),
        pytest.param(lambda leaf: _view_without_grad(leaf * 1), id="view_made_without_grad"),
    ],
)
def test_views_that_torch_refuses_in_torchs_words(device, view):
    def text(call):
        target = view(torch.zeros(4, 4, device=device, requires_grad=True))
        index = torch.tensor([0], device=device)
        with pytest.raises(RuntimeError) as caught:
            call(target, index, torch.ones(1, *target.shape[1:], device=device))
        assert not target.detach().cpu().any()
        return str(caught.value)

    assert text(lambda target, index, src: OP(target, 0, index, src)) == text(
        lambda target, index, src: target.index_add_(0, index, src)
    )


def _view_without_grad(base):
    with torch.no_grad():
        return base[1:]


def test_the_module_refuses_lnc_when_it_is_made():
    with pytest.raises(ValueError) as caught:
        tns.ScatterAdd(lnc=4)
    assert_expected_inline(
        str(caught.value), """ScatterAdd: lnc is 4; accepted are 1, 2 or None (what the runtime is configured for)"""
    )


@pytest.mark.parametrize("argument", ["input", "index", "src"])
@pytest.mark.parametrize("op", [tns.scatter_add_, tns.scatter_add], ids=lambda op: op.__name__)
def test_none_for_a_tensor(device, op, argument):
    operands = {"input": torch.zeros(4, 3), "index": torch.tensor([0]), "src": torch.ones(1, 3)}
    operands = {name: None if name == argument else tensor.to(device) for name, tensor in operands.items()}
    with pytest.raises(TypeError) as caught:
        op(**operands)
    assert str(caught.value) == f"{op.__name__}(): {argument} is None; accepted is a tensor"


@pytest.mark.parametrize("options", [{}, {"src_dtype": torch.bfloat16}, {"src_requires_grad": True}], ids=str)
def test_an_inference_tensor_outside_inference_mode(device, options):
    with torch.inference_mode():
        input = torch.zeros(4, 3, device=device)
    src = torch.ones(1, 3, dtype=options.get("src_dtype", torch.float32), device=device)
    src.requires_grad_(options.get("src_requires_grad", False))
    with pytest.raises(RuntimeError, match="input is an inference tensor"):
        OP(input, 0, torch.tensor([0], device=device), src)
    assert not input.cpu().any()


def test_a_refused_call_counts_no_version(device):
    leaf = torch.zeros(2, 2, device=device, requires_grad=True)
    exponential = leaf.exp()
    for src in (torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bfloat16)):
        with pytest.raises(IndexError):
            OP(exponential.detach(), 0, torch.tensor([9], device=device), src.to(device))
    exponential.sum().backward()
    assert leaf.grad.cpu().eq(1).all()


@pytest.mark.parametrize(
    ("dtype", "alpha"), [(torch.float32, 1e300), (torch.bfloat16, 1e300), (torch.float16, 1e6), (torch.float32, 2j)]
)
def test_an_alpha_that_the_dtype_cannot_hold(device, dtype, alpha):
    refused(device, input=torch.zeros(4, 3, dtype=dtype), src=torch.ones(2, 3, dtype=dtype), alpha=alpha)


def test_an_alpha_that_float32_cannot_hold_is_named_on_device_neuron(neuron):
    assert_expected_inline(
        refused(neuron, alpha=1e300),
        """RuntimeError: scatter_add_(): alpha is 1e+300; accepted for an input of torch.float32 are numbers up to 3.4028234663852886e+38""",  # noqa: E501
    )


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float64, 0), (torch.int64, 0), (torch.float32, 1), (torch.bool, 0)], ids=str
)
@pytest.mark.parametrize("row", [4, -1, 2**32])
def test_an_index_out_of_range_where_no_kernel_serves(device, dtype, dim, row):
    input, src = torch.zeros(4, 4, dtype=dtype), torch.ones(2, 4, dtype=dtype)
    text = refused(device, input=input, dim=dim, index=torch.tensor([0, row]), src=src if dim == 0 else src.t())
    assert text == f"IndexError: scatter_add_(): index[1] is {row}; accepted is 0 <= index < 4"


@pytest.mark.parametrize("lnc", [None, 1])
def test_an_index_that_shares_elements_with_input(device, lnc):
    input = torch.tensor([3, 9, 1, 9, 2, 9, 0, 9])[::2]
    with pytest.raises(RuntimeError, match="index shares memory with input"):
        memory = torch.tensor([3, 9, 1, 9, 2, 9, 0, 9], device=device)
        OP(memory[::2], 0, memory[0:8:2], torch.full((4,), 100, device=device), lnc=lnc)
    assert memory[::2].tolist() == input.tolist()
