"""Functions are compiled ahead of the steps that need them, each once, and never in their way."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from runs import ONE, ROOT, entries, no_evaluation, tiny

from transformer_jax.cli import COMPILING
from transformer_jax.config import Config
from transformer_jax.errors import UserError
from transformer_jax.training import compiling
from transformer_jax.training.compiling import CompileAhead, Job, memory_needed
from transformer_jax.training.loop import train
from transformer_jax.training.reporting import Reporter
from transformer_jax.training.step import shared_functions

GPU: Any = SimpleNamespace(platform="gpu", process_index=0, memory_stats=lambda: None)


def job(name: str, size: int = 2, **others: Any) -> Job:
    shape = jax.ShapeDtypeStruct((size,), jnp.float32)
    return Job(name, lambda: jax.jit(lambda x: x + 1).lower(shape), "Help it.", **others)


def failing(error: str) -> Job:
    def lower() -> Any:
        raise RuntimeError(error)

    return Job("step of 8 rows", lower, "Help it.")


def compile_ahead(*jobs: Job, devices: Sequence[Any] = ONE) -> CompileAhead:
    return CompileAhead(jobs, devices=devices, poll=lambda: False)


@pytest.fixture
def compiled() -> Iterator[list[tuple[str, str]]]:
    """The functions that XLA has compiled, or read from the cache, each with its thread."""
    found = []

    def note(event: str, _: float, *, fun_name: str = "", **__: Any) -> None:
        if event.endswith("backend_compile_duration"):
            found.append((fun_name, threading.current_thread().name))

    shared_functions.cache_clear()  # those of other tests are compiled already
    jax.monitoring.register_event_duration_secs_listener(note)
    yield found
    jax.monitoring.unregister_event_duration_listener(note)


def two_shapes(config: Config) -> Config:
    return dataclasses.replace(config, batch=dataclasses.replace(config.batch, buckets=2))


def test_a_run_compiles_each_shape_once_and_ahead(
    tmp_path: Path, compiled: list[tuple[str, str]]
) -> None:
    summary = train(two_shapes(tiny(steps=10, eval_every=10)), tmp_path, devices=ONE)
    counts = Counter(name for name, thread in compiled if "_step" in name or "search" in name)
    assert counts == {"jit(train_step)": 2, "jit(eval_step)": 1, "jit(_search_bucket)": 1}
    assert all(thread.startswith(COMPILING) for name, thread in compiled if name in counts)
    found = entries(tmp_path, "compile")
    assert len(found) == summary["compiled"]["shapes"] == 4
    assert all(entry["seconds"] > 0 and entry["memory_bytes"] > 0 for entry in found)
    assert summary["first_step_seconds"] > 0


def test_jobs_are_done_in_their_order() -> None:
    with closing(compile_ahead(job("a"), job("b"), job("c"))) as ahead:
        assert all(map(ahead.wait, ["c", "unknown", "b", "a"]))
        assert ahead.done == ahead.total == 3
        names = [each.name for each in ahead.finished]
        assert names == ["a", "b", "c"] or compiling.num_threads() > 1


def test_what_fails_is_named() -> None:
    with closing(compile_ahead(failing("INTERNAL: no such\ninstruction"), job("later"))) as ahead:
        with pytest.raises(UserError, match=r"step of 8 rows could not be compiled: INTERNAL: no "):
            ahead.wait("step of 8 rows")
        with pytest.raises(UserError, match="step of 8 rows"):  # whatever is asked for
            ahead.wait("later")


def test_a_shape_that_does_not_fit_is_refused_with_its_name_and_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "memory_limit", lambda devices: 200_000)
    with pytest.raises(UserError) as error:
        train(tiny(steps=3), tmp_path, devices=ONE)
    assert "training step of 72 rows of 14 + 12 tokens needs 0.0 GB" in str(error.value)
    assert "optimizer.accumulate_steps" in str(error.value)
    assert not entries(tmp_path, "train")
    monkeypatch.setattr(compiling, "memory_limit", lambda devices: 10**9)
    train(no_evaluation(tiny(steps=1)), tmp_path, devices=ONE)  # the folder is free again


def test_the_estimate_counts_donated_arguments_once_and_what_is_there_besides() -> None:
    shape = jax.ShapeDtypeStruct((1000,), jnp.float32)
    donating = jax.jit(lambda x: x + 1, donate_argnums=0).lower(shape).compile()
    assert memory_needed(donating) == 4000
    assert memory_needed(jax.jit(lambda x: x + 1).lower(shape).compile()) == 8000
    with closing(compile_ahead(job("a", 1000, beside=500))) as ahead:
        ahead.wait("a")
        assert ahead.finished[0].memory_bytes == 8500


def test_a_device_without_memory_to_tune_kernels_in_leaves_a_function_to_its_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = failing("RESOURCE_EXHAUSTED: Out of memory")
    with closing(compile_ahead(job, devices=[GPU])) as ahead:
        assert ahead.wait("step of 8 rows")
    assert "No memory to compile the step of 8 rows while training runs" in caplog.text


def test_before_steps_exchange_between_gpus_all_is_compiled() -> None:
    with closing(compile_ahead(job("a"), job("b"), devices=[GPU, GPU])) as ahead:
        assert ahead.wait("a") and ahead.done == 2


def test_processes_compile_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with closing(compile_ahead(job("a"), job("b"))) as ahead:
        time.sleep(0.2)
        assert ahead.done == 0
        assert ahead.wait("a") and ahead.done == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_step_is_compiled_ends_the_program_at_once(
    tmp_path: Path, number: signal.Signals
) -> None:
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
    for _ in range(2000):
        x = jnp.sin(x @ x) + jnp.cos(x[::-1]).cumsum(0)
    return x

def work():
    made = jax.jit(slow).lower(jnp.ones((64, 64)))
    print("compiling", flush=True)
    return made

loop.training_jobs = lambda run: [
    job._replace(lower=work) for job in compiling.training_jobs(run)
]
summary = {{}}

def main():
    summary = loop.train(tiny(), Path({str(tmp_path / "run")!r}))
    return 128 + signal.Signals[summary["stopped_by"]]

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
    process.send_signal(number)
    _, err = process.communicate(timeout=60)  # compiling takes minutes
    assert process.returncode == 128 + number, err
    assert "nothing was trained yet" in err and "terminate called" not in err
    assert not (tmp_path / "run" / "checkpoints" / "0").exists()


def test_a_script_that_ends_while_a_function_is_compiled_waits_for_it() -> None:
    """C++ aborts if Python ends under a thread of its own."""
    program = """
import time
import jax, jax.numpy as jnp
from transformer_jax.training.compiling import CompileAhead, Job

def slow(x):
    for _ in range(400):
        x = jnp.sin(x @ x) + jnp.cos(x[::-1]).cumsum(0)
    return x

ahead = CompileAhead(
    [Job("slow", lambda: jax.jit(slow).lower(jnp.ones((64, 64))), "")],
    devices=jax.devices(),
    poll=lambda: False,
)
time.sleep(0.3)
assert not ahead.done
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0"},
    )
    assert done.returncode == 0 and not done.stderr


def test_progress_is_told_in_a_line_now_and_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(Reporter(tmp_path, steps=5, start_step=0)) as reporter:
        reporter.compiling(0, 12, 3.0)
        reporter.compiling(6, 12, 23.4)
        reporter.compiling(7, 12, 24.0)
        reporter.compiling(12, 12, 80.0)
        reporter.compiling(12, 12, 80.0)
    told = capsys.readouterr().err.splitlines()
    assert told == ["compiling 7 of 12 shapes, 23 s", "compiled 12 shapes in 80 s"]
