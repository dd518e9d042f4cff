"""The six Python callables of torch that routing patches: index_add(_) and scatter_add(_) of Tensor, index_add and scatter_add
of torch.

A patch is a function in front of the object that was there. It passes a call on, untouched, whenever the call is not for the
operator. Somebody else may patch over it; it then stays beneath theirs and passes everything through while routing is off.
"""

import functools
import threading

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .. import stats
from ..ops.schema import SCATTER_ADD, SCATTER_ADD_
from . import rows
from .active import ACTIVE

# Subclasses of Tensor have a __torch_function__ that must see torch's own call; these have none of their own.
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, FakeTensor)

_inside = threading.local()


def _no_alpha(input, dim, index, src):
    return input, dim, index, src, 1


def _arguments_of_index_add(input, dim, index, source, *, alpha=1):
    return input, dim, index, source, alpha


def _decide(arguments, plan, args, kwargs):
    """The Plan of a call and its alpha; (None or a reason, None) for a call that goes to torch."""
    if len(args) == 0 or not isinstance(args[0], torch.Tensor):
        return None, None
    if args[0].device.type not in ACTIVE.devices:
        return None, None
    if "out" in kwargs:
        return (None if kwargs["out"] is None and len(kwargs) > 4 else "out"), None
    try:
        input, dim, index, src, alpha = arguments(*args, **kwargs)
    except TypeError:
        return None, None
    if not isinstance(index, torch.Tensor) or not isinstance(src, torch.Tensor):
        return None, None
    return plan(input, dim, index, src), alpha


def _subclasses(args, kwargs):
    return [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and type(x) not in PLAIN_TYPES]


def _as_subclass(original, subclasses, args, kwargs):
    """Make the call as if routing were off: __torch_function__ must be handed torch's own callable, which C++ looks up by name."""
    if any(tensor.device.type in ACTIVE.devices for tensor in subclasses):
        stats.count_fallback("subclass")
    if torch.overrides.has_torch_function(subclasses):
        return torch.overrides.handle_torch_function(original, subclasses, *args, **kwargs)
    return original(*args, **kwargs)


def _run(plan, alpha, original_input, in_place):
    if in_place:
        SCATTER_ADD_(plan.input, plan.dim, plan.index, plan.src, alpha=alpha)
        return original_input
    if plan.whole:
        return SCATTER_ADD(plan.input, plan.dim, plan.index, plan.src, alpha=alpha)
    result = original_input.clone(memory_format=torch.contiguous_format)
    part = result.as_strided(plan.input.shape, result.stride())
    SCATTER_ADD_(part, plan.dim, plan.index, plan.src, alpha=alpha)
    return result


class _Patch:
    """One callable of torch and what routing does to it."""

    def __init__(self, owner, name, arguments, plan, builtin=None):
        self.owner, self.name, self.builtin = owner, name, builtin
        self.arguments, self.plan, self.in_place = arguments, plan, name.endswith("_")
        self.wrapper = None
        self.made = []

    def _wrap(self, original):
        arguments, plan_call, in_place = self.arguments, self.plan, self.in_place

        # Not __name__: Dynamo takes a function of a Tensor method's name for the method itself and leaves it unrouted.
        @functools.wraps(original, assigned=("__doc__", "__qualname__"))
        def routed(*args, **kwargs):
            if not ACTIVE.devices:
                return original(*args, **kwargs)
            if torch.compiler.is_compiling():
                # No lock, thread-local or counter in a graph.
                plan, alpha = _decide(arguments, plan_call, args, kwargs)
                if isinstance(plan, rows.Plan):
                    return _run(plan, alpha, args[0], in_place)
                return original(*args, **kwargs)
            if getattr(_inside, "call", False):
                # Another patch of ours is in front of somebody else's, and has decided already.
                return original(*args, **kwargs)
            subclasses = _subclasses(args, kwargs)
            if subclasses:
                return _as_subclass(original, subclasses, args, kwargs)
            plan, alpha = _decide(arguments, plan_call, args, kwargs)
            if isinstance(plan, rows.Plan):
                return _run(plan, alpha, args[0], in_place)
            if plan is not None:
                stats.count_fallback(plan)
            _inside.call = True
            try:
                return original(*args, **kwargs)
            finally:
                _inside.call = False

        routed.__name__ = f"routed_{self.name}"
        if self.builtin is not None:
            # torch.jit.script knows torch's functions by identity.
            torch.jit._builtins._register_builtin(routed, self.builtin)
        return routed

    def install(self):
        current = getattr(self.owner, self.name)
        if current is self.wrapper:
            return
        for wrapper, had_own in self.made:
            if current is wrapper:
                self.wrapper, self.had_own = wrapper, had_own
                return
        self.had_own = self.name in vars(self.owner)
        self.wrapper = self._wrap(current)
        self.made.append((self.wrapper, self.had_own))
        setattr(self.owner, self.name, self.wrapper)

    def uninstall(self):
        """Put back what was there, unless somebody has patched over it meanwhile."""
        if self.wrapper is None or vars(self.owner).get(self.name) is not self.wrapper:
            return
        if self.had_own:
            setattr(self.owner, self.name, self.wrapper.__wrapped__)
        else:
            delattr(self.owner, self.name)
        self.wrapper = None


_PATCHES = (
    _Patch(torch.Tensor, "index_add_", _arguments_of_index_add, rows.index_add),
    _Patch(torch.Tensor, "index_add", _arguments_of_index_add, rows.index_add),
    _Patch(torch.Tensor, "scatter_add_", _no_alpha, rows.scatter_add),
    _Patch(torch.Tensor, "scatter_add", _no_alpha, rows.scatter_add),
    _Patch(torch, "index_add", _arguments_of_index_add, rows.index_add, "aten::index_add"),
    _Patch(torch, "scatter_add", _no_alpha, rows.scatter_add, "aten::scatter_add"),
)


def install():
    for patch in _PATCHES:
        patch.install()


def uninstall():
    for patch in _PATCHES:
        patch.uninstall()
