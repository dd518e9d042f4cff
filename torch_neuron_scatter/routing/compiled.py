"""Routes calls in code that torch.compile makes, and keeps that code true when routing changes.

Dynamo looks a method up on a tensor that comes into a graph, and finds our patch; for a tensor made in the graph it takes
torch's own method for granted, and then neither the graph nor a cache of compiled graphs knows of the patch. Code compiled
while routing is off met torch's own methods, of which Dynamo guards nothing. So Dynamo is given a handler for those methods that
reads ACTIVE, on which Dynamo then guards, and calls the patch; code compiled before that is dropped, once a process.

This imports Dynamo (about 1.5 seconds, at the first enable() or routing()), since Dynamo remembers which objects torch's
functions are when it is first used, and must not remember our patches for them.
"""

import sys
import threading

import torch

from .active import ACTIVE

# torch.index_add and torch.scatter_add need none: Dynamo guards on the identity of a module's functions.
METHODS = ("index_add_", "index_add", "scatter_add_", "scatter_add")

# Attribute of our patches, by which one is told from somebody else's.
MARK = "routes_to_neuron_scatter"

_watched = False
_calling_patch = threading.local()


def _read_state():
    # Dynamo guards on what is used, not on what is only fetched.
    return "on" if ACTIVE.devices else "off"


def _handler(name):
    """A method of Dynamo's TensorVariable; where it returns None, Dynamo goes on as without it."""

    def handler(variable, tx, *args, **kwargs):
        from torch._dynamo.variables.builder import SourcelessBuilder

        tx.inline_user_function_return(SourcelessBuilder.create(tx, _read_state), [], {})
        patch = vars(torch.Tensor).get(name)
        if not ACTIVE.devices or not hasattr(patch, MARK) or getattr(_calling_patch, "now", False):
            return None
        # The patch calls torch's own method where it does not route, which comes here again.
        _calling_patch.now = True
        try:
            return tx.inline_user_function_return(SourcelessBuilder.create(tx, patch), [variable, *args], kwargs)
        finally:
            _calling_patch.now = False

    return handler


def watch():
    """Install the handler, once a process; called before anything is patched."""
    global _watched
    if _watched:
        return
    may_have_compiled = "torch._dynamo.eval_frame" in sys.modules
    from torch._dynamo import reset_code_caches, trace_rules
    from torch._dynamo.variables.tensor import TensorVariable

    trace_rules.get_torch_obj_rule_map()
    trace_rules.get_tensor_method()
    for name in METHODS:
        setattr(TensorVariable, f"method_{name}", _handler(name))
    if may_have_compiled:
        reset_code_caches()
    _watched = True
