"""Counts of what ran where since the last reset, process-wide and thread-safe.

Other parts call `count_kernel` and `handing_back`; users call `stats` and `reset_stats`.
"""

import collections
import contextlib
import threading

_lock = threading.Lock()
_counts = collections.Counter()
_handing_back = threading.local()


def count_kernel():
    """Count one launch of an NKI kernel."""
    with _lock:
        _counts["kernel"] += 1


@contextlib.contextmanager
def handing_back(reason):
    """Count the call of torch inside under "fallback" and "fallback:<reason>", unless it raises.

    What that call hands back in turn is part of it, and counts no second time.
    """
    outermost = not getattr(_handing_back, "inside", False)
    _handing_back.inside = True
    try:
        yield
    finally:
        _handing_back.inside = not outermost
    if outermost:
        with _lock:
            _counts["fallback"] += 1
            _counts[f"fallback:{reason}"] += 1


def stats():
    """Counts since the last `reset_stats()`.

    Returns:
        dict of str to int: "kernel" NKI kernel launches, "fallback" calls handed back to torch, and for each reason that
        occurred "fallback:<reason>".
    """
    with _lock:
        return {"kernel": 0, "fallback": 0, **_counts}


def reset_stats():
    """Set all counts to zero."""
    with _lock:
        _counts.clear()
