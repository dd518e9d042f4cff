"""Batching rules of torch.func.vmap for neuron::scatter_add_ and neuron::scatter_add.

A batch of inputs with one shared index is one scatter of longer rows: the batch joins the columns. Where each member of the
batch has an index of its own, the destinations are stacked to B * N rows and the indices offset by N a member.
"""

import torch
from torch._C._functorch import _add_batch_dim, _unwrap_batched, is_batchedtensor, maybe_get_level
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from .checks import check_index_range
from .schema import LIBRARY, SCATTER_ADD, SCATTER_ADD_


def _unwrap(tensor, level):
    if is_batchedtensor(tensor) and maybe_get_level(tensor) == level:
        return _unwrap_batched(tensor, level)
    return tensor, None


def _batch_first(tensor, batch_dim, size):
    if batch_dim is None:
        return tensor.unsqueeze(0).expand(size, *tensor.shape)
    return tensor.movedim(batch_dim, 0)


def _rows_first(tensor, dim):
    """[B, ...] with rows at logical `dim` as a view [N, B, ...]; a 0-d member counts as one row."""
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.movedim(dim + 1, 0)


def _own_rows(index, rows):
    """[B, K] indices into N rows each as [B * K] into B * N, an index out of range staying out of range."""
    batch = index.shape[0]
    index = index.long()
    offset = torch.arange(batch, device=index.device).unsqueeze(1) * rows
    valid = (index >= 0) & (index < rows)
    return torch.where(valid, index + offset, -1).reshape(-1)


def _scatter_add_(name, size, input, index, index_dim, src, src_dim, dim, options):
    """Accumulate in place; input is [B, ...] and may have any strides."""
    rank = max(input.dim() - 1, 1)
    if not -rank <= dim < rank:
        raise IndexError(f"{name}(): dim is {dim}; accepted for an input of {rank} dimensions: {-rank} to {rank - 1}")
    dim %= rank
    rows = _rows_first(input, dim)
    src_rows = _rows_first(_batch_first(src, src_dim, size), dim)
    if index_dim is None:
        SCATTER_ADD_(rows, 0, index, src_rows, **options)
        return

    index = index.movedim(index_dim, 0).reshape(size, -1)
    if index.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(index):
        check_index_range(name, index, rows.shape[0])
    stacked = rows.transpose(0, 1)
    flat_shape = (size * rows.shape[0], *stacked.shape[2:])
    flat_src = src_rows.transpose(0, 1).reshape(-1, *stacked.shape[2:])
    flat_index = _own_rows(index, rows.shape[0])
    try:
        flat = stacked.view(flat_shape)
    except RuntimeError:
        flat = SCATTER_ADD(stacked.reshape(flat_shape), 0, flat_index, flat_src, **options)
        stacked.copy_(flat.reshape(stacked.shape))
    else:
        SCATTER_ADD_(flat, 0, flat_index, flat_src, **options)


def _register(op, name, in_place):
    def vmap(keyset, input, dim, index, src, **options):
        interpreter = retrieve_current_functorch_interpreter()
        level, size = interpreter.level(), interpreter.batch_size()
        physical, input_dim = _unwrap(input, level)
        index, index_dim = _unwrap(index, level)
        src, src_dim = _unwrap(src, level)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)):
            if input_dim is None and index_dim is None and src_dim is None:
                result = op(physical, dim, index, src, **options)
                return input if in_place else result
            if in_place:
                if input_dim is None:
                    raise RuntimeError(
                        f"{name}(): input has no batch dimension under vmap, but index or src has; accepted for an "
                        f"in-place call is a batched input, use {name[:-1]} instead"
                    )
                _scatter_add_(name, size, physical.movedim(input_dim, 0), index, index_dim, src, src_dim, dim, options)
                return input
            result = _batch_first(physical, input_dim, size).clone(memory_format=torch.contiguous_format)
            _scatter_add_(name, size, result, index, index_dim, src, src_dim, dim, options)
            return _add_batch_dim(result, 0, level)

    LIBRARY.impl(name, vmap, "FuncTorchBatched", with_keyset=True)


_register(SCATTER_ADD_, "scatter_add_", True)
_register(SCATTER_ADD, "scatter_add", False)
