"""Which calls are row scatters that the operator serves, decided from shapes, strides, dtypes and devices, never from values.

A `Plan` says what to accumulate where; a str is the reason, as stats() counts it, why a call goes back to torch. "arguments"
stands for what torch refuses, or takes in a form that is not looked into here (a dim that is no int, ranks 0 and 1 mixed).
"""

import typing

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false

from .. import kernel_choice
from ..ops.checks import dense_and_intersecting
from ..ops.schema import SCATTER_ADD, SCATTER_ADD_

INDEX_DTYPES = (torch.int32, torch.int64)

# Device types that the operator has a kernel for.
OPERATOR_DEVICES = ("cpu", "meta", "neuron")


class Plan(typing.NamedTuple):
    """input[index[k]] += alpha * src[k] along dim, where input is a tensor's first `sizes` elements, None for all of it."""

    dim: int
    index: torch.Tensor
    src: torch.Tensor
    alpha: object
    sizes: tuple | None

    def part(self, tensor):
        """What is accumulated into, as a view of `tensor`."""
        if self.sizes is None:
            return tensor
        for axis, size in enumerate(self.sizes):
            if tensor.shape[axis] != size:
                tensor = tensor.narrow(axis, 0, size)
        return tensor

    def run(self, input, in_place):
        """Accumulate into `input` and return it, or return a new tensor."""
        operands = self.dim, self.index, self.src
        if in_place:
            SCATTER_ADD_(self.part(input), *operands, alpha=self.alpha)
            return input
        if self.sizes is None:
            return SCATTER_ADD(input, *operands, alpha=self.alpha)
        result = input.clone(memory_format=torch.contiguous_format)
        SCATTER_ADD_(self.part(result), *operands, alpha=self.alpha)
        return result


def _operands_fit(input, dim, index, src):
    """What torch demands of both calls; it has the words for what is wrong."""
    rank = max(input.dim(), 1)
    return (
        isinstance(dim, int)
        and not isinstance(dim, bool)
        and -rank <= dim < rank
        and index.dtype in INDEX_DTYPES
        and src.dtype == input.dtype
        and src.dim() == input.dim()
        and index.device == input.device == src.device
    )


def _refusal(input, dim, index, src, alpha):
    """Why the operator does not serve a row scatter, or None; on the CPU it takes all that torch takes."""
    if input.device.type not in OPERATOR_DEVICES:
        return "device"
    # Dynamo traces strided tensors only, and in the backward of an autograd.Function lets nobody ask.
    if not torch.compiler.is_dynamo_compiling() and any(t.layout != torch.strided for t in (input, index, src)):
        return "layout"
    if not isinstance(alpha, (int, float, complex, torch.SymInt, torch.SymFloat)):
        return "alpha"
    return kernel_choice.fallback_reason(input.dtype, input.shape, dim) if input.device.type == "neuron" else None


def index_add(input, dim, index, src, alpha):
    """Plan of index_add_(dim, index, src): a row scatter whenever its arguments are in order."""
    if not _operands_fit(input, dim, index, src) or index.dim() > 1:
        return "arguments"
    dim %= max(input.dim(), 1)
    if index.numel() != (src.shape[dim] if input.dim() else 1):
        return "arguments"
    for axis in range(input.dim()):
        if axis != dim and input.shape[axis] != src.shape[axis]:
            return "arguments"
    reason = _refusal(input, dim, index, src, alpha)
    if reason is not None:
        return reason
    if input.dim() and guard_or_false(src.numel() == 0):
        # Nothing is accumulated, and torch looks at no row number then.
        index, src = index.new_empty(0), src.narrow(dim, 0, 0)
    elif guard_or_false(input.numel() == 0):
        # No row number is right; torch passes over some of these calls and refuses others.
        return "arguments"
    return Plan(dim, index, src, alpha, None)


def scatter_add(input, dim, index, src, alpha=1):
    """Plan of scatter_add_(dim, index, src): a row scatter where index is expanded over every dimension but dim.

    torch lets index be smaller than src everywhere, and smaller than input beside dim: then those parts alone are meant.
    """
    if not _operands_fit(input, dim, index, src) or index.dim() != input.dim():
        return "arguments"
    dim %= max(input.dim(), 1)
    for axis in range(input.dim()):
        if index.shape[axis] > src.shape[axis] or (axis != dim and index.shape[axis] > input.shape[axis]):
            return "arguments"
    nothing = guard_or_false(index.numel() == 0)
    for axis in range(input.dim()):
        if not nothing and axis != dim and index.shape[axis] != 1 and index.stride(axis) != 0:
            return "index_shape"
    reason = _refusal(input, dim, index, src, alpha)
    if reason is not None:
        return reason

    sizes = tuple(input.shape[axis] if axis == dim else index.shape[axis] for axis in range(input.dim()))
    for axis in range(input.dim()):
        size = index.shape[axis]
        if axis == dim and nothing:
            size = 0
        if src.shape[axis] != size:
            src = src.narrow(axis, 0, size)
    if nothing:
        index = index.new_empty(0)
    else:
        for axis in reversed(range(input.dim())):
            if axis != dim:
                index = index.select(axis, 0)
    return Plan(dim, index, src, alpha, None if sizes == tuple(input.shape) else sizes)


def overlap(input, *operands):
    """Whether torch refuses to write into `input` for the memory it shares with itself or an operand.

    Like torch it looks at dense tensors only (at::get_overlap_status); the operator copes with interleaved ones.
    """
    if torch._debug_has_internal_overlap(input) == 1:
        return True
    return any(torch._C._is_alias_of(input, operand) and dense_and_intersecting(input, operand) for operand in operands)
