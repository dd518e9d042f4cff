"""The plain kernel: gather 128 rows, add, store 128 rows, as nki-library's scatter_add did up to Neuron SDK 2.32.

Wrong where an index repeats inside a tile: every repeat adds to the same old row, and the last store wins.
"""

import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def gather_add_store(input, index, src):
    """input[index[k], :] += src[k, :] for indices that are unique within each 128 of them.

    Args:
        input: [N, D] in HBM; accumulated into.
        index: [K] int32 in HBM.
        src: [K, D] in HBM, input's dtype.

    Returns:
        input.
    """
    width = input.shape[1]
    count = index.shape[0]
    for start in range(0, count, nl.tile_size.pmax):
        rows = min(nl.tile_size.pmax, count - start)
        target = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=target, src=index.ap(pattern=[[1, rows], [1, 1]], offset=start))
        addend = nl.ndarray((rows, width), dtype=src.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=addend, src=src.ap(pattern=[[width, rows], [1, width]], offset=start * width))
        at_target = input.ap(pattern=[[width, rows], [1, width]], offset=0, vector_offset=target, indirect_dim=0)
        old = nl.ndarray((rows, width), dtype=input.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=old, src=at_target)
        new = nl.ndarray((rows, width), dtype=input.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=new, data1=old, data2=addend, op=nl.add)
        nisa.dma_copy(dst=at_target, src=new)
    return input
