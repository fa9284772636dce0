"""Where a trained model looks when it translates a sentence: the weights, and pictures of them.

python -m transformer_jax.attention --workdir W --text "A man sleeps ." --output a.svg
"""

from __future__ import annotations

import functools
import io
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from transformer_jax.cli import PICTURES, check_output, flags_given, parse_flags, run_program
from transformer_jax.errors import UserError
from transformer_jax.special_ids import EOS_ID, PAD_ID
from transformer_jax.storage import write_atomically

if TYPE_CHECKING:
    from transformer_jax.decoding.translator import Translator

logger = logging.getLogger("transformer_jax.attention")

Kind = Literal["encoder", "decoder", "cross"]

READABLE = 60
"""Tokens of a longer sentence that are drawn if no others are asked for."""
_LONGEST = 1024  # memory goes with the square
_SIDES = {
    "encoder": ("source", "source", "Encoder: source tokens ({}) attend to source tokens ({})"),
    "decoder": ("target", "target", "Decoder: predicted tokens ({}) attend to earlier ones ({})"),
    "cross": ("target", "source", "Cross: predicted tokens ({}) attend to source tokens ({})"),
}
"""Of each kind the side of queries and of keys, and a title."""


@dataclass(frozen=True)
class SentenceAttention:
    """A sentence, its translation, and the attention weights of every layer and head, float32.

    Tokens have EOS last. Each row of weights sums to 1.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    encoder_NHSS: np.ndarray
    decoder_NHTT: np.ndarray
    """Row t is that of the position where token t is predicted; column t of the one before it."""
    cross_NHTS: np.ndarray

    def of(self, kind: Kind) -> tuple[tuple[str, ...], tuple[str, ...], np.ndarray]:
        """Queries (rows), keys (columns) and weights [N, H, queries, keys] of one kind.

        Decoder and cross-attention have as queries the tokens that are predicted. The decoder reads
        the target shifted right, so its keys begin with ``<s>``.
        """
        return {
            "encoder": (self.source, self.source, self.encoder_NHSS),
            "decoder": (self.target, ("<s>", *self.target[:-1]), self.decoder_NHTT),
            "cross": (self.target, self.source, self.cross_NHTS),
        }[kind]

    def save(self, output: str | Path) -> None:
        """Write a NumPy file (.npz) of the fields, without the shapes in their names."""
        names = {name.partition("_")[0]: value for name, value in vars(self).items()}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **names)
        write_atomically(Path(output), buffer.getvalue())


def sentence_attention(
    translator: Translator, text: str, *, target: str | None = None
) -> SentenceAttention:
    """The attention weights of a pass over ``text`` and its translation, without dropout.

    Args:
      target: the translation; None: the best that the translator finds.

    Raises:
      UserError: a translator of several models; text that is empty or too long.
    """
    from transformer_jax.decoding.buckets import padded_length
    from transformer_jax.decoding.trained_models import check_text

    check_text(text, "text")
    if not text.strip():
        raise UserError(f"text is {text!r}; expected a sentence.")
    if len(translator.models) > 1:
        raise UserError(
            f"The translator has {len(translator.models)} models; expected one: an ensemble has no "
            "attention weights of its own."
        )
    [model], tokenizer = translator.models, translator.tokenizer
    [source] = tokenizer.encode_source([text])
    longest = min(_LONGEST, model.config.position_limit)
    _check_length("text", source, longest)
    if target is None:
        [[translation]] = translator.stream([text])
        found = tokenizer.target_ids(translation.tokens)
    else:
        check_text(target, "target")
        [found] = tokenizer.encode_target([target])
    _check_length("target", found, longest)
    sides = [*source, EOS_ID], [*found, EOS_ID]
    S, T = map(len, sides)
    padded = [min(padded_length(len(side), 16), longest) for side in sides]  # to compile it seldom
    rows = [
        np.array([side + [PAD_ID] * (length - len(side))]) for side, length in zip(sides, padded)
    ]
    encoder_NHSS, decoder_NHTT, cross_NHTS = (
        np.stack([np.asarray(weights_1HTS)[0] for weights_1HTS in layers])
        for layers in _compiled()(model, *rows)
    )
    return SentenceAttention(
        (*tokenizer.source_tokens(source), "</s>"),
        (*tokenizer.target_tokens(found), "</s>"),
        encoder_NHSS[..., :S, :S],
        decoder_NHTT[..., :T, :T],
        cross_NHTS[..., :T, :S],
    )


@functools.cache
def _compiled() -> Callable[..., Any]:
    from flax import nnx

    from transformer_jax.model.transformer import Transformer

    return nnx.jit(Transformer.attention_weights)


def _check_length(name: str, tokens: Sequence[int], longest: int) -> None:
    if len(tokens) >= longest:
        raise UserError(
            f"{name} has {len(tokens) + 1} tokens, EOS included; expected at most {longest}."
        )


@dataclass(frozen=True)
class Arguments:
    """Draw where a trained model looks when it translates a sentence, or write the weights
    (docs/decoding.md).
    """

    workdir: str
    """Work directory of a training run or of an imported model, or its URL."""
    text: str
    """Sentence to translate."""
    output: str
    """File to write. A picture: .svg, .png or .pdf. All weights as NumPy arrays: .npz."""
    target: str | None = None
    """Its translation. Default: the best that beam search finds."""
    kind: Kind = "cross"
    """The encoder's or the decoder's self-attention, or the decoder's attention to the source."""
    style: Literal["maps", "lines"] = "maps"
    """A map for each layer and head, or lines between two columns of tokens for each layer, as in
    figures 3 to 5 of the paper.
    """
    layers: tuple[int, ...] = ()
    """Which layers, from 1; -1 is the last. Default: all."""
    heads: tuple[int, ...] = ()
    """Which heads, from 1. Default: all."""
    query: str | None = None
    """With --style lines: only the lines of this word or token, or of the token of this number,
    from 1.
    """
    source_tokens: tuple[int, int] | None = None
    """First and last source token to draw, from 1. Default: all, or the first 60."""
    target_tokens: tuple[int, int] | None = None
    """First and last target token to draw. Default: all, or the first 60."""
    checkpoint: Literal["last", "best"] | int | None = None
    """The newest checkpoint, the best on the dev set, or that of a step. Default: the newest; the
    best if early stopping ended the run.
    """
    average: int | None = None
    """Take the mean of so many checkpoints, up to the chosen one. Default: the run's
    training.average; with --checkpoint best or a step, 1.
    """


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status, as ``run_program`` has it."""
    return run_program(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> None:
    a = parse_flags(Arguments, argv)
    check_output(a.output, endings=(*PICTURES, ".npz"))
    check_effects(a, flags_given(argv))
    # here, so that flags are checked before JAX is loaded
    from transformer_jax.compilation_cache import keep_compiled
    from transformer_jax.decoding.translator import Translator
    from transformer_jax.model.layers import use_matmul_precision

    keep_compiled("auto")
    translator = Translator.from_workdir(
        a.workdir, checkpoint=a.checkpoint, average=a.average, batch_size=1
    )
    use_matmul_precision(translator.models[0].config)
    attention = sentence_attention(translator, a.text, target=a.target)
    if a.output.endswith(".npz"):
        attention.save(a.output)
    else:
        _draw(attention, a)


def check_effects(a: Arguments, given: set[str]) -> None:
    """Refuse flags that would do nothing."""
    sides = {f"{side}-tokens" for side in ("source", "target")}
    idle = sides - {f"{side}-tokens" for side in _SIDES[a.kind]}
    if a.style == "maps":
        idle.add("query")
    if a.output.endswith(".npz"):
        idle = sides | {"kind", "style", "layers", "heads", "query"}
    for name in sorted(idle & given):
        raise UserError(
            f"--{name} has no effect on {a.output!r} with --kind {a.kind} and --style {a.style}; "
            "leave it out."
        )


def _draw(attention: SentenceAttention, a: Arguments) -> None:
    from transformer_jax.pictures.drawing import attention_lines, attention_maps, save_picture

    queries, keys, weights_NHTS = attention.of(a.kind)
    *sides, title = _SIDES[a.kind]
    parts = {side: _part(side, len(getattr(attention, side)), a) for side in dict.fromkeys(sides)}
    rows, columns = (parts[side] for side in sides)
    view = queries[rows], keys[columns], weights_NHTS[:, :, rows, columns]
    if a.style == "maps":
        title = title.format("rows", "columns")
        figure = attention_maps(*view, layers=a.layers, heads=a.heads, title=title)
    else:
        title = title.format("left", "right")
        only = () if a.query is None else tokens_of(a.query, view[0], rows.start)
        figure = attention_lines(*view, layers=a.layers, heads=a.heads, only=only, title=title)
    save_picture(figure, a.output)


def _part(side: str, number: int, a: Arguments) -> slice:
    """Which of a side's tokens are drawn."""
    asked = getattr(a, f"{side}_tokens")
    if asked is None:
        if number > READABLE:
            logger.warning(
                "The %s has %d tokens, more than are readable; the first %d are drawn. "
                "--%s-tokens %d %d draws the next ones.",
                *(side, number, READABLE, side, READABLE + 1, min(number, 2 * READABLE)),
            )
        return slice(0, min(number, READABLE))
    first, last = asked
    if not 1 <= first <= last <= number:
        raise UserError(
            f"{side}_tokens is {first} {last}; expected the first and the last of the {number} "
            f"{side} tokens, from 1, EOS included."
        )
    return slice(first - 1, last)


def tokens_of(query: str, tokens: Sequence[str], offset: int) -> list[int]:
    """The tokens that spell a word (or are it, or have its number in the sentence)."""
    spelled = [
        range(start, end)
        for start in range(len(tokens))
        for end in range(start + 1, min(start + len(query) + 2, len(tokens) + 1))
        if "".join(tokens[start:end]).removeprefix("▁") == query
    ]
    words = [found for found in spelled if tokens[found[0]].startswith("▁")] or spelled
    if not words and query.isdecimal() and offset < int(query) <= offset + len(tokens):
        words = [range(int(query) - 1 - offset, int(query) - offset)]
    if not words:
        raise UserError(
            f"query is {query!r}; expected a word or token of what is drawn, or a number from "
            f"{offset + 1} to {offset + len(tokens)}: {' '.join(tokens)}"
        )
    return sorted({token for found in words for token in found})


if __name__ == "__main__":
    sys.exit(main())
