"""One engine of ``train_speed.py`` in a process of its own (in_turn.py); not for use by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from benchmarks.in_turn import Runner, Skipped, answer_once, serve
from benchmarks.train_job import Job


def start(name: str, job: Job, folder: Path) -> Runner:
    """The engine of that name, ready to run; ``Skipped`` where it cannot."""
    with np.load(folder / "batches.npz") as arrays:
        batches = list(zip(arrays["source"], arrays["target"]))
    if name == "ours":
        from benchmarks.train_ours import Ours

        return Ours(job, batches)
    try:
        from benchmarks.train_torch import Torch
    except ImportError as error:
        raise Skipped(f"not installed: {error}") from None
    return Torch(job, batches, compiled=name == "torch_compile")


def main() -> None:
    """``python -m benchmarks.train_engines NAME FOLDER``; ``prepare`` says what machine this is."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    if name == "prepare":
        from benchmarks.train_ours import prepare

        answer_once(prepare)
    else:
        serve(lambda: start(name, Job.read(folder), folder))


if __name__ == "__main__":
    main()
