"""neuron::scatter_add_ and neuron::scatter_add against torch on the CPU and float64, on every device."""

import copy
import math

import pytest
import torch
from reference import assert_right, bits_equal, float64, torch_cpu
from torch.testing._internal.common_methods_invocations import op_db

import torch_neuron_scatter as tns

OPS = torch.ops.neuron
KERNEL_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALL_DTYPES = [
    *KERNEL_DTYPES,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
INDEX_ADD = next(op for op in op_db if op.name == "index_add")


def make(shape, dtype, device="cpu", low=-4, high=4):
    return (
        torch.testing.make_tensor(shape, dtype=dtype, device="cpu", low=None, high=None).to(device)
        if (dtype in (torch.bool, torch.uint8))
        else torch.testing.make_tensor(shape, dtype=dtype, device="cpu", low=low, high=high).to(device)
    )


def test_the_example_of_the_problem_statement(device):
    index = torch.tensor([0, 0, 1, 2, 2, 2], device=device)
    input = torch.zeros(4, 1, device=device)
    result = OPS.scatter_add_(input, 0, index, torch.ones(6, 1, device=device))
    assert result is input
    assert input.flatten().tolist() == [2, 1, 3, 0]
    assert tns.stats()["kernel"] == (device == "neuron")
    assert tns.stats()["fallback"] == 0


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_every_dtype_that_torch_takes(device, dtype, index_dtype):
    torch.manual_seed(0)
    input, src = make((9, 5), dtype), make((40, 5), dtype)
    index = torch.randint(0, 9, (40,), dtype=index_dtype)
    result = OPS.scatter_add(input.to(device), 0, index.to(device), src.to(device))
    if dtype.is_complex:
        torch.testing.assert_close(result.cpu(), torch_cpu(input, index, src))
    else:
        assert_right(result, input, index, src)


@pytest.mark.parametrize(
    "dtype,src_dtype",
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float64, torch.float32),
        (torch.float64, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_src_narrower_than_input(device, dtype, src_dtype, dim):
    torch.manual_seed(1)
    input, index = make((6, 7), dtype), torch.randint(0, 6, (300,))
    shape = [6, 7]
    shape[dim] = 300
    src = make(shape, src_dtype)
    result = OPS.scatter_add_(input.clone().to(device), dim, index.to(device), src.to(device))
    assert_right(result, input, index, src, dim=dim % 2)


def test_a_wide_narrow_src_is_accumulated_piece_by_piece():
    """Above the CPU's widening block of 1 MiB: several pieces, one of them partial."""
    torch.manual_seed(2)
    input, src = make((50, 3000), torch.float32), make((700, 3000), torch.bfloat16)
    index = torch.randint(0, 50, (700,))
    assert_right(OPS.scatter_add(input, 0, index, src), input, index, src)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool], ids=str)
def test_the_samples_of_torchs_own_index_add_tests(device, dtype):
    """torch's OpInfo samples: 0-d tensors, negative dims, non-contiguous and scalar alphas."""
    tried = 0
    for sample in INDEX_ADD.sample_inputs("cpu", dtype, requires_grad=False):
        dim, index, src = sample.args
        expected = torch.index_add(sample.input, dim, index, src, **sample.kwargs)
        input = sample.input.clone().to(device)
        result = OPS.scatter_add(input, dim, index.to(device), src.to(device), **sample.kwargs)
        torch.testing.assert_close(result.cpu(), expected)
        in_place = OPS.scatter_add_(input, dim, index.to(device), src.to(device), **sample.kwargs)
        assert in_place is input
        assert bits_equal(input.cpu(), result.cpu()) if not dtype.is_complex else torch.equal(input.cpu(), result.cpu())
        tried += 1
    assert tried >= 6


