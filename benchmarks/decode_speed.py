"""Decoding speed: ours, CTranslate2 and Hugging Face ``generate`` on the same weights and inputs.

    python -m benchmarks.decode_speed --model base [--lengths FILE]
    python -m benchmarks.decode_speed --model base --source FILE --target FILE --tokenizer FOLDER
    python -m benchmarks.decode_speed --workdir W --input FILE

Each engine is a process of its own and only one of them works at a time: A B C D A B C D ... after
a round that is not timed (in which ours compiles). The time is from tokens to tokens, without
tokenising and loading.

*Random weights* (``--model base``: the paper's base size, 32,000 tokens): output lengths are forced
to be newstest2014's. No other engine can force the length of one sentence alone, so sentences are
sorted by source length and cut into batches, and all of a batch get its mean target length. The
others get one call per batch, ours one call for everything. Tokens are the forced ones: the
positions that every engine must decode for each sentence's best output. Lengths come from a file
(source and target, with the end symbol, two numbers a line), from text and its tokenizer, or from a
distribution like newstest2014's under a 32,000-token joint BPE: source log-normal (mean of logs
3.196, deviation 0.513), target / source log-normal (0.030, 0.172), both clipped to 3 to 98. The
real means there are 27.7 and 28.8.

*A trained model* (``--workdir``): every engine stops by itself, at most ``--max-extra-length``
tokens after the source's length (ours: each sentence's own, Hugging Face: the longest in the batch,
CTranslate2: in the file). Tokens are those of each engine's own best outputs and their end symbols.

The length penalty divides by length^alpha everywhere (ours: ``length_offset`` 0). Random weights
make near-ties, between which float rounding decides. With forced lengths ours ends in the end
symbol, theirs in any token, so ``same_lines`` leaves the last position out.

``load_of_others`` is how many CPU cores other programs used during an engine's turns. Rounds above
0.2 for any engine do not count and are repeated, up to twice as many rounds as asked for; if none
was quiet, all count, and ratios mean little (spinning thread pools suffer most).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import in_turn
from benchmarks.decode_job import NAMES

_MODULE = "benchmarks.decode_engines"


def main() -> None:
    """Make the inputs, measure each batch size, report."""
    arguments = _arguments()
    source, target_lengths = _inputs(arguments)
    report: dict[str, Any] = {
        "setting": "trained" if arguments.workdir else arguments.model,
        "sentences": len(source),
        "source_tokens": sum(len(x) + 1 for x in source),
        "beam_size": arguments.beam_size,
        "length_penalty": arguments.length_penalty,
        "max_extra_length": arguments.max_extra_length,
        "threads": arguments.threads,
        "repeats": arguments.repeats,
        "results": [],
    }
    for batch_size in arguments.batch_sizes:
        report["results"].append(_measure(arguments, source, target_lengths, batch_size))
        if arguments.output:
            arguments.output.write_text(json.dumps(report, indent=2) + "\n")
        _print_table(report["results"][-1])


def _measure(
    arguments: argparse.Namespace,
    source: list[list[int]],
    target_lengths: list[int] | None,
    batch_size: int,
) -> dict[str, Any]:
    """All engines at one batch size."""
    forced = None
    if target_lengths is not None:
        means = [
            round(float(np.mean(target_lengths[i : i + batch_size])))
            for i in range(0, len(source), batch_size)
        ]
        forced = [means[i // batch_size] for i in range(len(source))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = {
            "source": source,
            "forced": forced,
            "own_lengths": target_lengths,
            "batch_size": batch_size,
            "max_source_length": max(256, *(len(x) + 1 for x in source)),
            "workdir": str(arguments.workdir.absolute()) if arguments.workdir else None,
            **{
                key: getattr(arguments, key)
                for key in ("model", "beam_size", "length_penalty", "max_extra_length", "threads")
            },
        }
        (folder / "job.json").write_text(json.dumps(job))
        prepared = in_turn.prepare(_MODULE, folder, arguments.threads)
        (folder / "job.json").write_text(json.dumps(job | {"device": prepared["device"]}))
        skipped = prepared["skipped"] | {
            name: "not asked for" for name in NAMES if name not in arguments.engines
        }
        names = [name for name in NAMES if name not in skipped]
        with in_turn.running(_MODULE, names, folder, arguments.threads) as started:
            rounds = in_turn.take_turns(
                started.engines, repeats=arguments.repeats, patience=arguments.patience
            )
            result = _result(started, rounds, forced)
    return {
        "batch_size": batch_size,
        "device": prepared["device"],
        **result,
        "skipped": skipped | started.skipped,
        "environment": prepared["environment"],
    }


def _result(
    started: in_turn.Started, rounds: in_turn.Rounds, forced: list[int] | None
) -> dict[str, Any]:
    """Figures from what the engines answered."""
    engines = started.engines
    outputs = {name: rounds.timed[-1][name]["outputs"] for name in engines}
    tokens = {
        name: sum(forced) if forced else sum(len(x) + 1 for x in outputs[name]) for name in engines
    }
    speeds = {
        name: [tokens[name] / seconds for seconds in rounds.seconds(name)] for name in engines
    }
    found = {}
    for name, engine in engines.items():
        found[name] = {
            **started.said[name],
            "tokens_per_second": round(median(speeds[name]), 1),
            "tokens_per_second_all": [round(x, 1) for x in speeds[name]],
            "output_tokens": tokens[name],
            "first_run_seconds": round(rounds.warm_up[name]["seconds"], 2),
            "tokens_per_cpu_second": round(
                median(tokens[name] / each[name]["cpu_seconds"] for each in rounds.timed), 1
            ),
            "load_of_others": rounds.load_of_others(name),
            **engine.ask("extras"),
        }
    ratios = in_turn.ours_over(speeds)
    same = {}
    for name in ratios:
        pairs = zip(outputs["ours"], outputs[name], forced or [None] * len(outputs[name]))
        same[name] = sum(a == (b[: n - 1] if n else b) for a, b, n in pairs)
    return {
        "rounds": rounds.num_all,
        "quiet_rounds": rounds.num_quiet,
        "engines": found,
        "ours_over": ratios,
        "same_lines": same,
    }


def _inputs(arguments: argparse.Namespace) -> tuple[list[list[int]], list[int] | None]:
    """Source tokens, longest first, and the target lengths that belong to them if they are to be
    forced.
    """
    if arguments.workdir or arguments.source:
        # Late, as it brings JAX: wrong flags are told at once.
        from transformer_jax.data.sources import read_lines
        from transformer_jax.tokenizer import Tokenizer
    if arguments.workdir:
        lines = list(read_lines(arguments.input))
        tokens = [x for x in Tokenizer.load(arguments.workdir).encode_source(lines) if x]
        return sorted(tokens[: arguments.sentences], key=len, reverse=True), None
    rng = np.random.default_rng(0)
    if arguments.lengths:
        pairs_N2 = np.loadtxt(arguments.lengths, dtype=int, ndmin=2)
    elif arguments.source:
        tokenizer = Tokenizer.load(arguments.tokenizer)
        source, target = (list(read_lines(path)) for path in (arguments.source, arguments.target))
        sides = tokenizer.encode_source(source), tokenizer.encode_target(target)
        pairs_N2 = np.array([(len(a) + 1, len(b) + 1) for a, b in zip(*sides, strict=True)])
    else:
        count = arguments.sentences or 3003
        source_N = rng.lognormal(3.196, 0.513, count)
        pairs_N2 = (
            np.clip(
                np.stack([source_N, source_N * rng.lognormal(0.030, 0.172, count)], axis=1), 3, 98
            )
            .round()
            .astype(int)
        )
    if arguments.sentences:  # evenly from the whole file, which may be in some order
        pairs_N2 = pairs_N2[
            np.linspace(0, len(pairs_N2) - 1, min(arguments.sentences, len(pairs_N2))).astype(int)
        ]
    pairs_N2 = pairs_N2[np.argsort(-pairs_N2[:, 0], kind="stable")]
    vocab_size = {"base": 32_000, "tiny": 64}[arguments.model]
    # No translation may be longer than the search's capacity.
    targets = np.minimum(pairs_N2[:, 1], pairs_N2[:, 0] + arguments.max_extra_length)
    return [rng.integers(4, vocab_size, n - 1).tolist() for n in pairs_N2[:, 0]], targets.tolist()


def _print_table(result: dict[str, Any]) -> None:
    quiet = f"{result['quiet_rounds']} quiet rounds of {result['rounds']}"
    print(
        f"\nbatch size {result['batch_size']}, {quiet}, "
        f"{', '.join(result['environment']['devices'])}"
    )
    print(
        f"{'engine':<18}{'precision':<15}{'tokens/s':>9}{'ours/it':>9}{'pairs':>7}{'same':>7}"
        f"{'GB':>7}{'others':>8}  notes"
    )
    for name, x in result["engines"].items():
        ratio = result["ours_over"].get(name, {"of_medians": 1.0, "median_of_pairs": 1.0})
        same = result["same_lines"].get(name, "")
        notes = ""
        if name == "ours":
            notes = (
                f"compiling {x['compile_seconds']} s ({x['shapes_compiled']} shapes), "
                f"wasted slots {x['wasted_slots']:.1%}"
            )
            if "wasted_slots_own_lengths" in x:
                notes += f" (own lengths: {x['wasted_slots_own_lengths']:.1%})"
        print(
            f"{name:<18}{x['precision']:<15}{x['tokens_per_second']:>9}{ratio['of_medians']:>9}{ratio['median_of_pairs']:>7}"
            f"{same:>7}{x['peak_memory_gb']:>7.2f}{x['load_of_others']:>8}  {notes}"
        )
    for name, reason in result["skipped"].items():
        print(f"{name:<18}skipped: {reason}")
    sys.stdout.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=["base", "tiny"], help="random weights, forced lengths")
    parser.add_argument(
        "--lengths", type=Path, help="source and target length of a sentence in each line"
    )
    parser.add_argument(
        "--source", type=Path, help="text to take the lengths of, with --target and --tokenizer"
    )
    parser.add_argument("--target", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.model")
    parser.add_argument(
        "--workdir", type=Path, help="a trained model, natural lengths; with --input"
    )
    parser.add_argument("--input", type=Path, help="text to translate")
    parser.add_argument("--sentences", type=int, help="take so many; default: all")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--beam-size", type=int, default=4)
    parser.add_argument("--length-penalty", type=float, default=0.6)
    parser.add_argument("--max-extra-length", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--patience",
        type=float,
        default=20.0,
        help="most seconds to wait, before a turn, for a quiet machine",
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU cores for each engine")
    parser.add_argument("--engines", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments = parser.parse_args()
    if bool(arguments.model) == bool(arguments.workdir):
        parser.error("expected either --model or --workdir")
    if bool(arguments.workdir) != bool(arguments.input):
        parser.error("--workdir and --input go together")
    if len({bool(x) for x in (arguments.source, arguments.target, arguments.tokenizer)}) > 1:
        parser.error("--source, --target and --tokenizer go together")
    return arguments


if __name__ == "__main__":
    main()
