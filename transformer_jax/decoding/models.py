"""What the search asks of a model: one Transformer, one with shortlists, or an ensemble.

Letters as in ``model/attention.py`` and ``search.py``, and C tokens that all shortlists share, K
tokens of a sentence's own, X = C + K.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

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


class DecodingModel(Protocol):
    """Encodes sentences and scores next tokens.

    Its caches have ``attention_BWS`` (where the last step looked, or None), ``reorder(parents_BW)``
    and ``replace_rows(rows_R, fresh)``, as ``DecoderCache`` says.
    """

    def start_cache(self, source: Source, *, max_length: int = 0) -> Any:
        """Encode a block of sentences. With ``max_length`` 0 the cache is for ``replace_rows``
        only.
        """

    def step(self, tokens_BW: Array, cache: Any) -> tuple[Array, Any]:
        """Take in each hypothesis' last token and score the next: float32 logits, new cache."""

    def empty_cache(self, memory: Any, source: Source) -> Any:
        """A cache that holds no sentence, for sentences like ``source``; ``memory`` is used up."""

    def memory_of(self, cache: Any) -> Any:
        """The part of a cache that ``empty_cache`` can use again for sentences of any kind."""


@dataclasses.dataclass(frozen=True)
class SingleModel:
    """One Transformer; sentences are encoded in one of ``lengths``, to caches for the longest."""

    transformer: Transformer
    lengths: tuple[int, ...]
    beam_size: int
    keep_attention: bool = False

    def start_cache(self, source: Source, *, max_length: int = 0) -> DecoderCache:
        """Each sentence's own length decides the shape that it is encoded in."""

        def encoded(length: int, tokens_BS: Array) -> DecoderCache:
            tokens_BS = tokens_BS[:, :length]
            return self.transformer.start_cache(
                self.transformer.encode(tokens_BS),
                tokens_BS != PAD_ID,
                beam_size=self.beam_size,
                max_length=max_length,
                source_capacity=self.lengths[-1],
                keep_attention=self.keep_attention,
            )

        branches = [partial(encoded, length) for length in self.lengths]
        return jax.lax.switch(source.length_index_B[0], branches, source.tokens_BS)

    def step(self, tokens_BW: Array, cache: DecoderCache) -> tuple[Array, DecoderCache]:
        """Logits [B, W, V]."""
        return self.transformer.decode_step(tokens_BW, cache)

    def empty_cache(self, memory: DecoderCache, source: Source) -> DecoderCache:
        """The same cache without its sentences."""
        return memory.cleared()

    def memory_of(self, cache: DecoderCache) -> DecoderCache:
        """All of it."""
        return cache


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


class Shortlisted:
    """A model whose softmax is over a shortlist for each sentence: the tokens ``shared_C``, then
    the sentence's own. Tokens are numbered by their places in it.

    The shared tokens are one product for the whole batch, the own ones a narrow product for each
    sentence; so the cost does not grow with what a batch needs together.
    """

    def __init__(self, model: SingleModel, shared_C: np.ndarray):
        """Makes the shared part of the softmax matrix: outside the search's loop."""
        self._model, self._shared_C = model, jnp.asarray(shared_C)
        self._matrix_CD, self._bias_C = self._softmax(self._shared_C)

    def start_cache(self, source: Source, *, max_length: int = 0) -> ShortlistedCache:
        """The model's cache, and softmax weights of each sentence's own tokens."""
        decoder = self._model.start_cache(source, max_length=max_length)
        return self._with_own(decoder, source.own_BK)

    def step(self, places_BW: Array, cache: ShortlistedCache) -> tuple[Array, ShortlistedCache]:
        """Logits [B, W, X]."""
        C = self._shared_C.shape[0]
        own_BW = jnp.take_along_axis(cache.own_BK, jnp.maximum(places_BW - C, 0), axis=1)
        tokens_BW = jnp.where(places_BW < C, self._shared_C[jnp.minimum(places_BW, C - 1)], own_BW)
        tokens_BW = jnp.maximum(tokens_BW, 0)  # -1 in a hypothesis that cannot win any more
        hidden_BWD, decoder = self._model.transformer.decode_hidden(tokens_BW, cache.decoder)
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        shared_BWC = product("BWD,CD->BWC", hidden_BWD, self._matrix_CD)
        own_BWK = product("BWD,BDK->BWK", hidden_BWD, cache.matrix_BDK)
        logits_BWX = jnp.concatenate(
            [shared_BWC + self._bias_C[None, None], own_BWK + cache.bias_BK[:, None]], axis=-1
        )
        return logits_BWX, dataclasses.replace(cache, decoder=decoder)

    def empty_cache(self, memory: DecoderCache, source: Source) -> ShortlistedCache:
        """Rows begin without tokens of their own."""
        decoder = self._model.empty_cache(memory, source)
        rows = decoder.source_mask_BS.shape[0]
        return self._with_own(decoder, jnp.full((rows, source.own_BK.shape[1]), -1, jnp.int32))

    def memory_of(self, cache: ShortlistedCache) -> DecoderCache:
        """All but the own tokens, whose number differs from search to search."""
        return cache.decoder

    def _with_own(self, decoder: DecoderCache, own_BK: Array) -> ShortlistedCache:
        matrix_BKD, bias_BK = self._softmax(own_BK)
        bias_BK = jnp.where(own_BK < 0, IMPOSSIBLE, bias_BK)
        return ShortlistedCache(decoder, own_BK, matrix_BKD.swapaxes(1, 2), bias_BK)

    def _softmax(self, tokens: Array) -> tuple[Array, Array]:
        """Weights [..., D] and biases [...] of these tokens."""
        transformer = self._model.transformer
        bias_V = transformer.output_bias_V
        matrix = transformer.output_matrix_VD[tokens].astype(compute_dtype(transformer.config))
        return matrix, jnp.zeros(tokens.shape, jnp.float32) if bias_V is None else bias_V[tokens]


