"""Eager kernels of device neuron in front of those that are there, for the operators of `aten_ops`.

They are registered at the first enable() for device neuron and stay: a thread may be in the middle of a backward when routing is
switched off. While it is off, an override calls the kernel that it replaced.
"""

import functools

import torch

from .active import ACTIVE
from .aten_ops import ROUTED

KEY = "PrivateUse1"


def _override(library, name, function):
    try:
        previous = torch.library.get_kernel(f"aten::{name}", KEY)
    except RuntimeError:
        # No device neuron is loaded yet, so nothing is replaced; one may be loaded later.
        previous = None
    operator = getattr(torch.ops.aten, name).default

    def torchs(keys, *args, **kwargs):
        if previous is not None:
            return previous.call_boxed(keys, *args, **kwargs)
        return _on_cpu(operator, args, kwargs)

    def kernel(keys, *args, **kwargs):
        if "neuron" not in ACTIVE.devices:
            return torchs(keys, *args, **kwargs)
        return function(lambda *args, **kwargs: torchs(keys, *args, **kwargs), *args, **kwargs)

    library.impl(name, kernel, KEY, with_keyset=True)


def _on_cpu(operator, args, kwargs):
    """Run on copies on the CPU, as a device's fallback does; the first argument takes what is written into it."""
    first = next(arg for arg in args if isinstance(arg, torch.Tensor))
    copies = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, args)
    result = operator(*copies, **kwargs)
    return first.copy_(result) if operator._schema.is_mutable else result.to(first.device)


@functools.cache
def install():
    """Register the overrides, once a process. The library is returned so that it lives on."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in ROUTED.items():
        _override(library, name, function)
    return library
