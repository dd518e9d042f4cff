"""One launch: its grid, its seed, its on-chip memory, and the one place through which every instruction passes.

State is per thread, so launches may run side by side. The two programs of a grid of 2 run one after the other, in an order that
the seed decides; a kernel that needs them to meet (`core_barrier`) is refused.
"""

import contextlib
import os
import threading

import torch

SEED_VARIABLE = "NKI_STANDIN_SEED"

# Bytes a partition. PSUM: 8 banks of 2 KiB. SBUF: NeuronCore-v3 has 224 KiB and NeuronCore-v2 192 KiB (Trainium2 architecture
# guide); the smaller, so that a kernel which passes fits both.
SBUF_BYTES = 192 * 1024
PSUM_BYTES = 16 * 1024


class _Current(threading.local):
    launch = None
    generator = None


_current = _Current()


class Kept:
    """A declaration's memory without its claim on on-chip capacity, which ends with the tensor."""

    def __init__(self, storage):
        self.flat, self.shape, self.dtype, self.buffer = storage.flat, storage.shape, storage.dtype, storage.buffer
        self.place = storage.place


class _Loop:
    """A hardware loop that is running: what its body declared in the iteration before, in order."""

    def __init__(self):
        self.declared, self.position, self.iteration = [], 0, 0


class Launch:
    """One program of a launch; `instructions` counts what it executed, by name."""

    def __init__(self, program, programs, generator, shared):
        self.program, self.programs, self.generator = program, programs, generator
        self.in_use = {"sbuf": 0, "psum": 0}
        self.instructions = {}
        self.shared = shared
        self.shared_seen = 0
        self.loops = []

    @contextlib.contextmanager
    def loop(self):
        """A hardware loop; call the yielded function before each iteration."""
        loop = _Loop()

        def start_iteration():
            loop.position = 0
            loop.iteration += 1

        self.loops.append(loop)
        try:
            yield start_iteration
        finally:
            self.loops.pop()

    def repeats(self):
        """Whether this is not the first iteration of a running loop: the program holds its instructions once."""
        return any(loop.iteration > 1 for loop in self.loops)

    def reusable(self, shape, dtype, buffer):
        """What the body of the running loop declared here in an earlier iteration: it is allocated once (NKI Dynamic Loops)."""
        if not self.loops or self.loops[-1].position >= len(self.loops[-1].declared):
            return None
        storage = self.loops[-1].declared[self.loops[-1].position]
        same = (storage.shape, storage.dtype, storage.buffer) == (shape, dtype, buffer)
        return storage if same else None

    def remember(self, storage):
        if not self.loops:
            return
        loop = self.loops[-1]
        kept = Kept(storage)
        loop.declared[loop.position : loop.position + 1] = [kept]
        loop.position += 1


def current():
    if _current.launch is None:
        raise RuntimeError("nki calls belong inside a kernel that nki.jit launched")
    return _current.launch


def generator():
    if _current.generator is None:
        _current.generator = torch.Generator().manual_seed(int(os.environ.get(SEED_VARIABLE, "0")))
    return _current.generator


@contextlib.contextmanager
def seed(value):
    """Use `value` (int) as the seed of this thread's launches inside."""
    before = _current.generator
    _current.generator = torch.Generator().manual_seed(value)
    try:
        yield
    finally:
        _current.generator = before


def record(name):
    """Every instruction passes here before it runs."""
    counts = current().instructions
    counts[name] = counts.get(name, 0) + 1


def run(function, arguments, grid):
    """Run a kernel's programs and hand back its results in the caller's own kind of tensor."""
    from . import trace
    from .tensor import from_caller, to_caller

    wrapped, originals = {}, {}
    for name, value in arguments.items():
        wrapped[name] = from_caller(name, value)
        if wrapped[name] is not value:
            originals[wrapped[name].storage] = value
    programs = grid or 1
    order = torch.randperm(programs, generator=generator()).tolist()
    shared, results = [], {}
    before = _current.launch
    for program in order:
        _current.launch = Launch(program, programs, generator(), shared)
        try:
            results[program] = function(**wrapped)
            trace.finish_program()
        except BaseException:
            trace.drop_program()
            raise
        finally:
            _current.launch = before
    return to_caller(results[0], originals)
