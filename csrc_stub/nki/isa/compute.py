"""Vector, Scalar and GpSimd Engine instructions (their API pages; table "Supported Math Operators by NKI ISA").

Arithmetic operators compute in float32 on inputs of any dtype and cast the result to dst; bitvec operators take integer dtypes and
bit patterns. An engine that is not named is chosen as the pages say.
"""

import math

import torch

from .. import language as nl
from ..errors import check
from ..tensor import FLOATS, TORCH, NkiTensor
from .enums import engine, reduce_cmd
from .operands import as_float32, begin, bits, flat, in_buffers, same_layout, write, write_bits

ON_CHIP = ("sbuf", "psum")
_engines, _commands = engine, reduce_cmd
_equal = nl.equal


def _check_engine(name, chosen, allowed, *tiles):
    check(
        chosen is _engines.unknown or chosen in allowed,
        f"{name}: engine is {chosen.name}; accepted are {', '.join(e.name for e in allowed)}",
    )
    if chosen is _engines.gpsimd:
        check(all(tile.buffer != "psum" for tile in tiles), f"{name}: GpSimd Engine cannot access PSUM")


def _check_bitvec(name, *tiles):
    for tile in tiles:
        check(
            tile.dtype not in FLOATS,
            f"{name}: dtype is {tile.dtype} with a bitvec operator; accepted are integer dtypes",
        )
        check(
            TORCH[tile.dtype].itemsize == TORCH[tiles[0].dtype].itemsize,
            f"{name}: dtypes are {', '.join(t.dtype for t in tiles)} with a bitvec operator; accepted are dtypes of one width",
        )


def memset(dst, value, engine=engine.unknown, name=None):
    begin("memset", dst=dst)
    in_buffers("memset", ON_CHIP, dst=dst)
    _check_engine("memset", engine, (_engines.vector, _engines.gpsimd), dst)
    check(isinstance(value, (int, float)), f"memset: value is {value!r}; accepted is a compile-time number")
    dtype = torch.float32 if isinstance(value, float) else torch.int64
    write("memset", dst, torch.full(dst.shape, value, dtype=dtype))


def tensor_copy(dst, src, engine=engine.unknown, name=None):
    begin("tensor_copy", dst=dst, src=src)
    in_buffers("tensor_copy", ON_CHIP, dst=dst, src=src)
    same_layout("tensor_copy", dst, src=src)
    _check_engine("tensor_copy", engine, (_engines.vector, _engines.scalar, _engines.gpsimd), dst, src)
    bit_accurate = dst.dtype == src.dtype and engine is not _engines.scalar
    write("tensor_copy", dst, flat(src) if bit_accurate else as_float32(src))


def tensor_copy_predicated(dst, src, predicate, reverse_pred=False, name=None):
    begin("tensor_copy_predicated", dst=dst, predicate=predicate)
    in_buffers("tensor_copy_predicated", ON_CHIP, dst=dst, predicate=predicate)
    same_layout("tensor_copy_predicated", dst, predicate=predicate)
    check(
        predicate.dtype in ("uint8", "uint16", "uint32"),
        f"tensor_copy_predicated: predicate has dtype {predicate.dtype}; accepted are uint8, uint16 and uint32",
    )
    chosen = (bits(predicate) != 0) != reverse_pred
    target = dst.elements().reshape(dst.shape[0], -1)
    if isinstance(src, NkiTensor):
        in_buffers("tensor_copy_predicated", ON_CHIP, src=src)
        same_layout("tensor_copy_predicated", dst, src=src)
        check(
            src.dtype == dst.dtype,
            f"tensor_copy_predicated: src has dtype {src.dtype}, dst {dst.dtype}; accepted is one",
        )
        check(
            not (src.buffer == predicate.buffer == "psum"),
            "tensor_copy_predicated: src and predicate are both in PSUM; accepted is one",
        )
        values = flat(src)
    else:
        values = torch.full(target.shape, src, dtype=target.dtype)
    write("tensor_copy_predicated", dst, torch.where(chosen, values, target))


