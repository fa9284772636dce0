"""What the search asks of a model: of one Transformer or several, with shortlists or without.

Letters as in ``model/attention.py`` and ``search.py``, and C tokens that all shortlists share, K
tokens of a sentence's own, X = C + K.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.constraints import IMPOSSIBLE
from transformer_jax.model.cache import DecoderCache
from transformer_jax.model.layers import compute_dtype
from transformer_jax.model.transformer import Transformer
from transformer_jax.special_ids import PAD_ID


class Source(NamedTuple):
    """Sentences to translate."""

    tokens_BS: Any
    """Tokens, EOS, then PAD."""
    length_index_B: Any
    """Which of the model's ``lengths`` to encode in; the same for all sentences of a block."""
    own_BK: Any
    """Tokens of each sentence's own that a shortlist adds, each once, none of them shared (-1: no
    token); None without shortlists.
    """


@struct.dataclass
class DecodingCache:
    """The caches of all Transformers, and with shortlists their softmax weights of each sentence's
    own tokens. Its methods are those of ``DecoderCache``.
    """

    decoders: tuple[DecoderCache, ...]
    own_BK: Any
    """As in ``Source``."""
    own_softmax: tuple[tuple[Array, Array], ...]
    """Of each Transformer: weights [B, D, K] and biases [B, K], IMPOSSIBLE where there is no
    token. Empty without shortlists.
    """

    @property
    def attention_BWS(self) -> Array | None:
        """Where the last step looked, if kept: the mean over the Transformers."""
        each: list[Any] = [decoder.attention_BWS for decoder in self.decoders]
        return None if each[0] is None else jnp.stack(each).mean(axis=0)

    @property
    def needed_B(self) -> Array:
        """How many positions each sentence's next step must attend to, source and target alike."""
        return self.decoders[0].needed_B

    def reorder(self, parents_BW: Array) -> DecodingCache:
        """Beam w continues what was beam ``parents_BW[b, w]``."""
        decoders = tuple(decoder.reorder(parents_BW) for decoder in self.decoders)
        return dataclasses.replace(self, decoders=decoders)

    def replace_rows(self, rows_R: Array, fresh: DecodingCache) -> DecodingCache:
        """Put the R sentences of ``fresh``, which have not begun, into rows ``rows_R``."""
        pairs = zip(self.decoders, fresh.decoders, strict=True)
        own_BK, own_softmax = jax.tree.map(
            lambda old, new: old.at[rows_R].set(new, mode="drop"),
            (self.own_BK, self.own_softmax),
            (fresh.own_BK, fresh.own_softmax),
        )
        decoders = tuple(old.replace_rows(rows_R, new) for old, new in pairs)
        return DecodingCache(decoders, own_BK, own_softmax)


