"""Combine repeats in a tile by a matmul, as nki-library 2.33's scatter_add does for unique_indices=False.

E[p, j] = index[p] == index[j], and row p of E @ src is the sum of all rows of the tile with p's index. Every repeat stores
the same total, so it does not matter which store lands last. Indices are compared in float32, which tells row numbers apart
up to 2**24. The matmul multiplies by the zeros of E too, so one Inf or NaN of src reaches all rows of its tile. A
destination row that several tiles add to is rounded to input's dtype once a tile.
"""

import nki
import nki.isa as nisa
import nki.language as nl

# Columns of one gather and one store.
COLUMNS_PER_DMA = 2048


@nki.jit
def tile_combine(input, index, src):
    """input[index[k], :] += src[k, :], repeats accumulate.

    Args:
        input: [N, D] in HBM, N up to 2**24; accumulated into.
        index: [K] int32 in HBM.
        src: [K, D] in HBM; input's dtype or a narrower float.

    Returns:
        input.

    Launch: grid (1,) or (2,); with two cores each takes half of D, so D must be even.
    """
    width = input.shape[1]
    columns = width // nl.num_programs(0)
    first_column = nl.program_id(0) * columns
    count = index.shape[0]
    for start in range(0, count, nl.tile_size.pmax):
        rows = min(nl.tile_size.pmax, count - start)
        target = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=target, src=index.ap(pattern=[[1, rows], [1, 1]], offset=start))
        equal = _equality(index, target, start, rows, src.dtype)
        for column in range(first_column, first_column + columns, COLUMNS_PER_DMA):
            piece = min(COLUMNS_PER_DMA, first_column + columns - column)
            pattern = [[width, rows], [1, piece]]
            addend = nl.ndarray((rows, piece), dtype=src.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=addend, src=src.ap(pattern=pattern, offset=start * width + column))
            at_target = input.ap(pattern=pattern, offset=column, vector_offset=target, indirect_dim=0)
            old = nl.ndarray((rows, piece), dtype=input.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=old, src=at_target)
            new = nl.ndarray((rows, piece), dtype=input.dtype, buffer=nl.sbuf)
            for bank in range(0, piece, nl.tile_size.psum_bank_fmax):
                part = slice(bank, min(bank + nl.tile_size.psum_bank_fmax, piece))
                total = nl.ndarray((rows, part.stop - part.start), dtype=nl.float32, buffer=nl.psum)
                nisa.nc_matmul(dst=total, stationary=equal, moving=addend[:, part], is_stationary_onezero=True)
                nisa.tensor_tensor(dst=new[:, part], data1=old[:, part], data2=total, op=nl.add)
            nisa.dma_copy(dst=at_target, src=new)
    return input


def _equality(index, target, start, rows, dtype):
    """[rows, rows] of dtype: 1 where the indices of two rows of the tile agree, else 0; symmetric."""
    # tensor_scalar takes an operand tile in float32 only.
    column = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=column, src=target)
    across = nl.ndarray((rows, rows), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=across, src=index.ap(pattern=[[0, rows], [1, rows]], offset=start))
    equal = nl.ndarray((rows, rows), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=equal, data=across, op0=nl.equal, operand0=column)
    return equal
