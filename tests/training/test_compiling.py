"""Ahead-of-time compilation: each function once, before its step, without blocking training."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import ONE, ROOT, changed, entries, no_evaluation, tiny

from transformer_jax.decoding import engine as engine_module
from transformer_jax.devices.sharding import make_mesh, replicated
from transformer_jax.errors import UserError
from transformer_jax.settings.config import Config, MeshConfig
from transformer_jax.training import compiling
from transformer_jax.training import step as step_module
from transformer_jax.training.compiling import CompileAhead, memory_needed
from transformer_jax.training.loop import train


def fake_run(*shapes: tuple[int, int, int], lower: Any = None) -> Any:
    """A run whose step on rows of width S doubles a vector of length S. ``lower`` replaces it."""
    mesh = make_mesh(MeshConfig(), ONE)

    def doubling(state: Any, batch: Any) -> jax.stages.Lowered:
        vector = jax.ShapeDtypeStruct((batch.source_BS.shape[1],), jnp.float32)
        return jax.jit(lambda x: x + x, donate_argnums=0).lower(vector)

    state = jax.ShapeDtypeStruct((125,), jnp.float32, sharding=replicated(mesh))
    step = SimpleNamespace(lower=lower or doubling)
    return SimpleNamespace(
        mesh=mesh,
        plan=SimpleNamespace(packed=False, aligned=False, first_uses=lambda start, stop: shapes),
        functions=SimpleNamespace(abstract_state=state, train_step=step),
        state=SimpleNamespace(step=0),
        config=SimpleNamespace(training=SimpleNamespace(steps=9)),
    )


def failing(error: str) -> Any:
    def lower(state: Any, batch: Any) -> Any:
        raise jax.errors.JaxRuntimeError(error)

    return lower


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """Functions that XLA compiles or reads from the cache, with their threads."""
    found = []

    def note(event: str, _: float, *, fun_name: str = "", **__: Any) -> None:
        if event.endswith("backend_compile_duration"):
            found.append((fun_name, threading.current_thread().name))

    # do not reuse compiled functions of other tests
    for module, name in ((step_module, "shared_functions"), (engine_module, "compile_search")):
        monkeypatch.setattr(module, name, lru_cache(getattr(module, name).__wrapped__))
    jax.monitoring.register_event_duration_secs_listener(note)
    yield found
    jax.monitoring.unregister_event_duration_listener(note)


def two_shapes(config: Config) -> Config:
    return changed(config, batch={"buckets": 2})


def test_a_run_compiles_each_shape_once_and_ahead(
    tmp_path: Path, compiled: list[tuple[str, str]]
) -> None:
    train(two_shapes(tiny(steps=10, eval_every=10)), tmp_path, devices=ONE)
    counts = Counter(
        name for name, thread in compiled if "_step" in name or "admit_and_decode" in name
    )
    assert counts == {"jit(train_step)": 2, "jit(eval_step)": 1, "jit(admit_and_decode)": 1}
    threads = [thread for name, thread in compiled if name == "jit(train_step)"]
    assert all(thread.startswith("compiling") for thread in threads)


def test_a_step_waits_only_for_its_own_shape() -> None:
    release = threading.Event()

    def lower(state: Any, batch: Any) -> Any:
        if batch.source_BS.shape[1] == 3:
            assert release.wait(60)
        return fake_run().functions.train_step.lower(state, batch)

    told: list[str] = []
    with closing(CompileAhead(fake_run((8, 2, 2), (8, 3, 3), lower=lower))) as ahead:
        np.testing.assert_array_equal(ahead.wait((8, 2, 2), told.append)(jnp.ones(2)), [2, 2])
        told.clear()

        def show(state: str) -> None:
            told.append(state)
            release.set()

        assert len(ahead.wait((8, 3, 3), show)(jnp.ones(3))) == 3
    assert told == ["compiling shape 2 of 2"]


def test_a_failure_for_one_shape_is_raised_for_every_shape() -> None:
    lower = failing("INTERNAL: no such\ninstruction")
    with closing(CompileAhead(fake_run((8, 2, 3), (8, 4, 4), lower=lower))) as ahead:
        for shape in ((8, 2, 3), (8, 4, 4)):
            with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: no such"):
                ahead.wait(shape, lambda state: None)


def test_an_error_for_a_shape_that_exceeds_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "memory_limit", lambda device: 200_000)
    with pytest.raises(UserError) as error:
        train(tiny(steps=3), tmp_path, devices=ONE)
    assert "training step of 72 rows of 14 + 12 tokens needs 0.0 GB" in str(error.value)
    assert "optimizer.accumulate_steps" in str(error.value)
    assert not entries(tmp_path, "train")
    monkeypatch.setattr(compiling, "memory_limit", lambda device: 10**9)
    train(no_evaluation(tiny(steps=1)), tmp_path, devices=ONE)  # the folder is unlocked again


def test_the_estimate_counts_donated_arguments_once() -> None:
    shape = jax.ShapeDtypeStruct((1000,), jnp.float32)
    donating = jax.jit(lambda x: x + 1, donate_argnums=0).lower(shape).compile()
    assert memory_needed(donating) == 4000
    assert memory_needed(jax.jit(lambda x: x + 1).lower(shape).compile()) == 8000


@pytest.mark.parametrize(("limit", "fits"), [(4500, True), (4499, False)])
def test_the_estimate_includes_the_copy_for_saving(
    limit: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A donated vector has 4,000 bytes, the state 500."""
    monkeypatch.setattr(compiling, "memory_limit", lambda device: limit)
    refused = pytest.raises(UserError, match="training step of 8 rows of 1000 . 1 tokens needs 0.0")
    with closing(CompileAhead(fake_run((8, 1000, 1)))) as ahead, nullcontext() if fits else refused:
        ahead.wait((8, 1000, 1), lambda state: None)


