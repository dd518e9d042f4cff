"""Stand-in for torch_neuronx: device neuron, launches of NKI kernels, and what ran where.

Interface after the torch-neuronx documentation ("How to work with NKI kernels from torch-neuronx", SDK 2.33).
"""

from torch_neuron_scatter_stub import device as _device  # noqa: F401  (registers device neuron, as importing the original does)

from .nki_hop import wrap_nki
from .op_tracking import clear_op_tracking, get_executed_ops, get_fallback_ops

__version__ = "2.13.3.0+standin"

__all__ = ["clear_op_tracking", "get_executed_ops", "get_fallback_ops", "wrap_nki"]
