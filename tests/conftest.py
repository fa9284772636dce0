"""Test setup: eight simulated CPU devices or an accelerator, strict JAX, slow files first, and a
persistent compilation cache.
"""

import atexit
import gc
import hashlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

# The slowest files of `make test`, slowest first, and one file of each folder of TOGETHER. The
# profiler's file leads: each of its traces contains all functions that its process has compiled.
SLOW = [
    f"tests/{name}.py"
    for name in (
        "training/test_profiler",
        "pretrained/test_families",
        "training/test_loop",
        "decoding/test_engine",
        "test_library_examples",
        "training/test_step",
        "training/test_processes",
        "serving/test_app",
        "test_examples",
        "test_decode_cli",
        "model/test_transformer",
        "training/test_resumed_runs",
        "training/test_guided_alignment",
        "export/test_export",
        "training/test_language_pairs",
        "runs/test_checkpoint",
        "training/test_compiling",
        "test_benchmarks",
        "decoding/test_beam_search",
        "training/test_adafactor",
        "training/test_loss",
        "training/test_freeze",
        "translation/test_translator",
        "decoding/test_workers",
        "export/test_pytorch",
        "report/test_contents",
        "data/test_corpus",
        "translation/test_async_translator",
        "training/test_variants",
        "test_one_file",
        "decoding/test_sampling",
        "training/test_muon",
        "runs/test_remote",
        "test_cli",
        "test_wheel",
    )
]

# The files of these folders share what takes seconds to make: a service, and the modules of
# transformers. One of pytest's workers runs all files of such a folder.
TOGETHER = ("tests/pretrained", "tests/serving")

# Tests run on CPUs by default. TEST_PLATFORM selects an accelerator (cuda or tpu), as in
# `make test-gpu`. pytest's workers inherit it.
os.environ["JAX_PLATFORMS"] = ",".join({os.environ.get("TEST_PLATFORM", "cpu"): 0, "cpu": 0})

# Tests spend most of their time compiling. One LLVM module instead of 32, fewer LLVM passes and
# less optimization save up to two thirds. Without any optimization, jaxlib 0.11 and newer compute
# gradients less exactly in two processes; before, XLA's older code generator saves time, too.
# pytest's workers inherit GIVEN_XLA_FLAGS: their flags, and so their cache, are those of a run
# without workers.
os.environ.setdefault("GIVEN_XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
os.environ["XLA_FLAGS"] = (
    os.environ["GIVEN_XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"
    " --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
)
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
else:
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=1"

# One thread each for matmuls of NumPy, PyTorch and CTranslate2. More wait for each other, and use
# the CPU while they wait. pytest's workers and programs inherit this.
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"

# Float32 is not TF32, and model.dtype auto is float32 on CPUs with avx512_bf16 too.
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"

# No autotuning of GPU kernels: it is slow, and impossible for a GPU that this machine lacks. On an
# accelerator, steps are deterministic, and workers share the memory.
os.environ["XLA_FLAGS"] += " --xla_gpu_autotune_level=0"
if os.environ["JAX_PLATFORMS"] != "cpu":
    os.environ["XLA_FLAGS"] += " --xla_gpu_deterministic_ops=true"
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

# Test runs, workers and the programs that tests start share a compilation cache. JAX writes entries
# without a lock, so each worker has its own folder. Complete entries are linked into a shared
# folder for this JAX version, these flags and this CPU.
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
    "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",  # their path is part of the cache keys
}

# Programs that tests start, and pytest's workers, import the file sitecustomize.py there.
STARTED = [str(Path(__file__).with_name("started")), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, STARTED))

# Programs that tests start buffer their output, as they do for users.
os.environ.pop("PYTHONUNBUFFERED", None)

# The first import of a module compiles it to bytecode; that takes 13 s of CPU time in total. If all
# tests run, each worker starts with different packages, so that few modules are compiled twice.
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests load only models that they saved
PACKAGES = (
    ("transformer_jax.training.loop", "hypothesis", "chex"),
    ("torch", "transformers"),
    ("matplotlib.pyplot", "fastapi.testclient", "playwright.sync_api", "nbclient"),
)
worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
if worker and os.environ.get("ALL_TESTS") == "True":
    for number in range(len(PACKAGES)):
        for name in PACKAGES[(int(worker) + number) % len(PACKAGES)]:
            with suppress(ImportError):
                importlib.import_module(name)