def _layouts():
    """(name, function from a contiguous tensor to one with the same values in another layout)"""
    yield "contiguous", lambda x: x
    yield "transposed", lambda x: x.transpose(0, -1).contiguous().transpose(0, -1)
    yield "every_other_row", lambda x: torch.stack([x, torch.full_like(x, 77)], 1).flatten(0, 1)[::2]
    yield "columns_of_a_wider_one", lambda x: torch.cat([torch.full_like(x, 77), x], -1)[..., x.shape[-1] :]
    yield "rows_of_a_longer_one", lambda x: torch.cat([torch.full_like(x, 77), x], 0)[x.shape[0] :]


@pytest.mark.parametrize("input_layout", dict(_layouts()))
@pytest.mark.parametrize("src_layout", dict(_layouts()))
@pytest.mark.parametrize("shape", [(6, 5), (6, 2, 3)], ids=str)
def test_strides_and_views(device, input_layout, src_layout, shape):
    torch.manual_seed(3)
    layouts = dict(_layouts())
    input, src = make(shape, torch.float32), make((20, *shape[1:]), torch.float32)
    index = torch.randint(0, 6, (40,))[::2]
    strided = layouts[input_layout](input.clone().to(device))
    everything = strided.untyped_storage()
    before = torch.empty(0, device=device).set_(everything).cpu().clone()
    assert OPS.scatter_add_(strided, 0, index.to(device), layouts[src_layout](src.to(device))) is strided
    assert_right(strided, input, index, src)
    after = torch.empty(0, device=device).set_(everything).cpu()
    assert int((after == 77).sum()) == int((before == 77).sum()), "wrote outside the view"


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 255, 256, 300])
@pytest.mark.parametrize("columns", [1, 3, 511, 512, 513, 2048, 5000])
def test_counts_and_widths_around_the_tile_and_the_bank(device, count, columns):
    torch.manual_seed(4)
    input, src = make((7, columns), torch.float32), make((count, columns), torch.float32)
    index = torch.randint(0, 7, (count,))
    result = OPS.scatter_add_(input.clone().to(device), 0, index.to(device), src.to(device))
    assert_right(result, input, index, src)


def test_one_dimension_is_a_histogram(device):
    index = torch.randint(0, 10, (1000,))
    counts = tns.scatter_add_(torch.zeros(10, device=device), index.to(device), torch.ones(1000, device=device))
    assert counts.tolist() == torch.bincount(index, minlength=10).tolist()


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("alpha", [2, -1, 0, 0.3, 1e-3])
def test_alpha(device, dtype, alpha):
    torch.manual_seed(5)
    input, src, index = make((5, 4), dtype), make((30, 4), dtype), torch.randint(0, 5, (30,))
    result = OPS.scatter_add_(input.clone().to(device), 0, index.to(device), src.to(device), alpha=alpha)
    assert_right(result, input, index, src, alpha=alpha)


def test_alpha_zero_keeps_torchs_nan(device):
    """0 * inf is NaN in torch; a shortcut for alpha = 0 would lose it."""
    src = torch.tensor([[float("inf")], [1.0]])
    index = torch.tensor([0, 1])
    result = OPS.scatter_add(torch.zeros(2, 1, device=device), 0, index.to(device), src.to(device), alpha=0)
    assert bits_equal(result.cpu(), torch_cpu(torch.zeros(2, 1), index, src, alpha=0))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_non_finite_values_reach_their_own_row_and_no_other(device, dtype):
    torch.manual_seed(6)
    inf, nan = float("inf"), float("nan")
    index = torch.arange(200) % 100
    src = make((200, 3), dtype)
    for row, values in {3: [inf, -inf, nan], 103: [1.0, inf, 2.0], 7: [inf, inf, -inf], 107: [-inf, inf, -inf]}.items():
        src[row] = torch.tensor(values)
    input = make((100, 3), dtype)
    input[50, 0], input[51, 1] = inf, nan
    result = OPS.scatter_add(input.to(device), 0, index.to(device), src.to(device)).cpu()
    assert_right(result, input, index, src)
    rows = (~result.isfinite()).any(1).nonzero().flatten().tolist()
    assert rows == [3, 7, 50, 51]
    assert bits_equal(result[7], torch.tensor([nan, inf, -inf], dtype=dtype))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_negative_zero_stays_only_where_every_term_is_negative_zero(device, dtype):
    input = torch.tensor([[-0.0], [-0.0], [0.0], [-0.0], [-0.0]], dtype=dtype)
    src = torch.tensor([[-0.0], [-0.0], [-0.0], [0.0], [-0.0], [1.0], [-1.0]], dtype=dtype)
    index = torch.tensor([0, 0, 2, 1, 1, 3, 3])
    result = OPS.scatter_add(input.to(device), 0, index.to(device), src.to(device))
    assert bits_equal(result.cpu(), torch_cpu(input, index, src))
    assert torch.signbit(result.cpu()).flatten().tolist() == [True, False, False, False, True]


