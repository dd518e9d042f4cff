"""The C++ kernels of the plain CPU call: they run where they should, and say and compute what the Python kernels do.

`lnc=1` means nothing on the CPU but is no plain call, so it takes the Python kernels: the reference of these tests.
"""

import os
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import bits_equal
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_neuron_scatter as tns
from torch_neuron_scatter.ops import autograd, cpu, plain_cpu_call

REQUIRED = os.environ.get("TORCH_NEURON_SCATTER_REQUIRE_NEURON") == "1"

requires_cpp = pytest.mark.skipif(
    not plain_cpu_call.IN_USE and not REQUIRED, reason="the C++ part is not built: there was no compiler"
)


def python_kernels_of(call):
    """Names of the product's Python kernels that `call` runs."""
    seen = []
    files = {autograd.__file__, cpu.__file__}
    sys.setprofile(
        lambda frame, event, _: (
            seen.append(frame.f_code.co_name) if event == "call" and frame.f_code.co_filename in files else None
        )
    )
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


@requires_cpp
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_a_plain_call_runs_no_python_kernel(index_dtype):
    input, index, src = torch.zeros(4, 3), torch.tensor([0, 0, 3], dtype=index_dtype), torch.ones(3, 3)
    assert python_kernels_of(lambda: tns.scatter_add_(input, index, src)) == []
    assert python_kernels_of(lambda: tns.scatter_add(input, index, src)) == []
    assert input[:, 0].tolist() == [2.0, 0.0, 0.0, 1.0]


class Seen:
    """A mode of torch that notes what it sees pass."""

    def __init__(self, mode):
        self.names = []

        class Noting(mode):
            def __torch_dispatch__(_, func, types, args=(), kwargs=None):
                self.names.append(str(func))
                return func(*args, **(kwargs or {}))

            __torch_function__ = __torch_dispatch__

        self.mode = Noting()


class Subclass(torch.Tensor):
    pass


OPERANDS = torch.zeros(4, 3), torch.tensor([0, 0, 3]), torch.ones(3, 3)


def call_operator():
    input, index, src = OPERANDS
    return tns.scatter_add_(input, index, src)


def seen_by_mode(mode):
    seen = Seen(mode)
    with seen.mode:
        call_operator()
    return seen.names


def seen_by_profiler():
    with torch.profiler.profile() as profile:
        call_operator()
    return [event.key for event in profile.key_averages()]


def seen_by_tracer():
    traced = make_fx(lambda input: tns.scatter_add_(input, *OPERANDS[1:]))(OPERANDS[0])
    return [str(node.target) for node in traced.graph.nodes]


def seen_by_jit():
    traced = torch.jit.trace(lambda input: tns.scatter_add_(input, *OPERANDS[1:]), OPERANDS[:1], check_trace=False)
    return [node.kind() for node in traced.graph.nodes()]


@pytest.mark.parametrize(
    "names",
    [
        lambda: seen_by_mode(TorchFunctionMode),
        lambda: seen_by_mode(TorchDispatchMode),
        seen_by_profiler,
        seen_by_tracer,
        seen_by_jit,
    ],
    ids=["function mode", "dispatch mode", "profiler", "make_fx", "jit.trace"],
)
def test_whoever_watches_operators_sees_the_call(names):
    assert any("neuron" in name and "scatter_add_" in name for name in names())


@requires_cpp
def test_the_short_cut_takes_plain_calls_only():
    input, index, src = OPERANDS
    take = plain_cpu_call.try_plain_call
    assert take(input.clone(), 0, index, src) and take(torch.nn.Parameter(input, requires_grad=False), -2, index, src)
    before = input.clone()
    for others in (
        (input.as_subclass(Subclass), 0, index, src),
        (input, 0, index, src.to(torch.bfloat16)),
        (input, 2, index, src),
        (input, 2**70, index, src),
        (input, True, index, src),
        (input, 0, index.tolist(), src),
        (input, 0, index + 4, src),
        (input, 0, index[:2], src),
        (input.to("meta"), 0, index, src),
        (input, 0, index, src.clone().requires_grad_()),
    ):
        assert not take(*others)
    with torch.autocast("cpu"):
        assert not take(input, 0, index, src)
    with torch.inference_mode():
        assert not take(input, 0, index, src)
    assert bits_equal(input, before)