def tensor_tensor(dst, data1, data2, op, engine=engine.unknown, name=None):
    begin("tensor_tensor", dst=dst, data1=data1, data2=data2)
    in_buffers("tensor_tensor", ON_CHIP, dst=dst, data1=data1, data2=data2)
    same_layout("tensor_tensor", dst, data1=data1, data2=data2)
    _check_engine("tensor_tensor", engine, (_engines.vector, _engines.gpsimd), dst, data1, data2)
    check(
        not (data1.buffer == data2.buffer == "psum"),
        "tensor_tensor: data1 and data2 are both in PSUM; accepted is one of them",
    )
    check(isinstance(op, nl.Operator) and not op.unary, f"tensor_tensor: op is {op}; accepted are binary operators")
    if op.kind == "bitvec":
        _check_bitvec("tensor_tensor", dst, data1, data2)
        write_bits(dst, op.function(bits(data1), bits(data2)))
        return
    tiles = (dst, data1, data2)
    on_gpsimd = engine is not _engines.vector and all(tile.buffer == "sbuf" for tile in tiles)
    if on_gpsimd and all(tile.dtype in ("int32", "uint32") for tile in tiles):
        values = op.function(flat(data1).to(torch.int64), flat(data2).to(torch.int64)).to(torch.int64)
        dst.elements().copy_(_wrap(values, dst.dtype).reshape(dst.shape))
        return
    write("tensor_tensor", dst, op.function(as_float32(data1), as_float32(data2)))


def _wrap(values, dtype):
    """Native 32-bit integer arithmetic wraps around."""
    low = values & 0xFFFFFFFF
    return low if dtype == "uint32" else torch.where(low >= 2**31, low - 2**32, low)


def _operand(name, argument, operand, data, op):
    """The second operand of one step: a compile-time number, or a column."""
    if op.unary:
        check(operand in (None, 0), f"{name}: {argument} is {operand!r} with a unary operator; accepted are None and 0")
        return None
    if isinstance(operand, (int, float)):
        if op.kind == "bitvec":
            check(
                isinstance(operand, int),
                f"{name}: {argument} is {operand!r} with a bitvec operator; accepted is an integer",
            )
            width = 8 * TORCH[data.dtype].itemsize
            check(
                -(2 ** (width - 1)) <= operand < 2**width,
                f"{name}: {argument} is {operand}; accepted are integers of {width} bits",
            )
            return operand - 2**width if operand >= 2 ** (width - 1) else operand
        return operand
    check(
        isinstance(operand, NkiTensor),
        f"{name}: {argument} is {type(operand).__name__}; accepted are a number and a tile",
    )
    in_buffers(name, ON_CHIP, **{argument: operand})
    check(
        operand.shape == (data.shape[0], 1),
        f"{name}: {argument} has shape {operand.shape}; accepted is {(data.shape[0], 1)}",
    )
    if op.kind == "bitvec":
        _check_bitvec(name, data, operand)
        return bits(operand)
    check(operand.dtype == "float32", f"{name}: {argument} has dtype {operand.dtype}; accepted is float32")
    return flat(operand)


def _step(op, values, operand, reverse):
    if not reverse:
        return op.function(values, operand)
    return op.function(operand if isinstance(operand, torch.Tensor) else torch.full_like(values, operand), values)


# Operator pairs of tensor_scalar on Trn2's Scalar Engine.
_SCALAR_ENGINE_PAIRS = {("multiply", "add"), ("multiply", None), ("add", None)}


def tensor_scalar(
    dst, data, op0, operand0, reverse0=False, op1=None, operand1=None, reverse1=False, engine=engine.unknown, name=None
):
    begin("tensor_scalar", dst=dst, data=data)
    in_buffers("tensor_scalar", ON_CHIP, dst=dst, data=data)
    same_layout("tensor_scalar", dst, data=data)
    _check_engine("tensor_scalar", engine, (_engines.vector, _engines.scalar, _engines.gpsimd), dst, data)
    check(isinstance(op0, nl.Operator), f"tensor_scalar: op0 is {op0!r}; accepted are ALU operators")
    if engine is _engines.scalar:
        pair = (op0.name, op1.name if op1 else None)
        check(
            pair in _SCALAR_ENGINE_PAIRS,
            f"tensor_scalar: {pair} on Scalar Engine; accepted are {sorted(map(str, _SCALAR_ENGINE_PAIRS))}",
        )
    check(op1 is not None or operand1 is None, "tensor_scalar: operand1 is given without op1")
    if op1 is not None:
        check(
            op0.kind == op1.kind,
            f"tensor_scalar: op0 {op0} and op1 {op1}; accepted are two of one kind, bitvec or arithmetic",
        )
    if op0.kind == "bitvec":
        _check_bitvec("tensor_scalar", dst, data)
        check(
            engine in (_engines.unknown, _engines.vector), "tensor_scalar: bitvec operators run on Vector Engine only"
        )
        values = bits(data)
    else:
        values = as_float32(data)
    values = _step(op0, values, _operand("tensor_scalar", "operand0", operand0, data, op0), reverse0)
    if op1 is not None:
        values = _step(op1, values, _operand("tensor_scalar", "operand1", operand1, data, op1), reverse1)
    if op0.kind == "bitvec":
        write_bits(dst, values)
    else:
        write("tensor_scalar", dst, values)


