"""Which calls are row scatters that the operator serves, decided from shapes, strides, dtypes and devices, never from values.

A `Plan` says what to accumulate where; None stands for a call whose arguments torch itself refuses, and a str for the reason why
a call goes back to torch, as stats() counts it.
"""

import typing

import torch

from .. import kernel_choice

INDEX_DTYPES = (torch.int32, torch.int64)


class Plan(typing.NamedTuple):
    """input[index[k]] += src[k] along dim; whole: input is the caller's own tensor and no part of it."""

    input: torch.Tensor
    dim: int
    index: torch.Tensor
    src: torch.Tensor
    whole: bool


def _operands_fit(input, dim, index, src):
    """What torch demands of both calls; it has the words for what is wrong."""
    rank = max(input.dim(), 1)
    return (
        isinstance(dim, int)
        and -rank <= dim < rank
        and index.dtype in INDEX_DTYPES
        and src.dtype == input.dtype
        and src.dim() == input.dim()
        and index.device == input.device == src.device
        and input.layout == torch.strided
        and src.layout == torch.strided
    )


def _kernel_reason(input, dim):
    """Why device neuron has no kernel for this call, or None; on other devices the operator takes all that torch takes."""
    return kernel_choice.fallback_reason(input.dtype, input.shape, dim) if input.device.type == "neuron" else None


def index_add(input, dim, index, src):
    """Plan of index_add_(dim, index, src): a row scatter whenever its arguments are in order."""
    if not _operands_fit(input, dim, index, src) or index.dim() > 1:
        return None
    dim %= max(input.dim(), 1)
    if input.dim() and index.numel() != src.shape[dim]:
        return None
    for axis in range(input.dim()):
        if axis != dim and input.shape[axis] != src.shape[axis]:
            return None
    return _kernel_reason(input, dim) or Plan(input, dim, index, src, True)


def scatter_add(input, dim, index, src):
    """Plan of scatter_add_(dim, index, src): a row scatter where index is expanded over every dimension but dim.

    torch lets index be smaller than src everywhere, and smaller than input beside dim: then those parts alone are meant.
    """
    if not _operands_fit(input, dim, index, src) or index.dim() != input.dim() or input.dim() == 0:
        return None
    dim %= input.dim()
    for axis in range(input.dim()):
        if index.shape[axis] > src.shape[axis] or (axis != dim and index.shape[axis] > input.shape[axis]):
            return None
    if index.numel() == 0:
        return None
    for axis in range(input.dim()):
        if axis != dim and index.shape[axis] != 1 and index.stride(axis) != 0:
            return "index_shape"
    reason = _kernel_reason(input, dim)
    if reason is not None:
        return reason

    whole = True
    part, rows = input, index
    for axis in range(input.dim()):
        size = index.shape[axis]
        if src.shape[axis] != size:
            src = src.narrow(axis, 0, size)
        if axis != dim and part.shape[axis] != size:
            part, whole = part.narrow(axis, 0, size), False
    for axis in reversed(range(input.dim())):
        if axis != dim:
            rows = rows.select(axis, 0)
    return Plan(part, dim, rows, src, whole)
