"""What a matmul cannot sum: how a kernel sees that non-finite elements or signs of zero are at stake, and what it does then.

0 * inf is NaN, so one Inf or NaN among the rows of a matmul makes NaN of the sums of all of them: it shows. The sign of a zero does
not survive PSUM, which only matters where input holds -0.0. A kernel that sees either stores nothing of what it summed
(`Detector`) and has it redone, one tile after another, with counts that carry what a sum loses (`redo_tile`).
"""

import nki.isa as nisa
import nki.language as nl

from . import tiles

PARTITIONS = 128
CHUNK = 512
EXPONENT = 0x7F800000

# relu(-bits - bound) is above 0 for the bits of -0.0 alone, the most negative integer. In float32 the integers next to -2**31 round
# to it, so that some of the smallest negative subnormals are taken for -0.0: they only take the slower way.
NEGATIVE_ZERO_BOUND = {nl.float32: 2.0**31 - 256.0, nl.bfloat16: 2.0**15 - 1.0, nl.float16: 2.0**15 - 1.0}


class Detector(nl.NKIObject):
    """Whether anything special is in a number of PSUM sums and of tiles of input; one answer for all partitions."""

    def __init__(self, dtype, tile_count):
        self.dtype, self.integer = dtype, tiles.FLOAT_BITS[dtype][0]
        self.ones = filled((PARTITIONS, PARTITIONS), nl.bfloat16, 1.0)
        self.bank = nl.ndarray((PARTITIONS, tile_count + 1), dtype=nl.float32, buffer=nl.psum)

    def start(self, tile_count, sum_count, width):
        """Forget what was seen; `tile_count` tiles of input [128, width] and `sum_count` sums will be shown."""
        self.flags = nl.ndarray((PARTITIONS, tile_count + 1), dtype=nl.bfloat16, buffer=nl.sbuf)
        self.sums = nl.ndarray((PARTITIONS, sum_count), dtype=nl.float32, buffer=nl.sbuf)
        self.scratch = nl.ndarray((PARTITIONS, width), dtype=nl.bfloat16, buffer=nl.sbuf)
        self.seen = 0

    def evict(self, dst, bank):
        """Round sums from PSUM to `dst`; their total, kept here, is not finite if one of them is not."""
        nisa.tensor_scalar_reduce(
            dst=dst,
            data=bank,
            op0=nl.multiply,
            operand0=1.0,
            reduce_op=nl.add,
            reduce_res=self.sums[:, self.seen : self.seen + 1],
        )
        self.seen += 1

    def look_for_negative_zero(self, number, old):
        """Count the elements -0.0 of tile `number` of input."""
        nisa.activation(
            dst=self.scratch[:, 0 : old.shape[1]],
            op=nl.relu,
            data=old.view(self.integer),
            scale=-1.0,
            bias=-NEGATIVE_ZERO_BOUND[self.dtype],
            reduce_op=nl.add,
            reduce_res=self.flags[:, number + 1 : number + 2],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )

    def special(self):
        """[128, 1] int32: -1 in every partition if anything special was seen in any, else 0."""
        exponents = nl.ndarray(self.sums.shape, dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=exponents, data=self.sums.view(nl.int32), op0=nl.bitwise_and, operand0=EXPONENT)
        not_finite = nl.ndarray(self.sums.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar_reduce(
            dst=not_finite,
            data=exponents,
            op0=nl.equal,
            operand0=float(EXPONENT),
            reduce_op=nl.add,
            reduce_res=self.flags[:, 0:1],
        )
        flagged = self.bank[:, 0 : self.flags.shape[1]]
        nisa.nc_matmul(
            dst=flagged, stationary=self.ones, moving=self.flags, is_stationary_onezero=True, accumulate=False
        )
        mask = nl.ndarray(self.flags.shape, dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=mask, data=flagged, op0=nl.greater, operand0=0.0, op1=nl.multiply, operand1=-1.0)
        result = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=result, op=nl.bitwise_or, data=mask, axis=1)
        return result


