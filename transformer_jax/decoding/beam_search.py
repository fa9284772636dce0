"""Beam search (section 6.1 of the paper).

Shape suffixes (B, W, ...): ``search.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from transformer_jax.decoding import lexical_constraints
from transformer_jax.decoding.constraints import IMPOSSIBLE
from transformer_jax.decoding.logits import argmax, top_k
from transformer_jax.decoding.ranking import ranking_score
from transformer_jax.decoding.search import (
    NextToken,
    SearchMethod,
    SearchState,
    add_tokens,
    extend,
    finish,
    gather_beams,
)
from transformer_jax.settings.config import BeamSettings


@dataclass(frozen=True, kw_only=True)
class BeamSearch(SearchMethod, BeamSettings):
    """Beam search with ``beam_size`` live hypotheses per sentence.

    Each step ranks the 2W best continuations of a sentence's W live hypotheses. At most W of them
    end in EOS. A continuation that ends in EOS is finished if it ranks among the first W; the W
    best continuations without EOS stay live. Ties go to the better beam, then to the more likely
    token, then to the lower token id. A ``beam_size`` of 1 is greedy search: it takes the most
    likely token until EOS.

    A sentence is done when no live hypothesis can still rank among its ``num_hypotheses_B`` best.
    Log-probabilities never increase, so the score of the best live log-probability at the maximum
    length is an upper bound (``ranking_score``).

    If a sentence has terms, EOS is impossible before all are met, except at the last position, and
    ``lexical_constraints.allocate_beam`` replaces the order by log-probability. If no hypothesis
    meets all terms, the result has those whose unmet terms have the fewest tokens.

    With ``patience`` (Kasai et al., 2022, "A Call for Clarity in Beam Search"), a sentence is also
    done once beam size x patience hypotheses (rounded), and at least ``num_hypotheses_B``, have
    finished, however poor they are. It saves steps but can miss the best hypotheses.
    """

    def advance(self, state: SearchState, scores: NextToken) -> tuple[SearchState, Array | None]:
        """Add one token to every live hypothesis. Returns the state and each beam's parent."""
        W = self.beam_size
        if W == 1 and state.terms_BKAM is None:
            return add_tokens(self, state, scores, argmax(scores.logits_RV)), None
        parents_BC, tokens_BC, token_log_probs_BC = self._candidates(state, scores)
        parent_beams = gather_beams(state.live, parents_BC)
        candidates = extend(parent_beams, state.position_B, tokens_BC, token_log_probs_BC)
        is_eos_BC = tokens_BC == self.eos_id

        # EOS finishes a hypothesis only if it ranks among the first W. A beam of 1 is then greedy.
        top_candidates = jax.tree.map(lambda x: x[:, :W], candidates)
        scores_BW = ranking_score(top_candidates.log_probs_BW, state.position_B + 1, self)
        is_eos_BW = is_eos_BC[:, :W]
        if state.terms_BKAM is not None:
            progress = lexical_constraints.advance(candidates.progress, state.terms_BKAM, tokens_BC)
            num_needed_BC = lexical_constraints.num_needed(progress, state.terms_BKAM)
            has_ended_B1 = state.finished.scores_BN[:, :1] > IMPOSSIBLE / 2
            is_eos_BW &= num_needed_BC[:, :W] <= jnp.where(has_ended_B1, 0, num_needed_BC[:, :1])
            is_candidate_BC = jnp.cumsum(~is_eos_BC, axis=1) <= W
            log_probs_BC = jnp.where(is_candidate_BC, candidates.log_probs_BW, IMPOSSIBLE)
            candidates = candidates._replace(progress=progress, log_probs_BW=log_probs_BC)
        finished = finish(state, top_candidates, is_eos_BW, scores_BW)

        log_probs_BC = jnp.where(is_eos_BC, IMPOSSIBLE, candidates.log_probs_BW)
        log_probs_BW, survivors_BW = jax.lax.top_k(log_probs_BC, W)
        live, parents_BW = gather_beams((candidates, parents_BC), survivors_BW)
        bound_B = ranking_score(log_probs_BW[:, 0], state.limit_B, self)
        last_B1 = state.num_hypotheses_B[:, None] - 1
        worst_B = jnp.take_along_axis(finished.scores_BN, last_B1, axis=1)[:, 0]
        done_B = (bound_B <= worst_B) | (log_probs_BW[:, 0] <= IMPOSSIBLE / 2)
        if W == 1:
            done_B |= is_eos_BC[:, 0]
        if self.patience is not None:
            has_ended_BW = is_eos_BW & (top_candidates.log_probs_BW > IMPOSSIBLE / 2)
            num_ended_B = state.num_ended_B + has_ended_BW.sum(axis=1)
            state = state._replace(num_ended_B=num_ended_B)
            num_to_finish_B = jnp.maximum(W * jnp.float32(self.patience), state.num_hypotheses_B)
            done_B |= num_to_finish_B - num_ended_B < 0.5  # rounds halves up, as CTranslate2 does
        live = live._replace(log_probs_BW=log_probs_BW)
        return state._replace(live=live, finished=finished, done_B=done_B), parents_BW

    def _candidates(self, state: SearchState, scores: NextToken) -> tuple[Array, Array, Array]:
        """Find the 2W best continuations of each sentence. Returns their parent beams, tokens and
        log-probabilities, each [B, 2W].

        They are among the K best tokens of each hypothesis. For W = 2 hypotheses with K = 4 tokens
        each, continuation 5 (of 0 to 7) is token 1 of hypothesis 1.
        """
        B, W = state.live.log_probs_BW.shape
        logits_RK, tokens_RK = self._best_tokens(state, scores)
        K = tokens_RK.shape[1]
        # Impossible tokens stay impossible even if the normalizer is just as low.
        token_log_probs_RK = jnp.where(
            logits_RK > IMPOSSIBLE / 2, logits_RK - scores.normalizer_R1, IMPOSSIBLE
        )
        log_probs_BWK = state.live.log_probs_BW[:, :, None] + token_log_probs_RK.reshape(B, W, K)
        log_probs_BX = jnp.maximum(log_probs_BWK, IMPOSSIBLE).reshape(B, W * K)
        tokens_BX = tokens_RK.reshape(B, W * K)
        token_log_probs_BX = token_log_probs_RK.reshape(B, W * K)
        terms_BKAM = state.terms_BKAM
        if terms_BKAM is None:
            _, continuations_BC = jax.lax.top_k(log_probs_BX, 2 * W)
        else:
            progress = jax.tree.map(lambda x: jnp.repeat(x, K, axis=1), state.live.progress)
            progress = lexical_constraints.advance(progress, terms_BKAM, tokens_BX)
            continuations_BC = lexical_constraints.allocate_beam(
                lexical_constraints.num_needed(progress, terms_BKAM),
                log_probs_BX,
                ends_BX=tokens_BX == self.eos_id,
                num_remaining_B=state.limit_B - state.position_B - 2,
                beam_size=W,
            )
        return (
            continuations_BC // K,
            jnp.take_along_axis(tokens_BX, continuations_BC, axis=1),
            jnp.take_along_axis(token_log_probs_BX, continuations_BC, axis=1),
        )

    def _best_tokens(self, state: SearchState, scores: NextToken) -> tuple[Array, Array]:
        """Find the K best next tokens of each hypothesis: 2W and, if the sentence has terms, all
        that they need. Returns their logits and ids, [R, K].

        Within a hypothesis, logits rank tokens in the same order as log-probabilities.
        Log-probabilities over the whole vocabulary are therefore never materialized.
        """
        logits_RV, _, forced_R = scores
        num_tokens = min(2 * self.beam_size, logits_RV.shape[1])
        logits_RK, tokens_RK = top_k(logits_RV, num_tokens)
        if state.terms_BKAM is not None:
            logits_RK, tokens_RK = lexical_constraints.add_needed_tokens(
                state.live.progress, state.terms_BKAM, tokens_RK, logits_RV, self.eos_id
            )
        # A forced token is the only continuation, regardless of the constraints.
        forced_R1 = forced_R[:, None]
        first_1K = (jnp.arange(tokens_RK.shape[1]) == 0)[None]
        forced_logit_R1 = jnp.take_along_axis(logits_RV, jnp.maximum(forced_R1, 0), axis=1)
        forced_logits_RK = jnp.where(first_1K, forced_logit_R1, IMPOSSIBLE)
        return (
            jnp.where(forced_R1 < 0, logits_RK, forced_logits_RK),
            jnp.where(forced_R1 < 0, tokens_RK, forced_R1),
        )
