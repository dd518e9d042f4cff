"""Shapes, dtype, strides and device of the results, for meta and fake tensors of every device.

scatter_add_ returns its input. scatter_add returns a contiguous tensor of input's shape, as torch.index_add does. Nothing here
depends on the values of K or N.
"""

import torch

from . import inductor
from .checks import check_operands
from .schema import LIBRARY


@torch.library.register_fake("neuron::scatter_add_", lib=LIBRARY)
def scatter_add_(input, dim, index, src, *, alpha=1, unique_indices=False, lnc=None):
    check_operands("scatter_add_", input, dim, index, src, lnc)
    # Every compile traces through here after it has loaded its backend.
    inductor.register_if_loaded()
    return input


@torch.library.register_fake("neuron::scatter_add", lib=LIBRARY)
def scatter_add(input, dim, index, src, *, alpha=1, unique_indices=False, lnc=None):
    check_operands("scatter_add", input, dim, index, src, lnc)
    return input.new_empty(input.shape)
