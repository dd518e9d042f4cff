"""Routing: torch's own calls reach neuron::scatter_add_ with no edit to the user's model.

scopes      which devices are routed now: enable, disable, routing, is_enabled
methods     the six Python callables of torch that are patched while routing is on
rows        which calls are row scatters, by shapes and strides alone
aten_ops    the operators that autograd and C++ call, and what each is while device neuron is routed
overrides   calls those eagerly, as kernels of device neuron; they stay for as long as the process lives
traced      calls those in graphs that are traced for device neuron
compiled    keeps code that torch.compile made true when routing changes

Data flows methods, overrides, traced -> aten_ops -> rows -> the operator. Importing this package patches nothing.
"""

from .scopes import disable, enable, is_enabled, routing

__all__ = ["disable", "enable", "is_enabled", "routing"]
