"""Which kernel serves a call on device neuron, and why: one table, one function.

A kernel's row says when it can be used; `choose` takes the first that can, or the one that TORCH_NEURON_SCATTER_KERNEL names.
Nothing here launches anything; Neuron packages are imported only to look whether a kernel is there.
"""

import dataclasses
import functools
import importlib
import inspect
import os
from collections.abc import Callable

import torch

from .kernels import planner

ENVIRONMENT_VARIABLE = "TORCH_NEURON_SCATTER_KERNEL"

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Row numbers are int32 in the kernel, and its largest value marks "no row".
MAX_ROWS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Call:
    """What the choice depends on; no element of any tensor.

    rows, columns: N and D of input; where a graph leaves one open, the largest it can be. dtype, src_dtype: torch dtypes.
    has_alpha: whether alpha is other than 1.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    src_dtype: torch.dtype
    has_alpha: bool
    unique_indices: bool
    lnc: int


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that could serve.

    load: returns the nki kernel, called as launch(caller, input, index, src, alpha, call), which returns input's new value.
    refusal: for a Call, None or the reason why this kernel must not serve it.
    reason: why it is used where it is.
    """

    name: str
    load: Callable
    launch: Callable
    refusal: Callable
    reason: str


def fallback_reason(dtype, shape, dim):
    """Why no kernel serves a call, or None.

    Args:
        dtype: input's dtype.
        shape: input's shape.
        dim (int): from 0; behind dimensions of size 1 it is as good as 0.

    Returns:
        None, or the reason under which stats() counts the call.
    """
    if dtype not in KERNEL_DTYPES:
        return "dtype"
    if any(size != 1 for size in shape[:dim]):
        return "dim"
    if len(shape) and shape[dim] >= MAX_ROWS:
        return "rows"
    return None


def _kernel(module, name):
    return lambda: getattr(importlib.import_module(f"torch_neuron_scatter.kernels.{module}"), name)


def plan(call):
    """The planner's choice of form and tile sizes for a Call."""
    return planner.plan(call.rows, call.columns, call.dtype.itemsize, call.lnc, call.unique_indices)


def _launch_planned(caller, input, index, src, alpha, call):
    return caller(input, index, src, alpha, unique_indices=call.unique_indices, **plan(call).constants)


def _launch_grouped(caller, input, index, src, alpha, call):
    # Asked for where the planner would not have it, it still needs its own tile sizes.
    constants = planner.plan(MAX_ROWS, call.columns, call.dtype.itemsize, call.lnc, call.unique_indices).constants
    return caller(input, index, src, alpha, unique_indices=call.unique_indices, **constants)


def _launch_tiled(caller, input, index, src, alpha, call):
    return caller(input, index, src, alpha, unique_indices=call.unique_indices)


def _stationary_refusal(call):
    if plan(call).form != "stationary":
        return (
            f"it keeps all rows of input on the chip: up to {planner.STATIONARY_ROWS} rows, and indices that may repeat"
        )
    return None


@functools.cache
def _load_nkilib():
    """nki-library's kernel, or None where the package is absent, a placeholder, or older than its unique_indices argument."""
    try:
        kernel = importlib.import_module("nkilib.experimental.misc.scatter_add").scatter_add
    except (ImportError, AttributeError):
        return None
    function = getattr(kernel, "func", kernel)
    return kernel if "unique_indices" in inspect.signature(function).parameters else None


def _launch_nkilib(caller, input, index, src, alpha, call):
    return caller(input, 0, index, src, unique_indices=call.unique_indices)


def _nkilib_refusal(call):
    if _load_nkilib() is None:
        return "nki-library's scatter_add with unique_indices is not installed (Neuron SDK 2.33 or newer has it)"
    if not call.unique_indices:
        return "its combine of repeated indices spreads one NaN or Inf of src over a tile, and merges rows above 2**24"
    if call.src_dtype != call.dtype or call.has_alpha:
        return "it takes neither a src narrower than input nor an alpha"
    return None


KERNELS = (
    Kernel(
        name="stationary",
        load=_kernel("stationary", "stationary_scatter_add"),
        launch=_launch_planned,
        refusal=_stationary_refusal,
        reason="few rows: input stays on the chip, and every row of it is read and written once",
    ),
    Kernel(
        name="grouped",
        load=_kernel("grouped", "grouped_scatter_add"),
        launch=_launch_grouped,
        refusal=lambda call: None,
        reason="several tiles of 128 rows side by side: the wait for the rows before is paid once a group",
    ),
    Kernel(
        name="tiled",
        load=_kernel("scatter_add", "scatter_add"),
        launch=_launch_tiled,
        refusal=lambda call: None,
        reason="asked for: one tile of 128 rows after another, and one rounding a row however many tiles it is in",
    ),
    Kernel(
        name="nkilib",
        load=_load_nkilib,
        launch=_launch_nkilib,
        refusal=_nkilib_refusal,
        reason="asked for, and right where the caller promises unique indices",
    ),
)


def choose(call):
    """The kernel that serves `call`.

    Returns:
        (Kernel, str): the kernel and, in words, why this one.

    Raises:
        ValueError: TORCH_NEURON_SCATTER_KERNEL names no kernel.
    """
    asked = os.environ.get(ENVIRONMENT_VARIABLE, "auto")
    names = [kernel.name for kernel in KERNELS]
    if asked not in ("auto", *names):
        raise ValueError(f"{ENVIRONMENT_VARIABLE} is {asked!r}; accepted are 'auto' and {', '.join(map(repr, names))}")
    refused = ""
    candidates = KERNELS if asked == "auto" else sorted(KERNELS, key=lambda kernel: kernel.name != asked)
    for kernel in candidates:
        refusal = kernel.refusal(call)
        if refusal is None:
            return kernel, kernel.reason + refused
        refused += f"; {kernel.name} was passed over: {refusal}"
    raise AssertionError("the grouped kernel serves every call")
