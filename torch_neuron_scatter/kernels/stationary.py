"""Row accumulation into few rows: input stays on the chip, and every row of it is read and written once.

Dimensions:
    N: rows of input (the destination), up to 512
    D: columns
    K: rows of src, length of index
    T: tiles of 128 rows of src that one iteration takes; partition p reads T rows that are neighbours

Pseudo-code:
    refuse an index outside [0, N) before anything is written
    for each piece of columns:
        sums[b] = 0                                              one float32 PSUM bank for 128 rows of input and 512 columns
        for each tile of 128 rows of src:                        hardware loop
            hot = index[p] == n                                  one-hot rows over all N, exact: N is small
            sums[b] += hot[:, b].T @ src                         accumulated in PSUM over all K
        new = sums + input, rounded once
        input = new, unless anything in it is special            non-finite, or -0.0 in input
    for each piece that was special:                             runs not at all where there is none
        the same sums in a float32 copy of input in HBM, one tile after another, with what a sum loses carried as counts

Sources: nki.isa and nki.language API pages of NKI 0.6 and 0.7; "NKI Access Patterns"; "NKI Dynamic Loops".
"""

import nki
import nki.isa as nisa
import nki.language as nl

from . import special, tiles
from .special import CHUNK, PARTITIONS

# float16 counts exactly to 2048, and Vector Engine compares it four times as fast as float32 ("Trainium2 Architecture Guide").
MAX_ROWS = 512

# Of the 8 PSUM banks one is the detector's.
SUM_BANKS = 7


@nki.jit
def stationary_scatter_add(input, index, src, alpha=None, unique_indices=False, tiles_per_group=8):
    """Accumulate rows of src into rows of input, in place.

    Args:
        input: [N, D] float32, bfloat16 or float16 in HBM, N up to 512; accumulated into.
        index: [K] int32 in HBM; 0 <= index < N, repeats accumulate.
        src: [K, D] in HBM; input's dtype or a narrower float.
        alpha: [1] float32 in HBM that multiplies src, or None for 1.
        unique_indices (bool): taken for the same signature as the other kernels; nothing depends on it.
        tiles_per_group (int): T, 1 to 8.

    Returns:
        input.

    Launch: grid (1,) or (2,); with two cores each takes half of D, so D must be even.
    """
    work = _Work(input, index, src, alpha, tiles_per_group)
    for start, width in work.pieces:
        _piece(work, start, width)
    return input


