"""Build: pure Python, and the stand-in's C++ device where PyTorch and a compiler are at hand.

TORCH_NEURON_SCATTER_STUB=0 leaves the C++ device out, =1 makes a failure to build it an error.
Without build isolation (`pip install --no-build-isolation .`) the build sees the PyTorch it is to work with; PyTorch is no build
requirement, since most installations need no stand-in and a build environment's own PyTorch would be gigabytes.
"""

import glob
import os
import shutil
import sys

from setuptools import setup

WANTED = os.environ.get("TORCH_NEURON_SCATTER_STUB", "")


def _skip(reason):
    if WANTED == "1":
        sys.exit(f"TORCH_NEURON_SCATTER_STUB=1, but the stand-in device cannot be built: {reason}")
    print(f"torch-neuron-scatter: the C++ stand-in device is left out: {reason}", file=sys.stderr)
    return {}


def stand_in():
    """setup() arguments for the C++ device, empty where it is left out."""
    if WANTED == "0":
        return _skip("TORCH_NEURON_SCATTER_STUB=0")
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        return _skip(f"there is no C++ compiler {compiler!r}")
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        return _skip("PyTorch is not importable in the build environment")

    class OptionalBuild(BuildExtension):
        def run(self):
            try:
                super().run()
            except Exception as error:
                _skip(f"its build failed: {error}")

    # A file's folder is relative to this one: editable installs build in place.
    sources = sorted(glob.glob("csrc_stub/device/csrc/**/*.cpp", recursive=True))
    extension = CppExtension("torch_neuron_scatter_stub.device._C", sources, extra_compile_args=["-O2", "-Wall"])
    return {"ext_modules": [extension], "cmdclass": {"build_ext": OptionalBuild}}


setup(**stand_in())
