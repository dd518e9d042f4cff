"""nki.isa: enumerations and instructions. Signatures as documented: names, order, defaults.

dma       copies between HBM and SBUF, gather, scatter, accumulate
compute   Vector, Scalar and GpSimd Engine
matmul    Tensor Engine
registers scalars of the device
"""

from ..errors import NkiValidationError
from ..tensor import VirtualRegister
from ..trace import instruction
from . import compute, dma, matmul, registers
from .enums import dge_mode, engine, matmul_perf_mode, nc_version, oob_mode, reduce_cmd
from .registers import core_barrier, get_nc_version, register_alloc, register_load, register_move

activation = instruction(compute.activation)
affine_select = instruction(compute.affine_select)
dma_compute = instruction(dma.dma_compute)
dma_copy = instruction(dma.dma_copy)
iota = instruction(compute.iota)
memset = instruction(compute.memset)
nc_matmul = instruction(matmul.nc_matmul)
nc_transpose = instruction(matmul.nc_transpose)
register_store = instruction(registers.register_store)
scalar_tensor_tensor = instruction(compute.scalar_tensor_tensor)
tensor_copy = instruction(compute.tensor_copy)
tensor_copy_predicated = instruction(compute.tensor_copy_predicated)
tensor_reduce = instruction(compute.tensor_reduce)
tensor_scalar = instruction(compute.tensor_scalar)
tensor_scalar_reduce = instruction(compute.tensor_scalar_reduce)
tensor_tensor = instruction(compute.tensor_tensor)

__all__ = [
    "NkiValidationError",
    "VirtualRegister",
    "activation",
    "affine_select",
    "core_barrier",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "engine",
    "get_nc_version",
    "iota",
    "matmul_perf_mode",
    "memset",
    "nc_matmul",
    "nc_transpose",
    "nc_version",
    "oob_mode",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "scalar_tensor_tensor",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_reduce",
    "tensor_tensor",
]
