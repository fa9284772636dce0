"""CPU cores and JAX devices of this machine."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_jax.errors import UserError, one_line

if TYPE_CHECKING:
    import jax


def num_cores() -> int:
    """Return the number of CPU cores available to this process."""
    if hasattr(os, "sched_getaffinity"):  # Linux only
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@lru_cache
def cpu_flags() -> frozenset[str]:
    """Return the CPU's instruction set extensions, as Linux names them, such as ``avx512_bf16``."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split()[2:])  # after "flags" and ":"
    return frozenset()


def find_devices() -> list[jax.Device]:
    """Return all devices of the run.

    Raises ``UserError`` if JAX cannot find the device type in JAX_PLATFORMS.
    """
    import jax

    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError if no plugin is installed
        platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
        raise UserError(
            f"JAX_PLATFORMS is {platforms!r}, but JAX cannot find such a device: "
            f"{one_line(error)}. "
            "Install the device's driver (nvidia-smi lists NVIDIA GPUs) and JAX's plugin (pip "
            "install 'jax[cuda13]' or 'jax[tpu]'). Start at most one process for each device. To "
            "run on the CPU, set JAX_PLATFORMS=cpu or unset it."
        ) from None


def peak_memory_bytes() -> dict[str, int]:
    """Return the peak memory of this process and, if reported, of the first device."""
    import jax

    unit = 1 if sys.platform == "darwin" else 1024
    peaks = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        peaks["device"] = statistics["peak_bytes_in_use"]
    return peaks
