"""Keeps code that torch.compile made true when routing changes.

Code compiled while routing is on passed through our patches, which read ACTIVE, and Dynamo guards on what they read. Code
compiled while it is off met torch's own methods, of which Dynamo guards nothing: it would stay unrouted for good. So Dynamo is
given a handler for those methods that reads ACTIVE, and code compiled before that is dropped, once a process.

This imports Dynamo (about 1.5 seconds, at the first enable() or routing()), since Dynamo remembers which objects torch's
functions are when it is first used, and must not remember our patches for them.
"""

import sys

from .active import ACTIVE

# torch.index_add and torch.scatter_add need none: Dynamo guards on the identity of a module's functions.
METHODS = ("index_add_", "index_add", "scatter_add_", "scatter_add")

_watched = False


def _read_state():
    # Dynamo guards on what is used, not on what is only fetched.
    return "on" if ACTIVE.devices else "off"


def _handler(variable, tx, *args, **kwargs):
    """A method of Dynamo's TensorVariable; returning None has Dynamo go on as without it."""
    from torch._dynamo.variables.builder import SourcelessBuilder

    tx.inline_user_function_return(SourcelessBuilder.create(tx, _read_state), [], {})
    return None


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
        setattr(TensorVariable, f"method_{name}", _handler)
    if may_have_compiled:
        reset_code_caches()
    _watched = True
