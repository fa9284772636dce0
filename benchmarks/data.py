"""Speed of the data pipeline: building a corpus, planning batches, making batches.

    python -m benchmarks.data --pairs 200000 --against ../older

The text is random words, about 17 per sentence. Writing the text and training the tokenizer are not
timed. Memory is the peak of the main process, without worker processes.
"""

from __future__ import annotations

import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.in_turn import Answer, Engine, finish, measure, parser, workers
from transformer_jax import BatchConfig, DataConfig, PairsConfig, TokenizerConfig

_BATCHES = 100


def write_text(folder: Path, pairs: int) -> None:
    """Write two parallel files of random words with Zipf frequencies."""
    rng = np.random.default_rng(0)
    words = [f"{number:x}" for number in rng.integers(0, 2**32, 5000)]
    for side in ("source", "target"):
        with (folder / side).open("w") as file:
            for length in rng.lognormal(2.7, 0.5, pairs).clip(1, 60):
                ids = rng.zipf(1.3, int(length)) % len(words)
                file.write(" ".join(words[i] for i in ids) + "\n")


def start(_: str, job: Answer) -> Engine:
    """Make an engine that builds a corpus, plans batches and makes batches in every run."""
    from transformer_jax import BatchPlan, Tokenizer, build_corpus

    paths = [Path(job["folder"]) / side for side in ("source", "target")]
    text = PairsConfig(source=(str(paths[0]),), target=(str(paths[1]),))
    sample = islice(zip(*(path.read_text().splitlines() for path in paths)), 20_000)
    tokenizer = Tokenizer.train(sample, TokenizerConfig(vocab_size=4000))

    def run() -> Answer:
        begin = time.perf_counter()
        directory = tempfile.mkdtemp(dir=job["folder"])
        corpus = build_corpus(text, tokenizer, DataConfig(workers=job["workers"]), directory)
        built = time.perf_counter()
        plan = BatchPlan(corpus, BatchConfig(buckets=8), seed=0)
        plan.batch(0)
        planned = time.perf_counter()
        for step in range(_BATCHES):
            plan.batch(step)
        made = time.perf_counter()
        return {
            "built": corpus.num_pairs / (built - begin),
            "plan ms": 1e3 * (planned - built),
            "batch ms": 1e3 * (made - planned) / _BATCHES,
            "fill": min(plan.fill),
        }

    return run


def main() -> None:
    """Write the text, measure the checkouts in turn, and report."""
    flags = parser(__doc__)
    flags.add_argument("--pairs", type=int, default=200_000)
    flags.add_argument("--workers", type=int, default=0, help="processes; 0: one per core")
    arguments = flags.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder), arguments.pairs)
        job = vars(arguments) | {"folder": folder}
        with workers("data", ["ours"], job) as engines:
            measurements = measure(
                engines, arguments.rounds, lambda answer: answer["built"], "pairs/s"
            )
    finish(*measurements, arguments)


if __name__ == "__main__":
    main()
