"""Tests run on CPUs, or on the accelerator named by TEST_PLATFORM, and programs as Python does."""

import os
import subprocess
import sys
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parents[1]


def test_tests_run_on_the_requested_platform() -> None:
    """Also in pytest's workers. Arrays and random bits are on it by default."""
    asked = os.environ.get("TEST_PLATFORM", "cpu")
    assert jax.default_backend() == {"cuda": "gpu", "rocm": "gpu"}.get(asked, asked)
    assert {x.platform for x in jax.random.key(0).devices()} == {jax.default_backend()}
    assert len(jax.devices("cpu")) == 8


def test_programs_started_by_tests_run_on_cpus() -> None:
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_a_copy_of_a_warm_process_runs_a_program_as_python_does(tmp_path: Path) -> None:
    """tests/started/warm.py, and not for a program that a shell starts: same output and status."""
    (tmp_path / "config.json").write_text("{}")
    for flags in ("train.py --config none.py --workdir w", "decode.py --workdir . --beam-size 2"):
        command = [sys.executable, f"{ROOT}/{flags.split()[0]}", *flags.split()[1:]]
        warm, cold = (
            subprocess.run(each, capture_output=True, text=True, cwd=tmp_path)
            for each in (command, ["sh", "-c", 'exec "$@"', "sh", *command])
        )
        assert warm.returncode == cold.returncode == 2 and "error: " in cold.stderr
        assert (warm.stdout, warm.stderr) == (cold.stdout, cold.stderr)
