"""Code shared by the GPU kernels: hardware support, sharding, loads and stores, random bits.

Only this module imports Pallas' Triton backend, and only when a kernel is built.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType

from transformer_jax.model.dropout import threshold

logger = logging.getLogger(__name__)


def runs_kernels() -> bool:
    """Return True on GPUs with bfloat16 matmuls: compute capability 8.0 (A100) or newer.

    GPUs that do not report a compute capability count as supported. Without Pallas' Triton backend,
    the reference implementations replace all kernels.
    """
    if jax.default_backend() != "gpu":
        return False
    try:
        has_bfloat16_matmuls = float(getattr(jax.devices()[0], "compute_capability", 8.0)) >= 8.0
    except ValueError:  # AMD GPUs report a name
        return False
    return has_bfloat16_matmuls and _has_triton()


@cache
def _has_triton() -> bool:
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError as error:
        logger.warning(
            "jax %s does not have Pallas' Triton backend (%s), which is deprecated in JAX. The "
            "fused GPU kernels are off; training and decoding give the same results, but slower.",
            jax.__version__,
            error,
        )
        return False
    return True


def compiler_params(num_warps: int) -> Any:
    """Return the parameters that compile a kernel with Pallas' Triton backend."""
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=num_warps, num_stages=1)


def divides_evenly(num_rows: int, heads: int = 0) -> bool:
    """Return True if rows and heads divide evenly over the devices of a training step.

    Returns False if the sharding is unknown, because XLA would then all-gather a kernel's inputs.
    Programs for one of several devices are traced in ``single_device_mesh``.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.shape:
        return jax.device_count() == 1
    if not {"data", "fsdp", "tensor"} <= mesh.shape.keys():  # a mesh of another program
        return False
    return num_rows % row_shards(mesh) == 0 == heads % mesh.shape["tensor"]


def single_device_mesh() -> AbstractContextManager[Any]:
    """Context manager for tracing a program for one device, so that ``divides_evenly`` knows it.

    JAX may have more devices that run the same program on their own.
    """
    axes = ("data", "fsdp", "tensor")
    mesh = jax.sharding.get_abstract_mesh().update((1, 1, 1), axes, (AxisType.Auto,) * 3)
    return jax.sharding.use_abstract_mesh(mesh)


def row_shards(mesh: AbstractMesh) -> int:
    """Return the number of shards that the mesh splits rows into."""
    return mesh.shape["data"] * mesh.shape["fsdp"] if mesh.size > 1 else 1


def shard_mapped(
    mesh: AbstractMesh, function: Callable[..., Any], specs: Any, out_shapes: Any
) -> Callable[..., Any]:
    """Wrap ``function`` to run on each device's shards, because XLA cannot shard a kernel."""
    if mesh.size <= 1:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out_shapes, check_vma=False)


def split_qkv(arrays: Sequence[Any]) -> list[tuple[Any, int, int]]:
    """Return queries, keys and values, each as its array, number and width.

    Projections with the same input share a matmul: one array holds queries, keys and values; two
    arrays hold queries, and keys and values; three arrays hold one of them each. Within an array,
    they are equally wide and lie side by side in the last axis. Kernels read them there, because
    splitting the array would copy it.
    """
    counts = {1: [3], 2: [1, 2], 3: [1, 1, 1]}[len(arrays)]
    return [(x, i, x.shape[-1] // n) for x, n in zip(arrays, counts) for i in range(n)]


def rows_in_bounds(shape: tuple[int, ...], count: int) -> Array | None:
    """Return the mask of the block's rows that are inside the array, or None if all are."""
    if count % shape[0] == 0:
        return None
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return pl.program_id(0) * shape[0] + row < count


def load(ref: Any, in_bounds: Array | None) -> Array:
    """Load a block, with 0 outside the array. ``in_bounds=None`` loads all elements."""
    from jax.experimental.pallas import triton

    return ref[...] if in_bounds is None else triton.load(ref, mask=in_bounds, other=0)


def store(ref: Any, x: Array, in_bounds: Array | None) -> None:
    """Store the elements of a block that are inside the array, converted to the array's dtype."""
    from jax.experimental.pallas import triton

    triton.store(ref, x.astype(ref.dtype), mask=in_bounds)


def draw_dropout_mask(key_and_counter_ref: Any, shape: tuple[int, ...], rate: float) -> Array:
    """Draw the mask of ``dropout.keep_mask``, int32 [L, 1, C]. Bit i is for quarter i of a row.

    Args:
      key_and_counter_ref: uint32, the two words of the key and the counter for this device's first
        row.
    """
    L, _, C = shape
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 2))
    counter = ((pl.program_id(0) * L + row) * C + column).astype(jnp.uint32) + key_and_counter_ref[
        2
    ]
    random_words = _threefry(key_and_counter_ref[0], key_and_counter_ref[1], counter)
    halves = [half for word in random_words for half in (word & 0xFFFF, word >> 16)]
    bits = ((half >= jnp.uint32(threshold(rate))).astype(jnp.int32) for half in halves)
    return reduce(jnp.bitwise_or, (bit << i for i, bit in enumerate(bits)))


def _threefry(a: Array, b: Array, counter: Array) -> tuple[Array, Array]:
    """Compute the random words that ``jax.random.split`` derives from key (a, b) at this counter.

    The generator is Threefry-2x32 with 20 rounds (Salmon et al., 2011).
    """
    keys = a, b, a ^ b ^ jnp.uint32(0x1BD11BDA)
    x = jnp.zeros_like(counter) + a
    y = counter + b
    for group in range(5):
        for rotation in (13, 15, 26, 6) if group % 2 == 0 else (17, 29, 16, 24):
            x += y
            y = ((y << rotation) | (y >> (32 - rotation))) ^ x
        x += keys[(group + 1) % 3]
        y += keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y
