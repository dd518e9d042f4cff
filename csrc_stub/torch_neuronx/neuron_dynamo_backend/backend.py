"""The backend's compile function, registered under the name "neuron".

The original is found through the entry point group `torch_dynamo_backends`; the stand-in is no installed distribution of that
name, so importing it registers the function itself.
"""

import logging
import warnings

from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import register_backend
from torch.fx.experimental.proxy_tensor import py_sym_types

from . import decompositions, executor

_logger = logging.getLogger(__name__)


@register_backend(name="neuron")
def neuron_backend(gm, example_inputs, *, options=None, mode="default"):
    """Compile an FX graph for device neuron.

    Args:
        gm: what Dynamo captured.
        example_inputs: its arguments.
        options: accepted, without effect here.
        mode (str): only "default" applies; others log a warning, as the original does ("torch.compile backend reference").
    """
    if mode != "default":
        _logger.warning("backend neuron has no mode %r; it compiles in mode 'default'", mode)
    if any(isinstance(value, py_sym_types) for value in example_inputs):
        warnings.warn(
            "the stand-in for backend neuron runs this graph of dynamic shapes; TorchNeuron (Neuron SDK 2.33) rejects "
            "dynamic=True and compiles once for every shape",
            stacklevel=2,
        )
    compile_with_aot = aot_autograd(
        fw_compiler=executor.compile_graph,
        decompositions=decompositions.table(),
        # Mutations of inputs stay in the graph, where a kernel's result can be its operand.
        keep_inference_input_mutations=True,
    )
    return compile_with_aot(gm, example_inputs)
