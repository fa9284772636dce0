"""Which tokens may come next, and which are made less likely, in beam search and sampling alike.

Letters as in ``search.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from transformer_jax.errors import UserError

# Stands for log 0. Finite, so that no sum or difference gives NaN; real log-probabilities stay far
# above half of it.
IMPOSSIBLE = -1e9


@dataclass(frozen=True)
class Constraints:
    """Rules for the next token. Probabilities are not normalised again over the allowed tokens:
    the log-probabilities that a search reports stay the model's own.
    """

    min_length: int = 0
    """Tokens before EOS is allowed."""
    suppress: tuple[int, ...] = ()
    """Tokens that are never generated."""
    no_repeat_ngram: int = 0
    """No n-gram of this length occurs twice in a hypothesis (Paulus et al., 2017); 0: off."""
    repetition_penalty: float = 1.0
    """Multiplies the log-probability that ranks a token which the hypothesis already has (after
    Keskar et al., 2019).
    """

    def __post_init__(self) -> None:
        require_at_least(0, min_length=self.min_length, no_repeat_ngram=self.no_repeat_ngram)
        require_at_least(1, repetition_penalty=self.repetition_penalty)

    def adjust(
        self,
        logits_RV: Array,
        normalizer_R1: Array,
        *,
        tokens_RL: Array,
        position_R: Array,
        forced_R: Array,
    ) -> Array:
        """Logits to choose by: changed by the rules that depend on what a hypothesis has written.

        Args:
          normalizer_R1: the log-softmax is ``logits_RV - normalizer_R1``.
          tokens_RL: what each of R hypotheses has written: its first ``position_R`` tokens.
          forced_R: the one token that must come next; negative: any may.
        """
        rows_R1 = jnp.arange(logits_RV.shape[0])[:, None]
        if self.repetition_penalty != 1:
            written_RL = jnp.arange(tokens_RL.shape[1])[None] < position_R[:, None]
            used_RL = jnp.where(written_RL, tokens_RL, tokens_RL[:, :1])
            old_RL = jnp.take_along_axis(logits_RV, used_RL, axis=1)
            new_RL = normalizer_R1 + self.repetition_penalty * (old_RL - normalizer_R1)
            new_RL = jnp.where(position_R[:, None] > 0, new_RL, old_RL)
            logits_RV = logits_RV.at[rows_R1, used_RL].set(new_RL)
        if self.no_repeat_ngram:
            repeats_RL = _ends_of_repeats(tokens_RL, position_R, self.no_repeat_ngram)
            banned_RL = repeats_RL & (forced_R[:, None] < 0)
            values_RL = jnp.where(banned_RL, IMPOSSIBLE, jnp.inf)
            logits_RV = logits_RV.at[rows_R1, tokens_RL].min(values_RL)
        return logits_RV

    def allowed(
        self, position_R: Array, *, eos_id: int, pad_id: int
    ) -> tuple[Callable[[Array], Array], int]:
        """A function that says which tokens ``ids_RC`` may come next in their rows, those that are
        not suppressed, not PAD, and not EOS before ``min_length``; and how many tokens it refuses
        at most. Forced tokens are not asked about.
        """
        never = {*self.suppress} if pad_id == eos_id else {*self.suppress, pad_id}

        def allowed(ids_RC: Array) -> Array:
            ok_RC = (position_R[:, None] >= self.min_length) | (ids_RC != eos_id)
            for token in never:
                ok_RC &= ids_RC != token
            return ok_RC

        return allowed, len({*never, eos_id} if self.min_length else never)


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
