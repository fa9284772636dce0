"""Devices for decoding."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import numpy as np

from transformer_jax.devices.machine import find_devices, num_cores

_MIN_ROWS_PER_CORE = 4


def devices_for_rows(num_rows: int) -> list[jax.Device]:
    """Choose devices for a ``Translator`` whose ``batch_size`` is ``num_rows``: at least 1 row per
    accelerator, or 4 per CPU device.

    If JAX is not initialized yet, each CPU core becomes a device. A single device for all cores is
    slower (docs/decisions.md), but each device compiles the search for itself.
    """
    max_cpu_devices = max(1, num_rows // _MIN_ROWS_PER_CORE)
    with contextlib.suppress(RuntimeError):  # JAX is already initialized
        jax.config.update("jax_num_cpu_devices", min(max_cpu_devices, num_cores()))
    devices = find_devices()
    is_cpu = devices[0].platform == "cpu"
    return devices[: max_cpu_devices if is_cpu else num_rows]


def put_on_device(arrays: Any, device: jax.Device | None) -> Any:
    """Put arrays on a device. CPU devices share the memory of JAX's arrays."""
    if device is not None and device.platform == "cpu":
        arrays = jax.tree.map(np.asarray, arrays)
    return jax.device_put(arrays, device)
