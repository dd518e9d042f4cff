"""What ran on the device and what fell back to the CPU since the last `clear_op_tracking()`."""

import threading

from torch_neuron_scatter_stub.device import _C

_lock = threading.Lock()
_launched = set()


def record_launch(name):
    with _lock:
        _launched.add(name)


def clear_op_tracking():
    """Forget what ran."""
    with _lock:
        _launched.clear()
    _C.clear_fallback_counts()


def get_executed_ops():
    """Names of the NKI kernels that ran on the device."""
    with _lock:
        return sorted(_launched)


def get_fallback_ops():
    """Names of the operators that ran on the CPU because the device has none."""
    return sorted(_C.fallback_counts())
