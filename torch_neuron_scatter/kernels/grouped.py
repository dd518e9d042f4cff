"""Row accumulation in groups of several 128-row tiles: the wait for the rows of the group before is paid once a group.

Dimensions:
    N: rows of input (the destination), below 2**31
    D: columns
    K: rows of src, length of index
    T: tiles of a group; tile t, partition p is row p * T + t of the group, so that a partition reads T rows that are neighbours

Pseudo-code:
    refuse an index outside [0, N) before anything is written
    for each group of T * 128 rows of src:                                hardware loop
        equal[u, t][q, p] = index[u, q] == index[t, p]       for t <= u   exact: 32 products of +-0.5, one for each bit
        leader[t, p]      = no earlier row of the group has that index    the others are followers: they touch no HBM
        for each piece of columns:
            old[t]  = input[index[leader]]                                gathers of all tiles side by side
            new[t]  = sum over u >= t of equal[u, t].T @ src[u] + old[t]  float32 in PSUM, rounded once
            special = any sum that is not finite, any old element that is -0.0
            input[index[leader]] = new, unless special
    for each group that was special:                                      runs not at all where there is none
        one tile after another, with non-finite elements and signs of zero carried as counts (`tiles.combine`)

A matmul turns one Inf or NaN into NaN for every row of the group (0 * inf), and PSUM loses the sign of a zero: see `special`.

Nothing here relies on the order of two DMAs to the same HBM tensor: a group's stores read the tile `new`, one instruction that
overwrites a column of it waits for all of them, and the next gathers land where that instruction's result went.

Sources: nki.isa and nki.language API pages of NKI 0.6 and 0.7; "NKI Access Patterns"; "NKI Dynamic Loops".
"""

import nki
import nki.isa as nisa
import nki.language as nl

from . import special, tiles

PARTITIONS = 128
CHUNK = 512

# Of the 8 PSUM banks one holds the flags; the others take turns.
SUM_BANKS = 7


@nki.jit
def grouped_scatter_add(
    input, index, src, alpha=None, unique_indices=False, tiles_per_group=8, piece_columns=1024, piece_sets=1
):
    """Accumulate rows of src into rows of input, in place.

    Args:
        input: [N, D] float32, bfloat16 or float16 in HBM; accumulated into.
        index: [K] int32 in HBM; 0 <= index < N, repeats accumulate.
        src: [K, D] in HBM; input's dtype or a narrower float.
        alpha: [1] float32 in HBM that multiplies src, or None for 1.
        unique_indices (bool): the caller's promise that no index repeats.
        tiles_per_group (int): T, 1 to 8.
        piece_columns (int): columns of one gather and one store.
        piece_sets (int): pieces whose tiles are on the chip at once, each working while another waits.

    Returns:
        input.

    Launch: grid (1,) or (2,); with two cores each takes half of D, so D must be even.
    """
    work = _Work(input, index, src, alpha, unique_indices, tiles_per_group, piece_columns, piece_sets)
    count, group = index.shape[0], tiles_per_group * PARTITIONS
    full = count // group * group
    if full:
        nl.fori_loop(0, full, lambda row: _group(work, row, group), step=group)
    if count % group:
        _group(work, full, count % group)
    if not unique_indices:
        _redo_special_groups(work, full, count % group)
    return input