def filled(shape, dtype, value):
    tile = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=value)
    return tile


def matrix_where(compare, dtype):
    """[128, 128]: 1.0 where partition - column compares so with 0, else 0.0; `nl.equal` gives the identity."""
    shape = (PARTITIONS, PARTITIONS)
    result = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.affine_select(
        dst=result,
        pattern=[[-1, PARTITIONS]],
        channel_multiplier=1,
        on_true_tile=filled(shape, dtype, 1.0),
        on_false_value=0.0,
        cmp_op=compare,
        offset=0,
    )
    return result


def no_row_under(target, mask, result=None):
    """target [p, n] int32 with NO_ROW where mask, [p, n] or [p, 1] int32, is -1 and not 0; in `result` or a new tile."""
    no_row = nl.ndarray(mask.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=no_row, data=mask, op0=nl.bitwise_and, operand0=tiles.NO_ROW)
    if mask.shape != target.shape:
        no_row = no_row.broadcast(1, target.shape[1])
    if result is None:
        result = nl.ndarray(target.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=result, data1=target, data2=no_row, op=nl.bitwise_or, engine=nisa.engine.vector)
    return result


def loop_if(mask, end, step, body):
    """A hardware loop over range(0, end, step) if mask, [128, 1] int32, is not 0 in partition 0, else over nothing."""
    stop = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=stop,
        data=mask[0:1, :],
        op0=nl.not_equal,
        operand0=0.0,
        op1=nl.multiply,
        operand1=float(end),
        engine=nisa.engine.vector,
    )
    register = nisa.register_alloc()
    nisa.register_load(register, stop)
    nl.fori_loop(0, register, body, step=step)


class Tile(nl.NKIObject):
    """Up to 128 rows of src from `row` + `offset` on, their destinations, and which of those are the same."""

    def __init__(self, index, row, rows, offset, sum_dtype):
        self.row, self.rows, self.offset = row, rows, offset
        target = tiles.load_index(index, row, rows, offset)
        self.equal = tiles.equality_of(index, target, row, rows, offset)
        self.leaders = tiles.leaders_of(target, self.equal, rows)
        self.equal_moving = self.equal
        if sum_dtype != nl.float32:
            self.equal_moving = nl.ndarray((rows, rows), dtype=sum_dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=self.equal_moving, src=self.equal)


def redo_tile(tile, destination, destination_column, leaders, src, src_column, width, alpha, values, banks):
    """Add a tile's rows of src to the rows `leaders` of destination, exactly in what `Detector` looks for.

    `values`, [rows, width], holds what was there and then what comes: the next gather into it waits for this store, so no two
    accesses to a row of destination depend on the order of DMAs. `banks`: two PSUM tiles, see `tiles.combine`.
    """
    rows, stride = tile.rows, src.shape[1]
    src_tile = nl.ndarray((rows, width), dtype=src.dtype, buffer=nl.sbuf)
    pattern = [[stride, rows], [1, width]]
    nisa.dma_copy(dst=src_tile, src=tiles.at_row(src, tile.row, pattern, stride, tile.offset * stride + src_column))
    if alpha is not None:
        scaled = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=scaled, data=src_tile, op0=nl.multiply, operand0=alpha[0:rows, :])
        src_tile = scaled
    at_target = tiles.gathered(destination, leaders, destination_column, rows, width)
    nisa.dma_copy(dst=values, src=at_target, oob_mode=nisa.oob_mode.skip)
    for start in range(0, width, CHUNK):
        piece = slice(start, min(start + CHUNK, width))
        total = tiles.combine(tile.equal_moving, tile.equal, src_tile[:, piece], rows, piece.stop - piece.start, banks)
        nisa.tensor_tensor(dst=values[:, piece], data1=values[:, piece], data2=total, op=nl.add)
    nisa.dma_copy(dst=at_target, src=values, oob_mode=nisa.oob_mode.skip)
