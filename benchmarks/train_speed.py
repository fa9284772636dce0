"""Training speed: our step against PyTorch's ``torch.nn.Transformer``, same model and batches.

    python -m benchmarks.train_speed

On a CPU it trains the base model on 32 pairs of 32 + 32 tokens in float32, on a GPU on 25,000 +
25,000 tokens a step in bfloat16.

Engines: ``ours`` (``make_step_functions(...).train_step``), ``torch_eager``, and ``torch_compile``,
where the model and its loss are compiled. Each is a process of its own and only one of them works
at a time (in_turn.py): A B C A B C ... after a round that is not timed. A turn is ``--steps`` whole
steps (forward, backward, Adam) on batches that are already on the device; loading data is left out.
Batches are random tokens, all of one shape; ``--lengths mixed`` gives them lengths like real text,
log-normal as in train_step.py and clipped to ``--length``, with padding. The tokens counted are the
real ones of the target, end symbols included.

The same on both sides: encoder and decoder of the paper, post-norm, ReLU, one matrix for embeddings
and softmax, sinusoids, causal and padding masks, dropout 0.1 on embeddings and sub-layer outputs,
label smoothing 0.1, Adam(0.9, 0.98, 1e-9) under the paper's schedule. Parameters, norms and loss
are float32, matrix products ``--dtype`` (PyTorch: autocast; on a GPU attention is whatever
``scaled_dot_product_attention`` chooses). Different:

- PyTorch's attention has biases, ours has none: parameter counts agree except for these, which is
  checked.
- ``nn.Transformer`` also has dropout on attention weights and inside the feed-forward layer, and a
  norm after each stack. They are removed, which makes it faster: attention without dropout runs as
  one fused operation.
- PyTorch holds the logits of the whole batch, ours those of a chunk of positions at a time.
- Ours also computes the gradient's norm, and changes nothing if that is not finite.
- Initial weights, and which elements are dropped. The first step's losses are near ln V for all,
  which is checked.
- float32 on a GPU: XLA uses TF32 for matrix products, PyTorch by default does not.

Model FLOPs are those of the matrix products that real tokens need, three times forward (causal
attention counted as if full); ``mfu`` is their share of the best rate that the same process reaches
on one large square matrix product.

``load_of_others`` is how many CPU cores other programs used during an engine's turns. Rounds above
0.2 for any engine do not count and are repeated, up to twice as many rounds as asked for; if none
was quiet, all count.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import in_turn
from benchmarks.train_job import EOS_ID, NAMES, Job
from transformer_jax.config import ModelConfig
from transformer_jax.training.flops import model_flops

_MODULE = "benchmarks.train_engines"
_SHAPES = {
    "base": {"vocab_size": 37_000, "d_model": 512, "d_ff": 2048, "num_heads": 8, "num_layers": 6},
    "big": {"vocab_size": 37_000, "d_model": 1024, "d_ff": 4096, "num_heads": 16, "num_layers": 6},
    "tiny": {"vocab_size": 64, "d_model": 16, "d_ff": 32, "num_heads": 2, "num_layers": 1},
}
_NUM_BATCHES = 4
_TOKENS_ON_GPU = 25_000  # a step and side, as in the paper
# bfloat16 FLOP/s without sparsity, as the vendor says, by a part of the device's name
_DENSE_PEAKS = {"H200": 989e12, "H100 80GB HBM3": 989e12}


def main() -> None:
    """Make the batches, let the engines train in turn, report."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        machine = in_turn.prepare(_MODULE, folder, arguments.threads)
        job, pairs = _job(arguments, machine["device"])
        job.write(folder)
        source, target = _batches(arguments, pairs, job.vocab_size)
        np.savez(folder / "batches.npz", source=source, target=target)
        with in_turn.running(_MODULE, arguments.engines, folder, arguments.threads) as started:
            _check_parameters(started.said)
            rounds = in_turn.take_turns(
                started.engines, repeats=arguments.repeats, patience=arguments.patience
            )
            # the best rate of matrix products is measured now
            in_turn.wait_for_others(arguments.patience)
            result = _result(
                started, rounds, job, source, target, machine["environment"]["devices"][0]
            )
    report = {
        "model": arguments.model,
        "dtype": job.dtype,
        "pairs": pairs,
        "length": arguments.length,
        "lengths": arguments.lengths,
        "real_token_share": float(((source != 0).mean() + (target != 0).mean()) / 2),
        "steps_a_turn": job.steps,
        "repeats": arguments.repeats,
        "threads": arguments.threads,
        **result,
        "skipped": started.skipped
        | {name: "not asked for" for name in NAMES if name not in arguments.engines},
        "device": machine["device"],
        "environment": machine["environment"],
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    _print_table(report)
    # scores begin about as N(0, 1), which adds about 0.5
    for name, figures in result["engines"].items():
        difference = figures["first_loss"] - math.log(job.vocab_size)
        assert abs(difference) < 1.5, f"{name} began with a loss of ln V + {difference:.2f}"


def _job(arguments: argparse.Namespace, device: str) -> tuple[Job, int]:
    """The settings of this run, with the device's own defaults, and the pairs in a batch."""
    on_gpu = device == "gpu"
    pairs = arguments.pairs or (-(-_TOKENS_ON_GPU // arguments.length // 8) * 8 if on_gpu else 32)
    dtype = ("bfloat16" if on_gpu else "float32") if arguments.dtype == "auto" else arguments.dtype
    product_size = 128 if arguments.model == "tiny" else 8192 if on_gpu else 1024
    shape = _SHAPES[arguments.model]
    steps = arguments.steps or (40 if on_gpu else 4)
    return Job(
        **shape,
        device=device,
        dtype=dtype,
        steps=steps,
        threads=arguments.threads,
        product_size=product_size,
    ), pairs


def _batches(
    arguments: argparse.Namespace, pairs: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Source and target, int32 [batches, pairs, length]: random tokens, EOS, padding."""
    rng = np.random.default_rng(0)
    shape, longest = (_NUM_BATCHES, pairs), arguments.length
    if arguments.lengths == "mixed":
        source = np.clip(rng.lognormal(3.15, 0.6, shape), 2, longest).astype(int)
        target = np.clip(source * rng.normal(1.0, 0.15, shape), 2, longest).astype(int)
    else:
        source = target = np.full(shape, longest)
    sides = []
    for lengths in (source, target):
        tokens = rng.integers(4, vocab_size, (*shape, longest), dtype=np.int32)
        last = lengths[..., None] - 1
        sides.append(
            np.where(
                np.arange(longest) < last, tokens, EOS_ID * (np.arange(longest) == last)
            ).astype(np.int32)
        )
    return sides[0], sides[1]


def _check_parameters(said: dict[str, Any]) -> None:
    """All have as many, but for PyTorch's attention biases."""
    counts = {
        name: x["parameters"] - x.get("attention_biases", 0)
        for name, x in said.items()
        if "parameters" in x
    }
    assert len(set(counts.values())) <= 1, (
        f"models differ in parameters other than attention biases: {counts}"
    )


def _result(
    started: in_turn.Started,
    rounds: in_turn.Rounds,
    job: Job,
    source: np.ndarray,
    target: np.ndarray,
    device_kind: str,
) -> dict[str, Any]:
    """Figures from what the engines answered."""
    batches = np.arange(job.steps) % len(target)  # of one turn
    tokens = int((target[batches] != 0).sum())
    lengths = ((tokens[batches] != 0).sum(-1) for tokens in (source, target))
    model = ModelConfig(**{name: getattr(job, name) for name in _SHAPES["base"]})
    flops = model_flops(model, *lengths) / job.steps
    dense_peak = next(
        (
            peak
            for part, peak in _DENSE_PEAKS.items()
            if part in device_kind and job.dtype == "bfloat16"
        ),
        None,
    )
    speeds = {
        name: [tokens / seconds for seconds in rounds.seconds(name)] for name in started.engines
    }
    found = {}
    for name, engine in started.engines.items():
        step_seconds = median(rounds.seconds(name)) / job.steps
        extras = engine.ask("extras")
        found[name] = {
            **started.said[name],
            "target_tokens_per_second": round(median(speeds[name]), 1),
            "target_tokens_per_second_all": [round(x, 1) for x in speeds[name]],
            "milliseconds_a_step": round(1e3 * step_seconds, 2),
            "compile_seconds": round(max(0.0, extras.pop("first_step_seconds") - step_seconds), 2),
            "first_loss": round(rounds.warm_up[name]["outputs"][0], 4),
            "last_loss": round(rounds.timed[-1][name]["outputs"][-1], 4),
            "model_flops_per_second": flops / step_seconds,
            "mfu": round(flops / step_seconds / extras["product_flops"], 4),
            **(
                {"mfu_of_dense_peak": round(flops / step_seconds / dense_peak, 4)}
                if dense_peak
                else {}
            ),
            "load_of_others": rounds.load_of_others(name),
            **extras,
        }
    return {
        "real_target_tokens_a_step": tokens / job.steps,
        "model_flops_a_step": flops,
        "rounds": rounds.num_all,
        "quiet_rounds": rounds.num_quiet,
        "engines": found,
        "ours_over": in_turn.ours_over(speeds),
    }


def _print_table(report: dict[str, Any]) -> None:
    devices = ", ".join(report["environment"]["devices"])
    print(
        f"\n{report['model']}, {report['dtype']}, "
        f"{report['pairs']} pairs of {report['length']} + {report['length']}, "
        f"{report['real_token_share']:.1%} real tokens, "
        f"{report['quiet_rounds']} quiet rounds of {report['rounds']}, {devices}"
    )
    print(
        f"{'engine':<15}{'target tokens/s':>16}{'ours/it':>9}{'pairs':>7}{'ms a step':>11}"
        f"{'MFU':>7}{'of peak':>9}"
        f"{'compile s':>11}{'GB':>7}{'device GB':>11}{'loss':>8}{'others':>8}"
    )
    for name, x in report["engines"].items():
        ratio = report["ours_over"].get(name, {"of_medians": "", "median_of_pairs": ""})
        of_peak = f"{x['mfu_of_dense_peak']:.1%}" if "mfu_of_dense_peak" in x else ""
        print(
            f"{name:<15}{x['target_tokens_per_second']:>16,}{ratio['of_medians']:>9}{ratio['median_of_pairs']:>7}"
            f"{x['milliseconds_a_step']:>11}{x['mfu']:>7.1%}{of_peak:>9}{x['compile_seconds']:>11}{x['peak_memory_gb']:>7.2f}"
            f"{x.get('peak_device_gb', ''):>11}{x['first_loss']:>8.2f}{x['load_of_others']:>8}"
        )
    for name, reason in report["skipped"].items():
        print(f"{name:<15}skipped: {reason}")
    sys.stdout.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(_SHAPES), default="base")
    parser.add_argument(
        "--pairs",
        type=int,
        help="sentence pairs a step; default: 32, on a GPU about 25,000 tokens a side",
    )
    parser.add_argument(
        "--length",
        type=int,
        default=32,
        help="source and target tokens of a pair, padding included",
    )
    parser.add_argument(
        "--lengths",
        choices=["fixed", "mixed"],
        default="fixed",
        help="mixed: as in real text, with padding",
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds")
    parser.add_argument("--steps", type=int, help="steps a turn; default: 4, on a GPU 40")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument(
        "--patience",
        type=float,
        default=20.0,
        help="most seconds to wait, before a turn, for a quiet machine",
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU cores for each engine")
    parser.add_argument("--engines", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--output", type=Path, help="JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
