"""Devices as a mesh, and where parameters and batches live on it.

Three axes: ``data`` splits the batch; ``fsdp`` splits the batch and also every large parameter with
its optimizer state; ``tensor`` splits heads and d_ff. The arithmetic is the same for any sizes; XLA
adds the communication. For a step's duration parameters are whole along ``fsdp`` (``gathered``):
told only where they are kept, XLA would split what layers compute as well, and hand that around.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from transformer_jax.config import MeshConfig
from transformer_jax.errors import UserError
from transformer_jax.machine import num_cores

log = logging.getLogger(__name__)

BATCH_AXES = ("data", "fsdp")
_ROWS_OF_A_CORE = 16

# Where each axis of a parameter goes, by the last names of its path. Everything else (norms,
# biases) is on every device.
_RULES: dict[tuple[str, ...], PartitionSpec] = {
    ("query", "kernel"): PartitionSpec("fsdp", "tensor", None),  # [D, H, K]
    ("key", "kernel"): PartitionSpec("fsdp", "tensor", None),
    ("value", "kernel"): PartitionSpec("fsdp", "tensor", None),
    ("attention", "output", "kernel"): PartitionSpec("tensor", None, "fsdp"),  # [H, K, D]
    ("inner", "kernel"): PartitionSpec("fsdp", "tensor"),  # [D, F]
    ("feed_forward", "output", "kernel"): PartitionSpec("tensor", "fsdp"),  # [F, D]
    # [V, D]: embeddings, softmax; learned positions [L, D]
    ("matrix",): PartitionSpec(None, "fsdp"),
}


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """All devices (or the given ones) as a (data, fsdp, tensor) mesh."""
    devices = jax.devices() if devices is None else devices
    others = config.fsdp * config.tensor
    data = len(devices) // others if config.data == -1 else config.data
    if data * others != len(devices):
        raise UserError(
            f"mesh.data x mesh.fsdp x mesh.tensor is {config.data} x {config.fsdp} x {config.tensor}; "
            f"expected a product of {len(devices)}, the number of devices (mesh.data = -1 takes what is left)."
        )
    grid = np.asarray(devices).reshape(data, config.fsdp, config.tensor)
    return Mesh(grid, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over the ``data`` and ``fsdp`` axes."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def row_shardings(devices: Sequence[jax.Device]) -> tuple[Any, Any]:
    """For work on rows that need nothing of each other: a whole copy on every device, and the first
    axis spread over them.

    Both are None without devices (arrays stay where they are), and the device's own sharding with
    one.
    """
    if len(devices) < 2:
        there = SingleDeviceSharding(devices[0]) if devices else None
        return there, there
    mesh = Mesh(np.asarray(devices), ("rows",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("rows"))


def devices_for_rows(rows: int) -> tuple[jax.Device, ...]:
    """As many devices as ``rows`` rows divide over evenly.

    Where JAX has not started yet, a CPU's cores become devices of their own, as long as each gets
    16 rows: searching on one device that all cores share is up to 10% slower (docs/performance.md).
    """
    most = max(1, rows // _ROWS_OF_A_CORE)
    with contextlib.suppress(RuntimeError):  # it has started
        jax.config.update("jax_num_cpu_devices", min(most, num_cores()))
    devices = jax.devices()
    if devices[0].platform == "cpu":
        devices = devices[:most]
    used = max(count for count in range(1, len(devices) + 1) if rows % count == 0)
    if used < len(devices) and devices[0].platform != "cpu":
        better = -(-rows // len(devices)) * len(devices)
        message = "Only %d of %d devices are used, as %d rows divide evenly over no more; --batch-size %d uses all."
        log.warning(message, used, len(devices), rows, better)
    return tuple(devices[:used])


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def check_rows(mesh: Mesh, row_multiple: int, accumulate_steps: int = 1) -> None:
    """Every batch, and every part of one that is worked through in parts, must divide over the
    devices that share it.
    """
    devices = mesh.shape["data"] * mesh.shape["fsdp"]
    if row_multiple % (devices * accumulate_steps):
        parts = (
            f" x optimizer.accumulate_steps = {devices} x {accumulate_steps}"
            if accumulate_steps > 1
            else f" = {devices}"
        )
        raise UserError(
            f"batch.row_multiple is {row_multiple}; expected a multiple of mesh.data x mesh.fsdp{parts}, "
            "so that rows divide evenly over the devices."
        )


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """A NamedSharding for each leaf of a pytree of parameters, or of optimizer state that repeats
    their paths.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _sharding(path, leaf.shape, mesh), state
    )


def gathered(parameters: Any, mesh: Mesh) -> Any:
    """Parameters under ``jit``, whole along ``fsdp``, as a device needs them for its rows."""

    def whole(kept: NamedSharding) -> NamedSharding:
        return NamedSharding(
            mesh, PartitionSpec(*(None if axis == "fsdp" else axis for axis in kept.spec))
        )

    shardings = jax.tree.map(whole, state_shardings(parameters, mesh))
    return jax.lax.with_sharding_constraint(parameters, shardings)


def _sharding(path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
    # a leaf of an nnx.State
    if isinstance(path[-1], jax.tree_util.GetAttrKey) and names[-1] == "value":
        names.pop()
    for suffix, spec in _RULES.items():
        tail = names[len(names) - len(suffix) :]
        # "attention" stands for self_attention and cross_attention alike.
        matches = all(
            name == part or name.endswith("_" + part)
            for name, part in zip(tail, suffix, strict=False)
        )
        if len(tail) == len(suffix) and matches and len(spec) == len(shape):
            return NamedSharding(
                mesh,
                PartitionSpec(*(_fit(axis, size, mesh, names) for axis, size in zip(spec, shape))),
            )
    return replicated(mesh)


def _fit(axis: str | None, size: int, mesh: Mesh, names: list[str]) -> str | None:
    if axis is None or size % mesh.shape[axis] == 0:
        return axis
    divides = "model.num_heads and model.d_ff" if axis == "tensor" else "model.d_model"
    raise UserError(
        f"mesh.{axis} is {mesh.shape[axis]}; expected a divisor of {divides} ({'.'.join(names)} has {size} along that axis)."
    )
