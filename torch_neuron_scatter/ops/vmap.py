"""Batching rules of torch.func.vmap for neuron::scatter_add_ and neuron::scatter_add.

A batch of inputs with one shared index is one scatter of longer rows: the batch joins the columns. Where each member of the
batch has an index of its own, the destinations are stacked to B * N rows and the indices offset by N a member.
"""

import contextlib

import torch
from torch._C._functorch import _add_batch_dim, _unwrap_batched, is_batchedtensor, maybe_get_level
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from .checks import check_index_range, check_operands
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


def _member(tensor, batch_dim):
    return tensor if batch_dim is None else tensor.select(batch_dim, 0)


def _scatter_add(name, rows, index, src_rows, options):
    """A new [N, B, ...] from input's and src's rows; index is [K], or [B, K] where members have their own."""
    if index.dim() < 2:
        return SCATTER_ADD(rows, 0, index, src_rows, **options)
    stacked = rows.transpose(0, 1)
    flat, flat_index, flat_src = _stack(stacked, index, src_rows)
    with _index_in_own_words(name, index, rows.shape[0]):
        result = SCATTER_ADD(flat, 0, flat_index, flat_src, **options)
    return result.reshape(stacked.shape).transpose(0, 1)


def _scatter_add_(name, rows, index, src_rows, options):
    """The same into `rows`, which may have any strides."""
    if index.dim() < 2:
        SCATTER_ADD_(rows, 0, index, src_rows, **options)
        return
    stacked = rows.transpose(0, 1)
    flat, flat_index, flat_src = _stack(stacked, index, src_rows)
    with _index_in_own_words(name, index, rows.shape[0]):
        SCATTER_ADD_(flat, 0, flat_index, flat_src, **options)
    if not torch._C._is_alias_of(flat, stacked):
        stacked.copy_(flat.reshape(stacked.shape))


def _stack(stacked, index, src_rows):
    """[B, N, ...] and its operands as one destination of B * N rows, a view of `stacked` where its strides allow."""
    shape = (stacked.shape[0] * stacked.shape[1], *stacked.shape[2:])
    flat_src = src_rows.transpose(0, 1).reshape(-1, *stacked.shape[2:])
    return stacked.reshape(shape), _own_rows(index, stacked.shape[1]), flat_src


@contextlib.contextmanager
def _index_in_own_words(name, index, rows):
    """Name the offending number and position of a member's index [B, K]; of nested vmaps there is no telling."""
    readable = not torch._C._functorch.is_functorch_wrapped_tensor(index)
    if readable and index.device.type == "cpu":
        check_index_range(name, index, rows)
    try:
        yield
    except IndexError as error:
        if readable:
            try:
                check_index_range(name, index.cpu(), rows)
            except IndexError as refusal:
                raise refusal from error
        raise


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
            if in_place and input_dim is None:
                raise RuntimeError(
                    f"{name}(): input has no batch dimension under vmap, but index or src has; accepted for an "
                    f"in-place call is a batched input, use {name[:-1]} instead"
                )
            members = _member(physical, input_dim), _member(index, index_dim), _member(src, src_dim)
            dim = check_operands(name, members[0], dim, *members[1:], options.get("lnc"))
            if index_dim is not None:
                index = index.movedim(index_dim, 0).reshape(size, -1)
            rows = _rows_first(_batch_first(physical, input_dim, size), dim)
            src_rows = _rows_first(_batch_first(src, src_dim, size), dim)
            if in_place:
                _scatter_add_(name, rows, index, src_rows, options)
                return input
            result = _scatter_add(name, rows, index, src_rows, options)
            result = result.movedim(0, dim + 1) if members[0].dim() else result.squeeze(0)
            return _add_batch_dim(result, 0, level)

    LIBRARY.impl(name, vmap, "FuncTorchBatched", with_keyset=True)


_register(SCATTER_ADD_, "scatter_add_", True)
_register(SCATTER_ADD, "scatter_add", False)