def test_fp16_overflows_where_the_float32_total_does(device):
    index = torch.tensor([0, 0, 1, 1])
    src = torch.tensor([[60000.0], [60000.0], [60000.0], [-60000.0]], dtype=torch.float16)
    result = OPS.scatter_add(torch.zeros(2, 1, dtype=torch.float16, device=device), 0, index.to(device), src.to(device))
    assert result.flatten().tolist() == [float("inf"), 0.0]


def test_many_small_terms_are_not_lost_to_bf16(neuron):
    """256 + 1 is 256 in bf16: torch's one-dimensional sum of ones stalls there, the kernel's float32 sum does not."""
    src, index = torch.ones(128 * 4, dtype=torch.bfloat16), torch.zeros(128 * 4, dtype=torch.int64)
    input = torch.zeros(1, dtype=torch.bfloat16)
    assert torch_cpu(input, index, src).item() == 256
    assert OPS.scatter_add(input.to(neuron), 0, index.to(neuron), src.to(neuron)).item() == 512


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_rows_are_rounded_once_and_no_further_from_float64_than_torchs(neuron, dtype):
    torch.manual_seed(8)
    input, src = make((5, 64), dtype), make((2000, 64), dtype, low=-1, high=1)
    index = torch.randint(0, 5, (2000,))
    result = OPS.scatter_add(input.to(neuron), 0, index.to(neuron), src.to(neuron)).cpu()
    exact = float64(input, index, src)
    error, torchs = (result.double() - exact).abs(), (torch_cpu(input, index, src).double() - exact).abs()
    assert bool((error <= torchs).float().mean() > 0.99) and error.max() <= torchs.max()
    # Half a unit in the last place, and what 2001 float32 additions of at most 1 can add to it.
    assert bool((error <= 0.5 * torch.finfo(dtype).eps * exact.abs() + 2001 * 2**-24 * 2001).all())


@pytest.mark.parametrize("unique_indices", [False, True])
@pytest.mark.parametrize("lnc", [None, 1, 2])
def test_unique_indices_and_lnc_do_not_change_the_answer(device, unique_indices, lnc):
    torch.manual_seed(7)
    input, src = make((300, 6), torch.bfloat16), make((200, 6), torch.bfloat16)
    index = torch.randperm(300)[:200]
    result = OPS.scatter_add(
        input.to(device), 0, index.to(device), src.to(device), unique_indices=unique_indices, lnc=lnc
    )
    assert_right(result, input, index, src)


def test_empty_operands(device):
    for input_shape, src_shape in [((4, 3), (0, 3)), ((4, 0), (2, 0)), ((0, 3), (0, 3)), ((0,), (0,))]:
        input, index = (
            torch.ones(input_shape, device=device),
            torch.zeros(src_shape[0], dtype=torch.int64, device=device),
        )
        assert OPS.scatter_add_(input, 0, index, torch.ones(src_shape, device=device)) is input
        assert input.tolist() == torch.ones(input_shape).tolist()
    assert tns.stats() == {"kernel": 0, "fallback": 0}


def test_out_of_place_leaves_input_alone_and_is_contiguous_like_torchs(device):
    for input in (make((6, 4), torch.float32).t(), make((4, 1), torch.float32).expand(4, 6)):
        index, src = torch.tensor([1, 1, 3]), make((3, 6), torch.float32)
        on_device = input.to(device) if input.is_contiguous() else input.contiguous().to(device).t().contiguous().t()
        kept = on_device.cpu().clone()
        result = tns.scatter_add(on_device, index.to(device), src.to(device))
        assert bits_equal(on_device.cpu(), kept)
        assert result.stride() == torch.index_add(input, 0, index, src).stride()
        assert_right(result, kept, index, src)


