"""Processes without a shared folder train, die, resume and stop at one URL of an emulated store."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from runs import ONE, command, entries, no_evaluation, tiny, wait_for

from transformer_jax import Translator
from transformer_jax.checkpoint import complete_steps
from transformer_jax.config import Config
from transformer_jax.remote_workdir import local_workdir
from transformer_jax.storage import remote_path
from transformer_jax.training.loop import train

URL = "gs://ckpt/run"


def steps(number: int) -> Config:
    """A config that only trains."""
    return no_evaluation(tiny(steps=number, checkpoint_every=3))


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty store, and its address for gcsfs and tensorstore."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "any")
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "reader"))
    program = str(Path(__file__).with_name("gcs_emulator.py"))
    with (tmp_path / "emulator.log").open("w") as log:
        emulator = subprocess.Popen([sys.executable, program, str(port)], stdout=log, stderr=log)
    while emulator.poll() is None:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield
    emulator.kill()
    emulator.wait()


def start(tmp_path: Path, config: Config, *hosts: str) -> list[subprocess.Popen[str]]:
    """A process of two devices on each of these hosts, which have caches of their own."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    several = "--coordinator-address", address, "--num-processes", str(len(hosts)), "--process-id"
    processes = []
    for number, host in enumerate(hosts):
        os.environ["XDG_CACHE_HOME"] = str(tmp_path / host)
        flags = (*several, str(number)) if len(hosts) > 1 else ()
        processes.append(
            command(URL, tmp_path / "compiled", config, *flags, devices=2, folder=tmp_path)
        )
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "reader")
    return processes


def ends(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What they said, when all have ended."""
    return [process.communicate(timeout=120)[1] for process in processes]


def test_killed_stopped_and_resumed_on_other_hosts(tmp_path: Path) -> None:
    checkpoints = remote_path(URL) / "checkpoints"

    def newest() -> int:
        return max(complete_steps(checkpoints), default=0)

    both = start(tmp_path, steps(10_000), "a", "b")
    wait_for(newest, both[0], "the first checkpoint", pause=0.5)  # each look asks the store
    for process in both:
        process.send_signal(signal.SIGKILL)
    ends(both)
    killed = newest()
    both = start(tmp_path, steps(10_000), "c", "d")  # without anything of a and b
    wait_for(lambda: newest() > killed, both[0], "another checkpoint", pause=0.5)
    both[1].send_signal(signal.SIGTERM)
    said = ends(both)
    assert [process.returncode for process in both] == [128 + signal.SIGTERM] * 2, "\n".join(said)
    assert f"resuming at step {killed}" in said[0] and f"saved at step {newest()}" in said[0]
    stopped = newest()
    [said_alone] = ends(start(tmp_path, steps(stopped + 2), "e"))  # on another number of processes
    assert f"resuming at step {stopped}" in said_alone, said_alone
    run = local_workdir(URL)
    assert complete_steps(run / "checkpoints")[-1] == stopped + 2
    assert [entry["step"] for entry in entries(run)] == list(range(1, stopped + 3))
    train(steps(killed + 3), tmp_path / "undisturbed", devices=ONE)
    one, several = (
        [entry["loss"] for entry in entries(folder)] for folder in (tmp_path / "undisturbed", run)
    )
    np.testing.assert_allclose(several[: len(one)], one, rtol=1e-4)
    assert Translator.from_workdir(URL).translate(["1 2"])
