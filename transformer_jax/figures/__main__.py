"""Draw a trained model's attention for a sentence and its translation.

python -m transformer_jax.figures --workdir W --text "A man sleeps ." --output a.svg
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Literal

from transformer_jax import parse_flags, run_program
from transformer_jax.figures.drawing import (
    attention_lines,
    attention_maps,
    save_picture,
)

_TITLES = {
    "encoder": "encoder self-attention",
    "decoder": "decoder self-attention",
    "cross": "cross-attention, target to source",
}


@dataclass(frozen=True)
class Arguments:
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
    """Layers, numbered from 1; -1 is the last. Default: all."""
    heads: tuple[int, ...] = ()
    """Heads, numbered from 1. Default: all."""
    only: tuple[int, ...] = ()
    """For --style lines: draw only the lines from these tokens in the left column, numbered from 1.
    Default: all.
    """


def main(argv: list[str] | None = None) -> int:
    """Run the program. Returns the exit status (see ``run_program``)."""
    return run_program(lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    task = parse_flags(Arguments, argv)
    # Import late, so that flags are checked before JAX is loaded.
    from transformer_jax import Translator, keep_compiled, sentence_attention, use_matmul_precision

    keep_compiled()
    translator = Translator.from_workdir(task.workdir, batch_size=1)
    use_matmul_precision(translator.model.config.matmul_precision)
    attention = sentence_attention(translator, task.text, target=task.target)
    if task.output.endswith(".npz"):
        attention.save(task.output)
        return
    draw = partial(attention_lines, only=task.only) if task.style == "lines" else attention_maps
    view = attention.of(task.kind)
    figure = draw(*view, layers=task.layers, heads=task.heads, title=_TITLES[task.kind])
    save_picture(figure, task.output)


if __name__ == "__main__":
    sys.exit(main())
