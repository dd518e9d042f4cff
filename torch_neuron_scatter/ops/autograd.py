"""Gradients of neuron::scatter_add_ and neuron::scatter_add: backward, double backward, forward mode, version counting.

    d input = grad
    d src   = alpha * grad.index_select(dim, index), in src's dtype

Registered under the Autograd key because torch.library.register_autograd refuses operators that mutate. A call in which nothing
needs a gradient goes straight on to the kernel.
"""

import contextlib

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from . import cpu
from .checks import check_memory, check_tensors
from .schema import LIBRARY, SCATTER_ADD, SCATTER_ADD_


@contextlib.contextmanager
def _others_differentiate():
    """Undo, for whoever else records this call, that a Function's forward runs with gradients switched off.

    AOTAutograd takes a write under no_grad for one that no gradient passes through; torch.func levels outside this one have
    their own gradients to record.
    """
    with torch.enable_grad():
        if not torch._C._are_functorch_transforms_active():
            yield
            return
        with forward_ad._set_fwd_grad_enabled(True):
            yield


def _select(tensor, dim, index, src_ndim):
    """The rows of `tensor` that src's rows went to, in src's shape."""
    if tensor.dim() == 0:
        return tensor.clone()
    return tensor.index_select(dim, index if src_ndim else index.reshape(1))


class _ScatterAdd(_SingleLevelFunction):
    """Base class of both operators' autograd functions.

    Derives from _SingleLevelFunction: under a torch.func transform this code already runs inside that transform's own level,
    where torch.autograd.Function.apply would start the transform again.
    """

    op = None
    in_place = False

    @classmethod
    def call(cls, *args):
        if not torch._C._are_functorch_transforms_active():
            return cls.apply(*args)
        with enable_single_level_autograd_function():
            return cls.apply(*args)

    @classmethod
    def forward(cls, ctx, keyset, input, dim, index, src, alpha, unique_indices, lnc):
        # mark_dirty counts the version, so the ADInplaceOrView kernel below must not count it again.
        with _others_differentiate(), torch._C._AutoDispatchBelowADInplaceOrView():
            result = cls.op.redispatch(
                keyset & torch._C._after_ADInplaceOrView_keyset,
                input,
                dim,
                index,
                src,
                alpha=alpha,
                unique_indices=unique_indices,
                lnc=lnc,
            )
        if cls.in_place:
            # A torch.func level wraps what its kernel returns anew; mark_dirty wants the very object it was given.
            result = input
            ctx.mark_dirty(input)
        ctx.save_for_backward(index)
        ctx.save_for_forward(index)
        ctx.dim, ctx.alpha, ctx.unique_indices, ctx.lnc = dim, alpha, unique_indices, lnc
        ctx.src_dtype, ctx.src_ndim = src.dtype, src.dim()
        ctx.input_dtype, ctx.input_shape = input.dtype, input.shape
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx, grad):
        grad_input = grad_src = None
        if grad is not None:
            (index,) = ctx.saved_tensors
            if ctx.needs_input_grad[1]:
                grad_input = grad
            if ctx.needs_input_grad[4]:
                rows = _select(grad, ctx.dim, index, ctx.src_ndim)
                if not (isinstance(ctx.alpha, int) and ctx.alpha == 1):
                    alpha = ctx.alpha.conjugate() if isinstance(ctx.alpha, complex) else ctx.alpha
                    rows = rows * alpha
                grad_src = rows.to(ctx.src_dtype)
        return None, grad_input, None, None, grad_src, None, None, None


class _InPlace(_ScatterAdd):
    op = SCATTER_ADD_
    in_place = True


class _OutOfPlace(_ScatterAdd):
    op = SCATTER_ADD

    @classmethod
    def jvp(cls, ctx, keyset, input, dim, index, src, alpha, unique_indices, lnc):
        (saved_index,) = ctx.saved_tensors
        if src is None:
            return None if input is None else input.clone()
        if input is None:
            input = src.new_zeros(ctx.input_shape, dtype=ctx.input_dtype)
        return cls.op(input, ctx.dim, saved_index, src, alpha=ctx.alpha, unique_indices=ctx.unique_indices, lnc=ctx.lnc)


