"""Storage and views: `NkiTensor` after its API page and the "NKI Access Patterns" deep dive.

A view is (storage, shape, strides, offset, dtype) in elements of its dtype. On-chip tensors keep the partition dimension at 0; a
step there moves by all elements of a partition. Fresh memory is NaN in float dtypes and 0x7B bytes in integers, which no row
number reaches.
"""

import math

import torch

from . import launch
from .errors import NkiValidationError, check

TORCH = {
    "bool_": torch.uint8,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "uint16": torch.uint16,
    "int16": torch.int16,
    "uint32": torch.uint32,
    "int32": torch.int32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
NAMES = {dtype: name for name, dtype in TORCH.items() if name != "bool_"}
NAMES[torch.bool] = "bool_"
FLOATS = ("float16", "bfloat16", "float32")
ON_CHIP = ("sbuf", "psum")
PARTITIONS = 128
FRESH_BYTE = 0x7B


def itemsize(dtype):
    return TORCH[dtype].itemsize


class Storage:
    """Memory of one allocation. `from_matmul` says, for PSUM, which elements a matmul wrote last.

    `place` is the identity of the memory: a tensor that the body of a hardware loop declares has the same in every iteration.
    """

    def __init__(self, flat, shape, dtype, buffer, reused=None):
        self.flat, self.shape, self.dtype, self.buffer = flat, tuple(shape), dtype, buffer
        self.from_matmul = torch.zeros(flat.numel(), dtype=torch.int8) if buffer == "psum" else None
        self.place = object()
        if reused is not None:
            self.flat, self.place = reused.flat, reused.place
        self.launch = None
        if buffer in ON_CHIP:
            self.bytes = math.prod(shape[1:]) * itemsize(dtype)
            limit = launch.SBUF_BYTES if buffer == "sbuf" else launch.PSUM_BYTES
            state = launch.current()
            if state.in_use[buffer] + self.bytes > limit:
                trace.settle_all()
            in_use = state.in_use[buffer] + self.bytes
            check(
                in_use <= limit,
                f"{buffer} would hold {in_use} bytes a partition with this tensor of shape {self.shape} and dtype {dtype}; "
                f"accepted are up to {limit}",
            )
            state.in_use[buffer] = in_use
            self.launch = state

    def __del__(self):
        if getattr(self, "launch", None) is not None:
            self.launch.in_use[self.buffer] -= self.bytes


def allocate(shape, dtype, buffer):
    """Fresh memory (page nki.language.ndarray)."""
    check(dtype in TORCH, f"ndarray: dtype is {dtype!r}; accepted are {', '.join(TORCH)}")
    shape = tuple(shape)
    check(
        len(shape) >= 1 and all(isinstance(size, int) and size >= 1 for size in shape),
        f"ndarray: shape is {shape}; accepted are positive integers",
    )
    if buffer in ON_CHIP:
        check(len(shape) >= 2, f"ndarray: shape is {shape}; accepted in {buffer} are two dimensions and more")
        check(
            shape[0] <= PARTITIONS,
            f"ndarray: shape is {shape}; accepted in {buffer} are up to {PARTITIONS} partitions in dimension 0",
        )
    state = launch.current()
    if buffer == "shared_hbm":
        position, state.shared_seen = state.shared_seen, state.shared_seen + 1
        if position < len(state.shared):
            return NkiTensor(shape, dtype, state.shared[position], buffer)
    reused = state.reusable(shape, dtype, buffer)
    if reused is None:
        flat = torch.empty(math.prod(shape), dtype=TORCH[dtype])
        if dtype in FLOATS:
            flat.fill_(float("nan"))
        else:
            flat.view(torch.uint8).fill_(FRESH_BYTE)
        storage = Storage(flat, shape, dtype, buffer)
    else:
        storage = Storage(reused.flat, shape, dtype, buffer, reused)
    state.remember(storage)
    if buffer == "shared_hbm":
        state.shared.append(storage)
    return NkiTensor(shape, dtype, storage, buffer)


def from_caller(name, value):
    """A kernel argument: tensors become HBM tensors over the caller's memory, other values stay as they are."""
    if hasattr(value, "__array_interface__"):
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        return value
    check(value.device.type == "cpu", f"kernel argument {name} is on {value.device}; accepted is host-visible memory")
    check(
        value.is_contiguous(), f"kernel argument {name} has strides {value.stride()}; accepted are contiguous tensors"
    )
    check(value.dtype in NAMES, f"kernel argument {name} has dtype {value.dtype}; accepted are {', '.join(TORCH)}")
    dtype = NAMES[value.dtype]
    flat = value.detach().view(-1)
    flat = flat.view(torch.uint8) if value.dtype == torch.bool else flat
    return NkiTensor(tuple(value.shape), dtype, Storage(flat, value.shape, dtype, "hbm"), "hbm")


def to_caller(result, originals):
    """A kernel's results: an argument comes back as the caller's object, a new HBM tensor as a torch tensor."""
    if isinstance(result, (tuple, list)):
        return tuple(to_caller(item, originals) for item in result)
    if not isinstance(result, NkiTensor):
        return result
    check(result.buffer not in ON_CHIP, f"a kernel returns a tensor in {result.buffer}; accepted are tensors in HBM")
    if result.storage in originals:
        return originals[result.storage]
    return result.elements().clone()


class NkiTensor:
    """A view of storage (page NkiTensor). Views share storage; nothing is copied before an instruction runs."""

    def __init__(
        self, shape, dtype, storage, buffer="sbuf", name="", strides=None, offset=0, indirect=None, dynamic=False
    ):
        self.shape = tuple(shape)
        self.dtype, self.storage, self.buffer, self.name = dtype, storage, buffer, name
        self.strides = tuple(strides) if strides is not None else _contiguous(self.shape)
        self.offset = offset
        self._indirect = indirect
        self.dynamic = dynamic

    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    is_on_chip = property(lambda self: self.buffer in ON_CHIP)

    def __repr__(self):
        return f"NkiTensor(shape={self.shape}, dtype={self.dtype}, buffer={self.buffer})"

    def is_indirect(self):
        return self._indirect is not None

    def is_contiguous(self):
        first = 1 if self.is_on_chip else 0
        expected = _contiguous(self.shape)
        return all(n == 1 or s == e for n, s, e in list(zip(self.shape, self.strides, expected, strict=True))[first:])

    def get_pattern(self):
        return [[stride, size] for stride, size in zip(self.strides, self.shape, strict=True)]

    def _row_elements(self):
        """Elements of one partition, in this view's dtype."""
        return math.prod(self.storage.shape[1:]) * itemsize(self.storage.dtype) // itemsize(self.dtype)

    def _derive(self, shape, strides, offset, dtype=None, indirect=None, dynamic=False):
        view = NkiTensor(
            shape,
            dtype or self.dtype,
            self.storage,
            self.buffer,
            self.name,
            strides,
            offset,
            indirect or self._indirect,
            dynamic or self.dynamic,
        )
        view._check_bounds()
        return view

    def _check_bounds(self):
        """Static bounds; the partition rule "the access of every partition is the same" for on-chip tensors."""
        check(self.ndim <= 5, f"a view of {self.ndim} dimensions; accepted are up to 5 (NKI Language Guide)")
        total = self.storage.flat.numel() * itemsize(self.storage.dtype) // itemsize(self.dtype)
        span = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        if self.is_on_chip:
            row = self._row_elements()
            check(
                self.shape[0] == 1 or self.strides[0] == row,
                f"partition step is {self.strides[0]}; accepted is {row}, the elements of a partition (NKI Access Patterns)",
            )
            free = sum((n - 1) * s for n, s in list(zip(self.shape, self.strides, strict=True))[1:])
            check(
                self.offset % row + free < row and self.offset // row + self.shape[0] <= self.storage.shape[0],
                f"access of shape {self.shape} at offset {self.offset} leaves {self.buffer} storage {self.storage.shape}",
                IndexError,
            )
        elif self._indirect is None:
            check(
                self.offset >= 0 and self.offset + span < max(total, 1),
                f"access of shape {self.shape} at offset {self.offset} leaves HBM tensor {self.storage.shape}",
                IndexError,
            )

    def elements(self):
        """The view as a torch tensor over the storage; only for views that are not indirect."""
        flat = self.storage.flat
        if self.dtype != self.storage.dtype:
            flat = flat.view(TORCH[self.dtype])
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.offset)

    def __getitem__(self, key):
        key = key if isinstance(key, tuple) else (key,)
        if Ellipsis in key:
            at = key.index(Ellipsis)
            key = key[:at] + (slice(None),) * (self.ndim - len(key) + 1) + key[at + 1 :]
        check(len(key) <= self.ndim, f"{len(key)} indices for a tensor of {self.ndim} dimensions")
        key = key + (slice(None),) * (self.ndim - len(key))
        shape, strides, offset, dropped = [], [], self.offset, []
        for axis, (item, size, stride) in enumerate(zip(key, self.shape, self.strides, strict=True)):
            if self._indirect is not None and axis == 0:
                check(item == slice(None), "the indirect dimension of a view cannot be sliced again")
            if isinstance(item, DynamicSlice):
                item = slice(item.start, item.start + item.size)
            if isinstance(item, slice):
                start, stop, step = item.start or 0, size if item.stop is None else item.stop, item.step or 1
                start, stop = start + size * (start < 0), stop + size * (stop < 0)
                check(
                    0 <= start < stop <= size and step >= 1,
                    f"slice {item} of dimension {axis}; accepted is 0 <= start < stop <= {size}",
                    IndexError,
                )
                shape.append(len(range(start, stop, step)))
                strides.append(stride * step)
                offset += start * stride
                continue
            check(isinstance(item, int), f"index {item!r}; accepted are int, slice, Ellipsis and nl.ds")
            check(-size <= item < size, f"index {item} of dimension {axis} of size {size}", IndexError)
            offset += (item % size) * stride
            if self.is_on_chip and axis == 0:
                shape.append(1)
                strides.append(stride)
            else:
                dropped.append(axis)
        minimum = 2 if self.is_on_chip else 1
        while len(shape) < minimum:
            shape.append(1)
            strides.append(1)
        return self._derive(shape, strides, offset)

    def slice(self, dim, start, end, step=1):
        return self[tuple(slice(start, end, step) if axis == dim else slice(None) for axis in range(self.ndim))]

    def ap(self, pattern, offset=None, scalar_offset=None, vector_offset=None, indirect_dim=0, dtype=None):
        """An explicit access pattern over the storage, ignoring this view's shape and strides (NKI Access Patterns)."""
        pattern = [list(pair) for pair in pattern]
        check(
            all(len(pair) == 2 and all(isinstance(x, int) for x in pair) and pair[1] >= 1 for pair in pattern),
            f"ap: pattern is {pattern}; accepted are [step, num] pairs of compile-time integers",
        )
        check(scalar_offset is None or vector_offset is None, "ap: scalar_offset and vector_offset exclude each other")
        check(
            offset is None or isinstance(offset, int), f"ap: offset is {offset!r}; accepted is a compile-time integer"
        )
        strides, shape = [pair[0] for pair in pattern], [pair[1] for pair in pattern]
        offset = self.offset if offset is None else offset
        if scalar_offset is None and vector_offset is None:
            return self._derive(shape, strides, offset, dtype)
        check(dtype in (None, self.storage.dtype), "ap: an indirect access has the dtype of its tensor")
        base = self.storage.shape
        check(0 <= indirect_dim < len(base), f"ap: indirect_dim is {indirect_dim}; accepted is a dimension of {base}")
        unit = math.prod(base[indirect_dim + 1 :])
        if scalar_offset is not None:
            check(not self.is_on_chip or indirect_dim > 0, "ap: indirect_dim 0 of an on-chip tensor is its partitions")
            return self._derive(shape, strides, offset + scalar_value(scalar_offset) * unit, dtype, dynamic=True)
        check(not self.is_on_chip, f"ap: vector_offset on a tensor in {self.buffer}; accepted are tensors in HBM")
        check(indirect_dim == 0, f"ap: indirect_dim is {indirect_dim}; accepted with vector_offset is 0")
        check(
            vector_offset.buffer == "sbuf" and vector_offset.shape == (shape[0], 1),
            f"ap: vector_offset has shape {vector_offset.shape} in {vector_offset.buffer}; accepted is {(shape[0], 1)} in sbuf",
        )
        check(
            vector_offset.dtype in ("int32", "uint32"),
            f"ap: vector_offset has dtype {vector_offset.dtype}; accepted are int32 and uint32",
        )
        inner = sum((n - 1) * s for n, s in zip(shape[1:], strides[1:], strict=True))
        check(
            offset >= 0 and offset + inner < unit,
            f"ap: columns {offset} to {offset + inner} leave a row of {unit}",
            IndexError,
        )
        return self._derive(shape, strides, offset, dtype, indirect=(vector_offset, unit, base[0]))

    def vector_select(self, dim, vector_offset):
        check(dim == 0, f"vector_select: dim is {dim}; accepted is 0")
        pattern = [
            [self.strides[0], vector_offset.shape[0]],
            *[[s, n] for s, n in zip(self.strides, self.shape, strict=True)][1:],
        ]
        return self.ap(pattern, vector_offset=vector_offset)

    def select(self, dim, index):
        if isinstance(index, int):
            return self[tuple(index if axis == dim else slice(None) for axis in range(self.ndim))]
        pattern = [pair for axis, pair in enumerate(self.get_pattern()) if axis != dim]
        return self.ap(pattern, scalar_offset=index, indirect_dim=dim)

    def _free(self, dim, what):
        check(not (self.is_on_chip and dim == 0), f"{what}: dim 0 of an on-chip tensor is its partitions")

    def broadcast(self, dim, size):
        self._free(dim, "broadcast")
        check(self.shape[dim] == 1, f"broadcast: dimension {dim} has size {self.shape[dim]}; accepted is 1")
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = size, 0
        return self._derive(shape, strides, self.offset)

    def expand_dim(self, dim):
        self._free(dim, "expand_dim")
        return self._derive(
            (*self.shape[:dim], 1, *self.shape[dim:]), (*self.strides[:dim], 1, *self.strides[dim:]), self.offset
        )

    def squeeze_dim(self, dim):
        self._free(dim, "squeeze_dim")
        check(self.shape[dim] == 1, f"squeeze_dim: dimension {dim} has size {self.shape[dim]}; accepted is 1")
        keep = [axis for axis in range(self.ndim) if axis != dim]
        return self._derive([self.shape[a] for a in keep], [self.strides[a] for a in keep], self.offset)

    def permute(self, dims):
        check(sorted(dims) == list(range(self.ndim)), f"permute: dims is {dims}; accepted is a permutation")
        check(not (self.is_on_chip or self._indirect) or dims[0] == 0, "permute: the partition dimension stays first")
        return self._derive([self.shape[d] for d in dims], [self.strides[d] for d in dims], self.offset)

    def reshape(self, shape):
        check(
            math.prod(shape) == self.size,
            f"reshape: {self.shape} to {tuple(shape)}; accepted is the same number of elements",
        )
        check(self.is_contiguous(), "reshape: accepted is a contiguous view")
        if self.is_on_chip:
            check(shape[0] == self.shape[0], "reshape: the partition dimension is kept")
            return self._derive(shape, (self.strides[0], *_contiguous(shape)[1:]), self.offset)
        return self._derive(shape, _contiguous(shape), self.offset)

    def view(self, dtype):
        """Reinterpret the bits; the last dimension is scaled."""
        check(dtype in TORCH, f"view: dtype is {dtype!r}; accepted are {', '.join(TORCH)}")
        check(self._indirect is None, "view: not after a dynamic select")
        check(self.strides[-1] == 1 or self.shape[-1] == 1, "view: the last dimension must be contiguous")
        old, new = itemsize(self.dtype), itemsize(dtype)
        check(
            self.shape[-1] * old % new == 0,
            f"view: {self.shape[-1]} elements of {self.dtype} are no whole number of {dtype}",
        )

        def scaled(count):
            check(count * old % new == 0, "view: strides and offset must be whole numbers of the new dtype")
            return count * old // new

        shape = (*self.shape[:-1], self.shape[-1] * old // new)
        return self._derive(shape, (*(scaled(s) for s in self.strides[:-1]), 1), scaled(self.offset), dtype)


class DynamicSlice:
    """nl.ds(start, size)"""

    def __init__(self, start, size):
        self.start, self.size = start, size


class VirtualRegister:
    """A register of the device. Its value is not known while a kernel is traced, so Python may not look at it.

    `after` says which instructions gave its value (`trace.settle`).
    """

    def __init__(self, value=None, frozen=False):
        self._value, self._frozen = value, frozen
        self.after = 0

    def _refuse(self, *_):
        raise TypeError("the value of a VirtualRegister is not known while the kernel is traced")

    __bool__ = __int__ = __index__ = __add__ = __radd__ = __mul__ = __rmul__ = __lt__ = __gt__ = __sub__ = _refuse


def scalar_value(scalar):
    """The value of a register or a (1, 1) integer tile; only the simulator may read it."""
    if isinstance(scalar, VirtualRegister):
        check(scalar._value is not None, "a VirtualRegister is read before it was written")
        return scalar._value
    check(
        isinstance(scalar, NkiTensor),
        f"scalar_offset is {type(scalar).__name__}; accepted are a register and a (1, 1) tile",
    )
    check(
        scalar.shape == (1, 1) and scalar.buffer == "sbuf",
        f"scalar_offset has shape {scalar.shape}; accepted is (1, 1) in sbuf",
    )
    check(scalar.dtype in ("int32", "uint32"), f"scalar_offset has dtype {scalar.dtype}; accepted are int32 and uint32")
    trace.settle(scalar)
    return int(scalar.elements().item())


def _contiguous(shape):
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


from . import trace  # noqa: E402  (trace reads views; a view's dynamic offset asks trace to run what it depends on)

__all__ = ["DynamicSlice", "NkiTensor", "NkiValidationError", "VirtualRegister", "allocate", "scalar_value"]
