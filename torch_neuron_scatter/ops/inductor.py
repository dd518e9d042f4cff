"""Inductor's lowerings of both operators; of neuron::scatter_add_ the result is the destination buffer itself.

Inductor's default for an unknown operator takes the returned tensor for another buffer and copies it onto the destination at the
end of the graph. Importing Inductor is slow, so the lowering is registered only once a process has it loaded.
"""

import functools
import sys

from .schema import SCATTER_ADD, SCATTER_ADD_


def register_if_loaded():
    if "torch._inductor.lowering" in sys.modules:
        _register()


@functools.cache
def _register():
    from torch._inductor import ir
    from torch._inductor.lowering import fallback_handler, register_lowering

    def buffer(tensor):
        return ir.ExternKernel.realize_input(tensor).get_name()

    def apart(operand, input):
        # Inductor drops a clone() of what it takes for a value, and then gives the destination that value's memory.
        return ir.ExternKernel.copy_input(operand) if buffer(operand) == buffer(input) else operand

    # Defaults are spelled out: AOTInductor passes them to the model either way, but lists only what it was given.
    @register_lowering(SCATTER_ADD_, type_promotion_kind=None)
    def scatter_add_(input, dim, index, src, alpha=1, unique_indices=False, lnc=None):
        options = {"alpha": alpha, "unique_indices": unique_indices, "lnc": lnc}
        ir.FallbackKernel.create(SCATTER_ADD_, input, dim, apart(index, input), apart(src, input), **options)
        return input

    torchs = fallback_handler(SCATTER_ADD, add_to_fallback_set=False)

    @register_lowering(SCATTER_ADD, type_promotion_kind=None)
    def scatter_add(input, dim, index, src, alpha=1, unique_indices=False, lnc=None):
        return torchs(input, dim, index, src, alpha=alpha, unique_indices=unique_indices, lnc=lnc)
