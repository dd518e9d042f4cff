"""CPU kernels: torch's own index_add_ on the CPU, behind the checks.

torch.index_add_ is the reference for every device, so nothing is computed in another way here. Only what it lacks is added: an
index check before the first write, and src narrower than input.
"""

import torch

from .checks import check_index_range, check_memory, check_operands, index_in_range
from .schema import LIBRARY

# Bytes of the widened copy of src held at once where src is narrower than input; small enough to stay in a core's cache.
WIDENED_BYTES = 1 << 20

# The method of the C++ base class: what routing puts on torch.Tensor is not in its way, and it is called faster than aten's.
INDEX_ADD_ = torch._C.TensorBase.index_add_


def _accumulate(input, dim, index, src, alpha):
    index = index.reshape(-1)
    row_bytes = max(src.numel() // max(index.numel(), 1), 1) * input.element_size()
    step = max(WIDENED_BYTES // row_bytes, 1)
    for start in range(0, index.numel(), step):
        piece = index[start : start + step]
        rows = src.narrow(dim, start, piece.numel()) if src.dim() else src
        INDEX_ADD_(input, dim, piece, rows.to(input.dtype), alpha=alpha)


def scatter_add_(input, dim, index, src, *, alpha=1, unique_indices=False, lnc=None):
    if src.dtype == input.dtype and _may_go_to_torch(input, dim, index, src, lnc):
        try:
            return INDEX_ADD_(input, dim, index, src, alpha=alpha)
        except (IndexError, RuntimeError):
            # torch looks at its operands before it writes; the checks below say the same in this operator's words.
            check_operands("scatter_add_", input, dim, index, src, lnc)
            check_memory("scatter_add_", input, index, src)
            raise
    dim = check_operands("scatter_add_", input, dim, index, src, lnc)
    index, src = check_memory("scatter_add_", input, index, src)
    check_index_range("scatter_add_", index, input.shape[dim] if input.dim() else 1)
    _accumulate(input, dim, index, src, alpha)
    return input


def _may_go_to_torch(input, dim, index, src, lnc):
    """Whether all that torch would not refuse before its first write is in order: lnc, memory shared in part, the index values.

    The common call pays for these alone, since a call of a megabyte takes torch about 40 microseconds.
    """
    if input.is_inference() or any(torch._C._is_alias_of(input, operand) for operand in (index, src)):
        return False
    if lnc is not None or index.numel() == 0 or not -input.dim() <= dim < input.dim():
        return False
    if index.dtype not in (torch.int32, torch.int64):
        return False
    return index_in_range(index, input.shape[dim])


def scatter_add(input, dim, index, src, *, alpha=1, unique_indices=False, lnc=None):
    dim = check_operands("scatter_add", input, dim, index, src, lnc)
    check_index_range("scatter_add", index, input.shape[dim] if input.dim() else 1)
    result = input.clone(memory_format=torch.contiguous_format)
    if src.dtype == input.dtype:
        return INDEX_ADD_(result, dim, index, src, alpha=alpha)
    _accumulate(result, dim, index, src, alpha)
    return result


LIBRARY.impl("scatter_add_", scatter_add_, "CPU")
LIBRARY.impl("scatter_add", scatter_add, "CPU")
