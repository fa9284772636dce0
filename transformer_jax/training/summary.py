"""Memory, versions and hardware of a run."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import sys
from typing import Any

import jax

from transformer_jax.devices.machine import num_cores

_PACKAGES = [
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "sentencepiece",
    "sacrebleu",
    "numpy",
]


def peak_memory_bytes() -> dict[str, int]:
    """Return the peak memory of this process and, if reported, of the first device."""
    unit = 1 if sys.platform == "darwin" else 1024
    peaks = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        peaks["device"] = statistics["peak_bytes_in_use"]
    return peaks


def environment() -> dict[str, Any]:
    """Return software versions and hardware."""
    return {
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "cpu_cores": num_cores(),
        "devices": [str(device.device_kind) for device in jax.devices()],
        "processes": jax.process_count(),
    }