_REDUCTIONS = ("add", "multiply", "maximum", "minimum")


def tensor_scalar_reduce(
    dst,
    data,
    op0,
    operand0,
    reduce_op,
    reduce_res=None,
    reverse0=False,
    reduce_cmd=reduce_cmd.reset_reduce,
    reduce_init=None,
    reduce_res_negate=False,
    name=None,
):
    begin("tensor_scalar_reduce", dst=dst, data=data)
    in_buffers("tensor_scalar_reduce", ON_CHIP, dst=dst, data=data)
    same_layout("tensor_scalar_reduce", dst, data=data)
    check(op0.kind == "arithmetic", f"tensor_scalar_reduce: op0 is {op0}; accepted are arithmetic operators")
    check(
        reduce_op.name in _REDUCTIONS,
        f"tensor_scalar_reduce: reduce_op is {reduce_op}; accepted are {', '.join(_REDUCTIONS)}",
    )
    check(
        not reverse0 and not reduce_res_negate, "tensor_scalar_reduce: reverse0 and reduce_res_negate are not supported"
    )
    check(
        reduce_cmd is _commands.reset_reduce and reduce_init is None and reduce_res is not None,
        "tensor_scalar_reduce: accumulators kept from one instruction to another are not simulated; accepted is reset_reduce "
        "with a reduce_res",
    )
    values = _step(op0, as_float32(data), _operand("tensor_scalar_reduce", "operand0", operand0, data, op0), False)
    write("tensor_scalar_reduce", dst, values)
    # The page reduces dst: what a narrower dst rounded, or overflowed, is what is reduced.
    _write_reduced("tensor_scalar_reduce", reduce_res, reduce_op.reduction(as_float32(dst)))


def _write_reduced(name, reduce_res, values):
    in_buffers(name, ON_CHIP, reduce_res=reduce_res)
    check(
        reduce_res.shape == (values.shape[0], 1) and reduce_res.dtype in FLOATS,
        f"{name}: reduce_res has shape {reduce_res.shape} and dtype {reduce_res.dtype}; accepted is a float "
        f"({values.shape[0]}, 1)",
    )
    write(name, reduce_res, values)


# Functions of Scalar Engine that it computes exactly (table "Supported Activation Functions by NKI ISA"), valid on [-inf, inf].
_ACTIVATIONS = ("copy", "relu", "square")


def activation(
    dst,
    op,
    data,
    bias=None,
    scale=1.0,
    reduce_op=None,
    reduce_res=None,
    reduce_cmd=reduce_cmd.idle,
    name=None,
):
    """Scalar Engine: dst = op(data * scale + bias), with an optional sum along the free dimensions."""
    begin("activation", dst=dst, data=data)
    in_buffers("activation", ON_CHIP, dst=dst, data=data)
    same_layout("activation", dst, data=data)
    check(op.name in _ACTIVATIONS, f"activation: op is {op}; simulated are {', '.join(_ACTIVATIONS)}")
    values = as_float32(data) * _activation_operand("scale", scale, data)
    if bias is not None:
        values = values + _activation_operand("bias", bias, data)
    # NaN is outside the range that the table calls valid, so its result is unspecified: zero hides it soonest.
    values = torch.where(values.isnan(), torch.zeros(()), op.function(values, None))
    write("activation", dst, values)
    if reduce_res is None:
        check(reduce_op is None and reduce_cmd is _commands.idle, "activation: a reduction without a reduce_res")
        return
    check(
        reduce_op is nl.add and reduce_cmd is _commands.reset_reduce,
        f"activation: reduce_op is {reduce_op} and reduce_cmd {reduce_cmd.name}; simulated are nl.add and reset_reduce",
    )
    _write_reduced("activation", reduce_res, values.sum(-1))


def _activation_operand(argument, operand, data):
    if isinstance(operand, (int, float)):
        return operand
    in_buffers("activation", ON_CHIP, **{argument: operand})
    check(
        operand.shape == (data.shape[0], 1),
        f"activation: {argument} has shape {operand.shape}; accepted is {(data.shape[0], 1)}",
    )
    check(
        argument == "bias" or operand.dtype == "float32",
        f"activation: scale has dtype {operand.dtype}; accepted is float32",
    )
    return as_float32(operand)


