"""Device mesh, and sharding of parameters and batches over it.

Mesh axes: ``data`` splits the batch; ``fsdp`` splits the batch and every large parameter with its
optimizer state; ``tensor`` splits heads, d_ff and the vocabulary. The computation is the same on
any mesh; XLA adds the communication. During a step, parameters are all-gathered along ``fsdp`` in
the data type of matmuls (``all_gathered``), and gradients are reduce-scattered
(``reduce_scattered``). Otherwise, XLA would also shard the layers' computation along ``fsdp`` and
communicate activations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from transformer_jax.devices.machine import find_devices
from transformer_jax.errors import UserError
from transformer_jax.settings.config import MeshConfig

BATCH_AXES = ("data", "fsdp")

# Mesh axis for each axis of a parameter, by the end of its name. All other parameters (norms,
# biases) are replicated.
_RULES = {
    "(query|key|value).kernel": PartitionSpec("fsdp", "tensor", None),  # [D, H, K]
    "attention.output.kernel": PartitionSpec("tensor", None, "fsdp"),  # [H, K, D]
    "(inner|gate).kernel": PartitionSpec("fsdp", "tensor"),  # [D, F]
    "feed_forward.output.kernel": PartitionSpec("tensor", "fsdp"),  # [F, D]
    "position_matrix": PartitionSpec(None, "fsdp"),  # [L, D]
    # [V, D]: embeddings, softmax. If ``tensor`` does not divide V, they are not sharded along it.
    "matrix": PartitionSpec("tensor", "fsdp"),
}


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Arrange ``devices`` (default: all) in a (data, fsdp, tensor) mesh.

    ``data`` is split over slices first. Within a slice, ``jax.experimental.mesh_utils`` places
    neighbors in the mesh next to each other in the hardware.
    """
    devices = find_devices() if devices is None else devices
    devices_per_replica = config.fsdp * config.tensor
    data = len(devices) // devices_per_replica if config.data == -1 else config.data
    if data * devices_per_replica != len(devices):
        raise UserError(
            f"mesh.data x mesh.fsdp x mesh.tensor is {config.data} x {config.fsdp} x "
            f"{config.tensor}; expected a product of {len(devices)}, the number of devices "
            "(mesh.data = -1 uses all remaining devices)."
        )
    slices = _slices(devices, config.slices)
    if data % len(slices):
        raise UserError(
            f"mesh.data is {data}; expected a multiple of {len(slices)}, the number of slices, "
            "because fsdp and tensor stay within a slice. Set mesh.fsdp x mesh.tensor to "
            f"{len(devices) // len(slices)}, the number of devices in a slice, or to a divisor."
        )
    shape = (data // len(slices), config.fsdp, config.tensor)
    try:
        device_arrays = [
            create_device_mesh(shape, slice_devices, allow_split_physical_axes=True)
            for slice_devices in slices
        ]
    except (NotImplementedError, AssertionError):  # raised for TPUs
        raise UserError(
            f"mesh.data x mesh.fsdp x mesh.tensor is {' x '.join(map(str, shape))} in a slice of "
            f"{len(slices[0])} devices; expected axes that fit the slice's topology. "
            "Use powers of two, and all devices in the slice."
        ) from None
    axes = ("data", "fsdp", "tensor")
    return Mesh(np.concatenate(device_arrays), axes, axis_types=(AxisType.Auto,) * 3)


def _slices(devices: Sequence[jax.Device], count: int | None) -> list[list[jax.Device]]:
    """Split devices into ``count`` equal groups, ordered by the slices that TPUs report."""

    def index(device: jax.Device) -> int:  # GPUs report each machine as a slice
        return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0

    devices = sorted(devices, key=index)
    count = count or len(set(map(index, devices)))
    if len(devices) % count:
        raise UserError(
            f"mesh.slices is {count}; expected a divisor of {len(devices)}, the number of devices."
        )
    size = len(devices) // count
    return [devices[i : i + size] for i in range(0, len(devices), size)]


def check_axes(mesh: Mesh) -> None:
    """Raise ``UserError`` unless the mesh has the axes of ``make_mesh``."""
    if not {"data", "fsdp", "tensor"} <= set(mesh.axis_names):
        raise UserError(
            f"The axes of the mesh are {', '.join(mesh.axis_names)}; expected data, fsdp and "
            "tensor. Create the mesh with make_mesh, or give it these axes; an axis that does not "
            "split anything has size 1."
        )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch's rows over the ``data`` and ``fsdp`` axes."""
    check_axes(mesh)
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding that puts a full copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def check_rows(
    mesh: Mesh, rows: int, accumulate_steps: int = 1, name: str = "batch.row_multiple"
) -> None:
    """Raise ``UserError`` unless the rows of each microbatch divide evenly over the devices."""
    check_axes(mesh)
    product = mesh.shape["data"] * mesh.shape["fsdp"] * accumulate_steps
    if rows % product:
        raise UserError(
            f"{name} is {rows}; expected a multiple of mesh.data x mesh.fsdp x "
            f"optimizer.accumulate_steps = {product}, so that rows divide evenly over the devices."
        )


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """Return the NamedSharding of each leaf of the parameters or optimizer state."""
    check_axes(mesh)
    return map_named(lambda name, leaf: _sharding(name, leaf.shape, mesh), state)


def all_gathered(parameters: Any, mesh: Mesh, dtype: DTypeLike) -> Any:
    """All-gather parameters along ``fsdp`` as ``dtype``. Call this under ``jit``.

    Embeddings are converted back to float32, so their gradients are float32 sums.
    """

    def gather(name: str, parameter: Array, sharding: NamedSharding) -> Array:
        if mesh.shape["fsdp"] == 1 or "fsdp" not in sharding.spec:
            return parameter
        shard = jax.lax.with_sharding_constraint(parameter.astype(dtype), sharding)
        x = jax.lax.with_sharding_constraint(shard, _without_fsdp(sharding))
        return x.astype(jnp.float32) if name.endswith("matrix") else x

    return map_named(gather, parameters, state_shardings(parameters, mesh))


def unshard_embeddings(parameters: Any, mesh: Mesh) -> Any:
    """Constrain embeddings or their gradients to be unsharded along ``fsdp``.

    On one device, returns them without a constraint, which would keep XLA from adding gradients in
    place.
    """

    def constrain(name: str, x: Array, sharding: NamedSharding) -> Array:
        if mesh.size > 1 and name.endswith("matrix"):
            x = jax.lax.with_sharding_constraint(x, _without_fsdp(sharding))
        return x

    return map_named(constrain, parameters, state_shardings(parameters, mesh))


def reduce_scattered(gradients: Any, mesh: Mesh) -> Any:
    """Reduce-scatter gradients of all-gathered parameters along ``fsdp`` into float32 shards."""
    # With only the second constraint, XLA would move rows of the batch between devices to compute
    # shards of the embeddings' gradients.
    gradients = unshard_embeddings(gradients, mesh)
    shards = jax.lax.with_sharding_constraint(gradients, state_shardings(gradients, mesh))
    return jax.tree.map(lambda x: x.astype(jnp.float32), shards)


def _without_fsdp(sharding: NamedSharding) -> NamedSharding:
    axes = [None if axis == "fsdp" else axis for axis in sharding.spec]
    return NamedSharding(sharding.mesh, PartitionSpec(*axes))


def parameter_name(path: tuple[Any, ...]) -> str:
    """Return the dotted name of a leaf, such as ``encoder.layers.0.feed_forward.inner.kernel``."""
    # paths in an nnx.State end in .value
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def parameters_by_name(parameters: Any) -> dict[str, Any]:
    """Return the leaves of nested parameters by name (see ``parameter_name``)."""
    return {parameter_name(path): leaf for path, leaf in jax.tree.leaves_with_path(parameters)}


def map_named(function: Callable[..., Any], *trees: Any) -> Any:
    """Return the tree of ``function(name, *leaves)``, with the name of each leaf."""
    return jax.tree.map_with_path(lambda path, *x: function(parameter_name(path), *x), *trees)


def _sharding(name: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    for end, spec in _RULES.items():
        if re.search(rf"(^|[._]){end}$", name) and len(spec) == len(shape):
            if end == "matrix" and shape[0] % mesh.shape["tensor"]:
                spec = PartitionSpec(None, "fsdp")
            for axis, size in zip(spec, shape, strict=True):
                if axis is not None and size % mesh.shape[axis]:
                    divided = "num_heads and model.d_ff" if axis == "tensor" else "d_model"
                    raise UserError(
                        f"mesh.{axis} is {mesh.shape[axis]}; expected a divisor of "
                        f"model.{divided} ({name} has size {size} along that axis)."
                    )
            return NamedSharding(mesh, spec)
    return replicated(mesh)
