"""neuron::scatter_add_ and neuron::scatter_add on device neuron: from tensors of any layout to one kernel launch.

Checks, makes operands the kernel can take, launches, copies back where input was not contiguous. What no kernel serves goes to
the device's own index_add_ and is counted. Neuron packages are imported at the first launch, never before.
"""

import functools
import os

import torch

from . import kernel_choice, neuron_packages, stats
from .ops.checks import LNC_VALUES, check_alpha, check_index_range, check_memory, check_operands
from .ops.schema import LIBRARY

DEVICE_KEY = "PrivateUse1"

# Logical NeuronCores a launch shares where neither the caller nor the runtime says otherwise: Trn2 and Trn3 run with LNC 2
# (Neuron documentation, "Logical NeuronCore configuration").
DEFAULT_LNC = 2
LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"


def configured_lnc():
    """Logical NeuronCores a launch shares as the runtime is configured: 1 or 2.

    Raises:
        ValueError: NEURON_LOGICAL_NC_CONFIG is set to something else.
    """
    text = os.environ.get(LNC_VARIABLE, str(DEFAULT_LNC))
    if text not in map(str, LNC_VALUES):
        raise ValueError(f"{LNC_VARIABLE} is {text!r}; accepted are 1 and 2")
    return int(text)


def launch_lnc(lnc, columns):
    """Cores for one launch: the asked or configured number, or 1 where it does not divide D."""
    lnc = configured_lnc() if lnc is None else lnc
    return lnc if columns % lnc == 0 else 1


@functools.cache
def _caller(kernel):
    try:
        from torch_neuronx import wrap_nki

        return wrap_nki(kernel.load())
    except ImportError as error:
        missing = [
            package for package in neuron_packages.inspect_packages()[:2] if package.state not in ("real", "stand-in")
        ]
        states = ", ".join(f"{package.name} is {package.state}" for package in missing) or str(error)
        raise ImportError(
            f"the kernel cannot be loaded: {states}; accepted are the packages of {neuron_packages.WHERE_FROM}"
        ) from error


def _kernel_index(index, rows):
    """[K] contiguous int32; a number that int32 or the kernel could take for a row it is not becomes -1 or N first."""
    if index.dtype == torch.int64:
        index = index.clamp(-1, rows).to(torch.int32)
    return index.contiguous()


def _raise_for_index(name, index, rows, error):
    """Say which index the device refused; reading it is a copy to the host, paid only on the way out."""
    try:
        check_index_range(name, index.cpu(), rows)
    except IndexError as refusal:
        raise refusal from error


def _at_most(size):
    """A size the choice of kernel may look at: one that a graph leaves open must not become a guard."""
    return size if isinstance(size, int) else kernel_choice.MAX_ROWS


def launch(input, index, src, alpha, unique_indices, lnc):
    """Launch the kernel on input [N, ...], contiguous, whose new value the result is.

    Eagerly that is input's own memory; in a graph that is being traced, the result of the kernel's node.
    """
    rows, count = input.shape[0], index.numel()
    columns = input.numel() // rows
    has_alpha = not (isinstance(alpha, (int, bool)) and alpha == 1)
    call = kernel_choice.Call(
        rows=_at_most(rows),
        columns=_at_most(columns),
        dtype=input.dtype,
        src_dtype=src.dtype,
        has_alpha=has_alpha,
        unique_indices=unique_indices,
        lnc=launch_lnc(lnc, columns),
    )
    kernel, _ = kernel_choice.choose(call)
    alpha_tensor = torch.full((1,), alpha, dtype=torch.float32, device=input.device) if has_alpha else None
    # No view that changes nothing: in a graph each is a node.
    two_dimensional = input.dim() == 2
    result = kernel.launch(
        _caller(kernel)[(call.lnc,)],
        input if two_dimensional else input.view(rows, columns),
        _kernel_index(index if index.dim() == 1 else index.reshape(count), rows),
        (src if two_dimensional else src.reshape(count, columns)).contiguous(),
        alpha_tensor,
        call,
    )
    return result if two_dimensional else result.view(input.shape)


def rows_first(input, dim, src):
    """input and src as views (src may be copied) whose dimension 0 is `dim`, where all before it are of size 1."""
    if input.dim() == 0:
        return input.view(1), src.reshape(1)
    return (input.flatten(0, dim), src.flatten(0, dim)) if dim else (input, src)


def _accumulate(name, input, dim, index, src, alpha, unique_indices, lnc):
    if index.numel() == 0 or input.numel() == 0:
        check_index_range(name, index.cpu(), input.shape[dim] if input.dim() else 1)
        return
    rows = input.shape[dim] if input.dim() else 1
    try:
        _run(name, input, dim, index, src, alpha, unique_indices, lnc)
    except Exception as error:
        _raise_for_index(name, index, rows, error)
        raise


def _run(name, input, dim, index, src, alpha, unique_indices, lnc):
    reason = kernel_choice.fallback_reason(input.dtype, input.shape, dim)
    if reason is not None:
        with stats.handing_back(reason):
            torch.ops.aten.index_add_.default(input, dim, index.reshape(-1), src.to(input.dtype), alpha=alpha)
        return
    alpha = check_alpha(name, alpha, input.dtype)
    input, src = rows_first(input, dim, src)
    value = launch(input.contiguous(), index, src, alpha, unique_indices, lnc)
    stats.count_kernel()
    # The kernel wrote a contiguous copy, or the launcher gave the result memory of its own.
    if value.data_ptr() != input.data_ptr():
        input.copy_(value)


def scatter_add_(input, dim, index, src, *, alpha=1, unique_indices=False, lnc=None):
    dim = check_operands("scatter_add_", input, dim, index, src, lnc)
    index, src = check_memory("scatter_add_", input, index, src)
    _accumulate("scatter_add_", input, dim, index, src, alpha, unique_indices, lnc)
    return input


def scatter_add(input, dim, index, src, *, alpha=1, unique_indices=False, lnc=None):
    dim = check_operands("scatter_add", input, dim, index, src, lnc)
    result = input.clone(memory_format=torch.contiguous_format)
    _accumulate("scatter_add", result, dim, index, src, alpha, unique_indices, lnc)
    return result


LIBRARY.impl("scatter_add_", scatter_add_, DEVICE_KEY)
LIBRARY.impl("scatter_add", scatter_add, DEVICE_KEY)
