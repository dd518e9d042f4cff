"""Devices under test: the CPU, and device neuron, real where torch_neuronx is installed and the stand-in elsewhere.

A test that takes the fixture `device` runs on each of them. Without a compiler there is no stand-in device, and the neuron
half is skipped with the reason.
"""

import os
import shutil

import pytest
import torch
from torch._dynamo.utils import counters

import torch_neuron_scatter
from torch_neuron_scatter import stub


def _load_neuron():
    """None once device neuron is usable, else why it is not."""
    try:
        stub.install()
    except RuntimeError as error:
        if "torch_neuronx" in str(error) and hasattr(torch, "neuron"):
            return None
        return str(error)
    return None


NEURON_MISSING = _load_neuron()

if NEURON_MISSING and os.environ.get("TORCH_NEURON_SCATTER_REQUIRE_NEURON") == "1":
    raise RuntimeError(f"device neuron is required here and absent: {NEURON_MISSING}")

requires_neuron = pytest.mark.skipif(NEURON_MISSING is not None, reason=f"no device neuron: {NEURON_MISSING}")


requires_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++").split()[0]) is None, reason="Inductor needs a C++ compiler for the CPU"
)

# Backends of torch.compile for CPU tensors.
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=requires_compiler)]


@pytest.fixture(params=["cpu", pytest.param("neuron", marks=requires_neuron)])
def device(request):
    """Name of a device to run on."""
    return request.param


@pytest.fixture
def neuron():
    """Device neuron, for tests of what only it does."""
    if NEURON_MISSING is not None:
        pytest.skip(f"no device neuron: {NEURON_MISSING}")
    return "neuron"


@pytest.fixture
def fresh_dynamo():
    """Nothing compiled before, and Dynamo's counters at zero; as `usefixtures` for a whole module."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def fresh_state():
    """Counts start at zero, and a test must leave routing as it found it."""
    torch_neuron_scatter.reset_stats()
    before = torch_neuron_scatter.is_enabled()
    yield
    assert torch_neuron_scatter.is_enabled() == before, "the test left routing in another state"
