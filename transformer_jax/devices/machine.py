"""CPU cores and JAX devices of this machine."""

from __future__ import annotations

import ctypes
import math
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
    """Return the number of CPU cores available to this process.

    A container's CPU quota counts, rounded up: with 1.5 CPUs, two threads run 1.5 times as fast as
    one.
    """
    if not hasattr(os, "sched_getaffinity"):  # Linux only
        return os.cpu_count() or 1
    return math.ceil(min(len(os.sched_getaffinity(0)), cpu_quota()))


def cpu_quota(root: Path = Path("/")) -> float:
    """Return the number of CPUs that the control groups of this process may use (Linux).

    Each group and each of its parents can have a quota. Infinity if none has one.
    """
    quota = math.inf
    for group in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = group.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = root / "sys/fs/cgroup" / controllers / path.lstrip("/")
        mount = root / "sys/fs/cgroup" / controllers
        for place in (folder, *folder.parents):
            quota = min(quota, _quota_of(place))
            if place == mount:
                break
    return quota


def _quota_of(group: Path) -> float:
    """Return the quota of one control group, of version 2 or 1; infinity if it has none."""
    words = _read(group / "cpu.max").split()
    if not words:
        words = _read(group / "cpu.cfs_quota_us").split()
        words += _read(group / "cpu.cfs_period_us").split()
    if len(words) != 2 or not all(word.isdecimal() for word in words):  # max, -1
        return math.inf
    quota, period = map(int, words)  # microseconds of CPU time, in so many microseconds
    return quota / period if quota and period else math.inf


def _read(file: Path) -> str:
    with suppress(OSError):
        return file.read_text()
    return ""


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


def return_free_memory() -> None:
    """Return freed memory to the system, such as a compiler's, which malloc keeps (glibc only)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def peak_memory_bytes() -> dict[str, int]:
    """Return the peak memory of this process and, if reported, of the first device."""
    import jax

    unit = 1 if sys.platform == "darwin" else 1024
    peaks = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        peaks["device"] = statistics["peak_bytes_in_use"]
    return peaks
