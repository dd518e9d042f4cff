"""One row of src at a time: gather its destination row, add, store.

Right for repeats, since rows go one after the other; slow, since a DMA moves one row and uses one partition of 128.
"""

import nki
import nki.isa as nisa
import nki.language as nl

# Columns of one gather and one store.
COLUMNS_PER_DMA = 2048


@nki.jit
def one_row_a_tile(input, index, src):
    """input[index[k], :] += src[k, :], repeats accumulate.

    Args:
        input: [N, D] in HBM; accumulated into.
        index: [K] int32 in HBM.
        src: [K, D] in HBM; input's dtype or a narrower float.

    Returns:
        input.

    Launch: grid (1,) or (2,); with two cores each takes half of D, so D must be even.
    """
    width = input.shape[1]
    columns = width // nl.num_programs(0)
    first_column = nl.program_id(0) * columns
    # Declared once: a gather then waits for the store before it, which reads this tile, also where nothing else shows that
    # both are to the same row.
    total = nl.ndarray((1, min(columns, COLUMNS_PER_DMA)), dtype=input.dtype, buffer=nl.sbuf)
    for row in range(index.shape[0]):
        target = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=target, src=index.ap(pattern=[[1, 1], [1, 1]], offset=row))
        for column in range(first_column, first_column + columns, COLUMNS_PER_DMA):
            piece = min(COLUMNS_PER_DMA, first_column + columns - column)
            pattern = [[width, 1], [1, piece]]
            addend = nl.ndarray((1, piece), dtype=src.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=addend, src=src.ap(pattern=pattern, offset=row * width + column))
            at_target = input.ap(pattern=pattern, offset=column, vector_offset=target, indirect_dim=0)
            here = total[:, 0:piece]
            nisa.dma_copy(dst=here, src=at_target)
            nisa.tensor_tensor(dst=here, data1=here, data2=addend, op=nl.add)
            nisa.dma_copy(dst=at_target, src=here)
    return input
