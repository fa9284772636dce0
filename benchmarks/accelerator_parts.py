"""Parts of ``accelerator.py`` that no other benchmark measures; each a process of its own.

python -m benchmarks.accelerator_parts PART --output FILE [--toy]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator_recipe import entries
from benchmarks.train_job import EOS_ID, PRODUCTS, Job, best_rate
from benchmarks.train_ours import Ours
from transformer_jax.config import (
    BatchConfig,
    Config,
    DataConfig,
    ModelConfig,
    PairsConfig,
    TokenizerConfig,
    TrainingConfig,
)
from transformer_jax.training.loop import train
from transformer_jax.training.prepare import prepare
from transformer_jax.training.summary import environment

_BEGIN = time.perf_counter()


def main() -> int:
    """Measure one part and write what it found."""
    arguments = _arguments()
    if jax.default_backend() == "cpu" and not arguments.toy:
        print(
            f"error: JAX {jax.__version__} sees no accelerator here, only {jax.devices()}; expected"
            " a GPU or TPU. Install JAX for it (pip install '.[cuda]' or '.[tpu]'), look at what "
            "JAX_PLATFORMS says, or use --toy.",
            file=sys.stderr,
        )
        return 2
    found = _MEASURES[arguments.part](arguments)
    arguments.output.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def peaks(arguments: argparse.Namespace) -> dict[str, Any]:
    """The best rates of matrix products and of copying; and what machine this is."""
    size, megabytes = (128, 1) if arguments.toy else (8192, 2048)
    matrix = (jax.random.normal(jax.random.key(0), (size, size)) / size**0.5).astype(jnp.bfloat16)
    array = jnp.ones((megabytes, 2**18), jnp.float32)

    @jax.jit
    def product(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, PRODUCTS, lambda _, y: y @ matrix, x)

    @jax.jit
    def copies(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, PRODUCTS, lambda _, y: y + 1, x)

    flops = best_rate(lambda: jax.block_until_ready(product(matrix)), size)
    seconds = []
    for _ in range(4):  # the first compiles
        begin = time.perf_counter()
        jax.block_until_ready(copies(array))
        seconds.append(time.perf_counter() - begin)
    moved = 2 * PRODUCTS * array.nbytes  # read and written
    return {
        "product_size": size,
        "product_flops": flops,
        "copied_bytes": moved / min(seconds[1:]),
        "environment": environment(),
    }


def compile_again(arguments: argparse.Namespace) -> dict[str, Any]:
    """The first step of a process that finds the step in the compilation cache."""
    name, engine = _base(arguments)
    engine()
    seconds = time.perf_counter() - _BEGIN
    return {
        "model": name,
        "first_step_seconds": engine.first_step_seconds,
        "seconds": seconds,
    }


def _base(arguments: argparse.Namespace, steps: int = 1) -> tuple[str, Ours]:
    """The base model's training step, as ``train_speed.py`` has it on a GPU."""
    on_gpu = {"vocab_size": 37_000, "d_model": 512, "d_ff": 2048, "num_heads": 8, "num_layers": 6}
    toy = {"vocab_size": 64, "d_model": 16, "d_ff": 32, "num_heads": 2, "num_layers": 1}
    pairs, length = (4, 6) if arguments.toy else (784, 32)
    job = Job(
        **(toy if arguments.toy else on_gpu),
        device=jax.default_backend(),
        dtype="bfloat16",
        steps=steps,
        threads=1,
        product_size=8,
    )
    tokens = np.random.default_rng(0).integers(4, job.vocab_size, (2, pairs, length), np.int32)
    tokens[:, :, -1] = EOS_ID
    return "tiny" if arguments.toy else "base", Ours(job, [(tokens[0], tokens[1])])


def profile(arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a step's kernels, by name and by part of the model."""
    steps = 2 if arguments.toy else 10
    name, engine = _base(arguments, steps)
    engine()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            engine()
        [trace] = Path(folder).rglob("*.xplane.pb")
        kernels = kernel_times(trace)
    total = sum(seconds for seconds, _ in kernels.values())
    return {
        "model": name,
        "milliseconds": 1e3 * total / steps,
        "kernels": sum(count for _, count in kernels.values()) / steps,
        "parts": {},
        "by_name": {
            kernel: {"milliseconds": 1e3 * seconds / steps, "count": count / steps}
            for kernel, (seconds, count) in sorted(kernels.items(), key=lambda x: -x[1][0])[:60]
        },
    }


def kernel_times(trace: Path) -> dict[str, tuple[float, int]]:
    """Seconds and count of each kernel in a profile, by the operation that XLA compiled to it."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        if not re.match("/device:(GPU|TPU)", plane.name):
            continue
        for line in plane.lines:
            if not line.name.startswith(("Stream", "XLA Ops")):
                continue
            for event in line.events:
                stats = dict(event.stats)
                entry = found[str(stats.get("hlo_op") or event.name)]
                entry[0] += event.duration_ns / 1e9
                entry[1] += 1
    return {name: (seconds, int(count)) for name, (seconds, count) in found.items()}


def resume(arguments: argparse.Namespace) -> dict[str, Any]:
    """A run with a break and a run without: all that is in their last checkpoints."""
    steps = 4 if arguments.toy else 40
    config = Config(
        model=ModelConfig(d_model=64, d_ff=128, num_heads=4, num_layers=1, dropout=0.1),
        tokenizer=TokenizerConfig(vocab_size=160),
        data=DataConfig(
            train=PairsConfig("numbers", limit=2000), max_source_length=40, max_target_length=40
        ),
        batch=BatchConfig(tokens=2048, buckets=1),
        training=TrainingConfig(
            steps=steps, log_every=1, checkpoint_every=steps // 2, compilation_cache=""
        ),
    )
    half = dataclasses.replace(
        config, training=dataclasses.replace(config.training, steps=steps // 2)
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(config, folder / "whole")
        train(half, folder / "resumed")
        train(config, folder / "resumed")
        states, losses = [], []
        for workdir in (folder / "whole", folder / "resumed"):
            with prepare(config, workdir) as run:
                assert int(run.state.step) == steps
                states.append([np.asarray(leaf) for leaf in jax.tree.leaves(run.state)])
            losses.append([entry["loss"] for entry in entries(workdir, "train")])
    equal = all(np.array_equal(a, b) for a, b in zip(*states, strict=True))
    return {
        "steps": steps,
        "resumed_at": steps // 2,
        "equal": equal and losses[0] == losses[1],
        "last_loss": losses[0][-1],
    }


_MEASURES = {
    "peaks": peaks,
    "compile": compile_again,
    "profile": profile,
    "resume": resume,
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=list(_MEASURES))
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, on a CPU, say")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
