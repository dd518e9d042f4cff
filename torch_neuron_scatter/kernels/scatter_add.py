"""Row accumulation `input[index[k], :] += alpha * src[k, :]`, duplicates included, one 128-row tile after another.

Dimensions:
    N: rows of input (the destination), below 2**31
    D: columns
    K: rows of src, length of index

Pseudo-code:
    refuse an index outside [0, N) before anything is written
    for each tile of up to 128 rows of src:
        equal[p, j]  = index[p] == index[j]                       exact, on the bits
        leader[p]    = no j < p has index[j] == index[p]
        for each chunk of columns of this core:
            total    = equal @ (alpha * src)                      Tensor Engine, float32 in PSUM
            input[index[leader]] = input[index[leader]] + total   gather, add, scatter of the leaders' rows only

A 16-bit input that takes several tiles is accumulated in a float32 scratch instead and rounded once, see
`_accumulate_in_float32`. Only leaders touch HBM, so no row is stored twice by one DMA and the order of its stores cannot
matter. A matmul would turn one Inf or NaN into NaN for all 128 rows (0 * inf), so non-finite elements travel beside the finite
ones as counts, see `_combine`.

Sources: nki.isa and nki.language API pages of NKI 0.6 and 0.7; "NKI Access Patterns" for `.ap(scalar_offset, vector_offset)`.
"""

import nki
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


@nki.jit
def scatter_add(input, index, src, alpha=None, unique_indices=False):
    """Accumulate rows of src into rows of input, in place.

    Args:
        input: [N, D] float32, bfloat16 or float16 in HBM; accumulated into.
        index: [K] int32 in HBM; 0 <= index < N, repeats accumulate.
        src: [K, D] in HBM; input's dtype or a narrower float.
        alpha: [1] float32 in HBM that multiplies src, or None for 1.
        unique_indices (bool): the caller's promise that no index repeats; the Tensor Engine combine is left out.

    Returns:
        input.

    Launch: grid (1,) or (2,); with two cores each takes half of D, so D must be even.
    """
    columns = input.shape[1] // nl.num_programs(0)
    first_column = nl.program_id(0) * columns
    count = index.shape[0]

    _refuse_index_out_of_range(input, index)

    alpha_column = None
    if alpha is not None:
        alpha_column = nl.ndarray((nl.tile_size.pmax, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=alpha_column, src=alpha.ap(pattern=[[0, nl.tile_size.pmax], [1, 1]]))

    if input.dtype == nl.float32 or unique_indices or count <= nl.tile_size.pmax:

        def tile(row, rows):
            target = _load_index(index, row, rows)
            equal = None if unique_indices else _equality(index, target, row, rows)
            _accumulate_tile(input, first_column, target, equal, src, first_column, columns, alpha_column, row, rows)

        _for_each_tile(count, nl.tile_size.pmax, tile)
    else:
        _accumulate_in_float32(input, index, src, alpha_column, first_column, columns)
    return input


def _accumulate_in_float32(input, index, src, alpha_column, first_column, columns):
    """Round once per destination row although its src rows lie in several tiles.

    Every destination row that occurs is owned by one of the k that name it; its float32 total is kept in row k of a scratch in
    HBM, which starts as input's row and is rounded back at the end.
    """
    count, pmax = index.shape[0], nl.tile_size.pmax
    owner = nl.ndarray((input.shape[0], 1), dtype=nl.int32, buffer=nl.private_hbm)
    totals = nl.ndarray((count, columns), dtype=nl.float32, buffer=nl.private_hbm)

    numbers = _row_numbers()

    def claim(row, rows):
        target = _load_index(index, row, rows)
        leaders = _leaders(target, _equality(index, target, row, rows), rows)
        nisa.dma_copy(
            dst=owner.ap(pattern=[[1, rows], [1, 1]], offset=0, vector_offset=leaders, indirect_dim=0),
            src=numbers[0:rows, :],
            oob_mode=nisa.oob_mode.skip,
        )
        _advance(numbers)

    _for_each_tile(count, pmax, claim)

    def load(row, rows):
        target = _load_index(index, row, rows)
        for start, width in _column_pieces(columns):
            old = nl.ndarray((rows, width), dtype=input.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=old, src=_gathered(input, target, first_column + start, rows, width))
            wide = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=wide, src=old)
            nisa.dma_copy(dst=_rows(totals, row, [[columns, rows], [1, width]], columns, start), src=wide)

    _for_each_tile(count, pmax, load)

    def accumulate(row, rows):
        target = _load_index(index, row, rows)
        equal = _equality(index, target, row, rows)
        owners = _load_owner(owner, target, rows)
        _accumulate_tile(totals, 0, owners, equal, src, first_column, columns, alpha_column, row, rows)

    _for_each_tile(count, pmax, accumulate)

    store_numbers = _row_numbers()

    def store(row, rows):
        target = _load_index(index, row, rows)
        owned = _where_owned(target, _load_owner(owner, target, rows), store_numbers[0:rows, :], rows)
        for start, width in _column_pieces(columns):
            wide = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(dst=wide, src=_rows(totals, row, [[columns, rows], [1, width]], columns, start))
            rounded = nl.ndarray((rows, width), dtype=input.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=rounded, src=wide)
            nisa.dma_copy(
                dst=_gathered(input, owned, first_column + start, rows, width),
                src=rounded,
                oob_mode=nisa.oob_mode.skip,
            )
        _advance(store_numbers)

    _for_each_tile(count, pmax, store)


