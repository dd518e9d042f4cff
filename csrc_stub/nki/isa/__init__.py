"""nki.isa: enumerations and instructions. Signatures as documented: names, order, defaults.

dma       copies between HBM and SBUF, gather, scatter, accumulate
compute   Vector, Scalar and GpSimd Engine
matmul    Tensor Engine
registers scalars of the device
"""

from ..errors import NkiValidationError
from ..tensor import VirtualRegister
from .compute import (
    affine_select,
    iota,
    memset,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_copy_predicated,
    tensor_reduce,
    tensor_scalar,
    tensor_tensor,
)
from .dma import dma_compute, dma_copy
from .enums import dge_mode, engine, matmul_perf_mode, nc_version, oob_mode, reduce_cmd
from .matmul import nc_matmul, nc_transpose
from .registers import core_barrier, get_nc_version, register_alloc, register_load, register_move, register_store

__all__ = [
    "NkiValidationError",
    "VirtualRegister",
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
    "tensor_tensor",
]
