"""What kernels share: loops over rows, addresses, the index check, equality of a tile's indices, and the exact sum of a tile.

Sources: nki.isa and nki.language API pages of NKI 0.6 and 0.7; "NKI Access Patterns" for `.ap(scalar_offset, vector_offset)`.
"""

import nki.isa as nisa
import nki.language as nl

# An index no row number reaches (N < 2**31): `oob_mode.skip` drops its row, `oob_mode.error` raises on it.
NO_ROW = 0x7FFFFFFF

# Columns of one gather and one scatter: four PSUM banks, 4 KiB a partition in bf16 and 8 KiB in fp32, both above the 2 KiB
# below which a DMA is overhead-bound (NKI DMA bandwidth guide).
COLUMNS_PER_DMA = 2048

# The index check reads this many index columns a partition at once: 128 x 64 int32 is 256 bytes a partition.
CHECK_COLUMNS = 64

# IEEE 754 bit patterns as the signed integers NKI immediates hold: integer view, +inf, -inf (as signed), -0.0 (as signed).
FLOAT_BITS = {
    nl.float32: (nl.int32, 0x7F800000, -0x00800000, -0x80000000),
    nl.bfloat16: (nl.int16, 0x7F80, -0x0080, -0x8000),
    nl.float16: (nl.int16, 0x7C00, -0x0400, -0x8000),
}

# Bases of the counts that share one float32 sum. A tile counts at most 128, so bytes never carry into each other and the
# largest sum, 128 * (1 + 2**8 + 2**16), is below 2**24: exact in float32.
MINUS_BASE = 2.0**8
NOT_NEGATIVE_ZERO_BASE = 2.0**16


def column_pieces(columns):
    return [(start, min(COLUMNS_PER_DMA, columns - start)) for start in range(0, columns, COLUMNS_PER_DMA)]


def gathered(tensor, rows_wanted, column, rows, width):
    """View of `width` columns of the rows of an HBM tensor that an index tile names, for a gather or a scatter."""
    return tensor.ap(
        pattern=[[tensor.shape[1], rows], [1, width]], offset=column, vector_offset=rows_wanted, indirect_dim=0
    )


def load_alpha(alpha):
    """[128, 1] float32: alpha, [1] in HBM, in every partition; None for None."""
    if alpha is None:
        return None
    column = nl.ndarray((nl.tile_size.pmax, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=column, src=alpha.ap(pattern=[[0, nl.tile_size.pmax], [1, 1]]))
    return column


def load_index(index, row, rows, offset=0):
    index_column = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=index_column, src=at_row(index, row, [[1, rows], [1, 1]], 1, offset))
    return index_column


def for_each_tile(total, size, body):
    """Call `body(row, rows)` over `total` rows in steps of `size`: a hardware loop over the full steps, then the rest."""
    full = total // size
    if full > 1:
        nl.fori_loop(0, full * size, lambda row: body(row, size), step=size)
    elif full == 1:
        body(0, size)
    if total % size:
        body(full * size, total % size)


def at_row(tensor, row, pattern, row_stride, offset=0):
    """View of an HBM tensor that starts at `row`, a Python int or the register of a hardware loop."""
    if isinstance(row, int):
        return tensor.ap(pattern=pattern, offset=offset + row * row_stride)
    return tensor.ap(pattern=pattern, offset=offset, scalar_offset=row, indirect_dim=0)


