"""One launch of an NKI kernel on device tensors, in the simulator."""

import torch
from torch_neuron_scatter_stub.device import _C

from .op_tracking import record_launch


def launch(kernel, grid, arguments):
    """Run `kernel` on `grid`, (1,) or (2,), with `arguments` by name.

    Returns:
        What the kernel returns; an argument comes back as the caller's own tensor.

    Raises:
        RuntimeError: a tensor is not on device neuron, or not contiguous.
    """
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        if tensor.device.type != "neuron":
            raise RuntimeError(f"kernel argument {name} is on {tensor.device}; accepted are tensors on device neuron")
        if not tensor.is_contiguous():
            raise RuntimeError(f"kernel argument {name} has strides {tensor.stride()}; accepted are contiguous tensors")
    record_launch(kernel.func.__name__)
    owners = tuple(tensors.values())
    with _C.host_view(list(owners)) as views:
        result = kernel[grid](**dict(arguments, **dict(zip(tensors, views, strict=True))))
        return _on_device(result, views, owners)


def _on_device(result, views, owners):
    if isinstance(result, (tuple, list)):
        return tuple(_on_device(item, views, owners) for item in result)
    for view, owner in zip(views, owners, strict=True):
        if result is view:
            return owner
    return result.to(owners[0].device) if isinstance(result, torch.Tensor) else result
