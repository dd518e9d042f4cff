"""Registers and synchronisation (pages nki.isa.register_*, nki.isa.core_barrier)."""

import torch

from .. import launch, trace
from ..errors import check
from ..tensor import VirtualRegister, scalar_value
from .enums import engine, nc_version
from .operands import begin, write


def register_alloc(x=None):
    check(x is None or isinstance(x, int), f"register_alloc: x is {x!r}; accepted are None and a compile-time integer")
    return VirtualRegister(x)


def _writable(name, register):
    check(
        isinstance(register, VirtualRegister) and not register._frozen,
        f"{name}: dst is no register that can be written",
    )


def register_move(dst, src):
    _writable("register_move", dst)
    dst._value = src if isinstance(src, int) else scalar_value(src)


def register_load(dst, src):
    _writable("register_load", dst)
    begin("register_load", src=src)
    check(src.size == 1, f"register_load: src has {src.size} elements; accepted is one")
    dst.after = trace.settle(src)
    dst._value = int(src.elements().reshape(()).item())


def register_store(dst, src):
    begin("register_store", dst=dst)
    check(dst.size == 1, f"register_store: dst has {dst.size} elements; accepted is one")
    write("register_store", dst, torch.full(dst.shape, scalar_value(src), dtype=torch.int64))


def core_barrier(data, cores, engine=engine.gpsimd, name=None):
    check(launch.current().programs == 1, "core_barrier: the two programs of a launch run one after the other here")


def get_nc_version():
    return nc_version.gen3