def _row_numbers():
    """[128, 1] int32: the numbers k of the first tile's rows; `_advance` moves them to the next tile's."""
    numbers = nl.ndarray((nl.tile_size.pmax, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(numbers, [[1, 1]], 0, 1)
    return numbers


def _advance(numbers):
    step = nl.ndarray((nl.tile_size.pmax, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=step, value=nl.tile_size.pmax)
    nisa.tensor_tensor(dst=numbers, data1=numbers, data2=step, op=nl.add)


def _load_owner(owner, target, rows):
    owners = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=owners, src=_gathered(owner, target, 0, rows, 1))
    return owners


def _where_owned(target, owners, numbers, rows):
    """[rows, 1] int32: target where row k owns it, NO_ROW elsewhere."""
    differ = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=differ, data1=owners, data2=numbers, op=nl.bitwise_xor)
    other = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=other, data=differ, op0=nl.not_equal, operand0=0.0)
    owned = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=owned, data1=target, data2=_no_row_where(other, rows), op=nl.bitwise_or)
    return owned


def _column_pieces(columns):
    return [(start, min(COLUMNS_PER_DMA, columns - start)) for start in range(0, columns, COLUMNS_PER_DMA)]


def _gathered(tensor, rows_wanted, column, rows, width):
    """View of `width` columns of the rows of an HBM tensor that an index tile names, for a gather or a scatter."""
    return tensor.ap(
        pattern=[[tensor.shape[1], rows], [1, width]], offset=column, vector_offset=rows_wanted, indirect_dim=0
    )


def _load_index(index, row, rows):
    index_column = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=index_column, src=_rows(index, row, [[1, rows], [1, 1]], 1))
    return index_column


def _for_each_tile(total, size, body):
    """Call `body(row, rows)` over `total` rows in steps of `size`: a hardware loop over the full steps, then the rest."""
    full = total // size
    if full > 1:
        nl.fori_loop(0, full * size, lambda row: body(row, size), step=size)
    elif full == 1:
        body(0, size)
    if total % size:
        body(full * size, total % size)


def _rows(tensor, row, pattern, row_stride, offset=0):
    """View of an HBM tensor that starts at `row`, a Python int or the register of a hardware loop."""
    if isinstance(row, int):
        return tensor.ap(pattern=pattern, offset=offset + row * row_stride)
    return tensor.ap(pattern=pattern, offset=offset, scalar_offset=row, indirect_dim=0)