class DecodingModel:
    """Encodes sentences and scores next tokens; several Transformers decode as one, by the mean of
    their probabilities. Sentences are encoded in one of ``lengths``, to caches for the longest.

    With shortlists the softmax is over the tokens ``shared_C``, then the sentence's own; tokens
    are numbered by their places in it. The shared tokens are one product for the whole batch, the
    own ones a narrow product for each sentence; so the cost does not grow with what a batch needs
    together.
    """

    def __init__(
        self,
        transformers: Sequence[Transformer],
        lengths: tuple[int, ...],
        config: DecodingConfig,
        shared_C: np.ndarray | None = None,
    ):
        """Makes the shared part of the softmax matrices: outside the search's loop."""
        self._transformers, self._lengths, self._config = transformers, lengths, config
        self._shared_C = None if shared_C is None else jnp.asarray(shared_C)
        if self._shared_C is not None:
            self._shared_softmax = [_softmax(each, self._shared_C) for each in transformers]

    def start_cache(self, source: Source, *, max_length: int = 0) -> DecodingCache:
        """Encode a block of sentences. With ``max_length`` 0 the cache is for ``replace_rows``
        only.
        """

        def encoded(length: int, tokens_BS: Array) -> tuple[DecoderCache, ...]:
            tokens_BS = tokens_BS[:, :length]
            return tuple(
                transformer.start_cache(
                    transformer.encode(tokens_BS),
                    tokens_BS != PAD_ID,
                    beam_size=self._config.beam_size,
                    max_length=max_length,
                    source_capacity=self._lengths[-1],
                    keep_attention=self._config.coverage_penalty > 0,
                )
                for transformer in self._transformers
            )

        branches = [partial(encoded, length) for length in self._lengths]
        decoders = jax.lax.switch(source.length_index_B[0], branches, source.tokens_BS)
        return self._with_own(decoders, source.own_BK)

    def empty_cache(self, memory: tuple[DecoderCache, ...], source: Source) -> DecodingCache:
        """A cache that holds no sentence, for sentences like ``source``, in the ``decoders`` of an
        earlier one.
        """
        own_BK = None
        if source.own_BK is not None:
            rows = memory[0].source_mask_BS.shape[0]
            own_BK = jnp.full((rows, source.own_BK.shape[1]), -1, jnp.int32)
        return self._with_own(tuple(decoder.cleared() for decoder in memory), own_BK)

    def attended(self, cache: DecodingCache) -> list[int]:
        """The lengths worth a compiled step of their own, ascending; ``cache.needed_B`` tells which
        ones suffice. No sentence needs less than the shortest that is encoded.
        """
        return [length for length in cache.decoders[0].lengths if length >= self._lengths[0]]

    def step(
        self, tokens_BW: Array, cache: DecodingCache, *, length: int | None = None
    ) -> tuple[Array, DecodingCache]:
        """Take in each hypothesis' last token and score the next: float32 logits [B, W, V] or
        [B, W, X], new cache. Attends to ``length`` positions only (None: to all).
        """
        if self._shared_C is not None:
            tokens_BW = _tokens_at(tokens_BW, self._shared_C, cache.own_BK)
        logits, decoders = [], []
        for i, transformer in enumerate(self._transformers):
            hidden_BWD, decoder = transformer.decode_hidden(
                tokens_BW, cache.decoders[i], length=length
            )
            decoders.append(decoder)
            logits.append(
                transformer.logits(hidden_BWD)
                if self._shared_C is None
                else _shortlisted_logits(hidden_BWD, self._shared_softmax[i], cache.own_softmax[i])
            )
        cache = dataclasses.replace(cache, decoders=tuple(decoders))
        if len(logits) == 1:
            return logits[0], cache
        log_probs_MBWV = jnp.stack([jax.nn.log_softmax(x) for x in logits])
        mean_BWV = jax.nn.logsumexp(log_probs_MBWV, axis=0) - jnp.log(jnp.float32(len(logits)))
        return mean_BWV, cache

    def _with_own(self, decoders: tuple[DecoderCache, ...], own_BK: Array | None) -> DecodingCache:
        if own_BK is None:
            return DecodingCache(decoders, None, ())
        own_softmax = []
        for transformer in self._transformers:
            matrix_BKD, bias_BK = _softmax(transformer, own_BK)
            bias_BK = jnp.where(own_BK < 0, IMPOSSIBLE, bias_BK)
            own_softmax.append((matrix_BKD.swapaxes(1, 2), bias_BK))
        return DecodingCache(decoders, own_BK, tuple(own_softmax))


def _softmax(transformer: Transformer, tokens: Array) -> tuple[Array, Array]:
    """Weights [..., D] and biases [...] of these tokens."""
    bias_V = transformer.output_bias_V
    matrix = transformer.output_matrix_VD[tokens].astype(compute_dtype(transformer.config))
    return matrix, jnp.zeros(tokens.shape, jnp.float32) if bias_V is None else bias_V[tokens]


def _tokens_at(places_BW: Array, shared_C: Array, own_BK: Array) -> Array:
    """The tokens at these places of the shortlists."""
    C = shared_C.shape[0]
    own_BW = jnp.take_along_axis(own_BK, jnp.maximum(places_BW - C, 0), axis=1)
    tokens_BW = jnp.where(places_BW < C, shared_C[jnp.minimum(places_BW, C - 1)], own_BW)
    return jnp.maximum(tokens_BW, 0)  # -1 in a hypothesis that cannot win any more


def _shortlisted_logits(
    hidden_BWD: Array, shared: tuple[Array, Array], own: tuple[Array, Array]
) -> Array:
    """Logits [B, W, X], by weights and biases of shared tokens and of each sentence's own."""
    (matrix_CD, bias_C), (matrix_BDK, bias_BK) = shared, own
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    shared_BWC = product("BWD,CD->BWC", hidden_BWD, matrix_CD) + bias_C[None, None]
    own_BWK = product("BWD,BDK->BWK", hidden_BWD, matrix_BDK) + bias_BK[:, None]
    return jnp.concatenate([shared_BWC, own_BWK], axis=-1)