def test_functions_and_module_reach_the_op(device):
    index, src = torch.tensor([2, 2], device=device), torch.ones(2, 3, device=device)
    input = torch.zeros(4, 3, device=device)
    assert tns.scatter_add_(input, index, src, alpha=2) is input
    module = copy.deepcopy(tns.ScatterAdd(lnc=1, unique_indices=False))
    assert module(input, index, src) is input
    assert input[2].tolist() == [6, 6, 6]
    assert tns.scatter_add(input, index[:1], torch.ones(4, 1, device=device), dim=1)[:, 2].tolist() == [1, 1, 7, 1]
    assert repr(module) == "ScatterAdd(lnc=1, unique_indices=False)"


def test_autocast_leaves_dtypes_alone_as_it_does_for_index_add(device):
    input, index = torch.zeros(4, 3, device=device), torch.tensor([1, 1], device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert tns.scatter_add_(input, index, torch.ones(2, 3, device=device)) is input
        assert input.dtype == torch.float32
        assert (
            tns.scatter_add(input, index, torch.ones(2, 3, device=device, dtype=torch.bfloat16)).dtype == torch.float32
        )
    assert input[1].tolist() == [2, 2, 2]


def test_inference_mode(device):
    with torch.inference_mode():
        input = torch.zeros(4, 3, device=device)
        assert tns.scatter_add_(input, torch.tensor([1, 1], device=device), torch.ones(2, 3, device=device)) is input
    assert input[1].tolist() == [2, 2, 2]


@pytest.mark.parametrize("op", [OPS.scatter_add_, OPS.scatter_add], ids=["in_place", "out_of_place"])
@pytest.mark.parametrize(
    "dtype,src_dtype,dim",
    [
        (torch.float32, torch.float32, 0),
        (torch.float32, torch.bfloat16, 0),
        (torch.bfloat16, torch.bfloat16, -2),
        (torch.float32, torch.float32, 1),
        (torch.int64, torch.int64, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(device, op, dtype, src_dtype, dim, requires_grad):
    if requires_grad and not dtype.is_floating_point:
        pytest.skip("integers have no gradient")
    input, index = make((5, 5), dtype, device), torch.tensor([0, 0, 3, 4], device=device)
    src = make((4, 5) if dim != 1 else (5, 4), src_dtype, device).requires_grad_(requires_grad)
    if op is OPS.scatter_add:
        input.requires_grad_(requires_grad)
    utils = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if device == "neuron" and requires_grad:
        # "NYI devices other than CPU/CUDA/XPU": torch cannot run this one here; test_autograd.py runs on the device.
        utils.remove("test_autograd_registration")
    results = torch.library.opcheck(op.default, (input, dim, index, src), {"alpha": 2}, test_utils=utils)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("lnc", [None, 1])
def test_src_interleaved_with_input_counts_as_it_was_before_the_call(device, lnc):
    memory = torch.arange(12.0, device=device).reshape(4, 3)
    expected = memory[:3].cpu().index_add(0, torch.tensor([0, 1]), memory[:3].t()[:2].cpu())
    torch.ops.neuron.scatter_add_(memory[:3], 0, torch.tensor([0, 1], device=device), memory[:3].t()[:2], lnc=lnc)
    assert torch.equal(memory[:3].cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_elements_that_overflow_do_not_change_an_infinity(device, dtype):
    largest = torch.finfo(dtype).max
    src = torch.tensor([[-math.inf], [largest], [largest]], dtype=dtype, device=device)
    result = torch.ops.neuron.scatter_add(
        torch.zeros(1, 1, dtype=dtype, device=device), 0, torch.zeros(3, dtype=torch.int64, device=device), src
    )
    assert result.item() == -math.inf
