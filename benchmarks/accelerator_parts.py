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
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import parts
from benchmarks.accelerator_recipe import entries
from benchmarks.kernels import kernels
from benchmarks.train_job import EOS_ID, PRODUCTS, Job
from benchmarks.train_ours import Ours, product_flops
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
    array = jnp.ones((megabytes, 2**18), jnp.float32)

    @jax.jit
    def copies(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, PRODUCTS, lambda _, y: y + 1, x)

    flops = product_flops(size, "bfloat16")
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
        dtype="float32" if arguments.toy else "bfloat16",
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
    program = engine.program()
    engine()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            engine()
        [trace] = Path(folder).rglob("*.xplane.pb")
        times = kernel_times(trace)
    total, count = (sum(figures) for figures in zip(*times.values())) if times else (0.0, 0)
    by_name = sorted(times.items(), key=lambda item: -item[1][0])[:60]
    return {
        "model": name,
        "milliseconds": 1e3 * total / steps,
        "kernels": count / steps,
        "parts": {part: 1e3 * time / steps for part, time in by_part(program, times).items()},
        "by_name": {kernel: [1e3 * time / steps, n / steps] for kernel, (time, n) in by_name},
    }


def by_part(program: str, times: dict[str, tuple[float, int]]) -> dict[str, float]:
    """Seconds of each part of the model, by the names that kernels have in the program."""
    part_of = {_plain(kernel.name): parts.part(kernel) for kernel in kernels(program)}
    found = dict.fromkeys((*parts.PARTS, "without a name in the program"), 0.0)
    for name, (seconds, _) in times.items():
        found[part_of.get(_plain(name), "without a name in the program")] += seconds
    return found


def _plain(name: str) -> str:
    return re.sub(r"\W", "_", name)


def kernel_times(trace: Path) -> dict[str, tuple[float, int]]:
    """Seconds and number of launches in a profile, by the operation that XLA compiled to it."""
    found: dict[str, tuple[float, int]] = {}
    data = jax.profiler.ProfileData.from_file(str(trace))
    for plane in data.planes:
        lines = plane.lines if re.match("/device:(GPU|TPU)", plane.name) else ()
        for line in lines:
            if line.name.startswith(("Stream", "XLA Ops")):
                for event in line.events:
                    name = str(dict(event.stats).get("hlo_op") or event.name)
                    seconds, count = found.get(name, (0.0, 0))
                    found[name] = seconds + event.duration_ns / 1e9, count + 1
    return found


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
        training=TrainingConfig(steps=steps, log_every=1, checkpoint_every=steps // 2),
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
