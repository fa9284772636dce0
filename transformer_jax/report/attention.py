"""Attention weights of a sentence and its translation, and heat maps of attention."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_jax import Ensemble, ModelConfig, Transformer, Translator, UserError
from transformer_jax.errors import needs_extra
from transformer_jax.tokenization.rows import pad_rows, with_eos
from transformer_jax.translation.requests import check_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FONT = 8  # points
_CELL = 0.17  # inches per token
_LONGEST = 1024  # memory is quadratic in length
_attention_weights = nnx.jit(Transformer.attention_weights)


@dataclass(frozen=True)
class SentenceAttention:
    """A sentence, its translation, and the float32 attention weights of every layer and head.

    EOS is the last token. Each row of weights sums to 1.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    encoder_NHSS: np.ndarray
    decoder_NHTT: np.ndarray
    """Row t is the query that predicts target token t; column t is the key of token t - 1."""
    cross_NHTS: np.ndarray

    def of(
        self, kind: Literal["encoder", "decoder", "cross"]
    ) -> tuple[tuple[str, ...], tuple[str, ...], np.ndarray]:
        """Return queries (rows), keys (columns) and weights [N, H, queries, keys] for one attention
        type.

        In decoder self-attention and cross-attention, each query is labeled with the token that it
        predicts. The decoder's input is the target shifted right, so its keys begin with ``<s>``.
        """
        return {
            "encoder": (self.source, self.source, self.encoder_NHSS),
            "decoder": (self.target, ("<s>", *self.target[:-1]), self.decoder_NHTT),
            "cross": (self.target, self.source, self.cross_NHTS),
        }[kind]


def sentence_attention(
    translator: Translator, text: str, *, target: str | None = None
) -> SentenceAttention:
    """Compute the attention weights for ``text`` and its translation, without dropout.

    Args:
      target: the translation (default: the translator's best translation).

    Raises:
      UserError: ``translator`` is an ensemble; ``text`` is empty; ``text`` or the translation is
        too long.
    """
    check_text(text, "The text")
    if not text.strip():
        raise UserError(f"text is {text!r}; expected a sentence.")
    model = translator.model
    tokenizer = translator.tokenizer
    if isinstance(model, Ensemble):
        raise UserError(
            f"The translator has {len(model.models)} models; expected one, because each model of "
            "an ensemble has its own attention weights."
        )
    affixes = tokenizer.affixes()
    [text_ids] = tokenizer.source.encode([text])
    source = with_eos(affixes.source(text_ids), model.config.eos_id)
    source_1S = _padded("text", source, model.config)
    if target is None:
        [[translation]] = translator.stream([text])
        target_ids = tokenizer.target.ids(translation.tokens)
    else:
        check_text(target, "The text")
        [text_ids] = tokenizer.target.encode([target])
        target_ids = affixes.target(text_ids)
    target_ids = [*target_ids, model.config.eos_id]
    weights = _attention_weights(model, source_1S, _padded("target", target_ids, model.config))
    encoder_NHSS, decoder_NHTT, cross_NHTS = (np.concatenate(layers) for layers in weights)
    S = len(source)
    T = len(target_ids)
    return SentenceAttention(
        tuple(tokenizer.source.tokens(source)),
        tuple(tokenizer.target.tokens(target_ids)),
        encoder_NHSS[..., :S, :S],
        decoder_NHTT[..., :T, :T],
        cross_NHTS[..., :T, :S],
    )


def _padded(name: str, tokens: Sequence[int], config: ModelConfig) -> jax.Array:
    """Pad to a multiple of 64, to limit compilations. Returns int [1, L]."""
    longest = min(_LONGEST, config.position_limit)
    length = len(tokens)
    if length > longest:
        raise UserError(f"{name} has {length} tokens, EOS included; expected at most {longest}.")
    padded_length = min(-(-length // 64) * 64, longest)
    return jnp.array(pad_rows([tokens], config.pad_id, length=padded_length))


def attention_maps(
    queries: Sequence[str],
    keys: Sequence[str],
    weights_NHTS: np.ndarray,
    *,
    layers: Sequence[int] = (),
    heads: Sequence[int] = (),
    title: str = "",
) -> Figure:
    """Draw one attention heat map per layer and head, with queries as rows and keys as columns.

    Args:
      queries, keys: T and S tokens.
      weights_NHTS: attention weights of N layers and H heads. All maps share one color scale.
      layers, heads: layers and heads to draw, numbered from 1 as in the paper; -1 is the last.
        Default: all.

    Raises:
      UserError: a layer or head is invalid, the weights have the wrong shape, or matplotlib is not
        installed.
    """
    shape = weights_NHTS.shape
    if len(shape) != 4 or shape[2:] != (len(queries), len(keys)) or not weights_NHTS.size:
        raise UserError(
            f"weights_NHTS has shape {shape}; expected (layers, heads, {len(queries)}, "
            f"{len(keys)}), for {len(queries)} queries and {len(keys)} keys."
        )
    layers = _indices("layer", layers, shape[0])
    heads = _indices("head", heads, shape[1])
    largest = weights_NHTS[np.ix_(layers, heads)].max()
    width, height = (0.3 + _CELL * max(len(tokens), 6) for tokens in (keys, queries))
    with needs_extra("report"):
        from matplotlib.figure import Figure
    size = min(2 + width * len(heads), 100), min(1 + height * len(layers), 100)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(layers), len(heads), sharex=True, sharey=True, squeeze=False)
    for axes, (layer, head) in zip(grid.flat, product(layers, heads)):
        image = axes.imshow(weights_NHTS[layer, head], vmin=0, vmax=largest, cmap="Blues")
        axes.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=_FONT)
    style: Any = {"fontsize": _FONT, "parse_math": False}
    for axes in grid[-1]:
        axes.set_xticks(range(len(keys)), keys, rotation=90, **style)
    for axes in grid[:, 0]:
        axes.set_yticks(range(len(queries)), queries, **style)
    figure.colorbar(image, ax=grid, label="weight")
    figure.suptitle(title, **style)
    return figure


def save_picture(figure: Figure, output: str | Path) -> None:
    """Write a figure in the format of its suffix, such as .svg, .png or .pdf. SVG files store text
    as text, displayed in the viewer's fonts.

    Raises:
      UserError: the suffix is unsupported.
    """
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}), warnings.catch_warnings():
        if str(output).endswith(".svg"):
            warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        try:
            figure.savefig(output, dpi=150, format=Path(output).suffix[1:])
        except ValueError as error:
            raise UserError(f"output is {str(output)!r}: {error}") from None


def _indices(name: str, numbers: Sequence[int], total: int) -> list[int]:
    """Convert numbers of layers or heads, which start at 1, to indices. Default: all."""
    if not numbers:
        return list(range(total))
    indices = []
    for number in numbers:
        if not 1 <= abs(number) <= total:
            raise UserError(
                f"{name} is {number}; expected 1 to {total}, or -1 (the last) to -{total}."
            )
        indices.append(number - 1 if number > 0 else total + number)
    return indices
