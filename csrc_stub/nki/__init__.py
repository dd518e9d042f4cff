"""Functional simulator of the NKI calls that kernels use: an independent reading of the NKI 0.6 and 0.7 documentation.

launch    one launch: grid, seed, on-chip memory in use, and the one place every instruction passes through
tensor    storage, NkiTensor and its views
language  nki.language: dtypes, memory regions, loops, operators, allocation
isa       nki.isa: the instructions, each with the limits its page documents

What the documentation refuses raises `nki.isa.NkiValidationError` here (IndexError for an index out of range); where it is silent,
the choice is the one that breaks wrong code soonest. Instructions run one after the other, in program order. Nothing here may be
bent to what a kernel of this project needs.
"""

import dataclasses
import inspect

import torch

from . import isa, language, simulator
from .language import NKIObject
from .launch import run

__version__ = "0.7.0+standin"
__all__ = ["NKIObject", "isa", "jit", "language", "simulate", "simulator"]


@dataclasses.dataclass(frozen=True)
class TraceConfig:
    """What tracing a kernel says of a launch.

    return_types: (torch dtype, shape) of each result. returns_tuple: whether the kernel returns several.
    operand_output_aliases: position among the tensor arguments -> position of the result that is that very argument.
    dumped_config: the launch in words, for a compiled graph to hold.
    """

    return_types: tuple
    returns_tuple: bool
    operand_output_aliases: dict
    dumped_config: str


class Kernel:
    """A kernel function; `kernel[lnc](...)` launches it on 1 or 2 logical NeuronCores, `kernel(...)` on one.

    Tensors (torch on the CPU, or numpy) are HBM arguments that the kernel may write; everything else is a compile-time constant.
    """

    def __init__(self, func, grid=None):
        self.func = func
        self.sign = inspect.signature(func)
        self.grid = grid
        self.__name__ = func.__name__
        self.__doc__ = func.__doc__

    def __getitem__(self, grid):
        grid = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
        if grid not in ((1,), (2,)):
            raise isa.NkiValidationError(f"launch grid is {grid}; accepted are 1 and 2 (nki.jit)")
        return Kernel(self.func, grid[0])

    def __call__(self, *args, **kwargs):
        bound = self.sign.bind(*args, **kwargs)
        bound.apply_defaults()
        return run(self.func, bound.arguments, self.grid)

    def dump_config(self, **arguments):
        """Trace the kernel for tensors of these shapes and dtypes (on device meta), without their values.

        The simulator has no tracer apart from running, so this runs the kernel on zeros.

        Returns:
            TraceConfig.
        """
        bound = self.sign.bind(**arguments)
        bound.apply_defaults()
        tensors = {name: value for name, value in bound.arguments.items() if isinstance(value, torch.Tensor)}
        zeros = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in tensors.items()}
        result = run(self.func, dict(bound.arguments, **zeros), self.grid)
        results = result if isinstance(result, tuple) else (result,)
        for position, value in enumerate(results):
            if not isinstance(value, torch.Tensor):
                raise isa.NkiValidationError(
                    f"{self.__name__} returns {type(value).__name__} at {position}; accepted are tensors in HBM"
                )
        aliases = {
            operand: position
            for operand, tensor in enumerate(zeros.values())
            for position, value in enumerate(results)
            if value is tensor
        }
        constants = {name: value for name, value in bound.arguments.items() if name not in tensors}
        return TraceConfig(
            tuple((value.dtype, tuple(value.shape)) for value in results),
            isinstance(result, tuple),
            aliases,
            f"{self.__name__}({', '.join(f'{name}={value!r}' for name, value in constants.items())})",
        )


def jit(fn=None, **kwargs):
    """Make a function an NKI kernel (page nki.jit)."""
    return Kernel if fn is None else Kernel(fn)


def simulate(kernel):
    """The kernel itself: everything is simulated here (page nki.simulate)."""
    return kernel if isinstance(kernel, Kernel) else Kernel(kernel)
