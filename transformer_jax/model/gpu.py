"""What decides whether a kernel of ours can run: the GPU, and how a step is shared by several."""

from __future__ import annotations

import jax


def compute_capability() -> float | None:
    """9.0 of an H100, 8.0 of an A100; None of AMD's, and of one compiled for that is not here."""
    try:
        return float(jax.devices()[0].compute_capability)
    except (AttributeError, ValueError):
        return None


def runs_kernels() -> bool:
    """Whether this is compiled for GPUs that multiply matrices in bfloat16."""
    return jax.default_backend() == "gpu" and (compute_capability() or 8.0) >= 8.0


def shares() -> tuple[int, int] | None:
    """Among how many devices a training step shares rows and heads; None if that is not known.

    Not knowing it, XLA would gather a kernel's inputs from all devices.
    """
    mesh = jax.sharding.get_abstract_mesh().shape
    if "tensor" in mesh:
        return mesh["data"] * mesh["fsdp"], mesh["tensor"]
    return (1, 1) if not mesh and jax.device_count() == 1 else None
