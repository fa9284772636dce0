"""What decides whether a kernel of ours can run: the GPU, and how a step is shared by several."""

from __future__ import annotations

import jax


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
