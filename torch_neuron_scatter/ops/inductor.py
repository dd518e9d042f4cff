"""Inductor's lowering of neuron::scatter_add_: the result is the destination buffer itself.

Inductor's default for an unknown operator takes the returned tensor for another buffer and copies it onto the destination at the
end of the graph. Importing Inductor is slow, so the lowering is registered only once a process has it loaded.
"""

import functools
import sys

from .schema import SCATTER_ADD_


def register_if_loaded():
    if "torch._inductor.lowering" in sys.modules:
        _register()


@functools.cache
def _register():
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    @register_lowering(SCATTER_ADD_, type_promotion_kind=None)
    def scatter_add_(input, *args, **kwargs):
        ir.FallbackKernel.create(SCATTER_ADD_, input, *args, **kwargs)
        return input
