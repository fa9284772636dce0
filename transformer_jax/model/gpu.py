"""Shared code of the GPU kernels: hardware support, sharding, masked loads and stores."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas import triton


def runs_kernels() -> bool:
    """Return True for GPUs with bfloat16 matmuls: compute capability 8.0 (A100) or newer. A GPU
    without a known compute capability counts as supported.
    """
    if jax.default_backend() != "gpu":
        return False
    try:
        return float(getattr(jax.devices()[0], "compute_capability", 8.0)) >= 8.0
    except ValueError:  # AMD GPUs report names
        return False


def shares() -> tuple[int, int] | None:
    """Return the number of row shards and head shards in a training step; None if unknown.

    With unknown shards, XLA would all-gather a kernel's inputs.
    """
    mesh = jax.sharding.get_abstract_mesh().shape
    if "tensor" in mesh:
        return mesh["data"] * mesh["fsdp"], mesh["tensor"]
    return (1, 1) if not mesh and jax.device_count() == 1 else None


def load(ref: Any, inside: jax.Array | None) -> jax.Array:
    """Load a block, with 0 for elements outside the array; ``inside=None`` loads all."""
    return ref[...] if inside is None else triton.load(ref, mask=inside, other=0)


def store(ref: Any, x: jax.Array, inside: jax.Array | None) -> None:
    """Store the elements of a block that lie inside the array, in the array's type."""
    triton.store(ref, x.astype(ref.dtype), mask=inside)
