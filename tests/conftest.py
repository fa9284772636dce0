"""Test settings: eight simulated CPU devices or an accelerator, strict JAX, a compilation cache of
the tests' own.
"""

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

# The tests run on CPUs, whatever this machine has, unless TEST_PLATFORM names an accelerator (cuda,
# tpu), as in `make test-gpu`. pytest's workers inherit it.
os.environ["JAX_PLATFORMS"] = ",".join({os.environ.get("TEST_PLATFORM", "cpu"): 0, "cpu": 0})

# Compiling is most of what the tests do. Less optimisation and XLA's older, plainer code generator
# (which jaxlib 0.11 has no more) take a third of the time and change no arithmetic they rely on.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

# Kernels of a GPU are not chosen by timing them: that takes long, and cannot be done for a GPU that
# is not there. On an accelerator steps are the same each time, float32 is float32, not TF32, and
# workers share the memory.
os.environ["XLA_FLAGS"] += " --xla_gpu_autotune_level=0"
if os.environ["JAX_PLATFORMS"] != "cpu":
    os.environ["XLA_FLAGS"] += " --xla_gpu_deterministic_ops=true"
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

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

# Programs that tests start run on CPUs: what they show is the same there, and they start faster.
DEVICE = jax.devices()[0]
os.environ["JAX_PLATFORMS"] = "cpu"
if DEVICE.platform == "cpu" and (asked := os.environ.get("TEST_PLATFORM", "cpu")) != "cpu":
    raise pytest.UsageError(f"TEST_PLATFORM is {asked!r}, but JAX sees CPUs alone")

# A shell that starts the tests in the background has Ctrl-C ignored, and so would the programs that
# they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what an accelerator cannot show: several devices where it has one, and what CPUs do."""
    needed = max((mark.args[0] for mark in item.iter_markers("devices")), default=1)
    if jax.device_count() < needed:
        pytest.skip(f"needs {needed} devices, as simulated on CPUs; here are {jax.device_count()}")
    if (mark := item.get_closest_marker("cpu")) and jax.default_backend() != "cpu":
        pytest.skip(f"of CPUs alone: {mark.args[0]}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the tests ran on."""
    terminalreporter.write_line(
        f"on {DEVICE.platform} ({DEVICE.device_kind}), jax {jax.__version__}"
    )


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps() -> Iterator[None]:
    """Forget compiled functions when there are many: on a CPU each has memory maps of its own, and
    Linux aborts a process that asks for more than 65,530.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


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


@pytest.fixture
def h200() -> jax.Device:
    """A GPU to compile for, which need not be here; in fact, must not."""
    from benchmarks import compile_for

    if Path("/dev/nvidia0").exists():
        pytest.skip("XLA compiles for a GPU that is absent only on a machine without any")
    try:
        [device] = compile_for.gpus("h200")
    except NotImplementedError as error:
        pytest.skip(f"needs JAX's package for CUDA, pip install '.[cuda]': {error}")
    return device


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The browser that is installed, without a window."""
    api = pytest.importorskip("playwright.sync_api", reason="needs Playwright, to open pages")
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip(f"needs a browser ({' or '.join(names)}): apt-get install chromium")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()
