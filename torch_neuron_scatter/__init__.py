"""Row accumulation (index_add_, scatter_add_, embedding gradients) that is correct and fast on AWS Trainium.

Importing this package registers the operators neuron::scatter_add_ and neuron::scatter_add and changes nothing else; no Neuron
package is imported before a tensor on device `neuron` needs one.
"""

from . import dispatch, graph, ops, stub  # noqa: F401  (imported for what they register; stub as a public name)
from .functional import scatter_add, scatter_add_
from .nn import ScatterAdd
from .routing import disable, enable, is_enabled, routing
from .stats import reset_stats, stats

__all__ = [
    "ScatterAdd",
    "disable",
    "enable",
    "is_enabled",
    "reset_stats",
    "routing",
    "scatter_add",
    "scatter_add_",
    "stats",
    "stub",
]
