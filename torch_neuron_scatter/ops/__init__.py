"""The operators neuron::scatter_add_ and neuron::scatter_add.

schema     their definition, and the library everything registers in
checks     what every device refuses, before anything is written
cpu, meta  their kernels for CPU and for shapes only; device neuron has its own in `torch_neuron_scatter.dispatch`
autograd   gradients, forward mode, version counting
vmap       torch.func batching rules
plain_cpu_call   C++ kernels that stand before those of autograd and cpu for the plain call, where they are built

Importing this package registers the operators and changes nothing else.
"""

from . import autograd, cpu, meta, plain_cpu_call, vmap  # noqa: F401  (imported for what they register)
