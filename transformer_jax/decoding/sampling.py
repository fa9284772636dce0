"""Sampling from the model's distribution. Shape suffixes (B, W, ...): ``search.py``."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from transformer_jax.decoding.constraints import IMPOSSIBLE
from transformer_jax.decoding.logits import top_k
from transformer_jax.decoding.search import NextToken, SearchMethod, SearchState, add_tokens
from transformer_jax.settings.checks import PositiveInt
from transformer_jax.settings.config import SamplingSettings

_MIN_LOGIT = -1e6  # lowest logit of a possible token; its probability rounds to 0


@dataclass(frozen=True, kw_only=True)
class Sampling(SearchMethod, SamplingSettings):
    """Draws ``beam_size`` translations per sentence, sorted by score. Duplicates are possible.

    Reported log-probabilities are the model's own: at temperature 1 and over the whole vocabulary.
    A sentence's samples depend on ``seed`` and on its own ``seed_B``, not on other sentences. For
    greedy decoding, use ``top_k=1``; a temperature of 0 is invalid.
    """

    has_independent_beams = True

    beam_size: PositiveInt = 1

    def advance(self, state: SearchState, scores: NextToken) -> tuple[SearchState, None]:
        """Add one token to every sample that has not ended."""
        drawn_R = self._draw_tokens(scores.logits_RV, self._keys(state))
        return add_tokens(self, state, scores, drawn_R), None

    def _keys(self, state: SearchState) -> Array:
        """Make random keys that depend on the sentence, sample and position, but not on the row."""
        base_key = jax.random.key(self.seed)

        def key(sentence: Array, position: Array, sample: Array) -> Array:
            sentence_key = jax.random.fold_in(base_key, sentence)
            return jax.random.fold_in(jax.random.fold_in(sentence_key, sample), position)

        samples_1W = jnp.arange(self.beam_size)[None]
        return jnp.vectorize(key)(
            state.seed_B[:, None], state.position_B[:, None], samples_1W
        ).ravel()

    def _draw_tokens(self, logits_RV: Array, keys_R: Array) -> Array:
        """Draw one token per row from the softmax with the Gumbel-max trick: the argmax of logits
        plus Gumbel noise.
        """
        # At any temperature the most likely token has logit 0, and possible tokens stay far above
        # impossible tokens.
        temperature = max(self.temperature, float(jnp.finfo(jnp.float32).tiny))
        scaled_RV = (logits_RV - logits_RV.max(axis=1, keepdims=True)) / temperature
        scaled_RV = jnp.maximum(scaled_RV, _MIN_LOGIT)
        scaled_RV = jnp.where(logits_RV > IMPOSSIBLE / 2, scaled_RV, IMPOSSIBLE)
        logits_RK, tokens_RK = self._filter_tokens(scaled_RV)
        noise_RK = jax.vmap(lambda key: jax.random.gumbel(key, logits_RK.shape[1:]))(keys_R)
        choice_R1 = jax.lax.argmax(logits_RK + noise_RK, 1, jnp.int32)[:, None]
        if tokens_RK is not None:
            choice_R1 = jnp.take_along_axis(tokens_RK, choice_R1, axis=1)
        return choice_R1[:, 0]

    def _filter_tokens(self, logits_RV: Array) -> tuple[Array, Array | None]:
        """Apply the filters: top-k, then top-p. Returns logits, IMPOSSIBLE for tokens that may not
        be drawn, and their ids; None: all tokens, in the order of their ids.
        """
        if not self.top_k and self.top_p == 1:
            return logits_RV, None
        V = logits_RV.shape[1]
        logits_RK, tokens_RK = top_k(logits_RV, min(self.top_k or V, V))
        if self.top_p < 1:
            probs_RK = jax.nn.softmax(logits_RK, axis=-1)
            cumulative_before_RK = jnp.cumsum(probs_RK, axis=-1) - probs_RK
            top_p = self.top_p * (1 - 1e-6)  # the difference is rounded
            logits_RK = jnp.where(cumulative_before_RK < top_p, logits_RK, IMPOSSIBLE)
        return logits_RK, tokens_RK