def with_gradient():
    return tns.scatter_add(torch.zeros(4, 3), torch.tensor([0]), torch.ones(1, 3, requires_grad=True))


def with_tangent():
    with torch.autograd.forward_ad.dual_level():
        src = torch.autograd.forward_ad.make_dual(torch.ones(1, 3), torch.ones(1, 3))
        return tns.scatter_add(torch.zeros(4, 3), torch.tensor([0]), src)


def with_lnc():
    return tns.scatter_add_(torch.zeros(4, 3), torch.tensor([0]), torch.ones(1, 3), lnc=1)


def with_narrower_src():
    return tns.scatter_add_(torch.zeros(4, 3), torch.tensor([0]), torch.ones(1, 3, dtype=torch.bfloat16))


def with_lazy_conjugate():
    return tns.scatter_add_(
        torch.zeros(4, 3, dtype=torch.complex64), torch.tensor([0]), torch.ones(1, 3, dtype=torch.complex64).conj()
    )


@pytest.mark.parametrize("call", [with_gradient, with_tangent, with_lnc, with_narrower_src, with_lazy_conjugate])
def test_every_other_call_reaches_the_python_kernels(call):
    assert python_kernels_of(call) != []


def test_a_call_under_no_grad_counts_the_version():
    input = torch.zeros(4, 3)
    weight = torch.ones(4, 3, requires_grad=True)
    product = (weight * input).sum()
    with torch.no_grad():
        tns.scatter_add_(input, torch.tensor([0]), torch.ones(1, 3))
    assert input._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def outcome(op, tensors, dim, **options):
    """Result, or the error's type and text, with the destination as the call left it."""
    input, index, src = tensors
    try:
        result = op(input, dim, index, src, **options)
    except (IndexError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", input
    assert (result is input) == (op is not torch.ops.neuron.scatter_add)
    return result, input


def permuted(tensor, order):
    """A tensor of equal values whose memory is laid out in another order of dimensions."""
    return tensor.permute(order).contiguous().permute([order.index(axis) for axis in range(tensor.dim())])


@st.composite
def calls(draw):
    """Operands, one in three with a row that does not exist, and a dim that may not exist."""
    rank = draw(st.integers(1, 4))
    dim = draw(st.integers(-rank - 1, rank))
    axis = dim % rank
    shape = draw(st.lists(st.integers(0, 5), min_size=rank, max_size=rank))
    rows, count = shape[axis], draw(st.integers(0, 40))
    dtype = draw(
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.complex64, torch.bool])
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    input = torch.randn(shape, generator=generator).to(dtype)
    shape[axis] = count
    src = torch.randn(shape, generator=generator).to(dtype)
    index = torch.randint(max(rows, 1), (count,), generator=generator)
    if draw(st.integers(0, 2)) == 0 and count:
        bad = draw(st.sampled_from([-1, -(2**31), rows, 2**31 - 1, -(2**63), 2**32, 2**63 - 1]))
        index[draw(st.integers(0, count - 1))] = bad
    index = index.to(draw(st.sampled_from([torch.int32, torch.int64])))
    if draw(st.booleans()):
        index = index.repeat_interleave(3)[::3]
    order = draw(st.permutations(range(rank)))
    return permuted(input, order), index, permuted(src, draw(st.permutations(range(rank)))), dim


def through_python(input, dim, index, src, **options):
    return tns.scatter_add_(input, index, src, dim=dim, **options)


@requires_cpp
@settings(max_examples=1000, deadline=None)
@given(
    calls(),
    st.sampled_from([torch.ops.neuron.scatter_add_, torch.ops.neuron.scatter_add, through_python]),
    st.sampled_from([1, -2, True]),
)
def test_cpp_and_python_kernels_agree(call, op, alpha):
    *tensors, dim = call
    others = [tensor.clone() for tensor in tensors]
    got, got_input = outcome(op, tensors, dim, alpha=alpha)
    wanted, wanted_input = outcome(op, others, dim, alpha=alpha, lnc=1)
    assert type(got) is type(wanted)
    if isinstance(wanted, str):
        assert got == wanted
    else:
        assert got.dtype == wanted.dtype and got.stride() == wanted.stride()
        assert bits_equal(got, wanted)
    assert bits_equal(got_input, wanted_input)
