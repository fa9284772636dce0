"""Runs at a URL of an emulated object store: several hosts, kills, resuming, store outages."""

import itertools
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import (
    ONE,
    address,
    command,
    emulated_store,
    ends,
    entries,
    no_evaluation,
    numbered,
    tiny,
    wait_for,
)

from transformer_jax import Translator
from transformer_jax.errors import UserError
from transformer_jax.pretrained.loading import local_workdir
from transformer_jax.runs import checkpoints as checkpoints_module
from transformer_jax.runs.checkpoint_folder import complete_steps
from transformer_jax.runs.workdir import Workdir
from transformer_jax.settings.config import Config
from transformer_jax.storage import files as storage
from transformer_jax.storage.files import remote_path
from transformer_jax.training.loop import train

URL = "gs://ckpt/run"


def steps(number: int) -> Config:
    """A config without evaluation."""
    return no_evaluation(tiny(steps=number, checkpoint_every=3))


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An empty store that gcsfs and tensorstore use."""
    folder = tmp_path_factory.mktemp("store")
    with (
        emulated_store(folder / "emulator.log") as (_, variables),
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in (variables | {"XDG_CACHE_HOME": str(folder / "reader")}).items():
            patch.setenv(name, value)
        yield


def start(tmp_path: Path, config: Config, *hosts: str) -> list[subprocess.Popen[str]]:
    """A process with two devices on each host. Hosts share nothing but compiled functions."""
    coordinator = address()
    return [
        command(
            URL,
            tmp_path / "compiled",
            config,
            *(numbered(coordinator, len(hosts), number) if len(hosts) > 1 else ()),
            devices=2,
            folder=tmp_path,
            environment={"XDG_CACHE_HOME": str(tmp_path / host)},
        )
        for number, host in enumerate(hosts)
    ]


@pytest.mark.exhaustive
def test_killed_stopped_and_resumed_on_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoints = remote_path(URL) / "checkpoints"

    def newest() -> int:
        return max(complete_steps(checkpoints), default=0)

    [alone] = start(tmp_path, steps(10_000), "a")
    wait_for(newest, alone, "the first checkpoint", pause=0.5)  # each check asks the store
    alone.send_signal(signal.SIGKILL)
    alone.communicate()
    killed = newest()
    both = start(tmp_path, steps(10_000), "b", "c")  # without the files of a
    wait_for(lambda: newest() > killed, both[0], "another checkpoint", pause=0.5)
    both[1].send_signal(signal.SIGINT)
    said = ends(both)
    assert [process.returncode for process in both] == [128 + signal.SIGTERM] * 2, "\n".join(said)
    assert f"resuming at step {killed}" in said[0] and f"saved at step {newest()}" in said[0]
    stopped = newest()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "d"))
        train(steps(stopped + 2), URL, devices=ONE)
    assert f"resuming at step {stopped}" in capfd.readouterr().err
    run = local_workdir(URL)
    assert complete_steps(checkpoints)[-1] == stopped + 2
    assert (run / "model").exists() and not (run / "checkpoints").exists()
    assert [entry["step"] for entry in entries(run)] == list(range(1, stopped + 3))
    train(steps(killed + 3), tmp_path / "undisturbed", devices=ONE)
    one, several = (
        [entry["loss"] for entry in entries(folder)] for folder in (tmp_path / "undisturbed", run)
    )
    np.testing.assert_allclose(several[: len(one)], one, rtol=1e-4)
    assert Translator.from_workdir(URL).translate(["1 2"])


def test_a_store_that_fails_while_the_run_saves(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The run retries until the store responds, and saves every checkpoint. Then it resumes."""
    monkeypatch.setattr(storage, "_RETRY_INTERVAL_SECONDS", 0.01)
    url, failures = "gs://ckpt/failing", []

    def sometimes_failing(target: Any, name: str) -> None:
        function, calls = getattr(target, name), itertools.count()

        def call(*args: Any, **named: Any) -> Any:
            if next(calls) % 2:  # not the first one, at the start of the run
                failures.append(name)
                error = ConnectionError("503 Service Unavailable")
                if name == "check_claim":  # which wraps the store's errors
                    raise UserError(f"{url} cannot be read: {error}") from error
                raise error
            return function(*args, **named)

        monkeypatch.setattr(target, name, call)

    sometimes_failing(Workdir, "check_claim")
    sometimes_failing(checkpoints_module, "complete_steps")
    sometimes_failing(checkpoints_module, "write_manifest")
    train(steps(6), url, devices=ONE)
    monkeypatch.undo()
    assert complete_steps(remote_path(url) / "checkpoints") == [3, 6]
    assert set(failures) == {"check_claim", "complete_steps", "write_manifest"}
    assert "failed (503 Service Unavailable); retrying." in caplog.text
    train(steps(8), url, devices=ONE)
    assert complete_steps(remote_path(url) / "checkpoints") == [3, 6, 8]
    assert "resuming at step 6" in capfd.readouterr().err
    with pytest.raises(ConnectionError):  # no retries for a local folder
        storage.retry(Path("here"), failing)
    with pytest.raises(UserError):  # or for a user's mistake
        storage.retry(remote_path(url), mistaken)


def failing() -> None:
    raise ConnectionError


def mistaken() -> None:
    raise UserError("another run has started here")
