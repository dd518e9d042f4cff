"""The plain call on the CPU, in C++ where it is built: the same results as the kernels of `cpu`, without their time in Python.

A call of a megabyte takes torch about 40 microseconds, of which a Python kernel adds several. See csrc/plain_cpu_call.cpp.
"""

import importlib

import torch

from . import autograd, cpu  # noqa: F401  (the kernels that the C++ ones stand before, and hand over to)


def _built_for_this_torch(module):
    # C++ built for another torch may load and yet misread its objects; releases share a layout from one patch to the next.
    return module.TORCH_VERSION.split(".")[:2] == torch.__version__.split(".")[:2]


def _never_plain(input, dim, index, src):
    return False


def register():
    """Register the C++ kernels where they are there and fit this torch.

    Returns:
        (bool, callable): whether they are in use; without them every call takes the Python kernels. And
        `try_plain_call(input, dim, index, src)`, which accumulates in place and returns True, or does nothing and returns
        False: always where C++ is not in use.
    """
    try:
        module = importlib.import_module("._plain_cpu_call", __package__)
    except ImportError:
        return False, _never_plain
    if not _built_for_this_torch(module):
        return False, _never_plain
    module.register_kernels()
    return True, module.try_plain_call


IN_USE, try_plain_call = register()
