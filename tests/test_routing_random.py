"""Random calls of the six callables with routing on and off: the same result or the same error, and nothing goes unnoticed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import torch_neuron_scatter as tns

SIZES = st.integers(0, 4)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.complex64]
NAMES = ["index_add_", "index_add", "torch.index_add", "scatter_add_", "scatter_add", "torch.scatter_add"]


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ours = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.ours += function.namespace == "neuron"
        return function(*args, **(kwargs or {}))


def values(shape, dtype, seed):
    """Small whole numbers, so that every order of additions gives the same bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


@st.composite
def layouts(draw, tensor):
    kind = draw(st.sampled_from(["plain", "plain", "transposed", "strided", "offset", "expanded"]))
    if kind == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "strided" and tensor.dim():
        return torch.stack([tensor, tensor], -1)[..., 0]
    if kind == "offset":
        return torch.cat([tensor.new_zeros(3), tensor.reshape(-1)])[3:].view(tensor.shape)
    if kind == "expanded" and tensor.dim() and tensor.shape[0]:
        return tensor[:1].expand(tensor.shape)
    return tensor


@st.composite
def calls(draw):
    name = draw(st.sampled_from(NAMES))
    rank = draw(st.integers(0, 3))
    shape = [draw(SIZES) for _ in range(rank)]
    dim = draw(st.integers(-rank, rank - 1)) if rank and draw(st.integers(0, 9)) else draw(st.integers(-2, 2))
    dtype = draw(st.sampled_from(DTYPES))
    count = draw(SIZES)
    source = list(shape)
    if rank and -rank <= dim < rank:
        source[dim] = count
    index = torch.tensor([draw(st.integers(0, 3)) for _ in range(count)], dtype=torch.int64)
    rows = shape[dim] if rank and -rank <= dim < rank else 1
    if rows and draw(st.integers(0, 9)):
        index = index % rows
    if draw(st.integers(0, 3)) == 0:
        index = index.to(draw(st.sampled_from([torch.int32, torch.int16])))
    if "scatter" in name:
        smaller = [draw(st.integers(min(1, s), s)) if draw(st.integers(0, 3)) == 0 else s for s in source]
        if rank and -rank <= dim < rank:
            smaller[dim] = count
            index = index.view([count if axis == dim % rank else 1 for axis in range(rank)]).expand(smaller)
            if draw(st.integers(0, 3)) == 0:
                index = index.contiguous()
        elif rank == 0:
            index = torch.zeros((), dtype=torch.int64)
    elif count == 1 and draw(st.booleans()):
        index = index.squeeze(0)
    if draw(st.integers(0, 9)) == 0:
        axis = draw(st.integers(0, 2))
        source = [size + (axis == number) for number, size in enumerate(source)]
    seed = draw(st.integers(0, 99))
    input = draw(layouts(values(shape, dtype, seed)))
    src_dtype = dtype if draw(st.integers(0, 9)) else draw(st.sampled_from(DTYPES))
    src = draw(layouts(values(source, src_dtype, seed + 1)))
    alpha = (
        {} if "scatter" in name or draw(st.booleans()) else {"alpha": draw(st.sampled_from([1, 2, -1, 0.5, 0, True]))}
    )
    return name, input, dim, index, src, alpha, draw(st.booleans())


def outcome(name, input, dim, index, src, options, needs_grad):
    """(error or None, result, its strides, input afterwards, gradients) of one call on copies with the same strides."""
    storage = input.untyped_storage().clone()
    copy = torch.empty(0, dtype=input.dtype).set_(storage, input.storage_offset(), input.shape, input.stride())
    leaves = [copy, src.clone()]
    if needs_grad and input.dtype.is_floating_point:
        leaves = [leaf.detach().requires_grad_() for leaf in leaves] if src.dtype.is_floating_point else leaves
    receiver = leaves[0] * 1 if leaves[0].requires_grad and name.endswith("_") else leaves[0]
    try:
        if name.startswith("torch."):
            result = getattr(torch, name[6:])(receiver, dim, index, leaves[1], **options)
        else:
            result = getattr(receiver, name)(dim, index, leaves[1], **options)
    except (RuntimeError, IndexError, TypeError) as error:
        return (type(error), str(error)), None, None, leaves[0].detach(), None
    gradients = None
    if result.requires_grad:
        try:
            result.sum().backward()
            gradients = [leaf.grad for leaf in leaves]
        except RuntimeError:
            # torch's own backward of scatter_add refuses an index smaller than src.
            gradients = None
    return None, result.detach(), result.stride(), leaves[0].detach(), gradients


