"""Which devices are routed now.

The state belongs to the process, not to a thread: autograd runs the backward of device neuron on threads of its own, and a
switch that only the calling thread sees would lose exactly the gradients. There is one outermost state, which enable() and
disable() set, and a list of open `routing` scopes. The newest scope decides; leaving a scope removes that scope and no other,
so scopes of several threads may close in any order and the last one out finds what the first one met.
"""

import functools
import threading

from . import aten_ops, methods
from .active import ACTIVE

_lock = threading.RLock()


class _Scope:
    def __init__(self, devices):
        self.devices = devices


_scopes = [_Scope(frozenset())]


def _device_types(devices):
    if isinstance(devices, str):
        raise TypeError(
            f"devices is the str {devices!r}; accepted is a sequence of device types, such as ({devices!r},)"
        )
    devices = frozenset(devices)
    for device in devices:
        if not isinstance(device, str) or ":" in device or not device:
            raise TypeError(f"devices holds {device!r}; accepted are device types without a number, such as 'neuron'")
    return devices


def _apply():
    """Bring patches and overrides in line with the newest scope; the lock is held."""
    devices = _scopes[-1].devices
    if devices:
        methods.install()
        if "neuron" in devices:
            aten_ops.install()
        ACTIVE.devices = devices
    else:
        ACTIVE.devices = devices
        methods.uninstall()


def enable(devices=("neuron",)):
    """Route torch's calls on the given device types from now on.

    Args:
        devices (sequence of str): device types without a number. Others keep torch's own operators.

    Raises:
        TypeError: devices is no sequence of device types.

    Inside a `routing` scope this holds until the scope ends, which restores what was there before it.
    """
    devices = _device_types(devices)
    with _lock:
        _scopes[-1].devices = devices
        _apply()


def disable():
    """Stop routing: torch's callables are the very objects they were. Inside a `routing` scope, until that scope ends."""
    with _lock:
        _scopes[-1].devices = frozenset()
        _apply()


def is_enabled():
    """Whether calls on any device are routed now."""
    return bool(ACTIVE.devices)


class routing:
    """Context manager and decorator: route inside, restore on the way out, also after an exception; nests.

    Args:
        enabled (bool): False switches routing off inside.
        devices (sequence of str): device types without a number.

    Raises:
        TypeError: devices is no sequence of device types.
    """

    def __init__(self, enabled=True, *, devices=("neuron",)):
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled is {enabled!r}; accepted are True and False (device types go to devices=)")
        self._devices = _device_types(devices) if enabled else frozenset()
        self._open = threading.local()

    def __enter__(self):
        scope = _Scope(self._devices)
        with _lock:
            _scopes.append(scope)
            _apply()
        self._mine().append(scope)
        return self

    def __exit__(self, *exception):
        scope = self._mine().pop()
        with _lock:
            _scopes.remove(scope)
            _apply()

    def __call__(self, function):
        @functools.wraps(function)
        def routed(*args, **kwargs):
            with self:
                return function(*args, **kwargs)

        return routed

    def _mine(self):
        if not hasattr(self._open, "scopes"):
            self._open.scopes = []
        return self._open.scopes
