"""ScatterAdd, the operator as an nn.Module."""

import torch

from .functional import scatter_add_
from .ops.checks import LNC_VALUES


class ScatterAdd(torch.nn.Module):
    """Accumulates rows of src into input along dim 0, in place.

    Args:
        lnc (int or None): logical NeuronCores that share a launch, 1 or 2; None for what the runtime is configured for.
        unique_indices (bool): a promise that no index of any call repeats.

    Raises:
        ValueError: lnc other than None, 1, 2.

    Call: (input [N, ...], index [K] int32 or int64, src [K, ...]) -> input, the same object. See `scatter_add_`.
    """

    def __init__(self, lnc=None, unique_indices=False):
        super().__init__()
        if lnc is not None and lnc not in LNC_VALUES:
            raise ValueError(
                f"ScatterAdd: lnc is {lnc}; accepted are 1, 2 or None (what the runtime is configured for)"
            )
        self.lnc = lnc
        self.unique_indices = unique_indices

    def forward(self, input, index, src):
        return scatter_add_(input, index, src, unique_indices=self.unique_indices, lnc=self.lnc)

    def extra_repr(self):
        return f"lnc={self.lnc}, unique_indices={self.unique_indices}"
