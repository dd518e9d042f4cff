"""What neuron::scatter_add_ and neuron::scatter_add refuse on every device, before anything is written.

Exception types follow torch.index_add_: IndexError for dim, index rank and row numbers, RuntimeError for dtypes, shapes and
overlapping memory; ValueError for lnc, which torch does not have. Every message names the operator and the argument, says what
came and what is accepted. Sizes may be symbolic: conditions on them become guards or runtime assertions of the graph.
"""

import math

import torch

# src may be narrower than input: rows of a gradient in bf16 go into a float32 table without a cast copy.
NARROWER_SRC = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.float64: (torch.float32, torch.bfloat16, torch.float16),
}
LNC_VALUES = (1, 2)


def check_tensors(name, input, index, src):
    """Refuse None, which a schema's Tensor lets through.

    Raises:
        TypeError: naming the argument.
    """
    for argument, tensor in (("input", input), ("index", index), ("src", src)):
        if tensor is None:
            raise TypeError(f"{name}(): {argument} is None; accepted is a tensor")


def check_alpha(name, alpha, dtype):
    """alpha as the float that multiplies src in a kernel for a floating-point `dtype`.

    Raises:
        RuntimeError: alpha has an imaginary part, or is a finite number too large for dtype.
    """
    if isinstance(alpha, complex):
        if alpha.imag:
            raise RuntimeError(f"{name}(): alpha is {alpha}; accepted for an input of {dtype} is a real number")
        alpha = alpha.real
    if isinstance(alpha, (int, float)) and torch.finfo(dtype).max < abs(alpha) < math.inf:
        raise RuntimeError(
            f"{name}(): alpha is {alpha}; accepted for an input of {dtype} are numbers up to {torch.finfo(dtype).max}"
        )
    return alpha


def check_operands(name, input, dim, index, src, lnc):
    """Check dtypes, ranks, shapes, devices and lnc of one call.

    Args:
        name (str): the operator's name, for messages.
        input: [..., N, ...] at dim.
        dim (int): may be negative.
        index: [K], or 0-d for K = 1; int32 or int64.
        src: input's shape but for K at dim.
        lnc: None, 1 or 2.

    Returns:
        dim as a number from 0.

    Raises:
        IndexError: dim out of range, or index of more than one dimension.
        RuntimeError: dtype, shape, length or device that does not fit.
        ValueError: lnc other than None, 1, 2.
    """
    if lnc is not None and lnc not in LNC_VALUES:
        raise ValueError(f"{name}(): lnc is {lnc}; accepted are 1, 2 or None (what the runtime is configured for)")
    if index.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"{name}(): index has dtype {index.dtype}; accepted are torch.int32 and torch.int64")
    if index.dim() > 1:
        raise IndexError(f"{name}(): index has {index.dim()} dimensions; accepted is one, of length K")
    narrower = NARROWER_SRC.get(input.dtype, ())
    if src.dtype != input.dtype and src.dtype not in narrower:
        accepted = " or ".join(str(dtype) for dtype in (input.dtype, *narrower))
        raise RuntimeError(f"{name}(): src has dtype {src.dtype}; accepted for an input of {input.dtype}: {accepted}")
    for argument, tensor in (("index", index), ("src", src)):
        if tensor.device != input.device:
            raise RuntimeError(
                f"{name}(): {argument} is on device {tensor.device}; accepted is input's device, {input.device}"
            )

    rank = max(input.dim(), 1)
    if not -rank <= dim < rank:
        raise IndexError(
            f"{name}(): dim is {dim}; accepted for an input of {input.dim()} dimensions: {-rank} to {rank - 1}"
        )
    dim %= rank
    if src.dim() != input.dim():
        raise RuntimeError(
            f"{name}(): src has {src.dim()} dimensions; accepted is input's number of dimensions, {input.dim()}"
        )
    for axis in range(input.dim()):
        if axis != dim:
            torch._check_with(
                RuntimeError,
                src.shape[axis] == input.shape[axis],
                lambda axis=axis: (
                    f"{name}(): src has shape {list(src.shape)}, input {list(input.shape)}; "
                    f"accepted are equal sizes in every dimension but dim {dim}, and dimension {axis} differs"
                ),
            )
    rows = src.shape[dim] if src.dim() else 1
    torch._check_with(
        RuntimeError,
        index.numel() == rows,
        lambda: f"{name}(): index has {index.numel()} elements; accepted is the size of src in dim {dim}, {rows}",
    )
    return dim