def refuse_index_out_of_range(input, index, column=0):
    """Raise through `oob_mode.error` on any index outside [0, N), before the kernel writes.

    Signed bits, not a comparison: engines compare in float32, which cannot tell rows above 2**24 apart.

    Args:
        column (int): the column of input that is read where all is well; one that no other core writes.

    Returns:
        [128, 1] of input's dtype: what the last check read. Whatever is to wait for the checks can depend on it.
    """
    pmax = nl.tile_size.pmax
    touched = nl.ndarray((pmax, 1), dtype=input.dtype, buffer=nl.sbuf)
    nisa.memset(dst=touched, value=0.0)

    def check(row, rows):
        columns = max(rows // pmax, 1)
        _check_block(input, index, row, min(rows, pmax), columns, column, touched)
        if rows > pmax and rows % pmax:
            _check_block(input, index, row + rows // pmax * pmax, rows % pmax, 1, column, touched)

    for_each_tile(index.shape[0], pmax * CHECK_COLUMNS, check)
    return touched


def zero_after(checked, dtype):
    """[128, 1] zero in the integers of dtype's width, which is there when `refuse_index_out_of_range` has read `checked`."""
    integer = FLOAT_BITS[dtype][0]
    zero = nl.ndarray((nl.tile_size.pmax, 1), dtype=integer, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=zero, data=checked.view(integer), op0=nl.bitwise_and, operand0=0)
    return zero


def _check_block(input, index, row, partitions, columns, column, touched):
    shape = (partitions, columns)
    rows = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows, src=at_row(index, row, [[columns, partitions], [1, columns]], 1))

    last = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=last, value=input.shape[0] - 1)
    beyond = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=beyond, data1=last, data2=rows, op=nl.subtract)
    either = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=either, data1=beyond, data2=rows, op=nl.bitwise_or)
    any_bits = nl.ndarray((partitions, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=any_bits, op=nl.bitwise_or, data=either, axis=1)

    negative = nl.ndarray((partitions, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=negative, data=any_bits, op0=nl.less, operand0=0.0)
    probe = no_row_where(negative, partitions)
    nisa.dma_copy(dst=touched[0:partitions, :], src=gathered(input, probe, column, partitions, 1))


def no_row_where(flag, partitions):
    """[partitions, 1] int32: NO_ROW where flag is 1.0, row 0 where it is 0.0."""
    ones = nl.ndarray((partitions, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=ones, data=flag, op0=nl.multiply, operand0=-1.0)
    rows = nl.ndarray((partitions, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=rows, data=ones, op0=nl.bitwise_and, operand0=NO_ROW)
    return rows


def equality_of(index, index_column, row, rows, offset=0):
    """[rows, rows] float32, 1.0 where two rows of the tile go to the same destination.

    Xor is exact for all 32 bits, and a non-zero integer never becomes 0.0 in float32; comparing the indices themselves in
    float32 would merge rows above 2**24.
    """
    index_row = nl.ndarray((rows, rows), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=index_row, src=at_row(index, row, [[0, rows], [1, rows]], 1, offset))
    differ = nl.ndarray((rows, rows), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=differ, data1=index_row, data2=index_column.broadcast(1, rows), op=nl.bitwise_xor)
    equal = nl.ndarray((rows, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=equal, data=differ, op0=nl.equal, operand0=0.0)
    return equal


def leaders_of(index_column, equal, rows):
    """[rows, 1] int32: the tile's index where it occurs first, NO_ROW where an earlier row has the same."""
    earlier = nl.ndarray((rows, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.affine_select(
        dst=earlier,
        pattern=[[-1, rows]],
        channel_multiplier=1,
        on_true_tile=equal,
        on_false_value=0.0,
        cmp_op=nl.greater,
        offset=0,
    )
    follower = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=follower, op=nl.maximum, data=earlier, axis=1)
    leaders = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=leaders, data1=index_column, data2=no_row_where(follower, rows), op=nl.bitwise_or)
    return leaders


def combine(equal, equal32, src, rows, columns, banks=None):
    """[rows, columns] float32: for every row the float32 total of all rows of src with the same index.

    Finite elements are summed by the Tensor Engine with the others set to zero. What zeroing loses is counted by a second
    matmul: how many +inf or NaN, how many -inf or NaN, and how many elements are not -0.0. From the counts come +inf, -inf,
    NaN (as +inf - inf) and the one sum whose sign a matmul cannot give: -0.0, when every element is -0.0.

    `banks` are two [128, 512] float32 PSUM tiles to use where a caller has none to spare; columns is 512 at most.
    """
    shape = (rows, columns)
    integer, plus_inf, minus_inf, negative_zero = FLOAT_BITS[src.dtype]
    bits = src.view(integer)

    exponent = _bitvec(bits, nl.bitwise_and, plus_inf, shape, integer)
    non_finite = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=non_finite, data=exponent, op0=nl.equal, operand0=float(plus_inf))

    keep = nl.ndarray(shape, dtype=integer, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=keep, data=non_finite, op0=nl.subtract, operand0=1.0)
    finite = nl.ndarray(shape, dtype=src.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=finite.view(integer), data1=bits, data2=keep, op=nl.bitwise_and)

    total, counts = (bank[0:rows, 0:columns] for bank in banks or [_psum_bank(), _psum_bank()])
    nisa.nc_matmul(dst=total, stationary=equal, moving=finite, is_stationary_onezero=True, accumulate=False)

    plus = _non_finite_but(bits, minus_inf, non_finite, shape, integer)
    minus = _non_finite_but(bits, plus_inf, non_finite, shape, integer)
    signed = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=signed, data=minus, op0=nl.multiply, operand0=MINUS_BASE, op1=nl.add, operand1=plus)
    not_negative_zero = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=not_negative_zero,
        data=_bitvec(bits, nl.bitwise_xor, negative_zero, shape, integer),
        op0=nl.not_equal,
        operand0=0.0,
    )
    code = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=code,
        data=not_negative_zero,
        op0=nl.multiply,
        operand0=NOT_NEGATIVE_ZERO_BASE,
        op1=nl.add,
        operand1=signed,
    )
    nisa.nc_matmul(dst=counts, stationary=equal32, moving=code, is_stationary_onezero=True, accumulate=False)
    count_bits = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=count_bits, src=counts)

    _, plus_inf32, minus_inf32, negative_zero32 = FLOAT_BITS[nl.float32]
    plus_part = _bits_where(count_bits, 0xFF, nl.not_equal, plus_inf32, shape)
    minus_part = _bits_where(count_bits, 0xFF00, nl.not_equal, minus_inf32, shape)
    # Finite elements that overflow must not meet an infinity of the other sign.
    all_finite = _bits_where(count_bits, 0xFFFF, nl.equal, -1, shape)
    finite_total = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=finite_total.view(nl.int32), data1=total.view(nl.int32), data2=all_finite, op=nl.bitwise_and)
    with_plus = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=with_plus, data1=finite_total, data2=plus_part.view(nl.float32), op=nl.add)
    with_both = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=with_both, data1=with_plus, data2=minus_part.view(nl.float32), op=nl.add)
    # Last, since adding +0.0 would take the sign away again.
    sign = _bits_where(count_bits, 0xFF0000, nl.equal, negative_zero32, shape)
    result = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=result.view(nl.int32), data1=with_both.view(nl.int32), data2=sign, op=nl.bitwise_or)
    return result


def _psum_bank():
    return nl.ndarray((nl.tile_size.pmax, nl.tile_size.psum_bank_fmax), dtype=nl.float32, buffer=nl.psum)


def _bitvec(bits, op, immediate, shape, integer):
    result = nl.ndarray(shape, dtype=integer, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=bits, op0=op, operand0=immediate)
    return result


def _non_finite_but(bits, excluded, non_finite, shape, integer):
    """1.0 where an element is not finite and is not the infinity `excluded`: the other infinity, or NaN."""
    is_excluded = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=is_excluded, data=_bitvec(bits, nl.bitwise_xor, excluded, shape, integer), op0=nl.equal, operand0=0.0
    )
    result = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=result, data1=non_finite, data2=is_excluded, op=nl.subtract)
    return result


def _bits_where(count_bits, mask, compare, float_bits, shape):
    """int32 `float_bits` where the count under `mask` compares so with 0, else the bits of 0.0.

    Every `float_bits` used here is exact in the engine's float32: a multiple of 2**23, or -1.
    """
    count = _bitvec(count_bits, nl.bitwise_and, mask, shape, nl.int32)
    result = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=count, op0=compare, operand0=0.0, op1=nl.multiply, operand1=float(float_bits))
    return result
