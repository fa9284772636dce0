"""Two processes with two devices each act as one run: same losses, and joint stop and resume."""

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
from number_names import number_files
from runs import (
    address,
    changed,
    command,
    ends,
    entries,
    final_state,
    no_evaluation,
    numbered,
    tiny,
    traced,
    wait_for,
)

from transformer_jax import train
from transformer_jax.devices import distributed
from transformer_jax.errors import UserError
from transformer_jax.runs.checkpoint_folder import complete_steps
from transformer_jax.settings.config import Config, PairsConfig, Processes
from transformer_jax.training.__main__ import main

WHOLE = changed(
    tiny(dropout=0.1, steps=12, eval_every=12, bleu_sentences=0, checkpoint_every=4),
    data={"test": number_files(4, "test")},  # one sentence for each device
)
STEPS = no_evaluation(WHOLE)
ONE_PROCESS = jax.devices()[:2]  # of the runs to compare with


def two(workdir: Path, cache: Path, *configs: Config) -> list[subprocess.Popen[str]]:
    """Start two processes, as two slices, with one config or one each."""
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
def general(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process. The others fine-tune its model."""
    workdir = tmp_path_factory.mktemp("general")
    train(STEPS, workdir, devices=ONE_PROCESS)
    return workdir


def fine_tuning(config: Config, general: Path) -> Config:
    return changed(config, training={"start_from": str(general)})


@pytest.fixture(scope="module")
def finished(general: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of two processes."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    config = changed(fine_tuning(WHOLE, general), training={"profile": "2:4"})
    both = two(workdir, workdir.parent / "cache", config)
    said = ends(both)
    assert [process.returncode for process in both] == [0, 0], "\n".join(said)
    assert "training pairs" in said[0] and "training pairs" not in said[1]
    assert "Starting from the parameters of" in said[0]
    return workdir


@pytest.mark.cpu("the programs that it starts run on CPUs")
def test_each_process_writes_the_trace_of_its_own_devices(finished: Path) -> None:
    for process in range(2):
        assert traced(finished, process) == ([2, 3], 2 * 2)  # steps, runs on two devices


@pytest.mark.cpu("the programs that it starts run on CPUs")
def test_losses_and_scores_equal_those_of_one_process(
    general: Path, finished: Path, tmp_path: Path
) -> None:
    train(fine_tuning(WHOLE, general), tmp_path / "run", devices=ONE_PROCESS)
    for name in ("loss", "gradient_norm"):
        several, one = (
            [entry[name] for entry in entries(workdir)] for workdir in (finished, tmp_path / "run")
        )
        np.testing.assert_allclose(several, one, rtol=1e-5)
    assert entries(finished)[0]["loss"] < entries(general)[0]["loss"] - 0.1  # fine-tuned
    summaries = [
        json.loads((workdir / "summary.json").read_text())
        for workdir in (finished, tmp_path / "run")
    ]
    assert [summary["processes"] for summary in summaries] == [2, 1]
    assert summaries[0]["test"] == summaries[1]["test"]


@pytest.mark.cpu("the programs that it starts run on CPUs")
def test_after_a_kill_two_processes_resume_bit_exactly_and_one_closely(
    general: Path, finished: Path, tmp_path: Path
) -> None:
    """After SIGKILL to one process, the other exits within a minute and names the cause."""
    workdir, cache = tmp_path / "run", finished.parent / "cache"
    config = fine_tuning(STEPS, general)
    both = two(workdir, cache, config)
    wait_for(lambda: complete_steps(workdir / "checkpoints"), both[0], "the first checkpoint")
    both[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    said = ends(both, within=120)
    assert time.monotonic() - killed < 60
    assert both[0].returncode not in (0, None)
    # During a save, it waits until heartbeats are missing. Otherwise JAX reports the lost
    # connection at once, or (one time in ten) gloo aborts the process.
    waited = "tasks have crashed" in said[0]
    heard = "error: Process 0 of 2 lost contact with the other processes" in said[0]
    assert waited or (heard and both[0].returncode == 1) or "gloo::EnforceNotMet" in said[0], said
    shutil.copytree(workdir, tmp_path / "alone")
    both = two(workdir, cache, config)
    said = ends(both)
    assert [process.returncode for process in both] == [0, 0], "\n".join(said)
    assert "resuming at step" in said[0]
    assert [entry["loss"] for entry in entries(workdir)] == [
        entry["loss"] for entry in entries(finished)
    ]
    chex.assert_trees_all_equal(
        final_state(config, workdir), final_state(fine_tuning(WHOLE, general), finished)
    )
    train(config, tmp_path / "alone", devices=ONE_PROCESS)
    one, several = (
        [entry["loss"] for entry in entries(folder)] for folder in (tmp_path / "alone", finished)
    )
    np.testing.assert_allclose(one, several, rtol=1e-5)


def test_a_config_that_differs_between_processes_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = distributed.allgather

    def allgather(values: Any) -> list[Any]:
        return [values | {"seed": 0}, values] if "seed" in values else gathered(values)

    monkeypatch.setattr(distributed, "allgather", allgather)
    message = r"different settings or data;(?s:.*)\n  seed is 7, but 0 in process 0$"
    with pytest.raises(UserError, match=message):
        train(changed(STEPS, seed=7), tmp_path, devices=ONE_PROCESS)


def test_a_file_that_one_process_lacks_ends_both(finished: Path, tmp_path: Path) -> None:
    """Both name the file and exit at once."""
    (tmp_path / "text").write_text("1 2\n" * 50)
    pairs = PairsConfig("text", ("text",), ("text",))
    configs = [
        changed(STEPS, data={"root": str(root), "dev": pairs})
        for root in (tmp_path, tmp_path / "elsewhere")
    ]
    both = two(tmp_path / "run", finished.parent / "cache", *configs)
    for process, said, whose in zip(
        both, ends(both, within=120), ("Process 1 failed: ", ""), strict=True
    ):
        assert process.returncode == 2
        assert f"error: {whose}'{tmp_path}/elsewhere/text' is not a file" in said, said


def test_missing_processes_are_reported_without_a_stack_trace() -> None:
    """By process 0 on its own, and by process 1 whose coordinator does not exist."""
    alone = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from transformer_jax.devices.distributed import start; "
                "from transformer_jax.settings.config import Processes; start("
                f"Processes(False, '{address()}', 2, {number}, start_timeout=1))",
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (0, 1)
    ]
    for process, said in zip(alone, ends(alone, within=120), strict=True):
        assert process.returncode == 2
        assert said.startswith(
            "error: The processes did not connect within 1 s (--start-timeout)"
        ), said


@pytest.mark.parametrize("flag", ["--distributed", "--num-processes=2"])
def test_a_store_for_one_process_is_refused_before_others_are_awaited(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(distributed, "start", lambda _: pytest.fail("waits for other processes"))
    flags = "--workdir", "s3://bucket/run", flag, "--coordinator-address", "localhost:1"
    assert main([*flags, "--process-id", "0"]) == 2
    error = capsys.readouterr().err
    assert "workdir is 's3://bucket/run', which does not work with several processes" in error


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            Processes(False, "localhost", 2, 0),
            "--coordinator-address is 'localhost'; expected HOST:PORT",
        ),
        (Processes(False, "8476", 2, 0), "--coordinator-address is '8476'; expected HOST:PORT"),
    ],
)
def test_inconsistent_flags(settings: Processes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        distributed.start(settings)


def test_jax_names_flags_that_do_not_go_together() -> None:
    program = """
from transformer_jax import UserError
from transformer_jax.devices import distributed
from transformer_jax.settings.config import Processes
for settings in (Processes(num_processes=2), Processes(False, "localhost:1", 2, 2)):
    try:
        distributed.start(settings)
    except UserError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    first, second = done.stdout.splitlines()
    assert "coordinator_address should be defined" in first and "--coordinator-address" in first
    assert "process_id < num_processes. Got process_id=2, num_processes=2." in second


@pytest.mark.cpu("it finds a CPU")
def test_a_process_without_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without distributed flags falls back to the CPU."""
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
