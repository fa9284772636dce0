"""Which devices decode."""

from __future__ import annotations

import contextlib

import jax

from transformer_jax.machine import find_devices, num_cores

_ROWS_OF_A_CORE = 16


def devices_for_rows(rows: int) -> list[jax.Device]:
    """All devices, of a CPU as many as get 16 rows each.

    If JAX has not started yet, each CPU core becomes a device: a search on one device that all
    cores share is up to 10% slower (docs/performance.md).
    """
    most = max(1, rows // _ROWS_OF_A_CORE)
    with contextlib.suppress(RuntimeError):  # it has started
        jax.config.update("jax_num_cpu_devices", min(most, num_cores()))
    devices = find_devices()
    return devices[: most if devices[0].platform == "cpu" else rows]