class _Work(nl.NKIObject):
    """Operands, and the tiles that live through all groups."""

    def __init__(self, input, index, src, alpha, unique_indices, tiles_per_group, piece_columns, piece_sets):
        self.input, self.index, self.src, self.unique_indices = input, index, src, unique_indices
        columns = input.shape[1] // nl.num_programs(0)
        self.first_column = nl.program_id(0) * columns
        width = min(piece_columns, columns)
        self.pieces = [(start, min(width, columns - start)) for start in range(0, columns, width)]
        self.tiles = min(tiles_per_group, -(-index.shape[0] // PARTITIONS))
        self.sum_dtype = src.dtype if alpha is None else nl.float32

        self.alpha = None
        if alpha is not None:
            self.alpha = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(dst=self.alpha, src=alpha.ap(pattern=[[0, PARTITIONS], [1, 1]]))

        checked = tiles.refuse_index_out_of_range(input, index, self.first_column)
        self.sets = [_Rows(self, width, checked) for _ in range(min(piece_sets, len(self.pieces)))]
        if not unique_indices:
            self._allocate_for_sums()

    def _allocate_for_sums(self):
        self.detector = special.Detector(self.input.dtype, self.tiles)
        self.identity = special.matrix_where(nl.equal, self.input.dtype)
        self.not_before = special.matrix_where(nl.less_equal, self.sum_dtype)

        # 2**p as the float32 whose exponent is p: the mask of bit p in partition p.
        self.index_bits = max((self.input.shape[0] - 1).bit_length(), 1)
        exponents = nl.ndarray((self.index_bits, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.iota(exponents, [[1, 1]], 127 << 23, 1 << 23)
        self.bit_masks = nl.ndarray((self.index_bits, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=self.bit_masks, src=exponents.view(nl.float32), engine=nisa.engine.vector)

        self.equal = nl.ndarray((PARTITIONS, self.tiles, self.tiles, PARTITIONS), dtype=self.sum_dtype, buffer=nl.sbuf)
        nisa.memset(dst=self.equal, value=0.0)
        self.counts = special.filled((PARTITIONS, self.tiles, 2), nl.float32, 0.0)
        self.any_special = special.filled((PARTITIONS, 1), nl.int32, 0)
        self.not_special = [
            nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf) for _ in range(len(self.pieces))
        ]
        self.not_special_of_groups = nl.ndarray(
            (self.index.shape[0], len(self.pieces)), dtype=nl.int32, buffer=nl.private_hbm
        )
        self.banks = [nl.ndarray((PARTITIONS, CHUNK), dtype=nl.float32, buffer=nl.psum) for _ in range(SUM_BANKS)]
        self.next_bank = 0

    def bank(self):
        self.next_bank += 1
        return self.banks[(self.next_bank - 1) % SUM_BANKS]


class _Rows(nl.NKIObject):
    """The tiles of one piece: src, what input held, what it gets; [128, T, width] each."""

    def __init__(self, work, width, checked):
        shape = (PARTITIONS, work.tiles, width)
        self.src = nl.ndarray(shape, dtype=work.src.dtype, buffer=nl.sbuf)
        self.old = nl.ndarray(shape, dtype=work.input.dtype, buffer=nl.sbuf)
        self.new = nl.ndarray(shape, dtype=work.input.dtype, buffer=nl.sbuf)
        self.scaled = None
        if work.alpha is not None and not work.unique_indices:
            self.scaled = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        # A follower's row is not gathered: whatever lies there must be finite.
        for tile in range(work.tiles):
            nisa.memset(dst=self.old[:, tile, :], value=0.0)
        # The first gathers wait for the index check, whose result goes where they land.
        integer = tiles.FLOAT_BITS[work.input.dtype][0]
        zero = nl.ndarray((PARTITIONS, 1), dtype=work.input.dtype, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=zero.view(integer), data=checked.view(integer), op0=nl.bitwise_and, operand0=0)
        nisa.tensor_copy(dst=self.old[:, :, 0], src=zero.broadcast(1, work.tiles), engine=nisa.engine.vector)
        nisa.memset(dst=self.new[:, :, 0], value=0.0)

    def wait_for_stores(self):
        """What lands in `old` from here on comes after all stores from `new`."""
        nisa.memset(dst=self.new[:, :, 0], value=0.0, engine=nisa.engine.gpsimd)
        nisa.tensor_copy(dst=self.old[:, :, 0], src=self.new[:, :, 0], engine=nisa.engine.gpsimd)


def _group(work, row, count):
    """One group of `count` rows of src from `row` on, a Python int or the register of a hardware loop."""
    used = -(-count // PARTITIONS)
    target = _load_targets(work, row, count, used)
    leaders = target
    if not work.unique_indices:
        work.next_bank = 0
        _compare(work, row, count, used)
        leaders = _leaders(work, target, used)
    for number, (start, width) in enumerate(work.pieces):
        rows = work.sets[number % len(work.sets)]
        column = work.first_column + start
        rows.wait_for_stores()
        for tile in range(used):
            at_target = tiles.gathered(work.input, leaders[:, tile : tile + 1], column, PARTITIONS, width)
            nisa.dma_copy(dst=rows.old[:, tile, 0:width], src=at_target, oob_mode=nisa.oob_mode.skip)
        _load_src(work, rows, row, count, used, column, width)
        store_index = leaders
        if work.unique_indices:
            _add(work, rows, used, width)
        else:
            _sum(work, rows, used, width)
            store_index = _unless_special(work, number, row, leaders)
        for tile in range(used):
            nisa.dma_copy(
                dst=tiles.gathered(work.input, store_index[:, tile : tile + 1], column, PARTITIONS, width),
                src=rows.new[:, tile, 0:width],
                oob_mode=nisa.oob_mode.skip,
            )


def _is_full(count, used):
    return count == used * PARTITIONS


def _load_targets(work, row, count, used):
    """[128, T] int32: the index of every row of the group; NO_ROW beyond its end."""
    target = nl.ndarray((PARTITIONS, used), dtype=nl.int32, buffer=nl.sbuf)
    if _is_full(count, used):
        nisa.dma_copy(dst=target, src=tiles.at_row(work.index, row, [[used, PARTITIONS], [1, used]], 1))
        return target
    nisa.memset(dst=target, value=tiles.NO_ROW)
    for tile, rows in _partial_tiles(count):
        nisa.dma_copy(
            dst=target[0:rows, tile : tile + 1],
            src=tiles.at_row(work.index, row, [[1, rows], [1, 1]], 1, tile * PARTITIONS),
        )
    return target


def _partial_tiles(count):
    """(tile, rows) of a group that does not fill its tiles: tile t holds the rows from 128 * t on."""
    return [
        (tile, min(PARTITIONS, count - tile * PARTITIONS)) for tile in range((count + PARTITIONS - 1) // PARTITIONS)
    ]


def _load_src(work, rows, row, count, used, column, width):
    stride = work.src.shape[1]
    if _is_full(count, used):
        for tile in range(used):
            pattern = [[used * stride, PARTITIONS], [1, width]]
            nisa.dma_copy(
                dst=rows.src[:, tile, 0:width],
                src=tiles.at_row(work.src, row, pattern, stride, tile * stride + column),
            )
        return
    for tile, valid in _partial_tiles(count):
        if valid < PARTITIONS:
            nisa.memset(dst=rows.src[:, tile, 0:width], value=0.0)
        nisa.dma_copy(
            dst=rows.src[0:valid, tile, 0:width],
            src=tiles.at_row(work.src, row, [[stride, valid], [1, width]], stride, tile * PARTITIONS * stride + column),
        )


def _compare(work, row, count, used):
    """Fill `work.equal` and, with the number of equal rows in tiles t <= u, `work.counts`.

    With bits as +-0.5 two indices that differ in d of B bits have the product sum B / 4 - d / 2, and 2 * sum + 1 - B / 2 = 1 - d.
    """
    shape = (work.index_bits, used * PARTITIONS)
    index_row = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    if not _is_full(count, used):
        nisa.memset(dst=index_row, value=tiles.NO_ROW)
    nisa.dma_copy(dst=index_row[:, 0:count], src=tiles.at_row(work.index, row, [[0, work.index_bits], [1, count]], 1))
    masked = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=masked,
        data1=index_row,
        data2=work.bit_masks.broadcast(1, shape[1]),
        op=nl.bitwise_and,
        engine=nisa.engine.vector,
    )
    by_tile = masked.reshape((work.index_bits, used, PARTITIONS))
    if _is_full(count, used):
        by_tile = masked.reshape((work.index_bits, PARTITIONS, used)).permute((0, 2, 1))
    bits = nl.ndarray((work.index_bits, used, PARTITIONS), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=bits, data=by_tile, op0=nl.not_equal, operand0=0.0, op1=nl.subtract, operand1=0.5, engine=nisa.engine.vector
    )
    span = CHUNK // PARTITIONS
    for later in range(used):
        for number, first in enumerate(range(0, later + 1, span)):
            end = min(first + span, later + 1)
            width = (end - first) * PARTITIONS
            products = work.bank()[:, 0:width]
            nisa.nc_matmul(dst=products, stationary=bits[:, later, :], moving=bits[:, first:end, :], accumulate=False)
            nisa.activation(
                dst=work.equal[:, later, first:end, :],
                op=nl.relu,
                data=products,
                scale=2.0,
                bias=1.0 - work.index_bits / 2,
                reduce_op=nl.add,
                reduce_res=work.counts[:, later, number : number + 1],
                reduce_cmd=nisa.reduce_cmd.reset_reduce,
            )


def _leaders(work, target, used):
    """[128, T] int32: the index where it occurs first in the group, NO_ROW elsewhere."""
    shape = (PARTITIONS, used)
    # The blocks of a tile with itself lie on a diagonal of work.equal.
    own = work.equal.ap(
        pattern=[
            [work.tiles * work.tiles * PARTITIONS, PARTITIONS],
            [(work.tiles + 1) * PARTITIONS, used],
            [1, PARTITIONS],
        ],
        offset=0,
    )
    not_before = nl.ndarray((PARTITIONS, used, PARTITIONS), dtype=work.sum_dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=not_before,
        data1=own,
        data2=work.not_before.expand_dim(1).broadcast(1, used),
        op=nl.multiply,
        engine=nisa.engine.vector,
    )
    not_earlier = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=not_earlier, op=nl.add, data=not_before, axis=2)
    earlier = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=earlier,
        data1=work.counts[:, 0:used, 0],
        data2=not_earlier,
        op=nl.subtract,
        engine=nisa.engine.vector,
    )
    if used > CHUNK // PARTITIONS:
        nisa.tensor_tensor(
            dst=earlier, data1=earlier, data2=work.counts[:, 0:used, 1], op=nl.add, engine=nisa.engine.vector
        )
    follower = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=follower,
        data=earlier,
        op0=nl.greater,
        operand0=0.0,
        op1=nl.multiply,
        operand1=-1.0,
        engine=nisa.engine.vector,
    )
    return special.no_row_under(target, follower)


def _add(work, rows, used, width):
    """new = old + alpha * src where no index repeats."""
    for tile in range(used):
        new, old, src = (piece[:, tile, 0:width] for piece in (rows.new, rows.old, rows.src))
        if work.alpha is None:
            nisa.tensor_tensor(dst=new, data1=old, data2=src, op=nl.add, engine=nisa.engine.vector)
        else:
            nisa.scalar_tensor_tensor(dst=new, data=src, op0=nl.multiply, operand0=work.alpha, op1=nl.add, operand1=old)


def _sum(work, rows, used, width):
    """new = old + the sums of src by leader, with all that is special shown to the detector."""
    chunks = [(start, min(CHUNK, width - start)) for start in range(0, width, CHUNK)]
    moving = rows.src
    if work.alpha is not None:
        moving = rows.scaled
        for tile in range(used):
            nisa.tensor_scalar(
                dst=moving[:, tile, 0:width],
                data=rows.src[:, tile, 0:width],
                op0=nl.multiply,
                operand0=work.alpha,
                engine=nisa.engine.scalar,
            )
    work.detector.start(used, used * len(chunks), width)
    # Sums of src run ahead of the gathers by as many tiles as the banks hold.
    ahead = max(SUM_BANKS // len(chunks) - 1, 0)
    banks = {}
    for step in range(used + ahead):
        if step < used:
            banks[step] = [work.bank()[:, 0:size] for _, size in chunks]
            for later in range(step, used):
                for bank, (start, size) in zip(banks[step], chunks, strict=True):
                    nisa.nc_matmul(
                        dst=bank,
                        stationary=work.equal[:, later, step, :],
                        moving=moving[:, later, start : start + size],
                        is_stationary_onezero=True,
                        accumulate=later > step,
                    )
        tile = step - ahead
        if tile < 0:
            continue
        for bank, (start, size) in zip(banks.pop(tile), chunks, strict=True):
            nisa.nc_matmul(
                dst=bank,
                stationary=work.identity,
                moving=rows.old[:, tile, start : start + size],
                is_stationary_onezero=True,
                accumulate=True,
            )
            work.detector.evict(rows.new[:, tile, start : start + size], bank)
        work.detector.look_for_negative_zero(tile, rows.old[:, tile, 0:width])


def _unless_special(work, number, row, leaders):
    """The leaders' index, or NO_ROW for all of the group if anything in it is special; which of both is kept for later."""
    seen = work.detector.special()
    store_index = special.no_row_under(leaders, seen)
    nisa.tensor_tensor(
        dst=work.any_special, data1=work.any_special, data2=seen, op=nl.bitwise_or, engine=nisa.engine.vector
    )
    nisa.tensor_scalar(dst=work.not_special[number], data=seen, op0=nl.bitwise_xor, operand0=-1)
    nisa.dma_copy(
        dst=tiles.at_row(work.not_special_of_groups, row, [[1, 1], [1, 1]], len(work.pieces), number),
        src=work.not_special[number][0:1, :],
    )
    return store_index


def _redo_special_groups(work, full, rest):
    """Add what `_unless_special` held back, in loops that do not run where it held back nothing."""
    for rows in work.sets:
        rows.wait_for_stores()
    group = work.tiles * PARTITIONS
    if full:
        special.loop_if(work.any_special, full, group, lambda row: _redo(work, row, group))
    if rest:
        special.loop_if(work.any_special, 1, 1, lambda _: _redo(work, full, rest))


def _redo(work, row, count):
    for number, count_here in _partial_tiles(count):
        tile = special.Tile(work.index, row, count_here, number * PARTITIONS, work.sum_dtype)
        for piece, (start, width) in enumerate(work.pieces):
            not_special = work.not_special[piece][0:count_here, :]
            kept = tiles.at_row(work.not_special_of_groups, row, [[0, count_here], [1, 1]], len(work.pieces), piece)
            nisa.dma_copy(dst=not_special, src=kept)
            leaders = special.no_row_under(tile.leaders, not_special)
            column = work.first_column + start
            values = work.sets[piece % len(work.sets)].old[0:count_here, 0, 0:width]
            special.redo_tile(tile, work.input, column, leaders, work.src, column, width, work.alpha, values)
