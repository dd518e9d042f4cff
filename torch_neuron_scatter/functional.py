"""scatter_add_ and scatter_add: the functions users call, thin over the operators of namespace `neuron`."""

import torch

from .ops.plain_cpu_call import try_plain_call
from .ops.schema import SCATTER_ADD, SCATTER_ADD_


def scatter_add_(input, index, src, *, dim=0, alpha=1, unique_indices=False, lnc=None):
    """Accumulate rows in place: `input[index[k]] += alpha * src[k]` for every k, repeats included.

    Args:
        input: [N, ...], any strides; the destination. float32, bfloat16 and float16 run in the NKI kernel on device
            `neuron`, every other dtype that torch.index_add_ takes runs in torch.
        index: [K] int32 or int64 with 0 <= index < N; repeats accumulate.
        src: [K, ...], as input but for dim; input's dtype, or bfloat16/float16 for a float32 input (float32 too for float64).
        dim (int): the dimension of N and K; 0 is the kernel's case.
        alpha (number): multiplies src.
        unique_indices (bool): a promise that no index repeats; a false one is the caller's bug.
        lnc (int or None): logical NeuronCores that share the launch, 1 or 2; None for what the runtime is configured for.

    Returns:
        input, the same object.

    Raises:
        IndexError: dim out of range, index of more than one dimension, or a row number outside [0, N).
        RuntimeError: dtypes, shapes, devices or overlapping memory that do not fit, or a leaf that requires a gradient.
        ValueError: lnc other than None, 1, 2.
        Nothing has been written when an exception leaves this function.
    """
    if type(alpha) is int and alpha == 1 and not unique_indices and lnc is None:
        # torch.ops takes microseconds to read its arguments, keywords most of all, and a call of a megabyte about 40 of them.
        if not torch.compiler.is_compiling() and try_plain_call(input, dim, index, src):
            return input
        return SCATTER_ADD_(input, dim, index, src)
    return SCATTER_ADD_(input, dim, index, src, alpha=alpha, unique_indices=unique_indices, lnc=lnc)


def scatter_add(input, index, src, *, dim=0, alpha=1, unique_indices=False, lnc=None):
    """Out-of-place `scatter_add_`: same arguments and exceptions; returns a new contiguous tensor of input's shape."""
    return SCATTER_ADD(input, dim, index, src, alpha=alpha, unique_indices=unique_indices, lnc=lnc)