@struct.dataclass
class EnsembleCache:
    """A cache for each model."""

    members: tuple[Any, ...]

    @property
    def attention_BWS(self) -> Array | None:
        """The mean over the models, if kept."""
        each = [cache.attention_BWS for cache in self.members]
        return None if each[0] is None else jnp.stack(each).mean(axis=0)

    def reorder(self, parents_BW: Array) -> EnsembleCache:
        """``DecoderCache.reorder`` in every model."""
        return EnsembleCache(tuple(cache.reorder(parents_BW) for cache in self.members))

    def replace_rows(self, rows_R: Array, fresh: EnsembleCache) -> EnsembleCache:
        """``DecoderCache.replace_rows`` in every model."""
        pairs = zip(self.members, fresh.members, strict=True)
        return EnsembleCache(tuple(cache.replace_rows(rows_R, new) for cache, new in pairs))


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """Several models that decode as one: the mean of their probabilities."""

    members: Sequence[DecodingModel]

    def start_cache(self, source: Source, *, max_length: int = 0) -> EnsembleCache:
        """Every model encodes the sentences."""
        return EnsembleCache(
            tuple(model.start_cache(source, max_length=max_length) for model in self.members)
        )

    def step(self, tokens_BW: Array, cache: EnsembleCache) -> tuple[Array, EnsembleCache]:
        """The logarithm of the mean probability."""
        logits, caches = zip(
            *(
                model.step(tokens_BW, each)
                for model, each in zip(self.members, cache.members, strict=True)
            )
        )
        log_probs_MBWV = jnp.stack([jax.nn.log_softmax(x.astype(jnp.float32)) for x in logits])
        mean_BWV = jax.nn.logsumexp(log_probs_MBWV, axis=0) - jnp.log(jnp.float32(len(logits)))
        return mean_BWV, EnsembleCache(caches)

    def empty_cache(self, memory: tuple[Any, ...], source: Source) -> EnsembleCache:
        """Of every model."""
        pairs = zip(self.members, memory, strict=True)
        return EnsembleCache(tuple(model.empty_cache(each, source) for model, each in pairs))

    def memory_of(self, cache: EnsembleCache) -> tuple[Any, ...]:
        """Of every model."""
        pairs = zip(self.members, cache.members, strict=True)
        return tuple(model.memory_of(each) for model, each in pairs)


def decoding_model(
    transformers: Sequence[Transformer],
    lengths: tuple[int, ...],
    config: DecodingConfig,
    shared_C: np.ndarray | None = None,
) -> DecodingModel:
    """What the search sees of one or several Transformers, with shortlists if ``shared_C`` is
    given.
    """
    members: list[DecodingModel] = []
    for transformer in transformers:
        single = SingleModel(transformer, lengths, config.beam_size, config.coverage_penalty > 0)
        members.append(single if shared_C is None else Shortlisted(single, shared_C))
    return members[0] if len(members) == 1 else Ensemble(members)
