"""A recipe from nothing to its test BLEU, for ``accelerator.py``: ``train.py``, timed from outside.

    python -m benchmarks.accelerator_recipe --data FOLDER --output FILE [--seeds 1 2 3 4]

Imports no JAX: the accelerator belongs to ``train.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_TOY = {
    "model.d-model": 16,
    "model.d-ff": 16,
    "model.num-heads": 2,
    "model.num-layers": 1,
    "data.train.limit": 2000,
    "data.dev.limit": 5,
    "data.test.limit": 5,
    "batch.buckets": 1,
    "decoding.max-source-length": 40,
    "training.steps": 4,
    "training.log-every": 2,
    "training.eval-every": 2,
    "training.checkpoint-every": 2,
}


def main() -> None:
    """Train, and write what it took."""
    arguments = _arguments()
    cache = arguments.output.absolute().parent / "cache_of_the_recipe"
    if not arguments.warm:
        shutil.rmtree(cache, ignore_errors=True)
    recipe = "configs/demo.py" if arguments.toy else "configs/multi30k.py"
    settings = _TOY if arguments.toy else {"data.root": arguments.data.absolute()}
    command = [sys.executable, "train.py", "--config", recipe]
    for name, value in (settings | {"compilation-cache": cache}).items():
        command += [f"--{name}", str(value)]
    begin = time.time()
    with tempfile.TemporaryDirectory() as folder:
        runs = _train(command, {seed: Path(folder) / str(seed) for seed in arguments.seeds})
    bleus = [run["test_bleu"] for run in runs]
    found = {
        "recipe": recipe,
        "cache": "warm" if arguments.warm else "cold",
        "seeds": arguments.seeds,
        "seconds": time.time() - begin,
        "mean": statistics.mean(bleus),
        "deviation": statistics.stdev(bleus) if len(bleus) > 1 else 0.0,
        "runs": runs,
    }
    arguments.output.write_text(json.dumps(found, indent=2) + "\n")


def _train(command: list[str], workdirs: dict[int, Path]) -> list[dict[str, Any]]:
    """A run of each seed, together. The others begin when the first has evaluated once: what it
    compiled they find in the cache.
    """
    first, *_ = workdirs.values()
    started: dict[int, float] = {}
    processes: dict[int, subprocess.Popen[bytes]] = {}
    seconds: dict[int, float] = {}
    try:
        while len(seconds) < len(workdirs):
            for seed, workdir in workdirs.items():
                if seed not in processes and (not processes or any(entries(first, "dev"))):
                    started[seed] = time.time()
                    processes[seed] = subprocess.Popen(
                        [*command, "--workdir", str(workdir), "--seed", str(seed)],
                        cwd=ROOT,
                        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
                    )
            for seed, process in processes.items():
                if seed not in seconds and process.poll() is not None:
                    seconds[seed] = time.time() - started[seed]
                    if process.returncode:
                        raise SystemExit(f"error: train.py ended with status {process.returncode}.")
            time.sleep(0.1)
    finally:
        for process in processes.values():
            process.kill()
    return [_figures(workdir, seconds[seed], started[seed]) for seed, workdir in workdirs.items()]


def _figures(workdir: Path, seconds: float, started: float) -> dict[str, Any]:
    """Of one finished run."""
    summary = json.loads((workdir / "summary.json").read_text())
    kept = ("steps", "first_step_seconds", "compiled", "train_seconds", "tokens_per_second")
    return {
        "seconds": seconds,
        "first_evaluation_seconds": next(entries(workdir, "dev"))["time"] - started,
        "held_by_saves_seconds": sum(entry["held_seconds"] for entry in entries(workdir, "save")),
        "dev_bleu": [entry.get("dev_bleu") for entry in entries(workdir, "dev")],
        "test_bleu": summary["test"]["bleu"],
        "peak_memory_bytes": summary["peak_memory_bytes"],
        **{name: summary[name] for name in kept},
    }


def entries(workdir: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Those of metrics.jsonl, as far as it is written."""
    path = workdir / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.endswith("}") and (entry := json.loads(line))["kind"] == kind:
            yield entry


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"), help="Multi30k's text")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="a run each")
    parser.add_argument("--warm", action="store_true", help="keep what an earlier run compiled")
    parser.add_argument("--toy", action="store_true", help="configs/demo.py at a tiny size")
    return parser.parse_args()


if __name__ == "__main__":
    main()
