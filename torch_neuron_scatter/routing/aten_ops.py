"""Kernels of device neuron that autograd and C++ call without passing through Python, overridden where they accumulate rows.

An override is registered at the first enable() for device neuron and stays: a thread may be in the middle of a backward when
routing is switched off. While it is off, the override calls the kernel that it replaced.
"""

import torch

from .. import kernel_choice, stats
from ..ops.schema import SCATTER_ADD_
from .active import ACTIVE

DEVICE_KEY = "PrivateUse1"

_library = None


def embedding_dense_backward(previous, keys, grad_output, indices, num_weights, padding_idx, scale_grad_by_freq):
    """Gradient of an embedding table [num_weights, D] from grad_output [..., D] and indices [...]."""

    def torchs():
        if previous is not None:
            return previous.call_boxed(keys, grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)
        on_cpu = torch.ops.aten.embedding_dense_backward.default(
            grad_output.cpu(), indices.cpu(), num_weights, padding_idx, scale_grad_by_freq
        )
        return on_cpu.to(grad_output.device)

    if "neuron" not in ACTIVE.devices:
        return torchs()
    columns = grad_output.shape[-1]
    reason = kernel_choice.fallback_reason(grad_output.dtype, (num_weights, columns), 0)
    if reason is not None:
        stats.count_fallback(reason)
        return torchs()
    index = indices.reshape(-1)
    rows = grad_output.reshape(-1, columns)
    if scale_grad_by_freq:
        # float32 counts whole numbers up to 2**24, far more words than a batch holds.
        counts = torch.zeros(num_weights, dtype=torch.float32, device=rows.device)
        SCATTER_ADD_(counts, 0, index, torch.ones_like(index, dtype=torch.float32))
        rows = (rows / counts.index_select(0, index).unsqueeze(1)).to(rows.dtype)
    table = torch.zeros(num_weights, columns, dtype=rows.dtype, device=rows.device)
    SCATTER_ADD_(table, 0, index, rows)
    if 0 <= padding_idx < num_weights:
        # Its row has no gradient, whatever came in, NaN included; clearing it needs no look at the indices.
        table[padding_idx].zero_()
    return table


# What later overrides join: operator name -> function(previous kernel, dispatch keys, *the operator's arguments).
OVERRIDES = {"embedding_dense_backward": embedding_dense_backward}


def install():
    """Register the overrides, once a process."""
    global _library
    if _library is not None:
        return
    library = torch.library.Library("aten", "IMPL")
    for name, function in OVERRIDES.items():
        try:
            previous = torch.library.get_kernel(f"aten::{name}", DEVICE_KEY)
        except RuntimeError:
            # No device neuron is loaded yet, so nothing is replaced; one may be loaded later.
            previous = None

        def kernel(keys, *args, function=function, previous=previous):
            return function(previous, keys, *args)

        library.impl(name, kernel, DEVICE_KEY, with_keyset=True)
    _library = library