def is_out_of_range(call):
    _, input, dim, index, *_ = call
    rank = max(input.dim(), 1)
    if index.dtype not in (torch.int32, torch.int64) or not -rank <= dim < rank or index.numel() == 0:
        return False
    return bool((index >= (input.shape[dim] if input.dim() else 1)).any())


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(calls())
def test_routed_calls_do_what_torch_does(call):
    tns.reset_stats()
    error, result, strides, written, gradients = outcome(*call)
    with tns.routing(devices=("cpu",)), Operators() as operators:
        got_error, got, got_strides, got_written, got_gradients = outcome(*call)
    if is_out_of_range(call) and error and got_error and got_error[0] is IndexError:
        # The operator's own words, before anything is written; torch may have written some rows.
        return
    assert got_error == error
    assert torch.equal(got_written, written)
    if error:
        return
    assert torch.equal(got, result) and got.dtype == result.dtype and got_strides == strides
    assert bool(operators.ours) != bool(tns.stats()["fallback"]), "either the operator served it or it was counted"
    if gradients and got_gradients:
        for mine, torchs in zip(got_gradients, gradients, strict=True):
            assert (mine is None) == (torchs is None) and (mine is None or torch.equal(mine, torchs))


@pytest.mark.parametrize("in_place", [True, False])
def test_vmap_of_every_kind_of_row_scatter(in_place):
    input, src = torch.zeros(3, 4, 5), torch.randn(3, 6, 5)
    index = torch.randint(0, 4, (3, 6))

    def whole(x, i, s):
        return (x.clone().scatter_add_ if in_place else x.scatter_add)(0, i.unsqueeze(1).expand(-1, 5), s)

    def part(x, i, s):
        return (x.clone().scatter_add_ if in_place else x.scatter_add)(0, i.unsqueeze(1).expand(-1, 2), s)

    def added(x, i, s):
        return (x.clone().index_add_ if in_place else x.index_add)(0, i, s, alpha=2)

    for function in (whole, part, added):
        expected = torch.func.vmap(function)(input, index, src)
        expected_shared = torch.func.vmap(function, in_dims=(0, None, 0))(input, index[0], src)
        with tns.routing(devices=("cpu",)):
            torch.testing.assert_close(torch.func.vmap(function)(input, index, src), expected)
            shared = torch.func.vmap(function, in_dims=(0, None, 0))(input, index[0], src)
        torch.testing.assert_close(shared, expected_shared)


def test_vmap_of_a_part_where_only_src_is_batched():
    input, index, src = torch.zeros(4, 5), torch.tensor([[0], [3]]), torch.ones(3, 2, 5)
    function = lambda s: input.scatter_add(0, index, s)  # noqa: E731
    expected = torch.func.vmap(function)(src)
    with tns.routing(devices=("cpu",)):
        assert torch.equal(torch.func.vmap(function)(src), expected)
    assert tns.stats()["fallback:vmap"] == 1


def test_fake_tensors_are_routed_and_count_nothing():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), tns.routing(devices=("cpu",)):
        input, index, src = torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64), torch.ones(2, 3)
        assert input.index_add_(0, index, src) is input
        assert input.scatter_add(0, index.unsqueeze(1), src).shape == (4, 3)
        assert input.scatter_add(0, torch.zeros(2, 3, dtype=torch.int64), src).shape == (4, 3)
    assert tns.stats() == {"kernel": 0, "fallback": 0}