def _forward_mode():
    if not forward_ad._is_fwd_grad_enabled():
        return False
    if forward_ad._current_level >= 0:
        return True
    # In a graph of a torch.func transform the level is entered beneath Python's count of it.
    levels = torch._C._functorch.get_interpreter_stack() if torch._C._are_functorch_transforms_active() else None
    return any(level.key() == torch._C._functorch.TransformType.Jvp for level in levels or ())


def _check_leaf(input):
    """Refuse what torch refuses of an in-place operator, in torch's words, before the kernel writes."""
    if input.requires_grad and input.is_leaf and not input._is_view():
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    if not input._is_view():
        return
    if torch._C._autograd._get_creation_meta(input) != torch._C._autograd.CreationMeta.DEFAULT:
        # The words depend on how the view was made; a no-op in-place operator has torch say them.
        # The unpatched method: a routed one would come back here.
        cpu.INDEX_ADD_(input, 0, torch.empty(0, dtype=torch.int64, device=input.device), input.detach()[:0])
    if input.requires_grad and input._base.is_leaf:
        raise RuntimeError("a view of a leaf Variable that requires grad is being used in an in-place operation.")


def _redispatch(op, keyset, input, dim, index, src, **options):
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, input, dim, index, src, **options)


def _next_key(keyset):
    return (keyset & torch._C._after_ADInplaceOrView_keyset).highestPriorityTypeId()


def _needs_gradient(name, input, index, src):
    check_tensors(name, input, index, src)
    return torch.is_grad_enabled() and (input.requires_grad or src.requires_grad)


def _scatter_add_(keyset, input, dim, index, src, *, alpha=1, unique_indices=False, lnc=None):
    needs_gradient = _needs_gradient("scatter_add_", input, index, src)
    if needs_gradient:
        _check_leaf(input)
        if input.is_inference():
            check_memory("scatter_add_", input, index, src)
    if _forward_mode():
        # A tangent may be an immutable zero, which an in-place jvp cannot accumulate into; copy_ has its own formulas.
        return input.copy_(_OutOfPlace.call(keyset, input, dim, index, src, alpha, unique_indices, lnc))
    if needs_gradient:
        return _InPlace.call(keyset, input, dim, index, src, alpha, unique_indices, lnc)
    if src.dtype == input.dtype and _next_key(keyset) == torch._C.DispatchKey.CPU:
        # A short cut past two Python kernels: torch's index_add_ in there counts the version itself.
        return cpu.scatter_add_(input, dim, index, src, alpha=alpha, unique_indices=unique_indices, lnc=lnc)
    _redispatch(SCATTER_ADD_, keyset, input, dim, index, src, alpha=alpha, unique_indices=unique_indices, lnc=lnc)
    return input


def _scatter_add(keyset, input, dim, index, src, *, alpha=1, unique_indices=False, lnc=None):
    if _needs_gradient("scatter_add", input, index, src) or _forward_mode():
        return _OutOfPlace.call(keyset, input, dim, index, src, alpha, unique_indices, lnc)
    return _redispatch(SCATTER_ADD, keyset, input, dim, index, src, alpha=alpha, unique_indices=unique_indices, lnc=lnc)


def _count_version(keyset, input, *args, **kwargs):
    with torch._C._AutoDispatchBelowADInplaceOrView():
        result = SCATTER_ADD_.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, input, *args, **kwargs)
    # After the call: one that was refused has written nothing.
    torch.autograd.graph.increment_version(input)
    return result


LIBRARY.impl("scatter_add_", _scatter_add_, "Autograd", with_keyset=True)
LIBRARY.impl("scatter_add", _scatter_add, "Autograd", with_keyset=True)
LIBRARY.impl("scatter_add_", _count_version, "ADInplaceOrView", with_keyset=True)
