import enum

import torch

from .language import NkiTensor, _state


class oob_mode(enum.Enum):
    error = 0
    skip = 1


def _wr(dst, v):
    dst.torch().copy_(
        v if v.dtype == dst.dtype or v.dtype.is_floating_point == False or dst.dtype.is_floating_point else v
    )


def _arith(x):
    return x.float()


def dma_copy(dst, src, priority=None, oob_mode=oob_mode.error, dge_mode=None, engine=None, name=None):
    skip = oob_mode.name == "skip"

    def rows(t):
        idx, unit = t.ind
        idx = idx.long()
        n = t.st.numel() // unit
        bad = (idx < 0) | (idx >= t.base_shape[0])
        if bad.any() and not skip:
            raise IndexError(f"oob {idx[bad][0]}")
        return idx, unit, ~bad

    if src.ind is not None:
        idx, unit, ok = rows(src)
        assert src.shape[0] == idx.numel()
        base = src.st.as_strided(
            (src.base_shape[0],) + tuple(src.shape[1:]),
            (unit,) + tuple(src.strides[1:]),
            src.st.storage_offset() + src.offset,
        )
        d = dst.torch()
        if ok.all():
            d.copy_(base[idx])
        else:
            d[ok] = base[idx[ok]].to(d.dtype)
    elif dst.ind is not None:
        idx, unit, ok = rows(dst)
        base = dst.st.as_strided(
            (dst.base_shape[0],) + tuple(dst.shape[1:]),
            (unit,) + tuple(dst.strides[1:]),
            dst.st.storage_offset() + dst.offset,
        )
        order = torch.randperm(idx.numel(), generator=_state.gen)
        s = src.torch()
        for o in [order] if len(idx[ok].unique()) == int(ok.sum()) else [order[i : i + 1] for i in range(len(order))]:
            o = o[ok[o]]
            base[idx[o]] = s[o].to(base.dtype)
    else:
        d, s = dst.torch(), src.torch()
        d.copy_(s.reshape(d.shape))


def memset(dst, value, engine=None, name=None):
    dst.torch().fill_(value)


def tensor_copy(dst, src, engine=None, name=None):
    dst.torch().copy_(src.torch())


def _op(op, a, b):
    if op.bit:
        return op(a, b)
    return op(a.float(), b if not isinstance(b, torch.Tensor) else b.float())


def tensor_tensor(dst, data1, data2, op, engine=None, name=None):
    a, b = data1.torch(), data2.torch()
    if a.dtype == b.dtype == dst.dtype == torch.int32 and not op.bit:
        dst.torch().copy_(op(a, b))
        return
    if op.bit:
        assert a.dtype == b.dtype == dst.dtype
    dst.torch().copy_(_op(op, a, b))


def tensor_scalar(
    dst, data, op0, operand0, reverse0=False, op1=None, operand1=None, reverse1=False, engine=None, name=None
):
    a = data.torch()
    f = lambda o: o.torch() if isinstance(o, NkiTensor) else o
    r = _op(op0, a, f(operand0))
    if op1 is not None:
        assert op0.bit == op1.bit
        r = _op(op1, r, f(operand1))
    dst.torch().copy_(r)


def scalar_tensor_tensor(dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, name=None):
    r = _op(op0, data.torch(), operand0)
    dst.torch().copy_(_op(op1, r, operand1.torch()))


def tensor_reduce(dst, op, data, axis, negate=False, keepdims=False, name=None):
    a = data.torch()
    if op.__name__ == "bitwise_or":
        r = a[:, 0].clone()
        for j in range(1, a.shape[1]):
            r |= a[:, j]
    elif op.__name__ == "maximum":
        r = a.float().amax(1)
    else:
        r = a.float().sum(1)
    dst.torch().copy_(r.unsqueeze(1))


def affine_select(dst, pattern, channel_multiplier, on_true_tile, on_false_value, cmp_op=None, offset=0, name=None):
    ((step, n),) = pattern
    p = dst.shape[0]
    v = offset + torch.arange(p).unsqueeze(1) * channel_multiplier + torch.arange(n) * step
    dst.torch().copy_(torch.where(cmp_op(v.float(), 0.0) != 0, on_true_tile.torch(), on_false_value))


def nc_matmul(
    dst,
    stationary,
    moving,
    is_stationary_onezero=False,
    is_moving_onezero=False,
    is_transpose=False,
    accumulate=None,
    tile_position=(),
    tile_size=(),
    perf_mode=None,
    name=None,
):
    assert (stationary.dtype == torch.float32) == (moving.dtype == torch.float32)
    dst.torch().copy_(stationary.torch().float().t() @ moving.torch().float())


def iota(dst, pattern, offset=0, channel_multiplier=0, name=None):
    ((step, n),) = pattern
    p = dst.shape[0]
    dst.torch().copy_(offset + torch.arange(p).unsqueeze(1) * channel_multiplier + torch.arange(n) * step)
