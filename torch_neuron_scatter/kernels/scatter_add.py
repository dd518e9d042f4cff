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
ones as counts, see `tiles.combine`.

Sources: nki.isa and nki.language API pages of NKI 0.6 and 0.7; "NKI Access Patterns" for `.ap(scalar_offset, vector_offset)`.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from . import tiles


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

    tiles.refuse_index_out_of_range(input, index, first_column)

    alpha_column = tiles.load_alpha(alpha)

    if input.dtype == nl.float32 or unique_indices or count <= nl.tile_size.pmax:

        def tile(row, rows):
            target = tiles.load_index(index, row, rows)
            equal = None if unique_indices else tiles.equality_of(index, target, row, rows)
            _accumulate_tile(input, first_column, target, equal, src, first_column, columns, alpha_column, row, rows)

        tiles.for_each_tile(count, nl.tile_size.pmax, tile)
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
        target = tiles.load_index(index, row, rows)
        leaders = tiles.leaders_of(target, tiles.equality_of(index, target, row, rows), rows)
        nisa.dma_copy(
            dst=owner.ap(pattern=[[1, rows], [1, 1]], offset=0, vector_offset=leaders, indirect_dim=0),
            src=numbers[0:rows, :],
            oob_mode=nisa.oob_mode.skip,
        )
        _advance(numbers)

    tiles.for_each_tile(count, pmax, claim)

    def load(row, rows):
        target = tiles.load_index(index, row, rows)
        for start, width in tiles.column_pieces(columns):
            old = nl.ndarray((rows, width), dtype=input.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=old, src=tiles.gathered(input, target, first_column + start, rows, width))
            wide = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=wide, src=old)
            nisa.dma_copy(dst=tiles.at_row(totals, row, [[columns, rows], [1, width]], columns, start), src=wide)

    tiles.for_each_tile(count, pmax, load)

    def accumulate(row, rows):
        target = tiles.load_index(index, row, rows)
        equal = tiles.equality_of(index, target, row, rows)
        owners = _load_owner(owner, target, rows)
        _accumulate_tile(totals, 0, owners, equal, src, first_column, columns, alpha_column, row, rows)

    tiles.for_each_tile(count, pmax, accumulate)

    store_numbers = _row_numbers()

    def store(row, rows):
        target = tiles.load_index(index, row, rows)
        owned = _where_owned(target, _load_owner(owner, target, rows), store_numbers[0:rows, :], rows)
        for start, width in tiles.column_pieces(columns):
            wide = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(dst=wide, src=tiles.at_row(totals, row, [[columns, rows], [1, width]], columns, start))
            rounded = nl.ndarray((rows, width), dtype=input.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=rounded, src=wide)
            nisa.dma_copy(
                dst=tiles.gathered(input, owned, first_column + start, rows, width),
                src=rounded,
                oob_mode=nisa.oob_mode.skip,
            )
        _advance(store_numbers)

    tiles.for_each_tile(count, pmax, store)


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
    nisa.dma_copy(dst=owners, src=tiles.gathered(owner, target, 0, rows, 1))
    return owners


def _where_owned(target, owners, numbers, rows):
    """[rows, 1] int32: target where row k owns it, NO_ROW elsewhere."""
    differ = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=differ, data1=owners, data2=numbers, op=nl.bitwise_xor)
    other = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=other, data=differ, op0=nl.not_equal, operand0=0.0)
    owned = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=owned, data1=target, data2=tiles.no_row_where(other, rows), op=nl.bitwise_or)
    return owned


def _accumulate_tile(destination, destination_column, target, equal, src, src_column, columns, alpha_column, row, rows):
    """Add rows [row, row + rows) of src to the rows `target` of destination; equal is None where no target repeats."""
    moving_dtype = src.dtype if alpha_column is None else nl.float32
    store_index, equal_moving = target, equal
    if equal is not None:
        store_index = tiles.leaders_of(target, equal, rows)
        if moving_dtype != nl.float32:
            equal_moving = nl.ndarray((rows, rows), dtype=moving_dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=equal_moving, src=equal)

    for start, width in tiles.column_pieces(columns):
        src_tile = nl.ndarray((rows, width), dtype=src.dtype, buffer=nl.sbuf)
        pattern = [[src.shape[1], rows], [1, width]]
        nisa.dma_copy(dst=src_tile, src=tiles.at_row(src, row, pattern, src.shape[1], src_column + start))
        if alpha_column is not None:
            scaled = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_scalar(dst=scaled, data=src_tile, op0=nl.multiply, operand0=alpha_column[0:rows, :])
            src_tile = scaled

        at_target = tiles.gathered(destination, store_index, destination_column + start, rows, width)
        old = nl.ndarray((rows, width), dtype=destination.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=old, src=at_target, oob_mode=nisa.oob_mode.skip)
        new = nl.ndarray((rows, width), dtype=destination.dtype, buffer=nl.sbuf)
        for bank in range(0, width, nl.tile_size.psum_bank_fmax):
            piece = slice(bank, min(bank + nl.tile_size.psum_bank_fmax, width))
            total = src_tile[:, piece]
            if equal is not None:
                total = tiles.combine(equal_moving, equal, total, rows, piece.stop - piece.start)
            nisa.tensor_tensor(dst=new[:, piece], data1=old[:, piece], data2=total, op=nl.add)
        nisa.dma_copy(dst=at_target, src=new, oob_mode=nisa.oob_mode.skip)
