"""Draw a trained model's attention for a sentence and its translation.

python -m transformer_jax.report.heat_maps --workdir W --text "A man sleeps ." --output a.svg
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from transformer_jax import parse_flags, run_program

_TITLES = {
    "encoder": "encoder self-attention",
    "decoder": "decoder self-attention",
    "cross": "cross-attention, target to source",
}


@dataclass(frozen=True)
class Arguments:
    """Draw attention heat maps of a trained model for a sentence (docs/decoding.md)."""

    workdir: str
    """Work directory of a training run or imported model, or its URL."""
    text: str
    """Sentence to translate."""
    output: str
    """File to write: .svg, .png or .pdf."""
    target: str | None = None
    """Translation. Default: the best result of beam search."""
    kind: Literal["encoder", "decoder", "cross"] = "cross"
    """Encoder self-attention, decoder self-attention, or cross-attention."""
    layers: tuple[int, ...] = ()
    """Layers, numbered from 1; -1 is the last. Default: all."""
    heads: tuple[int, ...] = ()
    """Heads, numbered from 1. Default: all."""


def main(argv: list[str] | None = None) -> int:
    """Run the program. Returns the exit status (see ``run_program``)."""
    return run_program(lambda: _run(parse_flags(Arguments, argv)))


def _run(a: Arguments) -> None:
    # Import late, so that flags are checked before JAX is loaded.
    from transformer_jax import Translator
    from transformer_jax.devices.compilation_cache import enable_compilation_cache
    from transformer_jax.report.attention import attention_maps, save_picture, sentence_attention

    enable_compilation_cache()
    translator = Translator.from_workdir(a.workdir, batch_size=1)
    attention = sentence_attention(translator, a.text, target=a.target)
    figure = attention_maps(
        *attention.of(a.kind), layers=a.layers, heads=a.heads, title=_TITLES[a.kind]
    )
    save_picture(figure, a.output)


if __name__ == "__main__":
    sys.exit(main())
