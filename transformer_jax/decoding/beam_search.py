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
from transformer_jax.decoding.logits import (
    Shortlist,
    argmax,
    best_chunks,
    chunk_maxima,
    has_chunks,
    top_k,
)
from transformer_jax.decoding.ranking import ranking_score
from transformer_jax.decoding.search import (
    Continuations,
    NextToken,
    SearchMethod,
    SearchState,
    add_tokens,
    extend,
    finish,
    gather_beams,
    pick,
)
from transformer_jax.settings.config import BeamSettings


@dataclass(frozen=True, kw_only=True)
class BeamSearch(SearchMethod, BeamSettings):
    """Beam search with ``beam_size`` live hypotheses per sentence.

    Each step ranks the 2W best continuations of a sentence's W live hypotheses. At most W of them
    end in EOS. A continuation that ends in EOS is finished if it ranks among the first W; the W
    best continuations without EOS stay live. Ties go to the better beam, then to the lower token
    id; where tokens are chosen beam by beam (``_shortlist``), first to the more likely token. A
    ``beam_size`` of 1 is greedy search: it takes the most likely token until EOS.

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
        candidates = self._candidates(state, scores)
        is_eos_BC = candidates.tokens_BC == self.eos_id

        # EOS finishes a hypothesis only if it ranks among the first W. A beam of 1 is then greedy.
        top_candidates = jax.tree.map(lambda x: x[:, :W], candidates)
        is_eos_BW = is_eos_BC[:, :W]
        progress = None
        if state.terms_BKAM is not None:
            assert candidates.parents_BC is not None
            progress = lexical_constraints.advance(
                gather_beams(state.live.progress, candidates.parents_BC),
                state.terms_BKAM,
                candidates.tokens_BC,
            )
            num_needed_BC = lexical_constraints.num_needed(progress, state.terms_BKAM)
            has_ended_B1 = state.finished.scores_BN[:, :1] > IMPOSSIBLE / 2
            is_eos_BW &= num_needed_BC[:, :W] <= jnp.where(has_ended_B1, 0, num_needed_BC[:, :1])
            is_candidate_BC = jnp.cumsum(~is_eos_BC, axis=1) <= W
            log_probs_BC = jnp.where(is_candidate_BC, candidates.log_probs_BC, IMPOSSIBLE)
            candidates = candidates._replace(log_probs_BC=log_probs_BC)
        finished = finish(self, state, top_candidates, is_eos_BW)

        log_probs_BC = jnp.where(is_eos_BC, IMPOSSIBLE, candidates.log_probs_BC)
        log_probs_BW, survivors_BW = jax.lax.top_k(log_probs_BC, W)
        survivors = jax.tree.map(lambda x: pick(x, survivors_BW), candidates)
        survivors = survivors._replace(log_probs_BC=log_probs_BW)
        live = extend(state.live, state.position_B, survivors)
        if progress is not None:
            live = live._replace(progress=gather_beams(progress, survivors_BW))
        bound_B = ranking_score(log_probs_BW[:, 0], state.limit_B, self)
        last_B1 = state.num_hypotheses_B[:, None] - 1
        worst_B = pick(finished.scores_BN, last_B1)[:, 0]
        done_B = (bound_B <= worst_B) | (log_probs_BW[:, 0] <= IMPOSSIBLE / 2)
        if W == 1:
            done_B |= is_eos_BC[:, 0]
        if self.patience is not None:
            has_ended_BW = is_eos_BW & (top_candidates.log_probs_BC > IMPOSSIBLE / 2)
            num_ended_B = state.num_ended_B + has_ended_BW.sum(axis=1)
            state = state._replace(num_ended_B=num_ended_B)
            num_to_finish_B = jnp.maximum(W * jnp.float32(self.patience), state.num_hypotheses_B)
            done_B |= num_to_finish_B - num_ended_B < 0.5  # rounds halves up, as CTranslate2 does
        state = state._replace(live=live, finished=finished, done_B=done_B)
        return state, survivors.parents_BC

    def _candidates(self, state: SearchState, scores: NextToken) -> Continuations:
        """Find the 2W best continuations of each sentence, best first."""
        W = self.beam_size
        live_BW = state.live.log_probs_BW
        shortlist = _only_forced(self._shortlist(state, scores), scores, W)
        token_log_probs_BGK, log_probs_BGK = _log_probs(
            shortlist.logits_BGK,
            pick(scores.normalizer_R1.reshape(live_BW.shape), shortlist.beams_BG),
            pick(live_BW, shortlist.beams_BG),
        )
        B, _, K = log_probs_BGK.shape
        tokens_BX = shortlist.tokens_BGK.reshape(B, -1)
        log_probs_BX = log_probs_BGK.reshape(B, -1)
        if state.terms_BKAM is None:
            best = jax.lax.top_k(log_probs_BX, 2 * W)
            # Without a barrier, XLA merges later slices of the best into a sort of all. With one
            # for both arrays, XLA cannot partition the search of a model on several devices.
            log_probs_BC, indices_BC = map(jax.lax.optimization_barrier, best)
        else:
            progress = jax.tree.map(lambda x: jnp.repeat(x, K, axis=1), state.live.progress)
            progress = lexical_constraints.advance(progress, state.terms_BKAM, tokens_BX)
            indices_BC = lexical_constraints.allocate_beam(
                lexical_constraints.num_needed(progress, state.terms_BKAM),
                log_probs_BX,
                ends_BX=tokens_BX == self.eos_id,
                num_remaining_B=state.limit_B - state.position_B - 2,
                beam_size=W,
            )
            log_probs_BC = jnp.take_along_axis(log_probs_BX, indices_BC, axis=1)
        tokens_BC, token_log_probs_BC = (
            jnp.take_along_axis(x_BX, indices_BC, axis=1, mode="clip")
            for x_BX in (tokens_BX, token_log_probs_BGK.reshape(B, -1))
        )
        parents_BC = pick(shortlist.beams_BG, indices_BC // K)
        return Continuations(parents_BC, tokens_BC, token_log_probs_BC, log_probs_BC)

    def _shortlist(self, state: SearchState, scores: NextToken) -> Shortlist:
        """Find tokens among which are the 2W best continuations of each sentence.

        Within a beam, logits rank tokens in the same order as log-probabilities. Log-probabilities
        over the whole vocabulary are therefore never materialized.
        """
        logits_RV = scores.logits_RV
        live_BW = state.live.log_probs_BW
        B, W = live_BW.shape
        if state.terms_BKAM is None and has_chunks(logits_RV, 2 * W):
            maxima_BWQ = chunk_maxima(logits_RV).reshape(B, W, -1)
            normalizer_BW = scores.normalizer_R1.reshape(B, W)
            _, maxima_BWQ = _log_probs(maxima_BWQ, normalizer_BW, live_BW)
            return best_chunks(logits_RV, maxima_BWQ, 2 * W)
        logits_RK, tokens_RK = top_k(logits_RV, min(2 * W, logits_RV.shape[1]))
        if state.terms_BKAM is not None:
            logits_RK, tokens_RK = lexical_constraints.add_needed_tokens(
                state.live.progress, state.terms_BKAM, tokens_RK, logits_RV, self.eos_id
            )
        beams_BW = jnp.broadcast_to(jnp.arange(W)[None], (B, W))
        return Shortlist(beams_BW, tokens_RK.reshape(B, W, -1), logits_RK.reshape(B, W, -1))


def _log_probs(logits_BGK: Array, normalizer_BG: Array, live_BG: Array) -> tuple[Array, Array]:
    """Return the log-probabilities of tokens, alone and with the hypotheses that they continue."""
    # Impossible tokens stay impossible even if the normalizer is just as low.
    token_log_probs_BGK = jnp.where(
        logits_BGK > IMPOSSIBLE / 2, logits_BGK - normalizer_BG[:, :, None], IMPOSSIBLE
    )
    log_probs_BGK = live_BG[:, :, None] + token_log_probs_BGK
    return token_log_probs_BGK, jnp.maximum(log_probs_BGK, IMPOSSIBLE)


def _only_forced(shortlist: Shortlist, scores: NextToken, W: int) -> Shortlist:
    """Make a forced token the only continuation of each beam, regardless of the constraints."""
    beams_BG, tokens_BGK, logits_BGK = shortlist
    B, G, K = logits_BGK.shape
    forced_B1 = scores.forced_R.reshape(B, W)[:, :1]
    is_forced_B1 = forced_B1 >= 0
    forced_index_R1 = jnp.maximum(scores.forced_R[:, None], 0)
    forced_logit_R1 = jnp.take_along_axis(scores.logits_RV, forced_index_R1, axis=1, mode="clip")
    beams_BG = jnp.where(is_forced_B1, jnp.minimum(jnp.arange(G), W - 1)[None], beams_BG)
    forced_logit_BG = pick(forced_logit_R1.reshape(B, W), beams_BG)
    is_first_GK = (jnp.arange(G) < W)[:, None] & (jnp.arange(K) == 0)[None]
    forced_logits_BGK = jnp.where(is_first_GK[None], forced_logit_BG[:, :, None], IMPOSSIBLE)
    is_forced_B11 = is_forced_B1[:, :, None]
    return Shortlist(
        beams_BG,
        jnp.where(is_forced_B11, forced_B1[:, :, None], tokens_BGK),
        jnp.where(is_forced_B11, forced_logits_BGK, logits_BGK),
    )
