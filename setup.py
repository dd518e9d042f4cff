"""Build: pure Python, and two C++ parts where PyTorch and a compiler are at hand.

    torch_neuron_scatter.ops._plain_cpu_call   the plain call on the CPU without a step through Python (speed only)
    torch_neuron_scatter_stub.device._C        the stand-in for device neuron

TORCH_NEURON_SCATTER_CPP=0 leaves both out, =1 makes a failure to build either an error; TORCH_NEURON_SCATTER_STUB=0 leaves only
the stand-in out. Without build isolation (`pip install --no-build-isolation .`) the build sees the PyTorch it is to work with;
PyTorch is no build requirement, since a build environment's own PyTorch would be gigabytes.
"""

import glob
import os
import shutil
import sys

from setuptools import setup

WANTED = os.environ.get("TORCH_NEURON_SCATTER_CPP", "")
STUB_WANTED = os.environ.get("TORCH_NEURON_SCATTER_STUB", "") != "0"


def _skip(reason):
    if WANTED == "1":
        sys.exit(f"TORCH_NEURON_SCATTER_CPP=1, but the C++ parts cannot be built: {reason}")
    print(f"torch-neuron-scatter: the C++ parts are left out: {reason}", file=sys.stderr)
    return {}


def cpp_parts():
    """setup() arguments for the C++ parts, empty where they are left out."""
    if WANTED == "0":
        return _skip("TORCH_NEURON_SCATTER_CPP=0")
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
                _skip(f"a build failed: {error}")

    # A file's folder is relative to this one: editable installs build in place.
    parts = [
        # -O3: the pass over the index is a loop for the vectoriser.
        CppExtension(
            "torch_neuron_scatter.ops._plain_cpu_call", ["csrc/plain_cpu_call.cpp"], extra_compile_args=["-O3", "-Wall"]
        )
    ]
    if STUB_WANTED:
        sources = sorted(glob.glob("csrc_stub/device/csrc/**/*.cpp", recursive=True))
        parts.append(CppExtension("torch_neuron_scatter_stub.device._C", sources, extra_compile_args=["-O2", "-Wall"]))
    return {"ext_modules": parts, "cmdclass": {"build_ext": OptionalBuild}}


setup(**cpp_parts())