import jax  # noqa: E402  reads the settings above
import pytest  # noqa: E402
from jax._src import compilation_cache  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402
from warm import start_programs_warm  # noqa: E402

# Programs started by tests run on one CPU: same behavior, faster startup, less to compile.
DEVICE = jax.devices()[0]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
if DEVICE.platform == "cpu" and (asked := os.environ.get("TEST_PLATFORM", "cpu")) != "cpu":
    raise pytest.UsageError(f"TEST_PLATFORM is {asked!r}, but JAX finds only CPUs")

# A shell ignores Ctrl-C for background jobs, and programs started by tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
jax.config.update("jax_numpy_rank_promotion", "raise")

# JAX makes a context of MLIR, with all of its dialects, for each function that it compiles: a fifth
# of the time of a small one. Here, a thread makes one for a hundred functions.
_new_context = mlir.make_ir_context
_contexts = threading.local()


def make_ir_context() -> Any:
    """Return this thread's context, a new one after each hundred uses."""
    uses = getattr(_contexts, "uses", 0)
    if uses % 100 == 0:
        _contexts.newest = _new_context()
    _contexts.uses = uses + 1
    return _contexts.newest


mlir.make_ir_context = make_ir_context


def exchange_compiled() -> None:
    """Link new entries from this worker's folder to the shared folder, and vice versa."""
    own, shared = ({path.name for path in folder.glob("*-cache")} for folder in (OWN, SHARED))
    for name in own - shared:
        try:
            compilation_cache.decompress_executable((OWN / name).read_bytes())
        except Exception:  # corrupt: its writer may have been killed; the type depends on the codec
            continue
        with suppress(FileExistsError):
            os.link(OWN / name, SHARED / name)
    for name in shared - own:
        with suppress(FileNotFoundError, FileExistsError):
            os.link(SHARED / name, OWN / name)


with suppress(FileNotFoundError):  # another test run deletes its folder
    for entry in [] if "PYTEST_XDIST_WORKER" in os.environ else COMPILED.glob("*/*-cache"):
        if max(entry.stat().st_atime, entry.stat().st_mtime) < time.time() - 7 * 86400:
            entry.unlink()
exchange_compiled()


