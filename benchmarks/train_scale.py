"""How training speed grows with devices, model size and sentence length; draws docs/scaling.png.

    python -m benchmarks.train_scale --output train_scale.json
    python -m benchmarks.plan_scale --output plan_scale.json
    python -m benchmarks.train_scale --draw docs/scaling.png train_scale.json plan_scale.json

One thing varies at a time around the paper's base model on batches of ``--tokens`` + ``--tokens``
positions without padding: devices (simulated on a CPU; the global batch stays), d_model (with
d_ff = 4 d_model and heads of 64), length of both sides. Each point is a process of its own; the
points take turns for ``--rounds`` rounds, and the median counts. ``FLOP/s`` are those of the matrix
products that the model needs (train_speed.py). Dropout is on; loading data is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

_VARIED = {
    "devices": (1, 2, 4, 8),
    "d_model": (64, 128, 256, 512, 1024),
    "length": (16, 32, 64, 128, 256),
}
_VOCAB = 37_000


def main() -> None:
    """Measure every point in turn and write JSON; or draw what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, values in _VARIED.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, nargs="*", default=values)
    parser.add_argument("--base", type=int, default=512, help="d_model where it does not vary")
    parser.add_argument("--layers", type=int, default=6, help="of the encoder, and of the decoder")
    parser.add_argument(
        "--tokens", type=int, default=1024, help="positions a side and step; 25,000 in the paper"
    )
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a point in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--draw", nargs=3, metavar=("PICTURE", "TRAIN", "PLAN"), help="draw these two files instead"
    )
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)  # the inner process
    arguments = parser.parse_args()
    if arguments.draw:
        picture, *measured = map(Path, arguments.draw)
        draw(picture, *(json.loads(path.read_text()) for path in measured))
    elif arguments.point:
        print(json.dumps(measure(**arguments.point)))
    else:
        report = run(arguments)
        if arguments.output:
            arguments.output.write_text(json.dumps(report, indent=2) + "\n")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All points, each ``--rounds`` times."""
    base = {"devices": 1, "d_model": arguments.base, "length": 32}
    fixed = {
        "num_layers": arguments.layers,
        "tokens": arguments.tokens,
        "steps": arguments.steps,
        "dtype": arguments.dtype,
    }
    points = {
        json.dumps(base | {name: value}): (name, value)
        for name in _VARIED
        for value in getattr(arguments, name)
    }
    answers: dict[str, list[dict[str, Any]]] = {key: [] for key in points}
    for number in range(arguments.rounds):
        for key, (name, value) in points.items():
            answer = _in_a_process(json.loads(key) | fixed)
            answers[key].append(answer)
            print(
                f"round {number}: {name} {value}: "
                f"{answer['target_tokens_per_second']:,.1f} target tokens/s",
                file=sys.stderr,
            )
    varied: dict[str, list[dict[str, Any]]] = {}
    for name in _VARIED:
        for value in getattr(arguments, name):
            these = answers[json.dumps(base | {name: value})]
            medians = {
                figure: median(answer[figure] for answer in these)
                for figure in these[0]
                if figure != "device"
            }
            varied.setdefault(name, []).append({name: value} | medians)
    report = {
        "base": base | fixed,
        "rounds": arguments.rounds,
        "device": these[0]["device"],
        "varied": varied,
    }
    for name, rows in varied.items():
        heads = (
            name,
            "parameters",
            "target tokens/s",
            "GFLOP/s",
            "compilation, s",
            "peak memory, GB",
        )
        print("\n| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
        for row in rows:
            print(
                f"| {row[name]} | {row['parameters'] / 1e6:,.1f} M "
                f"| {row['target_tokens_per_second']:,.0f} | {row['flops_per_second'] / 1e9:,.0f} "
                f"| {row['compile_seconds']:.1f} | {row['peak_memory_bytes'] / 1e9:.2f} |"
            )
    return report


def measure(
    *, devices: int, d_model: int, length: int, num_layers: int, tokens: int, steps: int, dtype: Any
) -> dict[str, Any]:
    """One point, in this process."""
    import jax
    import numpy as np

    from transformer_jax.config import Config, MeshConfig, ModelConfig
    from transformer_jax.data.batching import Batch
    from transformer_jax.sharding import batch_sharding, make_mesh
    from transformer_jax.training.flops import model_flops
    from transformer_jax.training.step import make_step_functions
    from transformer_jax.training.summary import peak_memory_bytes

    heads = max(1, d_model // 64)
    model = ModelConfig(
        vocab_size=_VOCAB,
        d_model=d_model,
        d_ff=4 * d_model,
        num_heads=heads,
        num_layers=num_layers,
        dtype=dtype,
    )
    mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
    step_functions = make_step_functions(Config(model=model), mesh)
    rows = tokens // length
    token_ids = np.random.default_rng(0).integers(4, _VOCAB, (2, rows, length), dtype=np.int32)
    batch = jax.device_put(Batch(*token_ids), batch_sharding(mesh))
    state, times = step_functions.init(), []
    for _ in range(steps + 1):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(step_functions.train_step(state, batch))
        times.append(time.perf_counter() - began)
    lengths = np.full(rows, length)
    seconds = median(times[1:])
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.parameters)),
        "target_tokens_per_second": rows * length / seconds,
        "flops_per_second": model_flops(model, lengths, lengths) / seconds,
        "compile_seconds": times[0] - seconds,
        "peak_memory_bytes": max(peak_memory_bytes().values()),
        "device": jax.devices()[0].device_kind,
    }


def draw(path: Path, train: dict[str, Any], plan: dict[str, Any]) -> None:
    """Four panels: speed against devices, model size and length; start-up time and memory against
    the corpus.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    base, varied = train["base"], train["varied"]
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")

    def panel(axis: Any, x: list[float], y: list[float], **settings: Any) -> None:
        axis.plot(x, y, "o-")
        bottom = min(y) / 1.5 if settings.get("yscale") == "log" else 0
        axis.set(xscale="log", ylim=(bottom, 1.15 * max(y)), **settings)
        axis.set_xticks([], minor=True)

    def beside(axis: Any, x: list[float], y: list[float], **settings: Any) -> None:
        other = axis.twinx()
        other.plot(x, y, "s--", color="C1")
        other.set(ylim=(0, 1.15 * max(y)), **settings)

    speed = {
        name: [row["target_tokens_per_second"] for row in rows] for name, rows in varied.items()
    }
    devices, lengths = ([row[name] for row in varied[name]] for name in ("devices", "length"))
    panel(
        axes[0, 0],
        devices,
        speed["devices"],
        title="devices, the global batch unchanged",
        ylabel="target tokens/s",
    )
    axes[0, 0].set_xticks(devices, devices)
    panel(
        axes[1, 0],
        lengths,
        speed["length"],
        title="tokens a sentence, positions unchanged",
        ylabel="target tokens/s",
    )
    axes[1, 0].set_xticks(lengths, lengths)
    sizes = [row["parameters"] for row in varied["d_model"]]
    gigaflops = [row["flops_per_second"] / 1e9 for row in varied["d_model"]]
    panel(
        axes[0, 1],
        sizes,
        speed["d_model"],
        title="parameters",
        ylabel="target tokens/s (solid)",
        yscale="log",
    )
    axes[0, 1].set_xticks(sizes, [f"{size / 1e6:.0f} M" for size in sizes])
    axes[0, 1].yaxis.set_major_formatter("{x:g}")
    beside(axes[0, 1], sizes, gigaflops, ylabel="GFLOP/s (dashed)")
    pairs = [row["pairs"] for row in plan["results"]]
    seconds = [row["plan_seconds"] + row["window_seconds"] for row in plan["results"]]
    panel(
        axes[1, 1],
        pairs,
        seconds,
        title="pairs in the corpus",
        ylabel="open, plan, first batch: s (solid)",
    )
    beside(
        axes[1, 1], pairs, [row["peak_mb"] for row in plan["results"]], ylabel="memory, MB (dashed)"
    )
    figure.suptitle(
        f"base model around d_model {base['d_model']}, "
        f"{base['tokens']:,} + {base['tokens']:,} positions, {base['dtype']}; "
        f"{train['device']}"
    )
    figure.savefig(path, dpi=110)


def _in_a_process(point: dict[str, Any]) -> dict[str, Any]:
    devices = f"--xla_force_host_platform_device_count={point['devices']}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
    command = [sys.executable, "-m", "benchmarks.train_scale", "--point", json.dumps(point)]
    root = Path(__file__).resolve().parents[1]
    answer = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, cwd=root, env=os.environ | {"XLA_FLAGS": flags}
    )
    if answer.returncode:
        raise SystemExit(f"error: {point} failed (status {answer.returncode}); see above.")
    return json.loads(answer.stdout)


if __name__ == "__main__":
    main()
