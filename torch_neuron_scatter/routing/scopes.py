"""Which devices are routed now.

The state belongs to the process, not to a thread: autograd runs the backward of device neuron on threads of its own, and a
switch that only the calling thread sees would lose exactly the gradients. Each open `routing` scope and each enable() or
disable() is a token in one list; the newest token decides, and leaving a scope takes away that scope's token and no other, so
scopes of several threads may close in any order and the last one out finds what the first one met.

enable() and disable() inside a scope of the same thread belong to that scope and go with it; elsewhere they hold until the next
enable() or disable(), whatever other threads' scopes do.
"""

import functools
import inspect
import threading

from . import methods, overrides, traced
from .active import ACTIVE

_lock = threading.RLock()
_tokens = []


class _Token:
    """scope: for a switch by enable() or disable(), the scope it was set in, or None; a scope is its own."""

    def __init__(self, devices):
        self.devices = devices
        self.thread = threading.get_ident()
        self.scope = self


def _device_types(devices):
    if isinstance(devices, str):
        raise TypeError(
            f"devices is the str {devices!r}; accepted is a sequence of device types, such as ({devices!r},)"
        )
    try:
        devices = frozenset(devices)
    except TypeError:
        raise TypeError(
            f"devices is {devices!r}; accepted is a sequence of device types, such as ('neuron',)"
        ) from None
    for device in devices:
        if not isinstance(device, str) or ":" in device or not device:
            raise TypeError(f"devices holds {device!r}; accepted are device types without a number, such as 'neuron'")
    return devices


def _apply():
    """Bring patches and overrides in line with the newest token; the lock is held."""
    devices = _tokens[-1].devices if _tokens else frozenset()
    if devices:
        if "neuron" in devices:
            overrides.install()
            traced.install()
        methods.install()
        ACTIVE.devices = devices
    else:
        ACTIVE.devices = devices
        methods.uninstall()


def _switch(devices):
    token = _Token(devices)
    with _lock:
        open_here = [other for other in _tokens if other.scope is other and other.thread == token.thread]
        token.scope = open_here[-1] if open_here else None
        _tokens[:] = [other for other in _tokens if other.scope is other or other.scope is not token.scope]
        _tokens.append(token)
        _apply()


def enable(devices=("neuron",)):
    """Route torch's calls on the given device types from now on.

    Inside a `routing` scope of this thread it holds until the scope ends, which restores what was there before the scope.

    A routed call gives what torch gives. Only a row number out of range is refused in the operator's words: an IndexError, on
    every device, before anything is written.

    Args:
        devices (sequence of str): device types without a number. Others keep torch's own operators. Where there is no such
            device it does nothing.

    Raises:
        TypeError: devices is no sequence of device types.
    """
    _switch(_device_types(devices))


def disable():
    """Stop routing: torch's callables are the very objects they were. Inside a `routing` scope, until that scope ends."""
    _switch(frozenset())


def is_enabled():
    """Whether calls on any device are routed now."""
    return bool(ACTIVE.devices)


class routing:
    """Context manager and decorator: route inside, restore on the way out, also after an exception; nests.

    The state is the process's: other threads' calls are routed too while the scope is open.

    Args:
        enabled (bool): False switches routing off inside.
        devices (sequence of str): device types without a number.

    Raises:
        TypeError: devices is no sequence of device types; or what it decorates runs after its call has returned (a generator
            or coroutine function), where the scope would be closed already.
    """

    def __init__(self, enabled=True, *, devices=("neuron",)):
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled is {enabled!r}; accepted are True and False (device types go to devices=)")
        devices = _device_types(devices)
        self._devices = devices if enabled else frozenset()
        self._open = []

    def __enter__(self):
        token = _Token(self._devices)
        with _lock:
            self._open.append(token)
            _tokens.append(token)
            _apply()
        return self

    def __exit__(self, *exception):
        with _lock:
            if not self._open:
                raise RuntimeError("routing: left more often than entered")
            mine = [token for token in self._open if token.thread == threading.get_ident()]
            scope = (mine or self._open)[-1]
            self._open.remove(scope)
            _tokens[:] = [token for token in _tokens if token.scope is not scope]
            _apply()

    def __call__(self, function):
        for test in (
            inspect.isgeneratorfunction,
            inspect.iscoroutinefunction,
            inspect.isasyncgenfunction,
            inspect.isclass,
        ):
            if test(function):
                raise TypeError(
                    f"routing decorates {function!r}; accepted are plain functions, use `with routing():` inside it"
                )

        @functools.wraps(function)
        def routed(*args, **kwargs):
            with self:
                return function(*args, **kwargs)

        return routed
