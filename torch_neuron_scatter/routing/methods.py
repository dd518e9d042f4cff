"""The six Python callables of torch that routing patches: index_add(_) and scatter_add(_) of Tensor, index_add and scatter_add
of torch.

A patch is a function in front of the object that was there. It passes a call on, untouched, whenever the call is not for the
operator. Somebody else may patch over it; it then stays beneath theirs and passes everything through while routing is off.
"""

import contextlib
import functools
import threading

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .. import stats
from . import compiled, rows
from .active import ACTIVE

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)
NO_TORCH_FUNCTION = torch.nn.Parameter.__torch_function__

_inside = threading.local()


def _is_plain(tensor):
    """Whether no code of a subclass of Tensor must see the call: neither a __torch_function__ nor a __torch_dispatch__."""
    kind = type(tensor)
    if kind in PLAIN_TYPES:
        return True
    return kind.__torch_function__ is NO_TORCH_FUNCTION and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _traces_subclass(tensors):
    """The same question while tracing; Dynamo cannot look at the type of what has a __torch_function__."""
    dynamo = torch.compiler.is_dynamo_compiling()
    if dynamo and (not torch._C._is_torch_function_enabled() or torch.overrides.has_torch_function(tensors)):
        return True
    return not all(_is_plain(tensor) for tensor in tensors)


def _is_traced(tensors):
    return any(isinstance(tensor, (FakeTensor, FunctionalTensor)) for tensor in tensors)


def _tensors(args, kwargs):
    return [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]


# The arguments of torch's signatures; a call that does not fit them has a TypeError coming, in torch's words.
def _index_add(input, dim, index, source, *, alpha=1):
    return input, dim, index, source, alpha, None


def _scatter_add(input, dim, index, src):
    return input, dim, index, src, 1, None


def _torch_index_add(input, dim, index, source, *, alpha=1, out=None):
    return input, dim, index, source, alpha, out


def _torch_scatter_add(input, dim, index, src, *, out=None):
    return input, dim, index, src, 1, out


def _decide(signature, plan_call, in_place, args, kwargs):
    """(input, Plan) of a call that the operator serves, or (input, reason) for one that goes to torch."""
    try:
        input, dim, index, src, alpha, out = signature(*args, **kwargs)
    except TypeError:
        return None, "arguments"
    if out is not None:
        return input, "out"
    if not all(isinstance(operand, torch.Tensor) for operand in (input, index, src)):
        return input, "arguments"
    plan = plan_call(input, dim, index, src, alpha)
    # torch refuses a leaf that requires a gradient; of a part of it the operator would speak as of a view.
    part = in_place and isinstance(plan, rows.Plan) and plan.sizes is not None
    if part and input.is_leaf and input.requires_grad and torch.is_grad_enabled():
        return input, "arguments"
    return input, plan


def _decide_in_eager(signature, plan_call, in_place, args, kwargs):
    """The same, looking also at what exists outside a graph only: memory, and the levels of torch.func."""
    input, plan = _decide(signature, plan_call, in_place, args, kwargs)
    if not isinstance(plan, rows.Plan):
        return input, plan
    transformed = torch._C._are_functorch_transforms_active()
    if in_place and not transformed and rows.overlap(*_tensors(args, kwargs)):
        return input, "overlap"
    if not in_place and transformed and plan.sizes is not None:
        return input, "vmap"
    return input, plan


def _pass_on(original, tensors, args, kwargs):
    """The call as if routing were off: a __torch_function__ is handed torch's own callable, where C++ would look up ours."""
    if torch.overrides.has_torch_function(tensors):
        return torch.overrides.handle_torch_function(original, tensors, *args, **kwargs)
    return original(*args, **kwargs)


def _is_routed_by_dynamo(device_type):
    """Whether to look at a call while tracing.

    Of device neuron, what traces or runs the graph next sees the call as well; and in the backward of an autograd.Function Dynamo
    lets nobody ask for strides.
    """
    return device_type in ACTIVE.devices and not (device_type == "neuron" and torch.compiler.is_dynamo_compiling())


def _is_seen_again(plan, tensors):
    """Whether what was not understood here comes to device neuron as a plain call of the operator, which decides and counts."""
    return plan in ("alpha", "arguments") and tensors[0].device.type == "neuron"


def _is_routed(tensor):
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.device.type in ACTIVE.devices


