"""What a batch plan costs as the corpus grows: time to open and plan, time for a batch, memory.

    python -m benchmarks.plan_scale --pairs 100000 1000000 10000000
        [--layout packed] [--window 1048576]

The corpora have lengths like WMT14's (log-normal, up to 256 tokens) on disk; their tokens are a
sparse file of zeros. Each is measured in a process of its own. Memory is what the process allocates
beyond its imports; pages of memory-mapped files, which the system reclaims when it needs them, are
reported separately.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.config import BatchConfig
from transformer_jax.data.batching import BatchPlan
from transformer_jax.data.bucketing import count_lengths
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.corpus_files import open_corpus
from transformer_jax.data.windows import windows_of

_BLOCK = 2**20
_COLUMNS = {
    "pairs": "pairs",
    "windows": "windows",
    "lengths_seconds": "pass over lengths, s",
    "plan_seconds": "open and plan, that pass included, s",
    "again_seconds": "again, s",
    "window_seconds": "first batch, s",
    "batch_milliseconds": "batch, ms",
    "plan_mb": "plan and window, MB",
    "peak_mb": "peak memory, MB",
    "mapped_mb": "mapped files, MB",
}


def write_corpus(folder: Path, pairs: int) -> None:
    """A corpus in the format of ``build_corpus``, with synthetic lengths and no text."""
    folder.mkdir()
    random = np.random.default_rng(0)
    totals = [0, 0]
    with (
        open(folder / "source_offsets", "wb") as source_file,
        open(folder / "target_offsets", "wb") as target_file,
    ):
        files = source_file, target_file
        for file in files:
            file.write(np.zeros(1, np.int64).data)
        for start in range(0, pairs, _BLOCK):
            source = random.lognormal(np.log(22), 0.65, min(_BLOCK, pairs - start))
            target = source * random.lognormal(0.05, 0.25, len(source))
            for side, lengths in enumerate((source, target)):
                ends = totals[side] + np.cumsum(np.clip(lengths, 2, 256).astype(np.int64))
                totals[side] = int(ends[-1])
                files[side].write(ends.data)
    for side, total in zip(("source", "target"), totals, strict=True):
        with open(folder / f"{side}_tokens", "wb") as tokens:
            tokens.truncate(2 * total)
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    settings = {
        "fingerprint": folder.name,
        "num_pairs": pairs,
        "num_samples": 1,
        "dtypes": ["uint16", "uint16"],
    }
    statistics = {
        "read": pairs,
        "kept": pairs,
        "empty": 0,
        "too_long": 0,
        "ratio": 0,
        "invalid_utf8": 0,
    }
    (folder / "manifest.json").write_text(
        json.dumps(settings | {"sizes": sizes, "statistics": statistics})
    )


class Memory:
    """This process' memory in MB from here on, looked at every few milliseconds."""

    def __init__(self) -> None:
        self._base, self._base_mapped, self._ended = (
            self._now("RssAnon"),
            self._now("RssFile"),
            threading.Event(),
        )
        self.peak = 0.0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def _now(field: str) -> float:
        [line] = [
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith(field + ":")
        ]
        return int(line.split()[1]) * 1024 / 1e6

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.peak = max(self.peak, self.own)

    @property
    def own(self) -> float:
        return self._now("RssAnon") - self._base

    @property
    def mapped(self) -> float:
        return self._now("RssFile") - self._base_mapped

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def measure(folder: Path, config: BatchConfig, batches: int) -> dict[str, Any]:
    """Figures for the corpus in ``folder``."""

    def corpus() -> Corpus:
        found = open_corpus(folder, "corpus")
        assert found, "the corpus does not open"
        return found

    def plan() -> BatchPlan:
        return BatchPlan(corpus(), config, seed=0)

    def timed(work: Callable[[], Any]) -> tuple[Any, float]:
        began = time.perf_counter()
        return work(), time.perf_counter() - began

    pairs = corpus().num_pairs
    memory = Memory()
    lengths_seconds = timed(lambda: count_lengths(windows_of(corpus(), config.window)))[1]
    seconds = timed(plan)[1]
    made, again_seconds = timed(plan)
    gc.collect()
    window_seconds = timed(lambda: made.batch(0))[1]
    for step in range(1, 20):  # the buckets' first permutations
        made.batch(step)
    began = time.perf_counter()
    for step in range(20, 20 + batches):
        made.batch(step)
    batch_seconds = (time.perf_counter() - began) / batches
    memory.end()
    return {
        "pairs": pairs,
        "windows": -(-pairs // config.window),
        "steps_per_epoch": round(made.steps_per_epoch),
        "fill": [round(share, 3) for share in made.fill],
        "lengths_seconds": round(lengths_seconds, 3),
        "plan_seconds": round(seconds, 3),
        "again_seconds": round(again_seconds, 3),
        "window_seconds": round(window_seconds, 3),
        "batch_milliseconds": round(1000 * batch_seconds, 2),
        "plan_mb": round(memory.own),
        "peak_mb": round(memory.peak),
        "mapped_mb": round(memory.mapped),
    }


def main() -> None:
    """Write each corpus, measure it in a fresh process, report JSON and a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--layout", choices=["bucketed", "packed"], default="bucketed")
    parser.add_argument("--window", type=int, default=BatchConfig().window)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--output", type=Path, help="JSON as well")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # the inner process
    arguments = parser.parse_args()
    if arguments.folder:
        config = BatchConfig(layout=arguments.layout, window=arguments.window)
        print(json.dumps(measure(arguments.folder, config, arguments.batches)))
        return
    results = []
    for pairs in arguments.pairs:
        with tempfile.TemporaryDirectory() as name:
            write_corpus(Path(name) / "corpus", pairs)
            inner = [sys.executable, "-m", "benchmarks.plan_scale", *sys.argv[1:], "--folder", name]
            results.append(
                json.loads(
                    subprocess.run(inner, stdout=subprocess.PIPE, text=True, check=True).stdout
                )
            )
    settings = {"layout": arguments.layout, "window": arguments.window}
    report = json.dumps(settings | {"results": results}, indent=2)
    print(report)
    if arguments.output:
        arguments.output.write_text(report + "\n")
    print("\n| " + " | ".join(_COLUMNS.values()) + " |\n" + "|---" * len(_COLUMNS) + "|")
    for result in results:
        print("| " + " | ".join(f"{result[name]:,}" for name in _COLUMNS) + " |")


if __name__ == "__main__":
    main()
