"""Test settings: eight simulated CPU devices, strict JAX, no compilation cache of the user's."""

import os
from pathlib import Path

# Compiling is most of what the tests do: less optimisation halves their time and changes no arithmetic they rely on.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def shared_data() -> Path:
    """Real text to measure on, named by TRANSFORMER_JAX_DATA or in ../shared/data; tests that need it skip without."""
    root = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("TRANSFORMER_JAX_DATA", root.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"needs the real text in {folder}, which is absent (TRANSFORMER_JAX_DATA names another folder)")
    return folder
