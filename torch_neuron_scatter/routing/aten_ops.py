"""Kernels of device neuron that autograd and C++ call without passing through Python, overridden where they accumulate rows.

An override is registered at the first enable() for device neuron and stays: a thread may be in the middle of a backward when
routing is switched off. While it is off, the override calls the kernel that it replaced.
"""

import torch

from .. import kernel_choice, stats
from ..ops.schema import SCATTER_ADD_
from .active import ACTIVE
from .rows import INDEX_DTYPES

_library = None


def _refusal(grad_output, indices, num_weights):
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
    reason = _refusal(grad_output, indices, num_weights)
    if reason is not None:
        result = torchs(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)
        stats.count_fallback(reason)
        return result
    index = indices.reshape(-1)
    rows = grad_output.reshape(index.numel(), grad_output.shape[-1])
    if scale_grad_by_freq:
        # float32 counts whole numbers up to 2**24, far more words than a batch holds.
        counts = torch.zeros(num_weights, dtype=torch.float32, device=rows.device)
        SCATTER_ADD_(counts, 0, index, torch.ones_like(index, dtype=torch.float32))
        rows = rows / counts.index_select(0, index).unsqueeze(1)
    table = torch.zeros(num_weights, grad_output.shape[-1], dtype=rows.dtype, device=rows.device)
    SCATTER_ADD_(table, 0, index, rows)
    if 0 <= padding_idx < num_weights:
        # Its row has no gradient, whatever came in, NaN included; clearing it needs no look at the indices.
        table[padding_idx].zero_()
    return table.to(grad_output.dtype)


# (operator, dispatch key) -> function(what was there, *the operator's arguments), called while device neuron is routed.
OVERRIDES = {("embedding_dense_backward", "PrivateUse1"): embedding_dense_backward}


def _override(library, name, key, function):
    try:
        previous = torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:
        # No device neuron is loaded yet, so nothing is replaced; one may be loaded later.
        previous = None
    operator = getattr(torch.ops.aten, name).default

    def torchs(keys, *args):
        if previous is not None:
            return previous.call_boxed(keys, *args)
        devices = [arg.device for arg in args if isinstance(arg, torch.Tensor)]
        return operator(*(arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args)).to(devices[0])

    def kernel(keys, *args):
        if "neuron" not in ACTIVE.devices:
            return torchs(keys, *args)
        return function(lambda *args: torchs(keys, *args), *args)

    library.impl(name, kernel, key, with_keyset=True)


def install():
    """Register the overrides, once a process."""
    global _library
    if _library is not None:
        return
    library = torch.library.Library("aten", "IMPL")
    for (name, key), function in OVERRIDES.items():
        _override(library, name, key, function)
    _library = library
