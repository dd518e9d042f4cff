"""Operators that autograd and C++ call without passing through Python, and what they are where they accumulate rows.

ROUTED has a function for each, called while device neuron is routed, with what torch does there and the operator's arguments. It
accumulates through neuron::scatter_add_, or hands the call back. `overrides` calls them eagerly, `traced` in graphs.
"""

import contextlib

import torch
from torch._subclasses.functional_tensor import FunctionalTensor

from .. import kernel_choice, stats
from ..ops.schema import SCATTER_ADD, SCATTER_ADD_
from . import rows
from .rows import INDEX_DTYPES


def _handing_back(reason, tensor):
    # A graph is traced once and run often; there is nothing to count while tracing.
    return contextlib.nullcontext() if isinstance(tensor, FunctionalTensor) else stats.handing_back(reason)


def _embedding_refusal(grad_output, indices, num_weights):
    """Why no kernel serves a backward of an embedding, or None."""
    if indices.dtype not in INDEX_DTYPES or indices.device != grad_output.device:
        return "arguments"
    if grad_output.dim() == 0 or grad_output.shape[:-1] != indices.shape:
        return "arguments"
    return kernel_choice.fallback_reason(grad_output.dtype, (num_weights, grad_output.shape[-1]), 0)


def embedding_dense_backward(torchs, grad_output, indices, num_weights, padding_idx, scale_grad_by_freq):
    """Gradient of an embedding table [num_weights, D] from grad_output [..., D] and indices [...].

    As the kernel does, this rounds a row of the table to grad_output's dtype once; rows divided by a count stay float32 till then.
    """
    reason = _embedding_refusal(grad_output, indices, num_weights)
    if reason is not None:
        with _handing_back(reason, grad_output):
            return torchs(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)
    index = indices.reshape(-1)
    gradients = grad_output.reshape(index.numel(), grad_output.shape[-1])
    if scale_grad_by_freq:
        # float32 counts whole numbers up to 2**24, far more words than a batch holds.
        counts = torch.zeros(num_weights, dtype=torch.float32, device=gradients.device)
        SCATTER_ADD_(counts, 0, index, torch.ones_like(index, dtype=torch.float32))
        gradients = gradients / counts.index_select(0, index).unsqueeze(1)
    # The padding row has no gradient, whatever came in, NaN included. In a graph a write into one row of the table would be a
    # copy of the table.
    padded = 0 <= padding_idx < num_weights
    in_graph = isinstance(grad_output, FunctionalTensor)
    if padded and in_graph:
        gradients = gradients.masked_fill((index == padding_idx).unsqueeze(1), 0)
    table = torch.zeros(num_weights, grad_output.shape[-1], dtype=gradients.dtype, device=gradients.device)
    SCATTER_ADD_(table, 0, index, gradients)
    if padded and not in_graph:
        table[padding_idx].zero_()
    return table.to(grad_output.dtype)


def _accumulate(plan_call, in_place):
    """What index_add(_) and scatter_add(_) are; plan_call as in `rows`."""

    def accumulate(torchs, input, dim, index, src, **options):
        plan = plan_call(input, dim, index, src, options.get("alpha", 1))
        if not isinstance(plan, rows.Plan):
            with _handing_back(plan, input):
                return torchs(input, dim, index, src, **options)
        return plan.run(input, in_place)

    return accumulate


def _index_put_refusal(input, indices, values):
    """Why input[indices] += values is no row scatter that the kernel serves, or None."""
    given = [index for index in indices if index is not None]
    if len(given) != 1 or indices[0] is None:
        return "index_shape"
    (index,) = given
    if index.dtype not in INDEX_DTYPES or index.device != input.device or values.device != input.device:
        return "arguments"
    if values.dtype != input.dtype or input.dim() == 0 or input.layout != torch.strided:
        return "arguments"
    if any(size == 0 for size in (*index.shape, *input.shape)):
        return "arguments"
    return kernel_choice.fallback_reason(input.dtype, input.shape, 0)


def _index_put(in_place):
    """What index_put(_) and _index_put_impl_ are where they accumulate: the backward of advanced indexing by one tensor."""

    def index_put(torchs, input, indices, values, accumulate=False, *unsafe):
        if not accumulate:
            return torchs(input, indices, values, accumulate, *unsafe)
        reason = _index_put_refusal(input, indices, values)
        if reason is not None:
            with _handing_back(reason, input):
                return torchs(input, indices, values, accumulate, *unsafe)
        row_shape = tuple(input.shape[1:])
        src = values.expand(*indices[0].shape, *row_shape).reshape(-1, *row_shape)
        index = indices[0].reshape(-1)
        # A row number below zero counts from the end.
        index = torch.where(index < 0, index + input.shape[0], index)
        return SCATTER_ADD_(input, 0, index, src) if in_place else SCATTER_ADD(input, 0, index, src)

    return index_put


# Operator of namespace aten -> function(what torch does, *the operator's arguments).
ROUTED = {
    "embedding_dense_backward": embedding_dense_backward,
    "index_add_": _accumulate(rows.index_add, in_place=True),
    "index_add": _accumulate(rows.index_add, in_place=False),
    "scatter_add_": _accumulate(rows.scatter_add, in_place=True),
    "scatter_add": _accumulate(rows.scatter_add, in_place=False),
    "_index_put_impl_": _index_put(in_place=True),
    "index_put_": _index_put(in_place=True),
    "index_put": _index_put(in_place=False),
}
