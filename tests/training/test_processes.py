"""Two processes of four devices are one run: same losses, and they end, die and resume together."""

import json
import signal
import socket
import subprocess
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import command, entries, final_state, tiny, wait_for

from transformer_jax import processes
from transformer_jax.config import Config, Processes
from transformer_jax.errors import UserError
from transformer_jax.saved_model import complete_steps


def two(workdir: Path, cache: Path, *configs: Config) -> list[subprocess.Popen[str]]:
    """Start two processes of four devices each; a config for both, or one each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = "--coordinator-address", address, "--num-processes", "2", "--process-id"
    return [command(workdir, cache, configs[i % len(configs)], *flags, str(i), devices=4) for i in range(2)]


def ends(processes: list[subprocess.Popen[str]], *, within: float = 300) -> list[str]:
    """What they said, when all have ended."""
    return [process.communicate(timeout=within)[1] for process in processes]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of two processes."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    both = two(workdir, workdir.parent / "cache", tiny())
    said = ends(both)
    assert [process.returncode for process in both] == [0, 0], "\n".join(said)
    assert "training pairs" in said[0] and "training pairs" not in said[1]
    return workdir


def test_two_processes_learn_what_one_learns(finished: Path, tmp_path: Path) -> None:
    process = command(tmp_path / "run", tmp_path / "cache", tiny(), devices=8)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    for name in ("loss", "source_fill", "gradient_norm"):
        several, one = ([entry[name] for entry in entries(workdir)] for workdir in (finished, tmp_path / "run"))
        np.testing.assert_allclose(several, one, rtol=1e-5)
    summaries = [json.loads((workdir / "summary.json").read_text()) for workdir in (finished, tmp_path / "run")]
    assert [summary["processes"] for summary in summaries] == [2, 1]
    assert summaries[0]["test"] == summaries[1]["test"]