def _refuse_index_out_of_range(input, index):
    """Raise through `oob_mode.error` on any index outside [0, N), before the kernel writes.

    Signed bits, not a comparison: engines compare in float32, which cannot tell rows above 2**24 apart.
    """
    pmax = nl.tile_size.pmax

    def check(row, rows):
        columns = max(rows // pmax, 1)
        _check_block(input, index, row, min(rows, pmax), columns)
        if rows > pmax and rows % pmax:
            _check_block(input, index, row + rows // pmax * pmax, rows % pmax, 1)

    _for_each_tile(index.shape[0], pmax * CHECK_COLUMNS, check)


def _check_block(input, index, row, partitions, columns):
    shape = (partitions, columns)
    rows = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows, src=_rows(index, row, [[columns, partitions], [1, columns]], 1))

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
    probe = _no_row_where(negative, partitions)
    touched = nl.ndarray((partitions, 1), dtype=input.dtype, buffer=nl.sbuf)
    nisa.dma_copy(
        dst=touched,
        src=input.ap(pattern=[[input.shape[1], partitions], [1, 1]], offset=0, vector_offset=probe, indirect_dim=0),
    )


def _no_row_where(flag, partitions):
    """[partitions, 1] int32: NO_ROW where flag is 1.0, row 0 where it is 0.0."""
    ones = nl.ndarray((partitions, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=ones, data=flag, op0=nl.multiply, operand0=-1.0)
    rows = nl.ndarray((partitions, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=rows, data=ones, op0=nl.bitwise_and, operand0=NO_ROW)
    return rows


def _accumulate_tile(destination, destination_column, target, equal, src, src_column, columns, alpha_column, row, rows):
    """Add rows [row, row + rows) of src to the rows `target` of destination; equal is None where no target repeats."""
    moving_dtype = src.dtype if alpha_column is None else nl.float32
    store_index, equal_moving = target, equal
    if equal is not None:
        store_index = _leaders(target, equal, rows)
        if moving_dtype != nl.float32:
            equal_moving = nl.ndarray((rows, rows), dtype=moving_dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=equal_moving, src=equal)

    for start, width in _column_pieces(columns):
        src_tile = nl.ndarray((rows, width), dtype=src.dtype, buffer=nl.sbuf)
        pattern = [[src.shape[1], rows], [1, width]]
        nisa.dma_copy(dst=src_tile, src=_rows(src, row, pattern, src.shape[1], src_column + start))
        if alpha_column is not None:
            scaled = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_scalar(dst=scaled, data=src_tile, op0=nl.multiply, operand0=alpha_column[0:rows, :])
            src_tile = scaled

        at_target = _gathered(destination, store_index, destination_column + start, rows, width)
        old = nl.ndarray((rows, width), dtype=destination.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=old, src=at_target, oob_mode=nisa.oob_mode.skip)
        new = nl.ndarray((rows, width), dtype=destination.dtype, buffer=nl.sbuf)
        for bank in range(0, width, nl.tile_size.psum_bank_fmax):
            piece = slice(bank, min(bank + nl.tile_size.psum_bank_fmax, width))
            total = src_tile[:, piece]
            if equal is not None:
                total = _combine(equal_moving, equal, total, rows, piece.stop - piece.start)
            nisa.tensor_tensor(dst=new[:, piece], data1=old[:, piece], data2=total, op=nl.add)
        nisa.dma_copy(dst=at_target, src=new, oob_mode=nisa.oob_mode.skip)


def _equality(index, index_column, row, rows):
    """[rows, rows] float32, 1.0 where two rows of the tile go to the same destination.

    Xor is exact for all 32 bits, and a non-zero integer never becomes 0.0 in float32; comparing the indices themselves in
    float32 would merge rows above 2**24.
    """
    index_row = nl.ndarray((rows, rows), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=index_row, src=_rows(index, row, [[0, rows], [1, rows]], 1))
    differ = nl.ndarray((rows, rows), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=differ, data1=index_row, data2=index_column.broadcast(1, rows), op=nl.bitwise_xor)
    equal = nl.ndarray((rows, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=equal, data=differ, op0=nl.equal, operand0=0.0)
    return equal


def _leaders(index_column, equal, rows):
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
    nisa.tensor_tensor(dst=leaders, data1=index_column, data2=_no_row_where(follower, rows), op=nl.bitwise_or)
    return leaders


def _combine(equal, equal32, src, rows, columns):
    """[rows, columns] float32: for every row the float32 total of all rows of src with the same index.

    Finite elements are summed by the Tensor Engine with the others set to zero. What zeroing loses is counted by a second
    matmul: how many +inf or NaN, how many -inf or NaN, and how many elements are not -0.0. From the counts come +inf, -inf,
    NaN (as +inf - inf) and the one sum whose sign a matmul cannot give: -0.0, when every element is -0.0.
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

    total = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=total, stationary=equal, moving=finite, is_stationary_onezero=True)

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
    counts = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=counts, stationary=equal32, moving=code, is_stationary_onezero=True)
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
