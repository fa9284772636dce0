"""Runs on a tiny task, in this process or as ``python train.py``, and readers for their output."""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import chex
import jax
import numpy as np
from number_names import number_files

from transformer_jax.settings.config import (
    BatchConfig,
    Config,
    DataConfig,
    DecodingConfig,
    ModelConfig,
    OptimizerConfig,
    PairsConfig,
    TokenizerConfig,
    TrainingConfig,
)
from transformer_jax.training.prepare import prepare

ROOT = Path(__file__).resolve().parents[2]
ONE = jax.devices()[:1]  # for tests of anything but several devices


def tiny(dropout: float = 0.0, **training: Any) -> Config:
    """A tiny model. Without dropout, a step compiles in two thirds of the time."""
    return Config(
        model=ModelConfig(
            d_model=16,
            d_ff=32,
            num_heads=2,
            num_layers=1,
            dropout=dropout,
            dtype="float32",
        ),
        tokenizer=TokenizerConfig(vocab_size=150),
        data=DataConfig(
            train=number_files(500),
            dev=number_files(20, "dev"),
            test=number_files(10, "test"),
            max_source_length=24,
            max_target_length=24,
        ),
        batch=BatchConfig(tokens=1024, buckets=1),  # each shape takes seconds to compile
        decoding=DecodingConfig(max_source_length=24, max_extra_length=8),
        optimizer=OptimizerConfig(warmup_steps=20, peak_learning_rate=0.01),
        training=TrainingConfig(
            **{
                "steps": 30,
                "log_every": 1,
                "eval_every": 15,
                "checkpoint_every": 5,
                "bleu_sentences": 5,
                "bleu_tokenize": "char",
                "keep_checkpoints": 3,
                "average": 2,
            }
            | training
        ),
    )


def changed(config: Config, **settings: Any) -> Config:
    """The config with other settings; fields of a section are a dict: ``training={"steps": 6}``."""
    sections = {
        name: dataclasses.replace(getattr(config, name), **value)
        for name, value in settings.items()
        if isinstance(value, dict)
    }
    return dataclasses.replace(config, **settings | sections)


def no_evaluation(config: Config) -> Config:
    """The same training steps, without compiling a search."""
    return changed(config, data={"dev": PairsConfig(), "test": PairsConfig()})


def xla_flags(devices: int) -> str:
    """XLA's flags in tests, for programs with this many simulated devices."""
    return re.sub(r"device_count=\d+", f"device_count={devices}", os.environ["XLA_FLAGS"])


def command(
    workdir: Path | str,
    cache: Path,
    config: Config,
    *flags: str,
    devices: int = 1,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stderr: int | IO[str] = subprocess.PIPE,
    program: tuple[str, ...] = ("train.py",),
) -> subprocess.Popen[str]:
    """Start ``python train.py`` with a config file in ``folder``; default: beside ``workdir``.

    ``environment`` adds variables. ``program`` is another script with its first arguments.
    """
    name = f"{Path(workdir).name}_{hash(config)}_config.py"
    file = (folder or Path(workdir).parent) / name
    text = json.dumps(dataclasses.asdict(config))
    file.write_text(
        "from transformer_jax.settings.config_files import from_json\n\n\n"
        f"def get_config():\n    return from_json({text!r})\n"
    )
    variables = os.environ | {"XLA_FLAGS": xla_flags(devices)}
    variables |= {"JAX_COMPILATION_CACHE_DIR": str(cache), **(environment or {})}
    arguments = ["--config", str(file), "--workdir", str(workdir), *flags]
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        stderr=stderr,
        text=True,
        cwd=ROOT,
        env=variables,
    )


def address() -> str:
    """A free port on this machine."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def numbered(coordinator: str, count: int, number: int) -> tuple[str, ...]:
    """Flags of one process of a multi-process run."""
    numbers = "--num-processes", str(count), "--process-id", str(number)
    return "--coordinator-address", coordinator, *numbers


def ends(processes: list[subprocess.Popen[str]], *, within: float = 300) -> list[str]:
    """Wait for processes and return their stderr."""
    return [process.communicate(timeout=within)[1] for process in processes]


@contextmanager
def emulated_store(log: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    """Start an empty store with a bucket ``ckpt``.

    Yields its process, and the environment variables that make gcsfs and tensorstore use it.
    """
    host, _, port = address().partition(":")
    program = str(Path(__file__).with_name("gcs_emulator.py"))
    with log.open("w") as file:
        emulator = subprocess.Popen([sys.executable, program, port], stdout=file, stderr=file)
    try:
        while emulator.poll() is None:
            with socket.socket() as client:
                if client.connect_ex((host, int(port))) == 0:
                    break
            time.sleep(0.05)
        url = f"http://127.0.0.1:{port}"
        yield (
            emulator,
            {
                "STORAGE_EMULATOR_HOST": url,
                "TENSORSTORE_GCS_HTTP_URL": url,
                "GOOGLE_AUTH_TOKEN_FOR_TESTING": "any",
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            },
        )
    finally:
        emulator.kill()
        emulator.wait()


def dev_figures(loss: float, **others: float) -> dict[str, float]:
    """Made-up metrics of the dev set."""
    return {"dev_loss": loss, "dev_perplexity": 2.0, "dev_accuracy": 0.5, **others}


def entries(workdir: Path, kind: str = "train") -> list[dict[str, Any]]:
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [
        entry
        for line in lines
        if line.endswith("}") and (entry := json.loads(line))["kind"] == kind
    ]


def traced(workdir: Path, process: int = 0) -> tuple[list[int], int]:
    """The numbers of the steps in a run's only trace, and how many times XLA ran the step."""
    [file] = (workdir / "profile" / f"process_{process}").rglob("*.xplane.pb")
    steps, runs = [], set()
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for event in [event for line in plane.lines for event in line.events]:
            found = dict(event.stats)
            if event.name == "train":
                steps.append(found["step_num"])
            if found.get("hlo_module") == "jit_train_step":
                runs.add((found["run_id"], found["device_ordinal"]))
    return sorted(steps), len(runs)


def saving(workdir: Path) -> bool:
    """True if an incomplete checkpoint exists."""
    folders = (workdir / "checkpoints").glob("*")
    return any(not (folder / "manifest.json").exists() for folder in folders)


def final_state(config: Config, workdir: Path) -> Any:
    """The state in the last checkpoint."""
    with prepare(config, workdir, devices=ONE) as run:
        assert run.checkpoints.steps()
        return jax.tree.map(np.asarray, run.state)


def assert_same_states(config: Config, folder: Path) -> Any:
    """Runs ``whole`` and ``resumed`` in ``folder`` have the same state, bit for bit. Returns it."""
    whole = final_state(config, folder / "whole")
    chex.assert_trees_all_equal(whole, final_state(config, folder / "resumed"))
    return whole


def assert_same_losses(folder: Path) -> None:
    """Runs ``whole`` and, on eight devices, ``eight`` in ``folder`` have the same losses."""
    losses = [[each["loss"] for each in entries(folder / name)] for name in ("whole", "eight")]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def assert_same_runs(config: Config, folder: Path) -> Any:
    """Compare the runs ``whole``, ``resumed`` and ``eight`` in ``folder``. Returns the state."""
    assert_same_losses(folder)
    return assert_same_states(config, folder)


def wait_for(
    condition: Any, process: subprocess.Popen[str], what: str, *, pause: float = 0.01
) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, f"train.py ended before {what}: {process.communicate()[1]}"
        assert time.monotonic() < deadline, f"no {what} within 120 s"
        time.sleep(pause)
