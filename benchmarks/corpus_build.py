"""Build and open a large generated corpus: pairs a second, peak memory, time to open it.

    python -m benchmarks.corpus_build [--pairs 2000000] [--workers 0] [--vocab-size 1000]
        [--sampling 0.1 --samples 2]

The text is sentences of one to six number names (English and German), about 17 words on the English
side. Writing it and training the tokenizer are not timed. Exits with status 1 if any process ever
used more than 1.5 GB.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
import psutil

from transformer_jax.config import DataConfig, PairsConfig, TokenizerConfig
from transformer_jax.data.corpus_files import build_corpus
from transformer_jax.data.sources import read_pairs
from transformer_jax.tokenizer import Tokenizer

_LIMIT_GB = 1.5
_TEXT = PairsConfig(kind="text", source=("source.en",), target=("target.de",))


def write_text(folder: Path, pairs: int) -> None:
    """Two parallel files in ``folder``."""
    names = list(read_pairs(PairsConfig(kind="numbers", limit=200_000)))
    generator = random.Random(0)
    with (
        open(folder / _TEXT.source[0], "w") as source,
        open(folder / _TEXT.target[0], "w") as target,
    ):
        for _ in range(pairs):
            sentence = generator.choices(names, k=generator.randint(1, 6))
            source.write("; ".join(name for name, _ in sentence) + "\n")
            target.write("; ".join(name for _, name in sentence) + "\n")


def build(folder: Path, workers: int, sampling: float, samples: int) -> None:
    """Build, then open; prints figures as JSON. Runs in a process of its own, so that its peak is
    the build's.
    """
    tokenizer = Tokenizer.load(folder)
    data = DataConfig(root=str(folder), workers=workers)
    seconds = []
    for _ in ("build", "open"):
        start = time.perf_counter()
        corpus = build_corpus(
            _TEXT, tokenizer, data, folder / "corpus", sampling=sampling, num_samples=samples
        )
        seconds.append(time.perf_counter() - start)
    source, target = corpus.sides
    parent = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    workers_peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(
        json.dumps(
            {
                "pairs": corpus.num_pairs,
                "segmentations": corpus.num_samples,
                "tokens": len(source.tokens) + len(target.tokens),
                "build_seconds": round(seconds[0], 2),
                "pairs_per_second": round(corpus.num_pairs * corpus.num_samples / seconds[0]),
                "open_seconds": round(seconds[1], 2),
                "read_all_tokens_checksum": int(np.add.reduce(source.tokens, dtype=np.int64)),
                "parent_peak_gb": round(parent * 1024 / 1e9, 3),
                "worker_peak_gb": round(workers_peak * 1024 / 1e9, 3),
            }
        )
    )


def main() -> None:
    """Prepare the text, build in a fresh process, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=2_000_000)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--sampling", type=float, default=0.0)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # the inner process
    arguments = parser.parse_args()
    if arguments.folder:
        build(arguments.folder, arguments.workers, arguments.sampling, arguments.samples)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder, arguments.pairs)
        size = sum((folder / file).stat().st_size for file in (*_TEXT.source, *_TEXT.target))
        sample = islice(read_pairs(_TEXT, name), 50_000)
        Tokenizer.train(sample, TokenizerConfig(vocab_size=arguments.vocab_size)).save(folder)
        inner = subprocess.run(
            [sys.executable, "-m", "benchmarks.corpus_build", *sys.argv[1:], "--folder", name],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    figures = {"text_mb": round(size / 1e6), "cpus": psutil.cpu_count()} | json.loads(inner.stdout)
    print(json.dumps(figures, indent=2))
    peak = max(figures["parent_peak_gb"], figures["worker_peak_gb"])
    print(f"peak memory of any process: {peak:.2f} GB (limit {_LIMIT_GB} GB)")
    sys.exit(peak > _LIMIT_GB)


if __name__ == "__main__":
    main()
