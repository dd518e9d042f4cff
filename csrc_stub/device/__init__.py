"""Loads the C++ device of the stand-in and makes it `torch.neuron`, once a process.

Importing this raises ImportError where the C++ part was not built.
"""

import torch

from . import (
    _C,  # noqa: F401  (importing it registers the backend's operators, guard, hooks and allocator)
    neuron,
)

torch.utils.rename_privateuse1_backend("neuron")
torch._register_device_module("neuron", neuron)
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
