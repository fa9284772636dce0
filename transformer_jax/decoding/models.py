"""What the search asks of a model: of one Transformer or several.

Letters as in ``model/attention.py`` and ``search.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from transformer_jax.model.kv_cache import DecoderCache
from transformer_jax.model.transformer import Transformer
from transformer_jax.special_ids import PAD_ID


class Source(NamedTuple):
    """Sentences to translate."""

    tokens_BS: Any
    """Tokens, EOS, then PAD."""
    length_index_B: Any
    """Which of the model's ``lengths`` to encode in; the same for all sentences of a block."""


@struct.dataclass
class DecodingCache:
    """The caches of all Transformers. Its methods are those of ``DecoderCache``."""

    decoders: tuple[DecoderCache, ...]

    @property
    def needed_B(self) -> Array:
        """How many positions each sentence's next step must attend to, source and target alike."""
        return self.decoders[0].needed_B

    def reorder(self, parents_BW: Array) -> DecodingCache:
        """Beam w continues what was beam ``parents_BW[b, w]``."""
        return DecodingCache(tuple(decoder.reorder(parents_BW) for decoder in self.decoders))

    def replace_rows(self, rows_R: Array, fresh: DecodingCache) -> DecodingCache:
        """Put the R sentences of ``fresh``, which have not begun, into rows ``rows_R``."""
        pairs = zip(self.decoders, fresh.decoders, strict=True)
        return DecodingCache(tuple(old.replace_rows(rows_R, new) for old, new in pairs))

    def cleared(self) -> DecodingCache:
        """An empty cache of the same capacity."""
        return DecodingCache(tuple(decoder.cleared() for decoder in self.decoders))


class DecodingModel:
    """Encodes sentences and scores next tokens; several Transformers decode as one, by the mean of
    their probabilities. Sentences are encoded in one of ``lengths``, to caches for the longest.
    """

    def __init__(
        self,
        transformers: Sequence[Transformer],
        lengths: tuple[int, ...],
        beam_size: int,
    ):
        self._transformers, self._lengths, self._beam_size = transformers, lengths, beam_size

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
                    beam_size=self._beam_size,
                    max_length=max_length,
                    source_capacity=self._lengths[-1],
                )
                for transformer in self._transformers
            )

        branches = [partial(encoded, length) for length in self._lengths]
        return DecodingCache(jax.lax.switch(source.length_index_B[0], branches, source.tokens_BS))

    def attended(self, cache: DecodingCache) -> list[int]:
        """The lengths worth a compiled step of their own, ascending; ``cache.needed_B`` tells which
        ones suffice. No sentence needs less than the shortest that is encoded.
        """
        return [length for length in cache.decoders[0].lengths if length >= self._lengths[0]]

    def step(
        self, tokens_BW: Array, cache: DecodingCache, *, length: int | None = None
    ) -> tuple[Array, DecodingCache]:
        """Take in each hypothesis' last token and score the next: float32 logits [B, W, V], new
        cache. Attends to ``length`` positions only (None: to all).
        """
        logits, decoders = [], []
        for transformer, decoder in zip(self._transformers, cache.decoders, strict=True):
            logits_BWV, decoder = transformer.decode_step(tokens_BW, decoder, length=length)
            logits.append(logits_BWV)
            decoders.append(decoder)
        cache = DecodingCache(tuple(decoders))
        if len(logits) == 1:
            return logits[0], cache
        log_probs_MBWV = jnp.stack([jax.nn.log_softmax(x) for x in logits])
        mean_BWV = jax.nn.logsumexp(log_probs_MBWV, axis=0) - jnp.log(jnp.float32(len(logits)))
        return mean_BWV, cache
