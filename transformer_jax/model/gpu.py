"""What the GPU kernels share: when they can run, and how blocks are read and written."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas import triton


def runs_kernels() -> bool:
    """Whether this is compiled for GPUs that multiply matrices in bfloat16: compute capability 8.0
    (A100) and newer, and what is compiled for a GPU that is not here.
    """
    if jax.default_backend() != "gpu":
        return False
    try:
        return float(getattr(jax.devices()[0], "compute_capability", 8.0)) >= 8.0
    except ValueError:  # AMD's have names
        return False


def shares() -> tuple[int, int] | None:
    """Among how many devices a training step shares rows and heads; None if that is not known.

    Not knowing it, XLA would gather a kernel's inputs from all devices.
    """
    mesh = jax.sharding.get_abstract_mesh().shape
    if "tensor" in mesh:
        return mesh["data"] * mesh["fsdp"], mesh["tensor"]
    return (1, 1) if not mesh and jax.device_count() == 1 else None


def load(ref: Any, inside: jax.Array | None) -> jax.Array:
    """A block, with 0 at what is not inside the array; None: all is."""
    return ref[...] if inside is None else triton.load(ref, mask=inside, other=0)


def store(ref: Any, x: jax.Array, inside: jax.Array | None) -> None:
    """Write a block in its array's type, but for what is not inside the array."""
    triton.store(ref, x.astype(ref.dtype), mask=inside)
