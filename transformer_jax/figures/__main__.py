"""Draw attention, positional encodings (section 3.5) or learning rate schedules (section 5.3).

python -m transformer_jax.figures attention --workdir W --text "A man sleeps ." --output a.svg
python -m transformer_jax.figures positions --output positions.svg
python -m transformer_jax.figures schedule --config demo --output schedule.svg
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import numpy as np

from transformer_jax import Config, load_config_file, parse_flags, run_program
from transformer_jax.figures.drawing import (
    attention_lines,
    attention_maps,
    positions_picture,
    save_picture,
    schedule_picture,
)

_TITLES = {
    "encoder": "encoder self-attention",
    "decoder": "decoder self-attention",
    "cross": "cross-attention, target to source",
}


@dataclass(frozen=True)
class Attention:
    """Draw a trained model's attention for a sentence and its translation, or write the weights
    (docs/decoding.md).
    """

    workdir: str
    """Work directory of a training run or imported model, or its URL."""
    text: str
    """Sentence to translate."""
    output: str
    """File to write: .svg, .png or .pdf for a figure, .npz for all weights as NumPy arrays."""
    target: str | None = None
    """Translation. Default: the best result of beam search."""
    kind: Literal["encoder", "decoder", "cross"] = "cross"
    """Encoder self-attention, decoder self-attention, or cross-attention."""
    style: Literal["maps", "lines"] = "maps"
    """maps: one heat map per layer and head. lines: for each layer, lines between two columns of
    tokens, as in figures 3 to 5 of the paper.
    """
    layers: tuple[int, ...] = ()
    """Layer numbers, from 1; -1 is the last. Default: all."""
    heads: tuple[int, ...] = ()
    """Head numbers, from 1. Default: all."""
    only: tuple[int, ...] = ()
    """For --style lines: draw only the lines from these tokens in the left column, numbered from 1.
    Default: all.
    """
    average: int | None = None
    """Average this many checkpoints, up to the chosen one. Default: the checkpoints chosen at the
    end of training; for a checkpoint's folder, this checkpoint alone.
    """


@dataclass(frozen=True)
class Positions:
    """Draw sinusoidal positional encodings."""

    output: str
    """File to write: .svg, .png or .pdf."""
    d_model: int = 512
    """Size of a position vector."""
    length: int = 100
    """Number of positions, from 0."""
    layout: Literal["interleaved", "split"] = "interleaved"
    """Alternating sines and cosines as in the paper, or all sines first (model.positions)."""


@dataclass(frozen=True)
class Schedule:
    """Draw learning rate schedules, one curve per config."""

    output: str
    """File to write: .svg, .png or .pdf."""
    config: tuple[str, ...] = ()
    """Recipes or config files. Default: the paper's base model."""


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status (see ``run_program``)."""
    return run_program(lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    task = parse_flags(cast(type[Any], Attention | Positions | Schedule), argv)
    if isinstance(task, Attention):
        _attention(task)
    elif isinstance(task, Positions):
        from transformer_jax import sinusoidal_positions

        table_LD = sinusoidal_positions(task.length, task.d_model, layout=task.layout)
        save_picture(positions_picture(table_LD), task.output)
    else:
        configs = {name: load_config_file(name) for name in task.config} or {"base": Config()}
        curves = {name: _learning_rate(config) for name, config in configs.items()}
        save_picture(schedule_picture(curves), task.output)


def _attention(task: Attention) -> None:
    # imported late, so that flags are checked before JAX is loaded
    from transformer_jax import Translator, keep_compiled, sentence_attention, use_matmul_precision

    keep_compiled("auto")
    translator = Translator.from_workdir(task.workdir, average=task.average, batch_size=1)
    use_matmul_precision(translator.model.config.matmul_precision)
    attention = sentence_attention(translator, task.text, target=task.target)
    if task.output.endswith(".npz"):
        attention.save(task.output)
        return
    draw = partial(attention_lines, only=task.only) if task.style == "lines" else attention_maps
    view = attention.of(task.kind)
    figure = draw(*view, layers=task.layers, heads=task.heads, title=_TITLES[task.kind])
    save_picture(figure, task.output)


def _learning_rate(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps from 1 and their learning rates."""
    from transformer_jax import learning_rate_schedule

    steps = np.arange(1, config.training.steps + 1)
    schedule = learning_rate_schedule(config.optimizer, config.model.d_model, len(steps))
    return steps, np.asarray(schedule(steps - 1))


if __name__ == "__main__":
    sys.exit(main())
