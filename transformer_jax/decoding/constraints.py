"""Which tokens may come next, and which are made less likely: the same rules for beam search and
sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from transformer_jax.decoding.search import IMPOSSIBLE, SearchState, forced_tokens, require_at_least


class History(NamedTuple):
    """What R hypotheses have so far."""

    tokens_RL: Array
    """Their tokens; the first ``position_R`` of each row count."""
    position_R: Array
    forced_R: Array
    """The one token that must come next; below 0: any."""


def history_of(state: SearchState, eos_id: int) -> History:
    """What every beam of every sentence has written: R = B * W rows."""
    B, W, L = state.tokens_BWL.shape
    return History(
        state.tokens_BWL.reshape(B * W, L),
        jnp.repeat(state.position_B, W),
        jnp.repeat(forced_tokens(state, eos_id), W),
    )


@dataclass(frozen=True)
class Constraints:
    """Rules for the next token. What is forbidden gets no probability, but nothing is normalised
    again: the log-probabilities that a search reports stay the model's own.
    """

    min_length: int = 0
    """Tokens before EOS is allowed."""
    suppress: tuple[int, ...] = ()
    """Tokens that are never generated."""
    no_repeat_ngram: int = 0
    """No n tokens in a row occur twice in a hypothesis (Paulus et al., 2017); 0: off."""
    repetition_penalty: float = 1.0
    """A token that the hypothesis already has is ranked by this times its log-probability (after
    Keskar et al., 2019).
    """

    def __post_init__(self) -> None:
        require_at_least(0, min_length=self.min_length, no_repeat_ngram=self.no_repeat_ngram)
        require_at_least(1, repetition_penalty=self.repetition_penalty)

    def adjust(self, logits_RV: Array, normalizer_R1: Array, history: History) -> Array:
        """Logits to choose by, changed where a hypothesis' own history asks for it; ``allowed`` has
        the other rules.

        The log-softmax is ``logits_RV - normalizer_R1``.
        """
        rows_R1 = jnp.arange(logits_RV.shape[0])[:, None]
        tokens_RL, position_R, forced_R = history
        if self.repetition_penalty != 1:
            written_RL = jnp.arange(tokens_RL.shape[1])[None] < position_R[:, None]
            # the first one is there, or nothing is
            used_RL = jnp.where(written_RL, tokens_RL, tokens_RL[:, :1])
            old_RL = jnp.take_along_axis(logits_RV, used_RL, axis=1)
            new_RL = normalizer_R1 + self.repetition_penalty * (old_RL - normalizer_R1)
            new_RL = jnp.where(position_R[:, None] > 0, new_RL, old_RL)
            logits_RV = logits_RV.at[rows_R1, used_RL].set(new_RL)
        if self.no_repeat_ngram:
            banned_RL = _ends_of_repeats(tokens_RL, position_R, self.no_repeat_ngram) & (
                forced_R[:, None] < 0
            )
            logits_RV = logits_RV.at[rows_R1, tokens_RL].min(
                jnp.where(banned_RL, IMPOSSIBLE, jnp.inf)
            )
        return logits_RV

    def forbidden(self, *, eos_id: int, pad_id: int) -> tuple[int, ...]:
        """Tokens that are never allowed, or (EOS, with ``min_length``) not always; forced ones are
        not asked for here.
        """
        never = self.suppress if pad_id == eos_id else (*self.suppress, pad_id)
        return (*never, eos_id) if self.min_length and eos_id not in never else never

    def allowed(self, ids_RC: Array, history: History, *, eos_id: int, pad_id: int) -> Array:
        """Whether ``suppress``, PAD and ``min_length`` allow each of these tokens as the next one
        of its row.
        """
        ok_RC = (history.position_R[:, None] >= self.min_length) | (ids_RC != eos_id)
        for never in self.forbidden(eos_id=eos_id, pad_id=pad_id):
            if never != eos_id or eos_id in self.suppress:
                ok_RC &= ids_RC != never
        return ok_RC


def _ends_of_repeats(tokens_RL: Array, position_R: Array, n: int) -> Array:
    """For each place in the history: would the token there now complete an n-gram a second time?"""
    length = tokens_RL.shape[1]
    index_L = jnp.arange(length)
    repeats_RL = (index_L[None] >= n - 1) & (index_L[None] < position_R[:, None])
    for back in range(1, n):
        last_R1 = jnp.take_along_axis(tokens_RL, jnp.maximum(position_R - back, 0)[:, None], axis=1)
        earlier_RL = jnp.pad(tokens_RL, ((0, 0), (back, 0)))[:, :length]
        repeats_RL &= earlier_RL == last_R1
    return repeats_RL