def test_out_of_memory_during_autotuning_postpones_compilation(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: None)
    run = fake_run((8, 2, 3), lower=failing("RESOURCE_EXHAUSTED: Out of memory"))
    run.mesh = SimpleNamespace(local_devices=[gpu], size=1)
    monkeypatch.setattr(compiling, "batch_sharding", lambda mesh: None)
    with closing(CompileAhead(run)) as ahead:
        assert ahead.wait((8, 2, 3), lambda state: None) is run.functions.train_step
    assert "Out of memory while compiling the training step of 8 rows" in caplog.text


def test_all_shapes_are_compiled_before_collectives_between_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In all processes, because on CPUs a collective waits only 30 s for the others."""
    compiled = []

    @contextmanager
    def raise_on_any_process() -> Iterator[None]:
        yield
        compiled.append(all(each.done() for each in ahead._compiled_steps.values()))

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(compiling, "raise_on_any_process", raise_on_any_process)
    with closing(CompileAhead(fake_run((8, 2, 2), (8, 3, 3), (8, 4, 4)))) as ahead:
        ahead.before_collectives(lambda state: None)
        ahead.wait((8, 2, 2), lambda state: None)
    assert compiled == [True]


def test_all_processes_compile_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of first use, one shape at a time, for any number of cores."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(compiling, "raise_on_any_process", nullcontext)
    monkeypatch.setattr(compiling, "num_cores", lambda: 8)
    events, shapes = [], [(8, width, width) for width in (5, 2, 4, 3)]

    def lower(state: Any, batch: Any) -> Any:
        events.append(width := batch.source_BS.shape[1])
        time.sleep(0.02)
        return SimpleNamespace(compile=lambda: events.append(width))

    monkeypatch.setattr(compiling, "memory_needed", lambda step: 0)
    with closing(CompileAhead(fake_run(*shapes, lower=lower))) as ahead:
        ahead.before_collectives(lambda state: None)
    assert events == [5, 5, 2, 2, 4, 4, 3, 3]


def test_ctrl_c_during_compilation_ends_the_program_at_once(tmp_path: Path) -> None:
    program = f"""
import sys, time
sys.path.insert(0, {str(ROOT / "tests" / "training")!r})
import jax, jax.numpy as jnp
from pathlib import Path
from runs import tiny
from transformer_jax.cli import run_program
from transformer_jax.training import compiling, loop
import signal

def slow(x):
    for _ in range(1000):
        x = jnp.sin(x @ x) + jnp.cos(x[::-1]).cumsum(0)
    return x

def compile(self, shape):
    made = jax.jit(slow).lower(jnp.ones((64, 64)))
    print("compiling", flush=True)
    return made.compile()

compiling.CompileAhead._compile = compile

def main():
    loop.train(tiny(), Path({str(tmp_path / "run")!r}))

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(run_program(main))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "compiling\n"
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)  # compiling takes minutes
    assert process.returncode == 128 + signal.SIGINT, err
    assert "Traceback" not in err and "terminate called" not in err
    assert not (tmp_path / "run" / "checkpoints" / "0").exists()


def test_a_script_that_ends_during_compilation_waits_for_it() -> None:
    """C++ would abort if Python exited while one of its threads is running."""
    program = """
import sys, time
sys.path.insert(0, "tests/training")
import jax, jax.numpy as jnp
from test_compiling import CompileAhead, fake_run

def slow(x):
    for _ in range(200):
        x = jnp.sin(x @ x) + jnp.cos(x[::-1]).cumsum(0)
    return x

lower = lambda state, batch: jax.jit(slow).lower(jnp.ones((64, 64)))
ahead = CompileAhead(fake_run((8, 2, 2), lower=lower))
time.sleep(0.3)
assert not ahead._compiled_steps[8, 2, 2].done()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0"},
    )
    assert done.returncode == 0 and not done.stderr
