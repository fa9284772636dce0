"""Runs on a tiny task, in this process or as ``python train.py``, and their output files."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from transformer_jax.config import (
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
ONE = jax.devices()[:1]  # where the number of devices is not what is tested


def tiny(**training: Any) -> Config:
    return Config(
        model=ModelConfig(
            d_model=16, d_ff=32, num_heads=2, num_layers=1, dropout=0.1, dtype="float32"
        ),
        tokenizer=TokenizerConfig(vocab_size=150),
        data=DataConfig(
            train=PairsConfig("numbers", limit=500),
            dev=PairsConfig("numbers", split="dev", limit=20),
            test=PairsConfig("numbers", split="test", limit=10),
            max_source_length=24,
            max_target_length=24,
        ),
        batch=BatchConfig(tokens=1024, buckets=1),  # each shape is compiled for seconds
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


def no_evaluation(config: Config) -> Config:
    """The same steps; nothing is translated, for which most would be compiled."""
    return dataclasses.replace(
        config, data=dataclasses.replace(config.data, dev=PairsConfig(), test=PairsConfig())
    )


def command(
    workdir: Path | str,
    cache: Path,
    config: Config,
    *flags: str,
    devices: int = 1,
    folder: Path | None = None,
) -> subprocess.Popen[str]:
    """``python train.py`` on this config, in a process of its own; the config's file is in
    ``folder``, or beside the work directory.
    """
    name = f"{Path(workdir).name}_{hash(config)}_config.py"
    file = (folder or Path(workdir).parent) / name
    text = json.dumps(dataclasses.asdict(config))
    file.write_text(
        "from transformer_jax.config_io import from_json\n\n\n"
        f"def get_config():\n    return from_json({text!r})\n"
    )
    xla_flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={devices}")
    environment = os.environ | {"XLA_FLAGS": xla_flags}
    arguments = [
        "--config",
        str(file),
        "--workdir",
        str(workdir),
        "--compilation-cache",
        str(cache),
        *flags,
    ]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )


def dev_figures(loss: float, **others: float) -> dict[str, float]:
    """What an evaluation on the dev set might find."""
    return {"dev_loss": loss, "dev_perplexity": 2.0, "dev_accuracy": 0.5, **others}


def entries(workdir: Path, kind: str = "train") -> list[dict[str, Any]]:
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [
        entry
        for line in lines
        if line.endswith("}") and (entry := json.loads(line))["kind"] == kind
    ]


def saving(workdir: Path) -> bool:
    """Whether a checkpoint is begun and not complete."""
    folders = (workdir / "checkpoints").glob("*")
    return any(not (folder / "manifest.json").exists() for folder in folders)


def final_state(config: Config, workdir: Path) -> Any:
    """Everything in the last checkpoint."""
    with prepare(config, workdir, devices=ONE) as run:
        assert run.checkpoints.steps()
        return jax.tree.map(np.asarray, run.state)


def wait_for(
    condition: Any, process: subprocess.Popen[str], what: str, *, pause: float = 0.01
) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, f"train.py ended before {what}: {process.communicate()[1]}"
        assert time.monotonic() < deadline, f"no {what} within 120 s"
        time.sleep(pause)
