"""Compilation cache: reused between runs; an unusable cache never stops a run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from transformer_jax.devices.compilation_cache import enable_compilation_cache
from transformer_jax.storage.files import cache_folder

ROOT = Path(__file__).resolve().parents[2]
MIN_COMPILE_TIME = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
PROGRAM = """
import logging, resource, sys
logging.basicConfig(stream=sys.stderr, format="%(message)s")
import jax, jax.numpy as jnp
from transformer_jax.devices.compilation_cache import enable_compilation_cache
if {limit}:
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))  # as a full disk does
enable_compilation_cache()
jax.monitoring.register_event_listener(lambda event, **_: print(event))
print(jax.jit(lambda x: jnp.sin(x @ x).sum())(jnp.ones((4, 4))).item())
"""


def run(*, limit: int = 0, **environment: str) -> tuple[str, str]:
    """Stdout and stderr of a small program that compiles a function."""
    changed = ("JAX_COMPILATION_CACHE_DIR", MIN_COMPILE_TIME)  # by conftest.py
    inherited = {k: v for k, v in os.environ.items() if k not in changed}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(limit=limit)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=inherited | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


HIT = "/jax/compilation_cache/cache_hits"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder after one run of the program."""
    home = tmp_path_factory.mktemp("home")
    out, err = run(XDG_CACHE_HOME=str(home))
    assert HIT not in out and not err
    assert list((home / "transformer_jax" / "compiled").glob("*-cache"))
    return home


def test_the_second_run_reads_what_the_first_one_compiled(filled: Path) -> None:
    """Also functions that take less than a second to compile."""
    out, err = run(XDG_CACHE_HOME=str(filled))
    assert HIT in out and not err


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Settings of JAX that are changed; none is set before."""
    changed: dict[str, object] = {}
    config = SimpleNamespace(jax_compilation_cache_dir=None, update=changed.__setitem__)
    monkeypatch.setattr(jax, "config", config)
    return changed


def test_jax_own_setting_has_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: dict[str, object]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "ours"))
    monkeypatch.setattr(jax.config, "jax_compilation_cache_dir", "theirs")
    monkeypatch.setenv(MIN_COMPILE_TIME, "5")
    enable_compilation_cache()
    assert not updates and not (tmp_path / "ours").exists()


def test_default_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/transformer_jax")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert cache_folder() == Path("/scratch/cache/transformer_jax")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says to ignore it
    assert cache_folder() == Path("/home/someone/.cache/transformer_jax")


def test_a_folder_that_cannot_be_created_disables_the_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out, err = run(XDG_CACHE_HOME=str(tmp_path / "file"))
    assert "persistent compilation cache" in err and "Not a directory" in err
    assert "Traceback" not in err and out


def test_a_full_disk_disables_the_cache(tmp_path: Path) -> None:
    out, err = run(XDG_CACHE_HOME=str(tmp_path), limit=1000)
    assert "Error writing persistent compilation cache entry" in err and "File too large" in err
    assert "Traceback" not in err and out


def test_a_corrupt_entry_is_recompiled_with_a_warning(filled: Path, tmp_path: Path) -> None:
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    for entry in (tmp_path / "transformer_jax" / "compiled").glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[:100])
    out, err = run(XDG_CACHE_HOME=str(tmp_path))
    assert HIT not in out and "Error reading persistent compilation cache entry" in err
