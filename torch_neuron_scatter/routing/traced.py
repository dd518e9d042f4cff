"""The operators of `aten_ops` in graphs that AOTAutograd traces for device neuron, forward and backward.

A rule sees an operator while it is functionalised, before a backend's decompositions do. What it decides hangs on whether
routing is on, so a graph compiled by Dynamo is guarded on that and is compiled anew when it changes.
"""

import functools

import torch
from torch._guards import TracingContext
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, disable_functional_mode

from .active import ACTIVE
from .aten_ops import ROUTED


def _guard_on_routing():
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.symbolic_convert import tls

    translator = getattr(tls, "current_tx", None)
    if translator is None or TracingContext.try_get() is None:
        # Not within Dynamo: whoever traces, keeps the graph and answers for it.
        return
    module = translator.import_source(ACTIVE.__module__)
    devices = AttrSource(AttrSource(module, "ACTIVE"), "devices")
    install_guard(devices.make_guard(GuardBuilder.EQUALS_MATCH))


def _rule(library, name, function):
    def rule(mode, op, types, args, kwargs):
        def torchs(*args, **kwargs):
            with disable_functional_mode():
                return mode.__torch_dispatch__(op, types, args, kwargs)

        on_neuron = any(isinstance(arg, torch.Tensor) and arg.device.type == "neuron" for arg in args)
        if on_neuron:
            _guard_on_routing()
        routed = on_neuron and "neuron" in ACTIVE.devices and all(issubclass(kind, FunctionalTensor) for kind in types)
        if not routed:
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return function(torchs, *args, **kwargs)

    torch.library.register_torch_dispatch(f"aten::{name}", FunctionalTensorMode, rule, lib=library)


@functools.cache
def install():
    """Register the rules, once a process. The library is returned so that it lives on."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in ROUTED.items():
        _rule(library, name, function)
    return library