def pytest_configure(config: pytest.Config) -> None:
    """Tell pytest's workers if they run all tests on CPUs. With a GPU, JAX must load first."""
    os.environ["ALL_TESTS"] = str(
        config.args == config.getini("testpaths") and DEVICE.platform == "cpu"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need CPUs, or more devices than the accelerator has."""
    needed = max((mark.args[0] for mark in item.iter_markers("devices")), default=1)
    if jax.device_count() < needed:
        pytest.skip(f"needs {needed} devices, as simulated on CPUs; found {jax.device_count()}")
    if (mark := item.get_closest_marker("cpu")) and jax.default_backend() != "cpu":
        pytest.skip(f"CPU only: {mark.args[0]}")


started: weakref.WeakSet[subprocess.Popen[Any]] = weakref.WeakSet()
_start_program = subprocess.Popen.__init__


def _start_and_note(self: subprocess.Popen[Any], *given: Any, **settings: Any) -> None:
    _start_program(self, *given, **settings)
    started.add(self)


subprocess.Popen.__init__ = _start_and_note  # type: ignore[method-assign]
start_programs_warm()


@contextmanager
def programs_end_with_failure() -> Iterator[None]:
    """Kill the programs that a failing test has started. Left running, they would make later tests
    fail.
    """
    before = set(started)
    try:
        yield
    except BaseException:
        for program in set(started) - before:
            program.kill()
            program.wait()
            for pipe in filter(None, (program.stdin, program.stdout, program.stderr)):
                with suppress(OSError):  # a broken pipe
                    pipe.close()
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    with programs_end_with_failure():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Generator[None, Any, Any]:
    with programs_end_with_failure():
        return (yield)


# CPU seconds of this process and of the programs that it waited for, at the last report of a test,
# and functions compiled since then. Wall time depends on what else the machine does; these do not.
cost = {"cpu_s": 0.0, "compiled": 0}
test_costs: dict[str, Counter[str]] = defaultdict(Counter)


def count_compiled(event: str, duration_s: float, **labels: Any) -> None:
    cost["compiled"] += event == "/jax/core/compile/backend_compile_duration"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Attach the cost of a test's setup, call or teardown to its report."""
    report = yield
    cpu_s = sum(os.times()[:4])
    report.cost = {"cpu_s": cpu_s - cost["cpu_s"], "compiled": cost["compiled"]}
    cost.update(cpu_s=cpu_s, compiled=0)
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a report's cost. Reports of workers come to the process that started them."""
    test_costs[report.nodeid].update(getattr(report, "cost", {}))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slowest", type=int, default=0, metavar="N", help="show the N slowest files and tests"
    )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the test platform, and the slowest files and tests by CPU time."""
    terminalreporter.write_line(
        f"on {DEVICE.platform} ({DEVICE.device_kind}), jax {jax.__version__}"
    )
    if not (count := config.getoption("slowest")):
        return
    file_costs: dict[str, Counter[str]] = defaultdict(Counter)
    for name, test_cost in test_costs.items():
        file_costs[name.partition("::")[0]].update(test_cost)
    total_s = sum(file_cost["cpu_s"] for file_cost in file_costs.values())
    terminalreporter.write_line(f"{total_s:.0f} CPU seconds; the most, and functions compiled:")
    for costs in (file_costs, test_costs):
        slowest = sorted(costs, key=lambda name: -costs[name]["cpu_s"])[:count]
        for name in slowest:
            terminalreporter.write_line(
                f"{costs[name]['cpu_s']:7.1f} s {costs[name]['compiled']:5}  {name}"
            )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each of pytest's workers one file at a time, or one folder of ``TOGETHER``."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            folder = file.rpartition("/")[0]
            return folder if folder in TOGETHER else file

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow files first, so that no worker starts one last.

    With xdist, this needs `--dist loadfile --no-loadscope-reorder`.
    """
    place = {name: place for place, name in enumerate(SLOW)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(SLOW)))


def pytest_collection_finish() -> None:
    """Collect garbage less often, because tracing creates many objects. Start to count costs."""
    gc.freeze()
    gc.set_threshold(1_000_000, 20, 50)
    jax.monitoring.register_event_duration_secs_listener(count_compiled)
    cost["cpu_s"] = sum(os.times()[:4])


@pytest.fixture(scope="module", autouse=True)
def compiled_functions() -> Iterator[None]:
    """Exchange compiled functions with other workers after each file. Clear JAX's in-memory caches
    when they are large: on CPUs each compiled function has its own memory maps, and Linux limits a
    process to 65,530.
    """
    yield
    exchange_compiled()
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def limited_digits() -> Iterator[None]:
    """Restore Python's limit on the digits of integers, which decode.py lifts in its process."""
    yield
    sys.set_int_max_str_digits(4300)


@pytest.fixture
def shared_data() -> Path:
    """Real text in the folder TRANSFORMER_JAX_DATA. Without it, tests that need it are skipped."""
    root = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("TRANSFORMER_JAX_DATA", root.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(
            f"needs real text in {folder}, which does not exist. "
            "TRANSFORMER_JAX_DATA sets another folder."
        )
    return folder


@pytest.fixture
def h200() -> jax.Device:
    """A GPU target for ahead-of-time compilation. This machine must not have a GPU."""
    from benchmarks import compile_for

    if Path("/dev/nvidia0").exists():
        pytest.skip("XLA compiles for an absent GPU only on a machine without GPUs")
    try:
        [device] = compile_for.gpus("h200")
    except NotImplementedError as error:
        pytest.skip(f"needs JAX's package for CUDA, pip install '.[cuda]': {error}")
    return device


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The installed browser, headless."""
    api = pytest.importorskip("playwright.sync_api", reason="needs Playwright to open pages")
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip(f"needs a browser ({' or '.join(names)}): apt-get install chromium")
    with api.sync_playwright() as play:
        api.expect.set_options(timeout=30_000)
        browser = play.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()
