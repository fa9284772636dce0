"""Beam search (section 6.1 of the paper).

Letters as in ``search.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from transformer_jax.decoding.constraints import IMPOSSIBLE, require_at_least
from transformer_jax.decoding.logits import top_k
from transformer_jax.decoding.search import (
    Method,
    NextToken,
    SearchState,
    extend,
    finish,
    gather_beams,
)
from transformer_jax.errors import UserError


@dataclass(frozen=True, kw_only=True)
class BeamSearch(Method):
    """Finds the best-scored hypotheses that a beam of ``beam_size`` meets.

    At each position a sentence looks at the 2W best continuations of its W live hypotheses, of
    which at most W are ends. An end among the first W of them is finished; the best W others live
    on. The order among equals is fixed: the better beam, then the likelier token, then the lower
    id. With ``beam_size`` 1 the search is greedy: it takes the likeliest token until EOS.

    A sentence stops when no live hypothesis can still enter the best that are wanted:
    log-probabilities only fall and the divisor only grows, so the best live log-probability over
    the divisor of the longest length is a bound.

    Finished hypotheses are ranked by log-probability / ``length_divisor``.
    """

    independent = False

    beam_size: int = 4

    def __post_init__(self) -> None:
        require_at_least(1, beam_size=self.beam_size)
        super().__post_init__()

    @property
    def num_beams(self) -> int:
        """W."""
        return self.beam_size

    def check(self, vocab_size: int) -> None:
        """``UserError`` for a beam wider than the vocabulary, or token ids outside it."""
        super().check(vocab_size)
        if vocab_size < self.beam_size:
            raise UserError(
                f"beam_size is {self.beam_size}; expected at most the vocabulary's {vocab_size} "
                "tokens."
            )

    def advance(self, state: SearchState, scores: NextToken) -> tuple[SearchState, Array]:
        """Add one token to every live hypothesis, and say which parents the beams continue."""
        W = self.beam_size
        parents_BC, tokens_BC, token_log_probs_BC = self._candidates(state, scores)
        parents = gather_beams(state.live, parents_BC)
        candidates = extend(parents, state.position_B, tokens_BC, token_log_probs_BC)
        ends_BC = tokens_BC == self.eos_id

        # Finish: only ends among the first W, so that a beam of 1 is greedy and a hypothesis must
        # earn its end.
        first = jax.tree.map(lambda x: x[:, :W], candidates)
        scores_BW = first.log_probs_BW / self.divisor(state.position_B + 1)[:, None]
        finished = finish(state, first, ends_BC[:, :W], scores_BW)

        # Live on.
        log_probs_BC = jnp.where(ends_BC, IMPOSSIBLE, candidates.log_probs_BW)
        log_probs_BW, survivors_BW = jax.lax.top_k(log_probs_BC, W)
        live, parents_BW = gather_beams((candidates, parents_BC), survivors_BW)
        bound_B = log_probs_BW[:, 0] / self.divisor(state.limit_B)
        last_B1 = state.wanted_B[:, None] - 1
        worst_B = jnp.take_along_axis(finished.scores_BN, last_B1, axis=1)[:, 0]
        done_B = (bound_B <= worst_B) | (log_probs_BW[:, 0] <= IMPOSSIBLE / 2)
        if W == 1:
            done_B |= ends_BC[:, 0]
        live = live._replace(log_probs_BW=log_probs_BW)
        return state._replace(live=live, finished=finished, done_B=done_B), parents_BW

    def _candidates(self, state: SearchState, scores: NextToken) -> tuple[Array, Array, Array]:
        """The 2W best continuations of each sentence: parent beam, token, its log-probability;
        each [B, 2W].

        Each beam's best come from its logits, whose order is that of the log-probabilities: those
        of the whole vocabulary are never written out.
        """
        logits_RV, normalizer_R1, forced_R = scores
        (B, W), V = state.live.log_probs_BW.shape, logits_RV.shape[1]
        K = min(2 * W, V)
        values_RK, tokens_RK = top_k(logits_RV, K)
        # Where one token is forced it is the only continuation, whatever the rules say.
        forced_R1, first_1K = forced_R[:, None], (jnp.arange(K) == 0)[None]
        forced_value_R1 = jnp.take_along_axis(logits_RV, jnp.maximum(forced_R1, 0), axis=1)
        forced_values_RK = jnp.where(first_1K, forced_value_R1, IMPOSSIBLE)
        values_RK = jnp.where(forced_R1 < 0, values_RK, forced_values_RK)
        tokens_RK = jnp.where(forced_R1 < 0, tokens_RK, forced_R1)
        # Impossible tokens stay so where the normaliser is as low as they are.
        token_log_probs_RK = jnp.where(
            values_RK > IMPOSSIBLE / 2, values_RK - normalizer_R1, IMPOSSIBLE
        )
        log_probs_BWK = state.live.log_probs_BW[:, :, None] + token_log_probs_RK.reshape(B, W, K)
        log_probs_BX = jnp.maximum(log_probs_BWK, IMPOSSIBLE).reshape(B, W * K)
        _, places_BC = jax.lax.top_k(log_probs_BX, 2 * W)
        tokens_BC, token_log_probs_BC = (
            jnp.take_along_axis(x.reshape(B, W * K), places_BC, axis=1)
            for x in (tokens_RK, token_log_probs_RK)
        )
        return places_BC // K, tokens_BC, token_log_probs_BC
