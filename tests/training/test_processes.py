"""Two processes with two devices each act as one run: same losses, and joint stop and resume."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chex
import jax
import numpy as np
import pytest
from runs import (
    address,
    command,
    ends,
    entries,
    final_state,
    no_evaluation,
    numbered,
    tiny,
    wait_for,
)

from transformer_jax import distributed, train
from transformer_jax.checkpoint import complete_steps
from transformer_jax.config import Config, PairsConfig, Processes
from transformer_jax.errors import UserError

WHOLE = tiny(dropout=0.1, steps=12, eval_every=12, bleu_every=0, checkpoint_every=4)
STEPS = no_evaluation(WHOLE)
ONE_PROCESS = jax.devices()[:2]  # of the runs to compare with


def two(workdir: Path, cache: Path, *configs: Config) -> list[subprocess.Popen[str]]:
    """Start two processes, as two slices; a config for both, or one each."""
    coordinator = address()
    return [
        command(
            workdir,
            cache,
            configs[i % len(configs)],
            "--mesh.slices",
            "2",
            *numbered(coordinator, 2, i),
            devices=2,
        )
        for i in range(2)
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of two processes."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    both = two(workdir, workdir.parent / "cache", WHOLE)
    said = ends(both)
    assert [process.returncode for process in both] == [0, 0], "\n".join(said)
    assert "training pairs" in said[0] and "training pairs" not in said[1]
    return workdir


@pytest.mark.cpu("the programs that it starts run on CPUs")
def test_two_processes_learn_what_one_learns(finished: Path, tmp_path: Path) -> None:
    train(WHOLE, tmp_path / "run", devices=ONE_PROCESS)
    for name in ("loss", "gradient_norm"):
        several, one = (
            [entry[name] for entry in entries(workdir)] for workdir in (finished, tmp_path / "run")
        )
        np.testing.assert_allclose(several, one, rtol=1e-5)
    summaries = [
        json.loads((workdir / "summary.json").read_text())
        for workdir in (finished, tmp_path / "run")
    ]
    assert [summary["processes"] for summary in summaries] == [2, 1]
    assert summaries[0]["test"] == summaries[1]["test"]


@pytest.mark.cpu("the programs that it starts run on CPUs")
def test_killed_together_resumed_together_or_alone(finished: Path, tmp_path: Path) -> None:
    """SIGKILL for one: the other ends by itself, telling why. Both go on exactly, and so does one
    process of two devices.
    """
    workdir, cache = tmp_path / "run", finished.parent / "cache"
    both = two(workdir, cache, STEPS)
    wait_for(lambda: any(entry["step"] >= 5 for entry in entries(workdir)), both[0], "step 5")
    both[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    said = ends(both, within=120)
    assert time.monotonic() - killed < 60
    assert both[0].returncode not in (0, None)
    # In a save it waits until the other's sign of life is missed. Otherwise it hears of it at once
    # and ends: from JAX, or (one time in ten) gloo ends the process.
    waited = "tasks have crashed" in said[0]
    heard = "error: Process 0 of 2 lost contact with the other processes" in said[0]
    assert waited or (heard and both[0].returncode == 1) or "gloo::EnforceNotMet" in said[0], said
    shutil.copytree(workdir, tmp_path / "alone")
    both = two(workdir, cache, STEPS)
    said = ends(both)
    assert [process.returncode for process in both] == [0, 0], "\n".join(said)
    assert "resuming at step" in said[0]
    assert [entry["loss"] for entry in entries(workdir)] == [
        entry["loss"] for entry in entries(finished)
    ]
    chex.assert_trees_all_equal(final_state(STEPS, workdir), final_state(WHOLE, finished))
    train(STEPS, tmp_path / "alone", devices=ONE_PROCESS)
    one, several = (
        [entry["loss"] for entry in entries(folder)] for folder in (tmp_path / "alone", finished)
    )
    np.testing.assert_allclose(one, several, rtol=1e-5)


def endless(**training: Any) -> Config:
    training = {"steps": 100_000, "checkpoint_every": 1000} | training
    return dataclasses.replace(STEPS, training=dataclasses.replace(STEPS.training, **training))


def test_another_config_in_one_process_is_named(finished: Path, tmp_path: Path) -> None:
    other = dataclasses.replace(STEPS, seed=7)
    both = two(tmp_path / "run", finished.parent / "cache", STEPS, other)
    for process, said in zip(both, ends(both, within=60), strict=True):
        assert process.returncode == 2
        assert "seed is 7, but 0 in process 0" in said


def test_a_file_that_one_process_lacks_ends_both(finished: Path, tmp_path: Path) -> None:
    """Each names it, and neither waits."""
    (tmp_path / "text").write_text("1 2\n" * 50)
    pairs = PairsConfig("text", ("text",), ("text",))
    configs = [
        dataclasses.replace(
            STEPS,
            data=dataclasses.replace(STEPS.data, root=str(root), dev=pairs),
        )
        for root in (tmp_path, tmp_path / "elsewhere")
    ]
    both = two(tmp_path / "run", finished.parent / "cache", *configs)
    for process, said, whose in zip(
        both, ends(both, within=60), ("Process 1 failed: ", ""), strict=True
    ):
        assert process.returncode == 2
        assert f"error: {whose}File '{tmp_path}/elsewhere/text' does not exist" in said, said


def test_processes_that_do_not_find_each_other_say_so() -> None:
    """Without JAX's stack trace: process 0 alone, and process 1 with nobody at the address."""
    alone = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from transformer_jax import distributed, config; distributed.start("
                f"config.Processes(False, '{address()}', 2, {number}, start_timeout=1))",
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (0, 1)
    ]
    for process, said in zip(alone, ends(alone, within=60), strict=True):
        assert process.returncode == 2
        assert said.startswith(
            "error: The processes did not connect within 1 s (--start-timeout)"
        ), said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Processes(num_processes=2), "pass all three flags, or only --distributed"),
        (Processes(False, "localhost:1", 2, 2), "--process-id is 2; expected 0 to 1"),
        (
            Processes(False, "localhost", 2, 0),
            "--coordinator-address is 'localhost'; expected HOST:PORT",
        ),
        (
            Processes(False, "8476", 2, 0),
            "--coordinator-address is '8476'; expected HOST:PORT",
        ),
    ],
)
def test_flags_that_do_not_go_together(settings: Processes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        distributed.start(settings)


@pytest.mark.cpu("it finds a CPU")
def test_a_process_that_finds_no_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several; one process may use its CPU."""
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: None)
    plugin = SimpleNamespace(name="xla_cuda13")
    monkeypatch.setattr(distributed, "entry_points", lambda group: [plugin])
    settings = Processes(False, "localhost:1", 1, 0)
    distributed.start(settings)  # JAX_PLATFORMS is cpu
    monkeypatch.delenv("JAX_PLATFORMS")
    distributed.start(Processes())
    message = "Process 0 of 1 found only a CPU, although the JAX plugin xla_cuda13 is installed"
    with pytest.raises(UserError, match=message):
        distributed.start(settings)


@pytest.mark.cpu("the programs that it starts run on CPUs")
def test_two_begin_from_another_run_and_end_together(finished: Path, tmp_path: Path) -> None:
    """One process reads the checkpoints' names for both, and neither waits for the other in vain.
    Ctrl-C in one saves and ends both (test_object_store.py sends SIGTERM).
    """
    workdir = tmp_path / "run"
    both = two(workdir, finished.parent / "cache", endless(start_from=str(finished)))
    wait_for(lambda: len(entries(workdir)) > 3, both[0], "step 3")
    both[1].send_signal(signal.SIGINT)
    said = ends(both, within=60)
    assert [process.returncode for process in both] == [128 + signal.SIGTERM] * 2, "\n".join(said)
    summary = json.loads((workdir / "summary.json").read_text())
    assert complete_steps(workdir / "checkpoints")[-1] == summary["steps"]
    assert "Starting from the parameters of" in said[0]
    assert "Run the same command again" in said[0]
    train(endless(start_from=str(finished), steps=2), tmp_path / "alone", devices=ONE_PROCESS)
    several, one = (
        [entry["loss"] for entry in entries(tmp_path / name)][:2] for name in ("run", "alone")
    )
    np.testing.assert_allclose(several, one, rtol=1e-5)
    assert one[0] < entries(finished)[0]["loss"] - 0.1  # not a fresh model's
