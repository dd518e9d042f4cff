"""Stand-in for torch_neuronx: device neuron, launches of NKI kernels eagerly and in graphs, and what ran where.

Interface after the torch-neuronx documentation ("How to work with NKI kernels from torch-neuronx", SDK 2.33).
"""

from torch_neuron_scatter_stub import device as _device  # noqa: F401  (registers device neuron, as importing the original does)

from . import neuron_dynamo_backend  # noqa: F401  (registers the backend, as the original's entry point does)
from .nki_hop import nki_op, wrap_nki
from .op_tracking import clear_op_tracking, get_executed_ops, get_fallback_ops

__version__ = "2.13.3.0+standin"

__all__ = ["clear_op_tracking", "get_executed_ops", "get_fallback_ops", "nki_op", "wrap_nki"]