def scalar_tensor_tensor(dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, name=None):
    begin("scalar_tensor_tensor", dst=dst, data=data, operand1=operand1)
    in_buffers("scalar_tensor_tensor", ON_CHIP, dst=dst, data=data, operand1=operand1)
    same_layout("scalar_tensor_tensor", dst, data=data, operand1=operand1)
    for op in (op0, op1):
        check(op.kind == "arithmetic", f"scalar_tensor_tensor: operator is {op}; accepted are arithmetic operators")
    check(
        not (data.buffer == operand1.buffer == "psum"),
        "scalar_tensor_tensor: data and operand1 are both in PSUM; accepted is one of them",
    )
    first = _step(op0, as_float32(data), _operand("scalar_tensor_tensor", "operand0", operand0, data, op0), reverse0)
    write("scalar_tensor_tensor", dst, _step(op1, first, as_float32(operand1), reverse1))


def tensor_reduce(dst, op, data, axis, negate=False, keepdims=False, name=None):
    begin("tensor_reduce", dst=dst, data=data)
    in_buffers("tensor_reduce", ON_CHIP, dst=dst, data=data)
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    check(
        0 not in axes and axes == tuple(range(data.ndim - len(axes), data.ndim)),
        f"tensor_reduce: axis is {axis}; accepted are the last free dimensions of {data.shape}",
    )
    check(op.reduction is not None, f"tensor_reduce: op is {op}; accepted are reduction operators")
    kept = data.shape[: data.ndim - len(axes)]
    check(
        dst.shape[0] == data.shape[0] and math.prod(dst.shape) == math.prod(kept),
        f"tensor_reduce: dst has shape {dst.shape}; accepted are {math.prod(kept[1:])} elements in {data.shape[0]} partitions",
    )
    if op.kind == "bitvec":
        _check_bitvec("tensor_reduce", dst, data)
        check(not negate, "tensor_reduce: negate with a bitvec operator; accepted with arithmetic operators")
        write_bits(dst, op.reduction(bits(data).reshape(*kept, -1)))
        return
    values = op.reduction(data.elements().to(torch.float32).reshape(*kept, -1))
    write("tensor_reduce", dst, -values if negate else values)


def _affine(name, dst, pattern, offset, channel_multiplier):
    """offset + partition * channel_multiplier + sum of steps, as int64 [partitions, elements]."""
    check(1 <= len(pattern) <= 4, f"{name}: pattern has {len(pattern)} dimensions; accepted are 1 to 4")
    check(
        math.prod(num for _, num in pattern) == math.prod(dst.shape[1:]),
        f"{name}: pattern {pattern} for dst of shape {dst.shape}; accepted is one value an element of a partition",
    )
    values = torch.zeros(1, dtype=torch.int64)
    for step, num in pattern:
        values = (values.unsqueeze(-1) + torch.arange(num) * step).reshape(-1)
    return offset + torch.arange(dst.shape[0]).unsqueeze(1) * channel_multiplier + values


def iota(dst, pattern, offset=0, channel_multiplier=0, name=None):
    begin("iota", dst=dst)
    in_buffers("iota", ("sbuf",), dst=dst)
    values = _affine("iota", dst, pattern, offset, channel_multiplier)
    if dst.dtype in FLOATS:
        values = values.to(torch.float32)
    write("iota", dst, values)


def affine_select(dst, pattern, channel_multiplier, on_true_tile, on_false_value, cmp_op=_equal, offset=0, name=None):
    begin("affine_select", dst=dst, on_true_tile=on_true_tile)
    in_buffers("affine_select", ("sbuf",), dst=dst, on_true_tile=on_true_tile)
    same_layout("affine_select", dst, on_true_tile=on_true_tile)
    check(
        isinstance(on_false_value, float), f"affine_select: on_false_value is {on_false_value!r}; accepted is a float32"
    )
    chosen = cmp_op.function(_affine("affine_select", dst, pattern, offset, channel_multiplier), 0) != 0
    same = dst.dtype == on_true_tile.dtype
    values = flat(on_true_tile) if same and dst.dtype in FLOATS else as_float32(on_true_tile)
    write("affine_select", dst, torch.where(chosen, values, torch.tensor(on_false_value, dtype=values.dtype)))
