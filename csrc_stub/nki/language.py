import math
import threading

import torch


class _S(threading.local):
    pid = 0
    n = 1

    def __init__(self):
        self.gen = torch.Generator().manual_seed(0)


_state = _S()
float32, bfloat16, float16, int32, int16, uint8 = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int16,
    torch.uint8,
)
sbuf, psum, hbm, shared_hbm, private_hbm = "sbuf", "psum", "hbm", "shared_hbm", "private_hbm"


class tile_size:
    pmax = 128
    psum_bank_fmax = 512


class Reg:
    def __init__(s, v):
        s._v = v


class NkiTensor:
    def __init__(s, st, shape, strides, offset, dtype, buffer, base_shape=None, ind=None):
        s.st, s.shape, s.strides, s.offset, s.dtype, s.buffer = st, tuple(shape), tuple(strides), offset, dtype, buffer
        s.base_shape = tuple(base_shape or shape)
        s.ind = ind

    @staticmethod
    def _hbm(t):
        assert t.is_contiguous()
        return NkiTensor(t.view(-1) if t.numel() else t.reshape(-1), t.shape, t.stride(), 0, t.dtype, "hbm")

    def ap(s, pattern, offset=None, scalar_offset=None, vector_offset=None, indirect_dim=0, dtype=None):
        off = s.offset if offset is None else offset
        shape = [p[1] for p in pattern]
        strides = [p[0] for p in pattern]
        unit = math.prod(s.base_shape[indirect_dim + 1 :])
        if scalar_offset is not None:
            off += scalar_offset._v * unit
        ind = None
        if vector_offset is not None:
            ind = (vector_offset.torch().reshape(-1), unit)
        return NkiTensor(s.st, shape, strides, off, s.dtype, s.buffer, s.base_shape, ind)

    def torch(s):
        assert s.ind is None
        if s.shape and s.offset + sum((n - 1) * st for n, st in zip(s.shape, s.strides)) >= s.st.numel():
            raise IndexError("static oob")
        return s.st.as_strided(s.shape, s.strides, s.st.storage_offset() + s.offset)

    def view(s, dtype):
        r = s.dtype.itemsize
        assert dtype.itemsize == r
        return NkiTensor(s.st.view(dtype), s.shape, s.strides, s.offset, dtype, s.buffer)

    def broadcast(s, dim, size):
        assert s.shape[dim] == 1 and dim != 0
        sh = list(s.shape)
        sh[dim] = size
        st = list(s.strides)
        st[dim] = 0
        return NkiTensor(s.st, sh, st, s.offset, s.dtype, s.buffer)

    def __getitem__(s, key):
        if not isinstance(key, tuple):
            key = (key,)
        sh, st, off = [], [], s.offset
        for k, n, str_ in zip(key, s.shape, s.strides):
            a, b, c = k.indices(n)
            assert c == 1 and b > a
            off += a * str_
            sh.append(b - a)
            st.append(str_)
        return NkiTensor(s.st, sh, st, off, s.dtype, s.buffer)


def ndarray(shape, dtype, buffer=sbuf, name="", address=None):
    n = math.prod(shape)
    assert shape[0] <= 128 or "hbm" in buffer
    t = torch.full((n,), float("nan"), dtype=dtype) if dtype.is_floating_point else torch.full((n,), 4, dtype=dtype)
    st = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return NkiTensor(t, shape, st, 0, dtype, buffer)


def fori_loop(lo, hi, body, step=1):
    for i in range(lo, hi, step):
        body(Reg(i))


def program_id(axis=0):
    return _state.pid


def num_programs(axes=0):
    return _state.n


def _f(name, fn, bit=False):
    def op(*a):
        return fn(*a)

    op.__name__ = name
    op.bit = bit
    globals()[name] = op


_f("add", torch.add)
_f("subtract", torch.sub)
_f("multiply", torch.mul)
_f("maximum", torch.maximum)
for n in ("equal", "not_equal", "less", "greater", "less_equal", "greater_equal"):
    t = {
        "equal": torch.eq,
        "not_equal": torch.ne,
        "less": torch.lt,
        "greater": torch.gt,
        "less_equal": torch.le,
        "greater_equal": torch.ge,
    }[n]
    _f(n, (lambda t: lambda a, b: t(a, b).float())(t))
_f("bitwise_and", torch.bitwise_and, True)
_f("bitwise_or", torch.bitwise_or, True)
_f("bitwise_xor", torch.bitwise_xor, True)
