"""Schemas of the operators. Public: names, argument order and defaults stay as they are.

A FRAGMENT library, since TorchNeuron may define operators of its own in namespace `neuron`. `Tag.inplace` is what lets
AOTAutograd functionalise an operator that returns its mutated input, and lets Inductor reuse the destination.
"""

import torch

LIBRARY = torch.library.Library("neuron", "FRAGMENT")

_ARGUMENTS = "int dim, Tensor index, Tensor src, *, Scalar alpha=1, bool unique_indices=False, int? lnc=None"

LIBRARY.define(
    f"scatter_add_(Tensor(a!) input, {_ARGUMENTS}) -> Tensor(a!)",
    tags=(torch.Tag.inplace, torch.Tag.pt2_compliant_tag),
)
LIBRARY.define(f"scatter_add(Tensor input, {_ARGUMENTS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))

SCATTER_ADD_ = torch.ops.neuron.scatter_add_.default
SCATTER_ADD = torch.ops.neuron.scatter_add.default
