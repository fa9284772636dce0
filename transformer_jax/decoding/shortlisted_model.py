"""A model whose softmax is over a shortlist of each sentence's own, and numbers tokens by their
places in it.

A shortlist is the C tokens that all sentences share, then K of its own (-1: none). The shared ones
are one product for the whole batch, the own ones a narrow product for each sentence; so it costs
the same whatever a batch needs together.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from transformer_jax.decoding.search import IMPOSSIBLE
from transformer_jax.model.cache import DecoderCache
from transformer_jax.model.layers import compute_dtype
from transformer_jax.model.transformer import Transformer


@struct.dataclass
class ShortlistedCache:
    """A ``DecoderCache`` and the softmax weights of each sentence's own tokens."""

    decoder: DecoderCache
    own_BK: Array
    matrix_BDK: Array
    bias_BK: Array  # IMPOSSIBLE where there is no token

    @property
    def attention_BWS(self) -> Array | None:
        """Where the last step looked, if kept."""
        return self.decoder.attention_BWS

    def reorder(self, parents_BW: Array) -> ShortlistedCache:
        """``DecoderCache.reorder``."""
        return dataclasses.replace(self, decoder=self.decoder.reorder(parents_BW))

    def replace_rows(self, rows_R: Array, fresh: ShortlistedCache) -> ShortlistedCache:
        """``DecoderCache.replace_rows``."""
        decoder = self.decoder.replace_rows(rows_R, fresh.decoder)
        old = self.own_BK, self.matrix_BDK, self.bias_BK
        new = fresh.own_BK, fresh.matrix_BDK, fresh.bias_BK
        return ShortlistedCache(
            decoder, *(x.at[rows_R].set(y, mode="drop") for x, y in zip(old, new, strict=True))
        )


class ShortlistedModel:
    """The steps of a model in places of shortlists that begin with ``shared_C``."""

    def __init__(self, model: Transformer, shared_C: np.ndarray):
        """The shared part of the softmax matrix is made here: outside the search's loop."""
        self._model, self._shared_C = model, jnp.asarray(shared_C)
        self._matrix_CD, self._bias_C = self._softmax(self._shared_C)

    def _softmax(self, tokens: Array) -> tuple[Array, Array]:
        """Weights [..., D] and biases [...] of these tokens."""
        bias_V = self._model.output_bias_V
        matrix = self._model.output_matrix_VD[tokens].astype(compute_dtype(self._model.config))
        return matrix, jnp.zeros(tokens.shape, jnp.float32) if bias_V is None else bias_V[tokens]

    def with_own(self, decoder: DecoderCache, own_BK: Array) -> ShortlistedCache:
        """The cache of sentences that have these tokens of their own; each at most once, none of
        them shared.
        """
        matrix_BKD, bias_BK = self._softmax(own_BK)
        return ShortlistedCache(
            decoder, own_BK, matrix_BKD.swapaxes(1, 2), jnp.where(own_BK < 0, IMPOSSIBLE, bias_BK)
        )

    def decode_step(
        self, places_BW: Array, cache: ShortlistedCache
    ) -> tuple[Array, ShortlistedCache]:
        """``Transformer.decode_step``: places in, float32 logits [B, W, C + K] out."""
        C = self._shared_C.shape[0]
        own_BW = jnp.take_along_axis(cache.own_BK, jnp.maximum(places_BW - C, 0), axis=1)
        tokens_BW = jnp.where(places_BW < C, self._shared_C[jnp.minimum(places_BW, C - 1)], own_BW)
        hidden_BWD, decoder = self._model.decode_hidden(tokens_BW, cache.decoder)
        shared_BWC, own_BWK = (
            jnp.einsum(equation, hidden_BWD, matrix, preferred_element_type=jnp.float32)
            for equation, matrix in (
                ("BWD,CD->BWC", self._matrix_CD),
                ("BWD,BDK->BWK", cache.matrix_BDK),
            )
        )
        logits_BWX = jnp.concatenate(
            [shared_BWC + self._bias_C[None, None], own_BWK + cache.bias_BK[:, None]], axis=-1
        )
        return logits_BWX, dataclasses.replace(cache, decoder=decoder)
