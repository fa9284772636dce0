"""Test settings: eight simulated CPU devices, strict JAX, a compilation cache of the tests' own."""

import atexit
import os
import shutil
import signal
import tempfile
from importlib.metadata import version
from pathlib import Path

# Compiling is most of what the tests do. Less optimisation and XLA's older, plainer code generator
# (which jaxlib 0.11 has no more) take a third of the time and change no arithmetic they rely on.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

# What was compiled is kept for what is compiled again: the same step made anew, and the programs
# that tests start. Each worker has a folder of its own, which goes with it: JAX writes without a
# lock, and with a size limit, which brings one, slowly.
os.environ |= {
    "JAX_COMPILATION_CACHE_DIR": tempfile.mkdtemp(prefix="compiled_by_tests_"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

import jax
import pytest

# A shell that starts the tests in the background has Ctrl-C ignored, and so would the programs that
# they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def shared_data() -> Path:
    """Real text, in the folder that TRANSFORMER_JAX_DATA names; without it its tests skip."""
    root = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("TRANSFORMER_JAX_DATA", root.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(
            f"needs the real text in {folder}, which is absent "
            "(TRANSFORMER_JAX_DATA names another folder)"
        )
    return folder
