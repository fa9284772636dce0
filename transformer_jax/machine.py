"""What this machine offers."""

from __future__ import annotations

import os


def num_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux only
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
