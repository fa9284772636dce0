"""Test settings: eight simulated CPU devices or an accelerator, strict JAX, slow files first, a
compilation cache that outlives the session.
"""

import atexit
import gc
import hashlib
import os
import shutil
import signal
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Files that take longest, longest first.
SLOW = [
    f"tests/{name}.py"
    for name in (
        "training/test_processes",
        "training/test_loop",
        "training/test_step",
        "test_benchmarks",
        "decoding/test_engine",
        "test_library_examples",
        "training/test_object_store",
        "test_examples",
        "training/test_going_on",
        "test_decode_cli",
        "test_notebooks",
        "test_table3",
        "decoding/test_workers",
        "training/test_checkpoint",
        "training/test_compiling",
        "decoding/test_continuous_batching",
        "serving/test_page",
        "model/test_transformer",
        "decoding/test_translator",
        "training/test_loss",
        "interop/test_import_huggingface",
        "decoding/test_beam_search",
        "serving/test_app",
        "training/test_variants",
        "interop/test_export",
        "interop/test_pytorch",
        "test_wheel",
        "test_report",
        "serving/test_program",
    )
]

# The tests run on CPUs, whatever this machine has, unless TEST_PLATFORM names an accelerator (cuda,
# tpu), as in `make test-gpu`. pytest's workers inherit it.
os.environ["JAX_PLATFORMS"] = ",".join({os.environ.get("TEST_PLATFORM", "cpu"): 0, "cpu": 0})

# Compiling is most of what the tests do. Less optimisation, one module for LLVM instead of 32, and
# XLA's older, plainer code generator (which jaxlib 0.11 has no more) take a third of the time and
# change no arithmetic they rely on.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
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

# Compiled functions are kept for the next session, and for the other workers and the programs that
# tests start. JAX writes entries without a lock, so each worker has a folder of its own; what is
# whole there is linked into the shared folder, which is for one JAX, these flags and this CPU.
CPU = Path("/proc/cpuinfo")
FEATURES = [line for line in CPU.read_text().splitlines() if "flags" in line.lower()][:1]
SETTINGS = [version("jax"), version("jaxlib"), os.environ["XLA_FLAGS"], *FEATURES]
COMPILED = Path(__file__).resolve().parents[1] / ".pytest_cache" / "compiled"
SHARED = COMPILED / hashlib.sha256(repr(SETTINGS).encode()).hexdigest()[:16]
SHARED.mkdir(parents=True, exist_ok=True)
OWN = Path(tempfile.mkdtemp(dir=COMPILED, prefix="worker-"))
atexit.register(shutil.rmtree, OWN, ignore_errors=True)
os.environ |= {
    "JAX_COMPILATION_CACHE_DIR": str(OWN),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",  # their folder is part of the keys
}


import jax  # noqa: E402  reads what is set above
import pytest  # noqa: E402

# Programs that tests start run on CPUs: what they show is the same there, and they start faster.
DEVICE = jax.devices()[0]
os.environ["JAX_PLATFORMS"] = "cpu"
if DEVICE.platform == "cpu" and (asked := os.environ.get("TEST_PLATFORM", "cpu")) != "cpu":
    raise pytest.UsageError(f"TEST_PLATFORM is {asked!r}, but JAX sees CPUs alone")

# A shell that starts the tests in the background has Ctrl-C ignored, and so would the programs that
# they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
jax.config.update("jax_numpy_rank_promotion", "raise")


def exchange_compiled() -> None:
    """Link new entries of this worker's folder into the shared folder, and the other way round."""
    own, shared = ({path.name for path in folder.glob("*-cache")} for folder in (OWN, SHARED))
    for name in own - shared:
        with suppress(zlib.error, FileExistsError):  # a program may have been killed as it wrote
            zlib.decompress((OWN / name).read_bytes())
            os.link(OWN / name, SHARED / name)
    for name in shared - own:
        with suppress(FileNotFoundError, FileExistsError):
            os.link(SHARED / name, OWN / name)


for entry in [] if "PYTEST_XDIST_WORKER" in os.environ else COMPILED.glob("*/*-cache"):
    with suppress(FileNotFoundError):
        if max(entry.stat().st_atime, entry.stat().st_mtime) < time.time() - 7 * 86400:
            entry.unlink()
exchange_compiled()


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files come first, so that no worker is left with one at the end (with xdist:
    `--dist loadfile --no-loadscope-reorder`).
    """
    place = {name: place for place, name in enumerate(SLOW)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(SLOW)))


def pytest_collection_finish() -> None:
    """Collect garbage less often, and none of what is imported: tracing makes many objects."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="module", autouse=True)
def compiled_functions() -> Iterator[None]:
    """Exchange compiled functions with other workers after each file. Forget those in memory when
    there are many: on a CPU each has memory maps of its own, and Linux aborts a process that asks
    for more than 65,530.
    """
    yield
    exchange_compiled()
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
