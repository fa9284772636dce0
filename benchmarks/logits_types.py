"""Whether the type of the logits changes what training reaches: a recipe with both, side by side.

    python -m benchmarks.logits_types --config configs/multi30k.py --output runs/logits_types

On accelerators the loss keeps its logits in bfloat16 and sums in float32 (training/loss.py). Here a
recipe trains with them in float32 and in bfloat16, all else the same, once for each of ``--seeds``,
one run after another. Prints the losses and BLEU of the dev set as they develop and BLEU of the
test set, as a Markdown table; the runs stay in ``--output``. Any field of the config may be given
as a flag, as with train.py. A run that is there already is resumed or read.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import tyro

from transformer_jax.cli import config_in_flags, parse_flags, run_program
from transformer_jax.config import Config
from transformer_jax.training import step
from transformer_jax.training.loop import train
from transformer_jax.training.loss import smoothed_cross_entropy

_TYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Arguments:
    """Train a recipe with logits of either type."""

    output: Path
    """Folder for the runs."""
    config: str = ""
    """Config file, as in configs/."""
    seeds: tuple[int, ...] = (1, 2)
    """Two runs each."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def main() -> int:
    """Train with both types and print the table."""
    return run_program(_main)


def _main() -> None:
    arguments = parse_flags(Arguments, defaults=config_in_flags(sys.argv[1:]))
    runs = {
        (seed, dtype): arguments.output / f"seed{seed}_{dtype}"
        for seed in arguments.seeds
        for dtype in _TYPES
    }
    for (seed, dtype), workdir in runs.items():
        loss = partial(smoothed_cross_entropy, logits_dtype=dtype)
        with mock.patch.object(step, "smoothed_cross_entropy", loss):
            train(dataclasses.replace(arguments.settings, seed=seed), workdir)
    rows = {f"seed {seed}, {dtype}": _figures(workdir) for (seed, dtype), workdir in runs.items()}
    print("|".join(["", "", *rows, ""]), "|".join(["", "---", *["---:"] * len(rows), ""]), sep="\n")
    for figure in next(iter(rows.values())):
        values = (f"{row[figure]:.4f}" if figure in row else "" for row in rows.values())
        print("|".join(["", figure, *values, ""]))


def _figures(workdir: Path) -> dict[str, float]:
    def entries(kind: str) -> Iterator[dict[str, Any]]:
        for line in (workdir / "metrics.jsonl").read_text().splitlines():
            if (entry := json.loads(line))["kind"] == kind:
                yield entry

    losses = {entry["step"]: entry["loss"] for entry in entries("train")}
    found = {}
    for entry in entries("dev"):
        at = f"step {entry['step']}: "
        if entry["step"] in losses:
            found[at + "training loss"] = losses[entry["step"]]
        names = {"dev_loss": "dev loss", "dev_nll": "dev nll", "dev_bleu": "dev BLEU"}
        found |= {at + name: entry[key] for key, name in names.items() if key in entry}
    test = json.loads((workdir / "summary.json").read_text()).get("test")
    return found | ({"test BLEU": test["bleu"]} if test else {})


if __name__ == "__main__":
    sys.exit(main())
