"""The module that becomes `torch.neuron`: devices, random numbers, memory figures.

Execution is synchronous, so there is one stream and nothing to wait for. Sizes are in bytes.
"""

import os

import torch

from . import _C


def device_count():
    return _C.device_count()


def is_available():
    return True


def is_initialized():
    return True


def _lazy_init():
    _C.check_not_forked()


_parent = os.getpid()


def _is_in_bad_fork():
    return os.getpid() != _parent


def current_device():
    return _C.current_device()


def _index(device):
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    return current_device() if device.index is None else device.index


def set_device(device):
    """Make `device` (int, str or torch.device) current on this thread; RuntimeError where there is none of that number."""
    _C.exchange_device(_index(device))


class device:
    """Context manager that makes a device (int, str or torch.device) current."""

    def __init__(self, device):
        self.index = _index(device)

    def __enter__(self):
        self.previous = _C.exchange_device(self.index)

    def __exit__(self, *exception):
        _C.exchange_device(self.previous)


def synchronize(device=None):
    """Nothing to wait for; checks that the device exists."""
    with globals()["device"](_index(device)):
        pass


def current_stream(device=None):
    return torch.Stream(device=torch.device("neuron", _index(device)))


def get_device_properties(device=None):
    index = _index(device)
    return {"name": "neuron stand-in", "index": index}


def get_device_name(device=None):
    return get_device_properties(device)["name"]


def default_generator(device=None):
    return _C.default_generator(_index(device))


def manual_seed(seed):
    default_generator().manual_seed(int(seed))


def manual_seed_all(seed):
    for index in range(device_count()):
        default_generator(index).manual_seed(int(seed))


def initial_seed():
    return default_generator().initial_seed()


def get_rng_state(device=None):
    return default_generator(device).get_state()


def set_rng_state(state, device=None):
    default_generator(device).set_state(state)


def memory_allocated(device=None):
    """Bytes that live tensors asked for."""
    return _C.memory_stats(_index(device))["allocated"]


def max_memory_allocated(device=None):
    """Highest `memory_allocated` since the last `reset_peak_memory_stats`."""
    return _C.memory_stats(_index(device))["peak"]


def memory_reserved(device=None):
    """Bytes mapped, those of cached free blocks included."""
    return _C.memory_stats(_index(device))["reserved"]


def reset_peak_memory_stats(device=None):
    _C.reset_peak(_index(device))


def empty_cache():
    """Unmap the free blocks."""
    _C.empty_cache()


def is_bf16_supported():
    return True


def get_amp_supported_dtype():
    return [torch.bfloat16, torch.float16]