def check_memory(name, input, index, src):
    """Refuse a destination that overlaps itself, src or index in memory, as torch's in-place operators do.

    Raises:
        RuntimeError: input is expanded, or shares elements with index or src as far as strides alone tell, or is an inference
            tensor outside inference mode.

    Returns:
        index and src, each cloned where it shares input's storage in an interleaved way that strides alone cannot tell apart.
    """
    if input.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{name}(): input is an inference tensor; accepted outside torch.inference_mode() is an ordinary tensor, "
            "clone() it first"
        )
    if torch._debug_has_internal_overlap(input) == 1:
        raise RuntimeError(
            f"{name}(): input overlaps itself in memory (an expanded dimension); "
            "accepted is a destination whose elements are distinct, clone() it first"
        )
    for argument, tensor in (("index", index), ("src", src)):
        if _certainly_overlap(input, tensor):
            raise RuntimeError(
                f"{name}(): {argument} shares memory with input; "
                f"accepted is {argument} in memory of its own, clone() it first"
            )
    return tuple(tensor.clone() if _may_overlap(input, tensor) else tensor for tensor in (index, src))


def index_in_range(index, rows):
    """Whether every index is in [0, rows); one pass over index, true for an empty one."""
    if index.numel() == 0:
        return True
    low, high = torch.aminmax(index)
    return low.item() >= 0 and high.item() < rows


def check_index_range(name, index, rows):
    """Check 0 <= index < rows by reading index; for devices whose memory the host reads.

    Raises:
        IndexError: with the first offending value, its position and the valid range.
    """
    if index_in_range(index, rows):
        return
    flat = index.reshape(-1)
    position = int(((flat < 0) | (flat >= rows)).nonzero()[0])
    accepted = f"0 <= index < {rows}" if rows else "no index at all, since input has no rows"
    raise IndexError(f"{name}(): index[{position}] is {int(flat[position])}; accepted is {accepted}")


def _byte_range(tensor):
    """First byte and one past the last byte of the tensor's elements, relative to its storage."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.element_size()
    return start, start + (span + 1) * tensor.element_size()


def _may_overlap(first, second):
    if first.numel() == 0 or second.numel() == 0:
        return False
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return False
    return _ranges_meet(first, second)


def _ranges_meet(first, second):
    (first_start, first_end), (second_start, second_end) = _byte_range(first), _byte_range(second)
    return first_start < second_end and second_start < first_end


def dense_and_intersecting(first, second):
    """Whether two tensors of one storage are both dense, and so share elements where their byte ranges meet.

    What at::get_overlap_status, by which torch refuses to write, can tell of two tensors.
    """
    return _is_dense(first) and _is_dense(second) and _ranges_meet(first, second)


def _certainly_overlap(first, second):
    return _may_overlap(first, second) and (dense_and_intersecting(first, second) or _same_view(first, second))


def _same_view(first, second):
    return (
        first.storage_offset() == second.storage_offset()
        and first.shape == second.shape
        and first.stride() == second.stride()
    )


def _is_dense(tensor):
    """Whether the elements fill their byte range, so that intersecting ranges mean shared elements."""
    if tensor.numel() == 0 or torch._debug_has_internal_overlap(tensor) != 0:
        return False
    start, end = _byte_range(tensor)
    return end - start == tensor.numel() * tensor.element_size()