class _Patch:
    """One callable of torch and what routing does to it."""

    def __init__(self, owner, name, signature, plan_call):
        self.owner, self.name, self.signature, self.plan_call = owner, name, signature, plan_call
        # Every wrapper made, one for each object found, and whether the owner itself had that object or inherited it.
        self.wrappers = {}

    def _wrap(self, original):
        signature, plan_call, in_place = self.signature, self.plan_call, self.name.endswith("_")

        @functools.wraps(original, assigned=("__doc__",))
        def routed(*args, **kwargs):
            if not ACTIVE.devices:
                return original(*args, **kwargs)
            if torch.compiler.is_compiling():
                # No lock, thread-local or counter in a graph.
                tensors = _tensors(args, kwargs)
                if tensors and _is_routed_by_dynamo(tensors[0].device.type) and not _traces_subclass(tensors):
                    input, plan = _decide(signature, plan_call, in_place, args, kwargs)
                    if isinstance(plan, rows.Plan):
                        return plan.run(input, in_place)
                return original(*args, **kwargs)
            tensors = _tensors(args, kwargs)
            if getattr(_inside, "call", False):
                # Another patch of ours is in front of somebody else's, and has decided already.
                return _pass_on(original, tensors, args, kwargs)
            if torch._C._is_torch_function_mode_enabled():
                # The mode sees one call, as of torch's, and routing goes on where the mode calls it.
                return torch.overrides.handle_torch_function(routed, tensors, *args, **kwargs)
            input, plan = None, None
            if not all(_is_plain(tensor) for tensor in tensors):
                if any(_is_routed(tensor) for tensor in tensors):
                    plan = "subclass"
            elif tensors and tensors[0].device.type in ACTIVE.devices:
                input, plan = _decide_in_eager(signature, plan_call, in_place, args, kwargs)
                if isinstance(plan, rows.Plan):
                    return plan.run(input, in_place)
            _inside.call = True
            try:
                counted = plan is not None and not _is_traced(tensors) and not _is_seen_again(plan, tensors)
                with stats.handing_back(plan) if counted else contextlib.nullcontext():
                    return _pass_on(original, tensors, args, kwargs)
            finally:
                _inside.call = False

        # Not __name__: Dynamo takes a function of a Tensor method's name for the method itself and leaves it unrouted.
        routed.__name__ = f"routed_{self.name}"
        setattr(routed, compiled.MARK, True)
        # Where pickle finds it, and whatever is there when the pickle is read.
        routed.__module__ = "torch"
        routed.__qualname__ = self.name if self.owner is torch else f"{self.owner.__name__}.{self.name}"
        self._introduce(routed)
        return routed

    def _introduce(self, routed):
        """Enter the wrapper where torch knows its functions by identity."""
        if self.owner is torch:
            torch.jit._builtins._register_builtin(routed, f"aten::{self.name}")
            torch.overrides._get_overridable_functions()[1][routed] = f"torch.{self.name}"
        else:
            torch.overrides._get_overridable_functions()[1][routed] = f"torch.Tensor.{self.name}"
            torch.overrides._get_tensor_methods().add(routed)

    def install(self):
        current = getattr(self.owner, self.name)
        if current in self.wrappers:
            return
        for wrapper in self.wrappers:
            if wrapper.__wrapped__ is current:
                break
        else:
            wrapper = self._wrap(current)
        self.wrappers[wrapper] = self.name in vars(self.owner)
        setattr(self.owner, self.name, wrapper)

    def uninstall(self):
        """Put back what was there, unless somebody has patched over it meanwhile."""
        while (current := vars(self.owner).get(self.name)) in self.wrappers:
            if self.wrappers[current]:
                setattr(self.owner, self.name, current.__wrapped__)
            else:
                delattr(self.owner, self.name)


_PATCHES = (
    _Patch(torch.Tensor, "index_add_", _index_add, rows.index_add),
    _Patch(torch.Tensor, "index_add", _index_add, rows.index_add),
    _Patch(torch.Tensor, "scatter_add_", _scatter_add, rows.scatter_add),
    _Patch(torch.Tensor, "scatter_add", _scatter_add, rows.scatter_add),
    _Patch(torch, "index_add", _torch_index_add, rows.index_add),
    _Patch(torch, "scatter_add", _torch_scatter_add, rows.scatter_add),
)


def install():
    # torch caches tables of its functions at their first use; they must hold torch's own, not what is patched over them.
    torch.overrides.get_testing_overrides()
    torch.overrides._get_tensor_methods()
    compiled.watch()
    for patch in _PATCHES:
        patch.install()


def uninstall():
    for patch in _PATCHES:
        patch.uninstall()
