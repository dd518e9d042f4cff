"""Gradients: backward, double backward, forward mode, in place on intermediates and views, versions, torch.func."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp

OPS = torch.ops.neuron
INDEX = torch.tensor([0, 0, 3, 4])


def operands(shape=(5, 3), src_shape=(4, 3), dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
    src = torch.randn(src_shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
    return input, src


def in_place(input, dim, index, src, **options):
    return OPS.scatter_add_(input * 1, dim, index, src, **options)


@pytest.mark.parametrize("call", [in_place, OPS.scatter_add], ids=["in_place", "out_of_place"])
@pytest.mark.parametrize(
    "dim,shape,src_shape", [(0, (5, 3), (4, 3)), (1, (3, 5), (3, 4)), (-1, (5,), (4,)), (0, (5, 2, 2), (4, 2, 2))]
)
@pytest.mark.parametrize("alpha", [1, -2.5])
def test_first_and_second_derivatives_in_both_modes(call, dim, shape, src_shape, alpha):
    input, src = operands(shape, src_shape)

    def function(input, src):
        return call(input, dim, INDEX, src, alpha=alpha)

    batched = call is not in_place
    assert torch.autograd.gradcheck(
        function, (input, src), check_forward_ad=True, check_batched_grad=batched, check_batched_forward_grad=batched
    )
    assert torch.autograd.gradgradcheck(
        lambda input, src: function(input, src).sin(), (input, src), check_fwd_over_rev=True, check_rev_over_rev=True
    )


@pytest.mark.parametrize("call", [in_place, OPS.scatter_add], ids=["in_place", "out_of_place"])
def test_complex_gradients(call):
    input = torch.randn(5, 3, dtype=torch.complex128, requires_grad=True)
    src = torch.randn(4, 3, dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(lambda input, src: call(input, 0, INDEX, src, alpha=1 + 2j), (input, src))


@pytest.mark.parametrize(
    "dtype,src_dtype",
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_equal_torchs(device, dtype, src_dtype, dim):
    input, src = operands((5, 5), (4, 5) if dim == 0 else (5, 4), dtype)
    src = src.detach().to(src_dtype).requires_grad_()
    weight = torch.randn(5, 5, dtype=dtype)

    def gradients(call, device):
        leaves = [x.detach().to(device).requires_grad_() for x in (input, src)]
        (call(leaves[0] * 1, leaves[1], INDEX.to(device)) * weight.to(device)).sum().backward()
        return [leaf.grad.cpu() for leaf in leaves]

    got = gradients(lambda input, src, index: OPS.scatter_add_(input, dim, index, src, alpha=3), device)
    expected = gradients(lambda input, src, index: input.index_add_(dim, index, src.to(dtype), alpha=3), "cpu")
    assert [g.dtype for g in got] == [dtype, src_dtype]
    for mine, torchs in zip(got, expected, strict=True):
        assert torch.equal(mine, torchs)


def test_0d_input_and_src():
    input, src = operands((), ())
    assert torch.autograd.gradcheck(
        lambda i, s: OPS.scatter_add(
            i,
            0,
            torch.tensor(
                [
                    0,
                ]
            ),
            s,
            alpha=2,
        ),
        (input, src),
    )


def test_only_src_needs_a_gradient(device):
    _, src = operands(dtype=torch.float32, device=device)
    src = src.detach().requires_grad_()
    buffer = torch.zeros(5, 3, device=device)
    assert OPS.scatter_add_(buffer, 0, INDEX.to(device), src) is buffer
    assert buffer.requires_grad and buffer.grad_fn is not None
    buffer.sum().backward()
    assert torch.equal(src.grad.cpu(), torch.ones(4, 3))


def test_in_place_on_a_view_of_a_larger_buffer(device):
    _, src = operands(dtype=torch.float32)
    src = src.detach().to(device).requires_grad_()
    buffer = torch.zeros(10, 3, device=device)
    OPS.scatter_add_(buffer[2:7], 0, INDEX.to(device), src)
    assert buffer.requires_grad
    (buffer * torch.arange(10.0, device=device).unsqueeze(1)).sum().backward()
    assert torch.equal(src.grad.cpu(), torch.tensor([2.0, 2.0, 5.0, 6.0]).unsqueeze(1).expand(4, 3))


def test_version_is_counted_once(device):
    src = torch.ones(4, 3, device=device)
    for requires_grad in (False, True):
        input = torch.zeros(5, 3, device=device)
        before = input._version
        OPS.scatter_add_(input, 0, INDEX.to(device), src.clone().requires_grad_(requires_grad))
        assert input._version == before + 1


def test_saved_index_is_version_checked(device):
    _, src = operands(dtype=torch.float32, device=device)
    src = src.detach().requires_grad_()
    index = INDEX.to(device).clone()
    result = OPS.scatter_add(torch.zeros(5, 3, device=device), 0, index, src)
    index.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_changing_input_saved_by_somebody_else_is_caught(device):
    leaf = torch.ones(5, 3, device=device, requires_grad=True)
    middle = leaf * 2
    squared = middle * middle
    OPS.scatter_add_(middle, 0, INDEX.to(device), torch.ones(4, 3, device=device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


def test_no_autograd_work_when_nothing_needs_a_gradient(device):
    input, src = operands(dtype=torch.float32, device=device)
    index = INDEX.to(device)
    assert OPS.scatter_add(input.detach(), 0, index, src.detach()).grad_fn is None
    with torch.no_grad():
        assert OPS.scatter_add(input, 0, index, src).grad_fn is None
        OPS.scatter_add_(input, 0, index, src)
    assert input.is_leaf and input.grad_fn is None


def test_forward_mode_when_only_one_operand_has_a_tangent(device):
    input, src = (x.detach() for x in operands(dtype=torch.float32, device=device))
    index, tangent = INDEX.to(device), torch.ones(4, 3, device=device)
    expected = torch.zeros(5, 3).index_add(0, INDEX, torch.ones(4, 3)) * 2
    with forward_ad.dual_level():
        for result in (
            OPS.scatter_add(input, 0, index, forward_ad.make_dual(src, tangent), alpha=2),
            OPS.scatter_add_(input.clone(), 0, index, forward_ad.make_dual(src, tangent), alpha=2),
        ):
            assert torch.equal(forward_ad.unpack_dual(result).tangent.cpu(), expected)
        dual = forward_ad.make_dual(input.clone(), torch.ones(5, 3, device=device))
        assert OPS.scatter_add_(dual, 0, index, src) is dual
        assert torch.equal(forward_ad.unpack_dual(dual).tangent.cpu(), torch.ones(5, 3))


def test_torch_func_transforms(device):
    input, src = (x.detach() for x in operands(dtype=torch.float32, device=device))
    index = INDEX.to(device)

    def out_of_place(s):
        return OPS.scatter_add(input, 0, index, s, alpha=2)

    def on_a_fresh_buffer(s):
        return OPS.scatter_add_(input.clone(), 0, index, s, alpha=2)

    def reference(s):
        return torch.index_add(input, 0, index, s, alpha=2)

    def twice(call):
        return grad(lambda s: grad(lambda t: call(t).sin().sum())(s).sum())(src)

    close = torch.testing.assert_close
    tangent, cotangent = torch.ones_like(src), torch.ones(5, 3, device=device)
    for call in (out_of_place, on_a_fresh_buffer):
        close(
            grad(lambda s, call=call: call(s).sin().sum())(src),
            grad(lambda s: reference(s).sin().sum())(src),
        )
        close(jvp(call, (src,), (tangent,)), jvp(reference, (src,), (tangent,)))
        close(vjp(call, src)[1](cotangent), vjp(reference, src)[1](cotangent))
        close(twice(call), twice(reference))
    close(jacrev(out_of_place)(src), jacrev(reference)(src))
    close(jacfwd(out_of_place)(src), jacfwd(reference)(src))
    close(hessian(lambda s: out_of_place(s).sin().sum())(src), hessian(lambda s: reference(s).sin().sum())(src))


def test_gradient_through_checkpoint(device):
    _, src = operands(dtype=torch.float32, device=device)
    index = INDEX.to(device)

    def block(s):
        return OPS.scatter_add_(torch.zeros(5, 3, device=device), 0, index, s * s).sin()

    for use_reentrant in (False, True):
        leaf = src.detach().requires_grad_()
        torch.utils.checkpoint.checkpoint(block, leaf, use_reentrant=use_reentrant).sum().backward()
        plain = src.detach().requires_grad_()
        block(plain).sum().backward()
        assert torch.equal(leaf.grad, plain.grad)
