"""Counts of what ran where since the last reset, process-wide and thread-safe.

Other parts call `count_kernel` and `count_fallback`; users call `stats` and `reset_stats`.
"""

import collections
import threading

_lock = threading.Lock()
_counts = collections.Counter()


def count_kernel():
    """Count one launch of an NKI kernel."""
    with _lock:
        _counts["kernel"] += 1


def count_fallback(reason):
    """Count one call handed back to torch, under "fallback" and "fallback:<reason>"."""
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
