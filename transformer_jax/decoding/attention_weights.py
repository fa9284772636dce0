"""Attention weights of a sentence and its translation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_jax.decoding.buckets import padded_length
from transformer_jax.decoding.ensemble import Ensemble
from transformer_jax.decoding.records import check_text
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.special_ids import EOS_ID, PAD_ID

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
    check_text(text, "text")
    if not text.strip():
        raise UserError(f"text is {text!r}; expected a sentence.")
    model, tokenizer = translator.model, translator.tokenizer
    if isinstance(model, Ensemble):
        raise UserError(
            f"The translator has {len(model.models)} models; expected one, because each model of "
            "an ensemble has its own attention weights."
        )
    [source] = tokenizer.source.encode([text])
    longest = min(_LONGEST, model.config.position_limit)
    source_1S = _padded("text", source, longest)
    if target is None:
        [[translation]] = translator.stream([text])
        found = tokenizer.target.ids(translation.tokens)
    else:
        check_text(target, "target")
        [found] = tokenizer.target.encode([target])
    weights = _attention_weights(model, source_1S, _padded("target", found, longest))
    encoder_NHSS, decoder_NHTT, cross_NHTS = (np.concatenate(layers) for layers in weights)
    S, T = len(source) + 1, len(found) + 1
    return SentenceAttention(
        (*tokenizer.source.tokens(source), "</s>"),
        (*tokenizer.target.tokens(found), "</s>"),
        encoder_NHSS[..., :S, :S],
        decoder_NHTT[..., :T, :T],
        cross_NHTS[..., :T, :S],
    )


def _padded(name: str, tokens: Sequence[int], longest: int) -> jax.Array:
    """Append EOS and pad to one of a few lengths, to limit compilations. Returns int [1, L]."""
    length = len(tokens) + 1
    if length > longest:
        raise UserError(f"{name} has {length} tokens, EOS included; expected at most {longest}.")
    padding = [PAD_ID] * (min(padded_length(length, 16), longest) - length)
    return jnp.array([[*tokens, EOS_ID, *padding]])
