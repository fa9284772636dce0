"""Which devices decode, and how they share the rows of a batch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from transformer_jax.machine import find_devices, num_cores

logger = logging.getLogger(__name__)

_ROWS_OF_A_CORE = 16


def devices_for_rows(rows: int) -> tuple[jax.Device, ...]:
    """As many devices as ``rows`` rows divide over evenly.

    If JAX has not started yet, each CPU core becomes a device, as long as it gets 16 rows: a search
    on one device that all cores share is up to 10% slower (docs/performance.md).
    """
    most = max(1, rows // _ROWS_OF_A_CORE)
    with contextlib.suppress(RuntimeError):  # it has started
        jax.config.update("jax_num_cpu_devices", min(most, num_cores()))
    devices = find_devices()
    if devices[0].platform == "cpu":
        devices = devices[:most]
    used = max(count for count in range(1, len(devices) + 1) if rows % count == 0)
    if used < len(devices) and devices[0].platform != "cpu":
        better = -(-rows // len(devices)) * len(devices)
        logger.warning(
            "Only %d of %d devices are used, as %d rows divide evenly over no more; "
            "--batch-size %d uses all.",
            used,
            len(devices),
            rows,
            better,
        )
    return tuple(devices[:used])


def row_shardings(devices: Sequence[jax.Device]) -> tuple[Any, Any]:
    """Shardings for independent rows: a whole copy on every device, and rows split between them.

    Both are None without devices (arrays stay where they are); one device has its own for both.
    """
    if len(devices) < 2:
        there = SingleDeviceSharding(devices[0]) if devices else None
        return there, there
    mesh = Mesh(np.asarray(devices), ("rows",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("rows"))
