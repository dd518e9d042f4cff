"""Launching NKI kernels on device tensors.

`wrap_nki(kernel)[(lnc,)](*args)` runs the kernel in the simulator on the tensors' device memory. Eager launches only: the
higher-order operator that puts a kernel into a compiled graph belongs here too.
"""

import torch
from torch_neuron_scatter_stub.device import _C

from .op_tracking import record_launch

GRIDS = ((1,), (2,))


def wrap_nki(nki_kernel):
    """Make a kernel decorated with `nki.jit` callable on device tensors.

    Args:
        nki_kernel: what `nki.jit` returned.

    Returns:
        A caller; `caller[(lnc,)]` sets the launch grid, calling it launches.

    Raises:
        TypeError: nki_kernel did not come from `nki.jit`.
    """
    if not hasattr(nki_kernel, "sign") or not hasattr(nki_kernel, "func"):
        raise TypeError(f"wrap_nki: nki_kernel is {type(nki_kernel).__name__}; accepted is what nki.jit returns")
    return _Caller(nki_kernel, (1,))


class _Caller:
    def __init__(self, kernel, grid):
        self._kernel = kernel
        self._grid = grid

    def __getitem__(self, grid):
        grid = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
        if grid not in GRIDS:
            raise ValueError(f"launch grid is {grid}; accepted are (1,) and (2,), the logical NeuronCores of a launch")
        return _Caller(self._kernel, grid)

    def __call__(self, *args, **kwargs):
        """Launch. Tensors must be contiguous on device neuron; other arguments are compile-time constants.

        A result that is one of the kernel's arguments comes back as the caller's own tensor.
        """
        bound = self._kernel.sign.bind(*args, **kwargs)
        bound.apply_defaults()
        names = [name for name, value in bound.arguments.items() if isinstance(value, torch.Tensor)]
        tensors = [bound.arguments[name] for name in names]
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.device.type != "neuron":
                raise RuntimeError(
                    f"kernel argument {name} is on {tensor.device}; accepted are tensors on device neuron"
                )
            if not tensor.is_contiguous():
                raise RuntimeError(
                    f"kernel argument {name} has strides {tensor.stride()}; accepted are contiguous tensors"
                )
        record_launch(self._kernel.func.__name__)
        with _C.host_view(tensors) as views:
            arguments = dict(bound.arguments, **dict(zip(names, views, strict=True)))
            result = self._kernel[self._grid[0]](**arguments)
            return self._on_device(result, views, tensors)

    def _on_device(self, result, views, tensors):
        if isinstance(result, (tuple, list)):
            return tuple(self._on_device(item, views, tensors) for item in result)
        for view, tensor in zip(views, tensors, strict=True):
            if result is view:
                return tensor
        return result.to(tensors[0].device) if isinstance(result, torch.Tensor) else result
