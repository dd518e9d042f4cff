"""Row accumulation in groups of several 128-row tiles: the wait for the rows of the group before is paid once a group.

Dimensions:
    N: rows of input (the destination), below 2**31
    D: columns
    K: rows of src, length of index
    T: tiles of a group; tile t, partition p is row p * T + t of it, so that a partition reads T rows that are neighbours

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
from .special import CHUNK, PARTITIONS

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
    count, group = index.shape[0], work.tiles * PARTITIONS
    full, rest = count // group * group, count % group
    # Each group prepares the next one's index; the last full group is apart from the loop, since what follows it differs.
    first = _prepare_index(work, 0, 0, group if full else rest)
    if not unique_indices:
        _compare(work, first)
        _find_leaders(work, first)
    work.wait_for_check()
    if full > group:
        nl.fori_loop(0, full - group, lambda row: _group(work, row, group, group), step=group)
    if full:
        _group(work, full - group, group, rest)
    if rest:
        _group(work, full, rest, 0)
    if not unique_indices:
        _redo_special_groups(work, full, rest)
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

        self.alpha = tiles.load_alpha(alpha)

        # With alpha a piece also has its float32 rows on the chip, and two such pieces do not fit.
        sets = min(piece_sets, len(self.pieces)) if alpha is None else 1
        self.sets = [_Rows(self, width) for _ in range(sets)]
        self.target = nl.ndarray((PARTITIONS, self.tiles), dtype=nl.int32, buffer=nl.sbuf)
        if not unique_indices:
            self._allocate_for_sums()
        self.read_by_check = tiles.refuse_index_out_of_range(input, index, self.first_column)

    def wait_for_check(self):
        """Order every later store after the index check: what that read goes, masked to 0, into what stores are made from."""
        zero = tiles.zero_after(self.read_by_check, self.input.dtype)
        if self.unique_indices:
            self.checked = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=self.checked, src=zero, engine=nisa.engine.vector)
            return
        first = self.identity[:, 0:1].view(zero.dtype)
        nisa.tensor_tensor(dst=first, data1=first, data2=zero, op=nl.bitwise_or, engine=nisa.engine.vector)

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
        self.bits = nl.ndarray((self.index_bits, self.tiles, PARTITIONS), dtype=nl.bfloat16, buffer=nl.sbuf)
        self.leaders = nl.ndarray((PARTITIONS, self.tiles), dtype=nl.int32, buffer=nl.sbuf)
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

    def __init__(self, work, width):
        shape = (PARTITIONS, work.tiles, width)
        self.src = nl.ndarray(shape, dtype=work.src.dtype, buffer=nl.sbuf)
        self.old = nl.ndarray(shape, dtype=work.input.dtype, buffer=nl.sbuf)
        self.new = nl.ndarray(shape, dtype=work.input.dtype, buffer=nl.sbuf)
        self.scaled = None
        if work.alpha is not None and not work.unique_indices:
            self.scaled = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        if work.unique_indices:
            return
        # A follower's row is not gathered: whatever lies there must be finite. As bfloat16, which is copied four at a time.
        bits = self.old.view(nl.bfloat16)
        nisa.memset(dst=bits[:, 0:1, :], value=0.0)
        if work.tiles > 1:
            nisa.tensor_copy(
                dst=bits[:, 1:, :], src=bits[:, 0:1, :].broadcast(1, work.tiles - 1), engine=nisa.engine.vector
            )

    def wait_for_stores(self):
        """What lands in `old` from here on comes after all stores from `new`."""
        nisa.memset(dst=self.new[:, :, 0], value=0.0, engine=nisa.engine.gpsimd)
        nisa.tensor_copy(dst=self.old[:, :, 0], src=self.new[:, :, 0], engine=nisa.engine.gpsimd)


def _group(work, row, count, next_count):
    """One group of `count` rows of src from `row` on, a Python int or a loop's register, and the index of the group after it."""
    used = -(-count // PARTITIONS)
    target = work.target[:, 0:used] if work.unique_indices else work.leaders[:, 0:used]
    work.next_bank = 0
    ahead = len(work.sets)
    for number in range(ahead):
        _gather(work, row, count, used, target, number)
    upcoming = None
    for number, (start, width) in enumerate(work.pieces):
        rows = work.sets[number % ahead]
        last = number == len(work.pieces) - 1
        if last and next_count and not work.unique_indices:
            upcoming = _prepare_index(work, row, count, next_count)
        if work.unique_indices:
            _add(work, rows, used, width)
            store_index = special.no_row_under(target, work.checked)
        else:
            _sum(work, rows, used, width)
            if upcoming is not None:
                _compare(work, upcoming)
            store_index = _unless_special(work, number, row, target)
        for tile in range(used):
            nisa.dma_copy(
                dst=tiles.gathered(
                    work.input, store_index[:, tile : tile + 1], work.first_column + start, PARTITIONS, width
                ),
                src=rows.new[:, tile, 0:width],
                oob_mode=nisa.oob_mode.skip,
            )
        if number + ahead < len(work.pieces):
            _gather(work, row, count, used, target, number + ahead)
    if upcoming is not None:
        _find_leaders(work, upcoming)
    elif next_count:
        _prepare_index(work, row, count, next_count)


def _gather(work, row, count, used, target, number):
    """Load one piece of the group: src, and the rows of input that it goes to."""
    start, width = work.pieces[number]
    rows, column = work.sets[number % len(work.sets)], work.first_column + start
    rows.wait_for_stores()
    for tile in range(used):
        at_target = tiles.gathered(work.input, target[:, tile : tile + 1], column, PARTITIONS, width)
        nisa.dma_copy(dst=rows.old[:, tile, 0:width], src=at_target, oob_mode=nisa.oob_mode.skip)
    _load_src(work, rows, row, count, used, column, width)


def _valid_rows(count, used):
    """(tile, partitions that hold a row) of a group of `count` rows: partition p, tile t is row p * used + t."""
    return [(tile, (count - tile + used - 1) // used) for tile in range(used)]


def _load_src(work, rows, row, count, used, column, width):
    stride = work.src.shape[1]
    for tile, valid in _valid_rows(count, used):
        if valid < PARTITIONS:
            nisa.memset(dst=rows.src[:, tile, 0:width], value=0.0)
        pattern = [[used * stride, valid], [1, width]]
        nisa.dma_copy(
            dst=rows.src[0:valid, tile, 0:width],
            src=tiles.at_row(work.src, row, pattern, stride, tile * stride + column),
        )


def _prepare_index(work, row, offset, count):
    """Load the index of the `count` rows from `row` + `offset` on, and split it into bits; what nothing earlier still reads.

    Returns:
        int: the tiles it takes; `_compare` and `_find_leaders` do the rest.
    """
    used = -(-count // PARTITIONS)
    target = work.target[:, 0:used]
    if count < used * PARTITIONS:
        nisa.memset(dst=target, value=tiles.NO_ROW)
    whole = count // used
    nisa.dma_copy(dst=target[0:whole, :], src=tiles.at_row(work.index, row, [[used, whole], [1, used]], 1, offset))
    if count % used:
        nisa.dma_copy(
            dst=target[whole : whole + 1, 0 : count % used],
            src=tiles.at_row(work.index, row, [[used, 1], [1, count % used]], 1, offset + whole * used),
        )
    if not work.unique_indices:
        _split_into_bits(work, row, offset, count, used)
    return used


def _split_into_bits(work, row, offset, count, used):
    """work.bits[b, t, p] = +0.5 where bit b of the index of tile t, partition p is set, else -0.5."""
    shape = (work.index_bits, used * PARTITIONS)
    index_row = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    if count < shape[1]:
        nisa.memset(dst=index_row, value=tiles.NO_ROW)
    nisa.dma_copy(
        dst=index_row[:, 0:count],
        src=tiles.at_row(work.index, row, [[0, work.index_bits], [1, count]], 1, offset),
    )
    masked = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=masked,
        data1=index_row,
        data2=work.bit_masks.broadcast(1, shape[1]),
        op=nl.bitwise_and,
        engine=nisa.engine.vector,
    )
    nisa.tensor_scalar(
        dst=work.bits[:, 0:used, :],
        data=masked.reshape((work.index_bits, PARTITIONS, used)).permute((0, 2, 1)),
        op0=nl.not_equal,
        operand0=0.0,
        op1=nl.subtract,
        operand1=0.5,
        engine=nisa.engine.vector,
    )


def _compare(work, used):
    """Fill `work.equal` and, with the number of equal rows in tiles t <= u, `work.counts`.

    With bits as +-0.5 two indices that differ in d of B bits have the product sum B / 4 - d / 2, and 2 * sum + 1 - B / 2 = 1 - d.
    """
    span = CHUNK // PARTITIONS
    for later in range(used):
        for number, first in enumerate(range(0, later + 1, span)):
            end = min(first + span, later + 1)
            products = work.bank()[:, 0 : (end - first) * PARTITIONS]
            nisa.nc_matmul(
                dst=products, stationary=work.bits[:, later, :], moving=work.bits[:, first:end, :], accumulate=False
            )
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


def _find_leaders(work, used):
    """work.leaders, [128, T] int32: the index where it occurs first in the group, NO_ROW elsewhere."""
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
    special.no_row_under(work.target[:, 0:used], follower, work.leaders[:, 0:used])


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
    for number in range(-(-count // PARTITIONS)):
        count_here = min(PARTITIONS, count - number * PARTITIONS)
        tile = special.Tile(work.index, row, count_here, number * PARTITIONS, work.sum_dtype)
        for piece, (start, width) in enumerate(work.pieces):
            not_special = work.not_special[piece][0:count_here, :]
            kept = tiles.at_row(work.not_special_of_groups, row, [[0, count_here], [1, 1]], len(work.pieces), piece)
            nisa.dma_copy(dst=not_special, src=kept)
            leaders = special.no_row_under(tile.leaders, not_special)
            column = work.first_column + start
            values = work.sets[piece % len(work.sets)].old[0:count_here, 0, 0:width]
            special.redo_tile(
                tile, work.input, column, leaders, work.src, column, width, work.alpha, values, work.banks[0:2]
            )
