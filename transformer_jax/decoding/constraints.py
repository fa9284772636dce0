"""Constraints on the next token, for beam search and sampling.

Shape suffixes (B, W, ...): ``search.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from transformer_jax.settings.checks import Count
from transformer_jax.settings.config import ConstraintSettings

# Represents log 0. It is finite, so sums and differences are never NaN. Real log-probabilities stay
# far above half of it.
IMPOSSIBLE = -1e9


@dataclass(frozen=True, kw_only=True)
class Constraints(ConstraintSettings):
    """Rules for the next token. Probabilities are not renormalized over the allowed tokens, so
    reported log-probabilities are the model's own.
    """

    suppressed_ids: tuple[Count, ...] = ()
    """Token ids that are never generated."""

    def apply(
        self,
        logits_RV: Array,
        *,
        tokens_RL: Array,
        position_R: Array,
        forced_R: Array,
        eos_id: int,
        pad_id: int,
    ) -> Array:
        """Set the logits of forbidden tokens to IMPOSSIBLE: tokens that would repeat an n-gram,
        suppressed tokens, PAD, and EOS before ``min_length``.

        Only these logits are updated, because copying all logits would cost more than the rest of
        the search.

        Args:
          tokens_RL: tokens of R hypotheses, of which only the first ``position_R`` are valid.
          forced_R: the token that must come next, regardless of the rules; negative: none.
        """
        is_free_R1 = forced_R[:, None] < 0
        rows_R1 = jnp.arange(forced_R.shape[0])[:, None]
        if self.no_repeat_ngram:
            repeats_RL = _ends_of_repeats(tokens_RL, position_R, self.no_repeat_ngram)
            bounds_RL = jnp.where(repeats_RL & is_free_R1, IMPOSSIBLE, jnp.inf)
            logits_RV = logits_RV.at[rows_R1, tokens_RL].min(bounds_RL)
        never_F = jnp.array(sorted({*self.suppressed_ids} | {pad_id} - {eos_id}), jnp.int32)
        bounds_R1 = jnp.where(is_free_R1, IMPOSSIBLE, jnp.inf)
        logits_RV = logits_RV.at[:, never_F].min(bounds_R1)
        if self.min_length:
            is_early_R = is_free_R1[:, 0] & (position_R < self.min_length)
            logits_RV = logits_RV.at[:, eos_id].min(jnp.where(is_early_R, IMPOSSIBLE, jnp.inf))
        return logits_RV


def _ends_of_repeats(tokens_RL: Array, position_R: Array, n: int) -> Array:
    """Mark earlier tokens that would complete a repeated n-gram if generated next."""
    length = tokens_RL.shape[1]
    index_L = jnp.arange(length)
    repeats_RL = (index_L[None] >= n - 1) & (index_L[None] < position_R[:, None])

    def keep_matching(distance: Array, repeats_RL: Array) -> Array:
        last_R1 = jnp.take_along_axis(
            tokens_RL, jnp.maximum(position_R - distance, 0)[:, None], axis=1
        )
        return repeats_RL & (jnp.roll(tokens_RL, distance, axis=1) == last_R1)

    return jax.lax.fori_loop(1, min(n, length), keep_matching, repeats_RL)
