"""Stand-in for TorchNeuron's backend of torch.compile: `torch.compile(model, backend="neuron")`.

backend         registers it; AOTAutograd with the backend's decompositions
decompositions  what operators become before they are lowered
executor        takes a graph of aten operators and kernel nodes, refuses any other, and runs it on the stand-in device
"""

from .backend import neuron_backend

__all__ = ["neuron_backend"]
