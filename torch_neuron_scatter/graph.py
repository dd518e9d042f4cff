"""neuron::scatter_add_ and neuron::scatter_add in graphs for torch.compile's backend `neuron`: the kernel's node.

That backend lowers aten operators and NKI kernel nodes and refuses a custom operator, so there the operator is replaced by what
dispatch would launch. The replacement happens while AOTAutograd functionalises: the node's result becomes input's new value,
and the backend may give both the same memory. Every other backend, torch.export and every other device keep the operator.
"""

import torch
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, PythonFunctionalizeAPI
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import guard_or_false

from . import dispatch, kernel_choice
from .ops.checks import check_alpha, check_operands
from .ops.schema import LIBRARY

BACKEND_PACKAGE = "torch_neuronx"

aten = torch.ops.aten
FACTORIES = (
    aten.zeros.default,
    aten.new_zeros.default,
    aten.zeros_like.default,
    aten.full.default,
    aten.new_full.default,
)


def is_for_backend_neuron():
    """Whether the graph being traced is for backend neuron, which is known by the decompositions it traces with."""
    mode = get_proxy_mode()
    decompositions = () if mode is None else mode.decomposition_table.values()
    return any(getattr(function, "__module__", "").partition(".")[0] == BACKEND_PACKAGE for function in decompositions)


def _is_fresh(value):
    """Whether a tensor was just made and nothing has read it: what autograd's formulas accumulate into, out of place."""
    slot = get_proxy_slot(value, get_proxy_mode().tracer, None)
    node = None if slot is None else slot.proxy.node
    return node is not None and node.target in FACTORIES and not node.users


def _new_value(name, input, dim, index, src, alpha, unique_indices, lnc):
    """input's value after the accumulation; all tensors are below functionalisation."""
    if guard_or_false(index.numel() == 0) or guard_or_false(input.numel() == 0):
        return input
    if kernel_choice.fallback_reason(input.dtype, input.shape, dim) is not None:
        return torch.index_add(input, dim, index.reshape(-1), src.to(input.dtype), alpha=alpha)
    alpha = check_alpha(name, alpha, input.dtype)
    destination, src = dispatch.rows_first(input, dim, src)
    value = dispatch.launch(destination.contiguous(), index, src, alpha, unique_indices, lnc)
    return value if destination is input else value.view(input.shape)


def _rule(name, in_place):
    def rule(mode, op, types, args, kwargs):
        input, dim, index, src = args
        if input.device.type != "neuron" or not is_for_backend_neuron():
            return mode.__torch_dispatch__(op, types, args, kwargs)
        if not all(issubclass(kind, FunctionalTensor) for kind in types):
            return NotImplemented
        functional = PythonFunctionalizeAPI(mode)
        input_value, index_value, src_value = functional.unwrap_tensors((input, index, src))
        options = (kwargs.get("alpha", 1), kwargs.get("unique_indices", False), kwargs.get("lnc"))
        dim = check_operands(name, input_value, dim, index_value, src_value, options[-1])
        if not in_place and not _is_fresh(input_value):
            input_value = input_value.clone(memory_format=torch.contiguous_format)
        value = _new_value(name, input_value, dim, index_value, src_value, *options)
        if not in_place:
            return functional.wrap_tensors(value)
        if value.stride() != input_value.stride():
            with mode:
                input.copy_(functional.wrap_tensors(value))
        else:
            functional.replace(input, value)
            functional.commit_update(input)
            functional.sync(input)
        return input

    torch.library.register_torch_dispatch(f"neuron::{name}", FunctionalTensorMode, rule, lib=LIBRARY)


_rule("scatter_add_", in_place=True)
_rule("scatter_add", in_place=False)
