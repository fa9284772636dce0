"""Speed of the training step at a recipe's shape: tokens/s, compile time, waiting for data.

    python -m benchmarks.train_step --config configs/wmt14_base.py
        [--tokens 25000] [--buckets 24] [--steps 20]

Pairs of random tokens stand in for text, with log-normal lengths like WMT14's (mean about 28 tokens
a side), stored on disk and read by memory map through the same plan and loader as in training.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from transformer_jax.config import Config
from transformer_jax.config_io import load_config_file
from transformer_jax.data.batching import BatchPlan
from transformer_jax.data.corpus import Corpus, Sequences
from transformer_jax.data.loader import load_batches
from transformer_jax.sharding import batch_sharding, check_rows, make_mesh
from transformer_jax.training.step import make_step_functions
from transformer_jax.training.summary import environment, peak_memory_bytes


def main() -> None:
    """Build a corpus, compile each shape, then time steps as the loop runs them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/wmt14_base.py")
    parser.add_argument("--tokens", type=int, help="batch.tokens; default: the recipe's")
    parser.add_argument("--buckets", type=int, help="batch.buckets; default: the recipe's")
    parser.add_argument("--pairs", type=int, default=200_000, help="pairs in the corpus")
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        help="timed steps, after every shape among them was compiled",
    )
    parser.add_argument("--longest", type=int, default=256, help="longest sentence in tokens")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps: expected 2 or more; a step's time is that between two of them")
    config = load_config_file(arguments.config)
    batch = dataclasses.replace(
        config.batch,
        tokens=arguments.tokens or config.batch.tokens,
        buckets=arguments.buckets or config.batch.buckets,
    )
    config = dataclasses.replace(config, batch=batch)
    vocab_size = config.tokenizer.vocab_size
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=vocab_size)
    )
    mesh = make_mesh(config.mesh)
    check_rows(mesh, config.batch.row_multiple)
    with tempfile.TemporaryDirectory() as folder:
        plan = BatchPlan(
            _corpus(arguments.pairs, arguments.longest, vocab_size, Path(folder)),
            config.batch,
            seed=0,
        )
        print(json.dumps(_measure(config, mesh, plan, arguments.steps), indent=2))


def _measure(
    config: Config, mesh: jax.sharding.Mesh, plan: BatchPlan, steps: int
) -> dict[str, object]:
    step_functions = make_step_functions(config, mesh)
    state = jax.block_until_ready(step_functions.init())
    compile_seconds = {}
    with load_batches(plan, sharding=batch_sharding(mesh), start=0, stop=steps) as batches:
        for batch in batches:  # every shape that will occur, compiled and run once
            shape = (*batch.source_BS.shape, batch.target_BT.shape[1])
            if shape not in compile_seconds:
                begin = time.perf_counter()
                step_functions.train_step.lower(state, batch).compile()  # type: ignore[attr-defined]
                compile_seconds[shape] = time.perf_counter() - begin
                state, _ = jax.block_until_ready(step_functions.train_step(state, batch))
    step_seconds, source_tokens, target_tokens, positions = [], 0.0, 0.0, 0
    with load_batches(plan, sharding=batch_sharding(mesh), start=0, stop=steps) as batches:
        begin = last = time.perf_counter()
        pending = None
        for batch in batches:
            state, metrics = step_functions.train_step(state, batch)
            if pending is not None:  # one step late, as in training
                source_tokens += float(pending.source_tokens)
                target_tokens += float(pending.sums.tokens)
                step_seconds.append((now := time.perf_counter()) - last)
                last = now
            pending = metrics
            positions += batch.source_BS.size + batch.target_BT.size
        assert pending is not None
        source_tokens += float(pending.source_tokens)
        target_tokens += float(pending.sums.tokens)
        seconds = time.perf_counter() - begin
        waited = batches.waited
    return {
        "shapes": [list(shape) for shape in compile_seconds],
        "compile_seconds": {
            "total": sum(compile_seconds.values()),
            "longest": max(compile_seconds.values()),
        },
        "steps": steps,
        "step_seconds_median": statistics.median(step_seconds),
        "tokens_per_second": (source_tokens + target_tokens) / seconds,
        "target_tokens_per_second": target_tokens / seconds,
        "real_token_share": (source_tokens + target_tokens) / positions,
        "data_wait_share": waited / seconds,
        "peak_memory_bytes": peak_memory_bytes(),
        **environment(),
    }


def _corpus(pairs: int, longest: int, vocab_size: int, folder: Path) -> Corpus:
    rng = np.random.default_rng(0)
    source = np.clip(rng.lognormal(3.15, 0.6, pairs), 2, longest).astype(np.int64)
    target = np.clip(source * rng.normal(1.0, 0.15, pairs), 2, longest).astype(np.int64)
    sides = []
    for name, lengths in (("source", source), ("target", target)):
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        tokens = np.memmap(
            folder / name,
            np.uint16 if vocab_size <= 2**16 else np.int32,
            "w+",
            shape=(int(offsets[-1]),),
        )
        tokens[:] = rng.integers(4, vocab_size, len(tokens))
        tokens[offsets[1:] - 1] = 2  # EOS
        tokens.flush()
        sides.append(Sequences(tokens, offsets))
    return Corpus("random", (sides[0], sides[1]), pairs, {})


if __name__ == "__main__":
    main()
