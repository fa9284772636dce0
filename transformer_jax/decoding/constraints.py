"""Which tokens may come next, in beam search and sampling alike.

Letters as in ``search.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from transformer_jax.errors import UserError

# Stands for log 0. Finite, so that no sum or difference gives NaN; real log-probabilities stay far
# above half of it.
IMPOSSIBLE = -1e9


@dataclass(frozen=True)
class Constraints:
    """Rules for the next token. Probabilities are not normalized again over the allowed tokens:
    the log-probabilities that a search reports stay the model's own.
    """

    min_length: int = 0
    """Tokens before EOS is allowed."""
    suppress: tuple[int, ...] = ()
    """Tokens that are never generated."""
    no_repeat_ngram: int = 0
    """No n-gram of this length occurs twice in a hypothesis (Paulus et al., 2017); 0: off."""

    def __post_init__(self) -> None:
        require_at_least(0, min_length=self.min_length, no_repeat_ngram=self.no_repeat_ngram)

    def without_repeats(
        self, logits_RV: Array, *, tokens_RL: Array, position_R: Array, forced_R: Array
    ) -> Array:
        """Logits that are IMPOSSIBLE for tokens that would complete an n-gram again.

        Args:
          tokens_RL: what each of R hypotheses has written: its first ``position_R`` tokens.
          forced_R: the one token that must come next; negative: any may.
        """
        if not self.no_repeat_ngram:
            return logits_RV
        repeats_RL = _ends_of_repeats(tokens_RL, position_R, self.no_repeat_ngram)
        banned_RL = repeats_RL & (forced_R[:, None] < 0)
        rows_R1 = jnp.arange(logits_RV.shape[0])[:, None]
        return logits_RV.at[rows_R1, tokens_RL].min(jnp.where(banned_RL, IMPOSSIBLE, jnp.inf))

    def forbidden(self, position_R: Array, *, eos_id: int, pad_id: int) -> Array:
        """The tokens that may not come next in each row, unless forced: int32 [R, F], -1 for none.
        They are the suppressed ones, PAD, and EOS before ``min_length``.
        """
        never = sorted({*self.suppress} if pad_id == eos_id else {*self.suppress, pad_id})
        never_RF = jnp.tile(jnp.array(never, jnp.int32), (position_R.shape[0], 1))
        if not self.min_length:
            return never_RF
        eos_R = jnp.where(position_R < self.min_length, eos_id, -1)
        return jnp.concatenate([never_RF, eos_R[:, None]], axis=1)


def masked(x_RC: Array, ids_RC: Array, forbidden_RF: Array) -> Array:
    """Values of the tokens ``ids_RC``: IMPOSSIBLE for those that are forbidden in their rows."""
    for f in range(forbidden_RF.shape[1]):
        x_RC = jnp.where(ids_RC == forbidden_RF[:, f : f + 1], IMPOSSIBLE, x_RC)
    return x_RC


def require_at_least(least: float, **settings: float) -> None:
    """``UserError`` unless each of them is a number of at least ``least``."""
    for name, value in settings.items():
        if not value >= least:  # NaN is not
            raise UserError(f"{name} is {value}; expected at least {least}.")


def _ends_of_repeats(tokens_RL: Array, position_R: Array, n: int) -> Array:
    """For each token of the history: would it, written again, complete an n-gram again?"""
    length = tokens_RL.shape[1]
    index_L = jnp.arange(length)
    repeats_RL = (index_L[None] >= n - 1) & (index_L[None] < position_R[:, None])
    for back in range(1, n):
        last_R1 = jnp.take_along_axis(tokens_RL, jnp.maximum(position_R - back, 0)[:, None], axis=1)
        earlier_RL = jnp.pad(tokens_RL, ((0, 0), (back, 0)))[:, :length]
        repeats_RL &= earlier_RL == last_R1
    return repeats_RL
