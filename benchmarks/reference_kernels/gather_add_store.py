"""The plain kernel: gather 128 rows, add, store 128 rows, as nki-library's scatter_add did up to Neuron SDK 2.32.

Wrong where an index repeats inside a tile: every repeat adds to the same old row, and the last store wins.
"""

import nki
import nki.isa as nisa
import nki.language as nl

# Columns of one gather and one store.
COLUMNS_PER_DMA = 2048


@nki.jit
def gather_add_store(input, index, src):
    """input[index[k], :] += src[k, :] for indices that are unique within each 128 of them.

    Args:
        input: [N, D] in HBM; accumulated into.
        index: [K] int32 in HBM.
        src: [K, D] in HBM, input's dtype.

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
        for column in range(first_column, first_column + columns, COLUMNS_PER_DMA):
            piece = min(COLUMNS_PER_DMA, first_column + columns - column)
            pattern = [[width, rows], [1, piece]]
            addend = nl.ndarray((rows, piece), dtype=src.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=addend, src=src.ap(pattern=pattern, offset=start * width + column))
            at_target = input.ap(pattern=pattern, offset=column, vector_offset=target, indirect_dim=0)
            old = nl.ndarray((rows, piece), dtype=input.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=old, src=at_target)
            new = nl.ndarray((rows, piece), dtype=input.dtype, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=new, data1=old, data2=addend, op=nl.add)
            nisa.dma_copy(dst=at_target, src=new)
    return input
