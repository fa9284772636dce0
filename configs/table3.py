"""The twenty rows of Table 3 of the paper (section 6.2), as small changes to any base config.

    python train.py --config table3:C-N2 --workdir runs/C-N2
    python train.py --config table3:C-N2,multi30k --workdir runs/C-N2-multi30k

The base after the comma is any value of `--config`: a recipe, a Python file or a config.json. The
default is `wmt14_base`. Flags override the row's settings, not the base's, so put settings that all
rows share in the base. `examples/table3.py` collects the results.

`ROWS` lists the changes in each row, with the paper's values. On another base, sizes change by the
same ratio as in the paper (rounded, at least 1) and rates by the same difference, except that a
rate of 0 stays 0. With a base of 3 layers, for example, C-N2, C-N4 and C-N8 have 1, 2 and 4 layers.
With a base dropout of 0.2, D-drop0.2 has 0.3.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from transformer_jax.errors import UserError, short_repr
from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import flatten, load_config_file


class Row(NamedTuple):
    """A row of Table 3: its changes to the base, and its results, as in the paper."""

    changes: dict[str, Any]
    million_parameters: int
    perplexity: float  # on newstest2013, per token
    bleu: float


# All settings that rows change, with their values in the paper's base model.
PAPER = {
    "model.num_layers": 6,
    "model.d_model": 512,
    "model.d_ff": 2048,
    "model.num_heads": 8,
    "model.d_k": 64,
    "model.dropout": 0.1,
    "training.label_smoothing": 0.1,
    "training.steps": 100_000,
}
BIG = {
    "model.d_model": 1024,
    "model.d_ff": 4096,
    "model.num_heads": 16,
    "model.dropout": 0.3,
    "training.steps": 300_000,
}

# d_k and d_v are d_model / h unless a row sets them.
ROWS = {
    "base": Row({}, 65, 4.92, 25.8),
    "A-h1": Row({"model.num_heads": 1}, 65, 5.29, 24.9),
    "A-h4": Row({"model.num_heads": 4}, 65, 5.00, 25.5),
    "A-h16": Row({"model.num_heads": 16}, 65, 4.91, 25.8),
    "A-h32": Row({"model.num_heads": 32}, 65, 5.01, 25.4),
    "B-dk16": Row({"model.d_k": 16}, 58, 5.16, 25.1),
    "B-dk32": Row({"model.d_k": 32}, 60, 5.01, 25.4),
    "C-N2": Row({"model.num_layers": 2}, 36, 6.11, 23.7),
    "C-N4": Row({"model.num_layers": 4}, 50, 5.19, 25.3),
    "C-N8": Row({"model.num_layers": 8}, 80, 4.88, 25.5),
    "C-dmodel256": Row({"model.d_model": 256}, 28, 5.75, 24.5),
    "C-dmodel1024": Row({"model.d_model": 1024}, 168, 4.66, 26.0),
    "C-dff1024": Row({"model.d_ff": 1024}, 53, 5.12, 25.4),
    "C-dff4096": Row({"model.d_ff": 4096}, 90, 4.75, 26.2),
    "D-drop0.0": Row({"model.dropout": 0.0}, 65, 5.77, 24.6),
    "D-drop0.2": Row({"model.dropout": 0.2}, 65, 4.95, 25.5),
    "D-ls0.0": Row({"training.label_smoothing": 0.0}, 65, 4.67, 25.3),
    "D-ls0.2": Row({"training.label_smoothing": 0.2}, 65, 5.47, 25.7),
    "E": Row({"model.positions": "learned"}, 65, 4.92, 25.7),
    "big": Row(BIG, 213, 4.33, 26.4),
}


def get_config(argument: str) -> Config:
    """Config of a row on wmt14_base (C-N2) or on another base (C-N2,multi30k)."""
    row, _, base = argument.partition(",")
    if row not in ROWS:
        raise UserError(f"Row {short_repr(row)} is unknown; expected one of {', '.join(ROWS)}.")
    return change(row, load_config_file(base or "wmt14_base"))


def change(row: str, base: Config) -> Config:
    """Apply a row of ``ROWS`` to ``base``. Raises ``UserError`` if the sizes become invalid."""
    settings = flatten(base) | {"model.d_k": base.model.head_width_k}
    sections: dict[str, dict[str, Any]] = {"model": {}, "training": {}}
    for name, paper in ROWS[row].changes.items():
        section, field = name.split(".")
        if isinstance(paper, float):
            value: Any = round(settings[name] + paper - PAPER[name], 6) if paper else 0.0
        elif isinstance(paper, int):
            value = max(1, round(settings[name] * paper / PAPER[name]))
        else:
            value = paper
        sections[section][field] = value
    if {"num_heads", "d_model"} & set(sections["model"]):
        sections["model"] |= {"d_k": None, "d_v": None}
    changed = {name: replace(getattr(base, name), **new) for name, new in sections.items()}
    return replace(base, **changed)