class _Work(nl.NKIObject):
    """Operands, and the tiles that live through all pieces."""

    def __init__(self, input, index, src, alpha, tiles_per_group):
        self.input, self.index, self.src = input, index, src
        self.count = index.shape[0]
        self.tiles = min(tiles_per_group, -(-self.count // PARTITIONS))
        self.blocks = [(row, min(PARTITIONS, input.shape[0] - row)) for row in range(0, input.shape[0], PARTITIONS)]
        columns = input.shape[1] // nl.num_programs(0)
        self.first_column = nl.program_id(0) * columns
        width = min(SUM_BANKS // len(self.blocks) * CHUNK, columns)
        self.pieces = [(start, min(width, columns - start)) for start in range(0, columns, width)]
        self.sum_dtype = src.dtype if alpha is None else nl.float32

        self.alpha = tiles.load_alpha(alpha)
        self.checked = tiles.refuse_index_out_of_range(input, index, self.first_column)

        self.detector = special.Detector(input.dtype, len(self.blocks))
        self.identity = special.matrix_where(nl.equal, input.dtype)
        self.zeros = special.filled((PARTITIONS, CHUNK), nl.bfloat16, 0.0)
        self.banks = [nl.ndarray((PARTITIONS, CHUNK), dtype=nl.float32, buffer=nl.psum) for _ in range(SUM_BANKS)]
        self.row_numbers = nl.ndarray((PARTITIONS, len(self.blocks) * PARTITIONS), dtype=nl.float16, buffer=nl.sbuf)
        nisa.iota(self.row_numbers, [[1, len(self.blocks) * PARTITIONS]], 0, 0)
        # What the stores wait for: -1 & 0 of the index check's result, or'ed into their row numbers.
        self.zero = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=self.zero, src=tiles.zero_after(self.checked, input.dtype), engine=nisa.engine.vector)


def _piece(work, start, width):
    chunks = [(begin, min(CHUNK, width - begin)) for begin in range(0, width, CHUNK)]
    column = work.first_column + start
    sums = {
        (block, begin): work.banks[number * len(chunks) + position][:, 0:size]
        for number, (block, _) in enumerate(work.blocks)
        for position, (begin, size) in enumerate(chunks)
    }
    for (_, begin), bank in sums.items():
        size = dict(chunks)[begin]
        nisa.nc_matmul(dst=bank, stationary=work.zeros[:, 0:PARTITIONS], moving=work.zeros[:, 0:size], accumulate=False)

    group = work.tiles * PARTITIONS
    full = work.count // group * group
    if full:
        nl.fori_loop(0, full, lambda row: _add_group(work, sums, row, group, column, chunks, width), step=group)
    if work.count % group:
        _add_group(work, sums, full, work.count % group, column, chunks, width)
    _store(work, sums, column, chunks, width)


def _add_group(work, sums, row, count, column, chunks, width):
    used = -(-count // PARTITIONS)
    is_full = count == used * PARTITIONS
    target = nl.ndarray((PARTITIONS, used), dtype=nl.int32, buffer=nl.sbuf)
    if is_full:
        nisa.dma_copy(dst=target, src=tiles.at_row(work.index, row, [[used, PARTITIONS], [1, used]], 1))
    else:
        nisa.memset(dst=target, value=-1)
        for tile, rows in _partial_tiles(count):
            nisa.dma_copy(
                dst=target[0:rows, tile : tile + 1],
                src=tiles.at_row(work.index, row, [[1, rows], [1, 1]], 1, tile * PARTITIONS),
            )
    target32 = nl.ndarray((PARTITIONS, used), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=target32, src=target, engine=nisa.engine.vector)

    stride = work.src.shape[1]
    all_src = nl.ndarray((PARTITIONS, used, width), dtype=work.src.dtype, buffer=nl.sbuf)
    for tile, rows in _partial_tiles(count):
        if rows < PARTITIONS:
            nisa.memset(dst=all_src[:, tile, :], value=0.0)
        pattern, offset = [[stride, rows], [1, width]], tile * PARTITIONS * stride
        if is_full:
            pattern, offset = [[used * stride, rows], [1, width]], tile * stride
        nisa.dma_copy(dst=all_src[0:rows, tile, :], src=tiles.at_row(work.src, row, pattern, stride, offset + column))
    for tile in range(used):
        moving = all_src[:, tile, :]
        if work.alpha is not None:
            moving = nl.ndarray((PARTITIONS, width), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_scalar(
                dst=moving,
                data=all_src[:, tile, :],
                op0=nl.multiply,
                operand0=work.alpha,
                engine=nisa.engine.scalar,
            )
        hot = nl.ndarray(work.row_numbers.shape, dtype=work.sum_dtype, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=hot,
            data=work.row_numbers,
            op0=nl.equal,
            operand0=target32[:, tile : tile + 1],
            engine=nisa.engine.vector,
        )
        for block, _ in work.blocks:
            for begin, size in chunks:
                nisa.nc_matmul(
                    dst=sums[block, begin],
                    stationary=hot[:, block : block + PARTITIONS],
                    moving=moving[:, begin : begin + size],
                    is_stationary_onezero=True,
                    accumulate=True,
                )


def _partial_tiles(count):
    return [(start // PARTITIONS, min(PARTITIONS, count - start)) for start in range(0, count, PARTITIONS)]


def _store(work, sums, column, chunks, width):
    """input = sums + input for this piece, or its redoing."""
    shape = (PARTITIONS, len(work.blocks), width)
    old = nl.ndarray(shape, dtype=work.input.dtype, buffer=nl.sbuf)
    new = nl.ndarray(shape, dtype=work.input.dtype, buffer=nl.sbuf)
    stride = work.input.shape[1]
    work.detector.start(len(work.blocks), len(work.blocks) * len(chunks), width)
    for number, (block, rows) in enumerate(work.blocks):
        if rows < PARTITIONS:
            nisa.memset(dst=old[:, number, :], value=0.0)
        nisa.dma_copy(
            dst=old[0:rows, number, :],
            src=work.input.ap(pattern=[[stride, rows], [1, width]], offset=block * stride + column),
        )
        for begin, size in chunks:
            nisa.nc_matmul(
                dst=sums[block, begin],
                stationary=work.identity,
                moving=old[:, number, begin : begin + size],
                is_stationary_onezero=True,
                accumulate=True,
            )
            work.detector.evict(new[:, number, begin : begin + size], sums[block, begin])
        work.detector.look_for_negative_zero(number, old[:, number, :])
    seen = work.detector.special()
    guard = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=guard, data1=seen, data2=work.zero, op=nl.bitwise_or, engine=nisa.engine.vector)
    for number, (block, rows) in enumerate(work.blocks):
        own = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.iota(own, [[1, 1]], block, 1)
        nisa.dma_copy(
            dst=tiles.gathered(work.input, special.no_row_under(own, guard)[0:rows, :], column, rows, width),
            src=new[0:rows, number, :],
            oob_mode=nisa.oob_mode.skip,
        )
    special.loop_if(guard, 1, 1, lambda _: _redo(work, old, column, width))


def _redo(work, old, column, width):
    """Accumulate in a float32 copy of this piece of input, one tile after another, and round once at the end."""
    copy = nl.ndarray((work.input.shape[0], width), dtype=nl.float32, buffer=nl.private_hbm)
    values = nl.ndarray((PARTITIONS, width), dtype=nl.float32, buffer=nl.sbuf)
    for number, (block, rows) in enumerate(work.blocks):
        nisa.tensor_copy(dst=values[0:rows, :], src=old[0:rows, number, :])
        nisa.dma_copy(dst=copy.ap(pattern=[[width, rows], [1, width]], offset=block * width), src=values[0:rows, :])

    def add_tile(row, rows):
        tile = special.Tile(work.index, row, rows, 0, work.sum_dtype)
        special.redo_tile(
            tile, copy, 0, tile.leaders, work.src, column, width, work.alpha, values[0:rows, :], work.banks[0:2]
        )

    tiles.for_each_tile(work.count, PARTITIONS, add_tile)
    stride = work.input.shape[1]
    for block, rows in work.blocks:
        nisa.dma_copy(dst=values[0:rows, :], src=copy.ap(pattern=[[width, rows], [1, width]], offset=block * width))
        rounded = nl.ndarray((rows, width), dtype=work.input.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=rounded, src=values[0:rows, :])
        nisa.dma_copy(
            dst=work.input.ap(pattern=[[stride, rows], [1, width]], offset=block * stride + column), src=rounded
        )
