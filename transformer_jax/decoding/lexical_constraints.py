"""Lexical constraints: terms that a hypothesis must contain, for beam search.

A term is met once one of its alternatives, a sequence of tokens, occurs in the hypothesis. Beam
search divides the beam among banks of hypotheses that need equally many tokens to meet all terms
(dynamic beam allocation; Post and Vilar, 2018).

``TermProgress`` has a fixed size. For each alternative, one integer holds the states of the
automaton that finds it (Shift-And; Baeza-Yates and Gonnet, 1992), so overlapping and repetitive
terms are exact.

Shape suffixes (B, W, ...): ``search.py``. In addition, K is the number of terms, A of a term's
alternatives, M of an alternative's tokens, C of candidates of a hypothesis, X of a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from transformer_jax.decoding.constraints import IMPOSSIBLE
from transformer_jax.errors import UserError

TABLE_SIZES = (1, 1, 8), (4, 2, 8), (16, 4, 16), (64, 4, 32)
"""Sizes (K, A, M) of tables for which searches are compiled. M is at most 32."""

# Estimated cost, in log-probability, of a token that unmet terms still need.
_COST_OF_NEEDED_TOKEN = 2.0
# Difference between the sort keys of two rounds: more than any log-probability.
_ROUND_GAP = 1e5


class TermProgress(NamedTuple):
    """Unmet terms of each hypothesis, and its progress in their alternatives."""

    unmet_BWK: Array
    matched_BWKA: Array
    """uint32: bit m is set if the hypothesis ends with the alternative's first m + 1 tokens."""


def term_table(terms: Sequence[Sequence[Sequence[int]]], name: str = "The sentence") -> np.ndarray:
    """Return the token ids of each term's alternatives as an array [K, A, M] of the smallest of
    ``TABLE_SIZES``. Raises ``UserError``, which begins with ``name``, if there are too many or they
    are too long.

    Alternatives are padded with -1. A missing alternative is a copy of the first; a missing term
    has no tokens.
    """
    num_alternatives = max(map(len, terms))
    longest = max(len(tokens) for term in terms for tokens in term)
    sizes = [
        (K, A, M)
        for K, A, M in TABLE_SIZES
        if len(terms) <= K and num_alternatives <= A and longest <= M
    ]
    if not sizes:
        raise UserError(
            f"{name}: {len(terms)} terms with up to {num_alternatives} alternatives of up to "
            f"{longest} tokens; expected at most {TABLE_SIZES[-1][0]} terms in a sentence, "
            f"{TABLE_SIZES[-1][1]} alternatives and {TABLE_SIZES[-1][2]} tokens. Shorten the "
            "glossary."
        )
    table_KAM = np.full(sizes[0], -1, np.int32)
    for term, table_AM in zip(terms, table_KAM):
        for a, tokens_M in enumerate(table_AM):
            tokens = term[a if a < len(term) else 0]
            tokens_M[: len(tokens)] = tokens
    return table_KAM


def start_progress(terms_BKAM: Array, limit_B: Array, beam_size: int) -> TermProgress:
    """Return the progress of empty hypotheses. Terms too long for the limit are ignored."""
    shortest_BK = _lengths_BKA(terms_BKAM).min(axis=2)
    unmet_BK = (shortest_BK > 0) & (shortest_BK < limit_B[:, None])
    unmet_BWK = jnp.repeat(unmet_BK[:, None], beam_size, axis=1)
    shape = *unmet_BWK.shape, terms_BKAM.shape[2]
    return TermProgress(unmet_BWK, jnp.zeros(shape, jnp.uint32))


def advance(progress: TermProgress, terms_BKAM: Array, tokens_BX: Array) -> TermProgress:
    """Return the progress of hypotheses after one more token each."""
    positions_BKAM = jax.lax.broadcasted_iota(jnp.uint32, terms_BKAM.shape, 3)
    is_match_BXKAM = terms_BKAM[:, None] == tokens_BX[:, :, None, None, None]
    match_bits_BXKA = (is_match_BXKAM << positions_BKAM[:, None]).sum(axis=4, dtype=jnp.uint32)
    matched_BXKA = (progress.matched_BWKA << 1 | 1) & match_bits_BXKA
    is_met_BXKA = _num_matched(matched_BXKA) == _lengths_BKA(terms_BKAM)[:, None]
    return TermProgress(progress.unmet_BWK & ~is_met_BXKA.any(axis=3), matched_BXKA)


def num_needed(progress: TermProgress, terms_BKAM: Array) -> Array:
    """Return the number of tokens with which each hypothesis meets all its terms, [B, W]. Fewer may
    do if terms overlap. One of the tokens of ``add_needed_tokens`` lowers it by one or more.
    """
    lengths_B1KA = _lengths_BKA(terms_BKAM)[:, None]
    shortest_B1K1 = lengths_B1KA.min(axis=3, keepdims=True)
    unmet_BWK1 = progress.unmet_BWK[..., None]
    saved_BWKA = shortest_B1K1 - lengths_B1KA + _num_matched(progress.matched_BWKA)
    saved_BW = jnp.where(unmet_BWK1, saved_BWKA, 0).max(axis=(2, 3))  # only one can be continued
    return jnp.where(unmet_BWK1, shortest_B1K1, 0).sum(axis=(2, 3)) - saved_BW


def add_needed_tokens(
    progress: TermProgress, terms_BKAM: Array, tokens_RK: Array, logits_RV: Array, eos_id: int
) -> tuple[Array, Array]:
    """Add the next tokens of unmet terms to the best tokens of each hypothesis. Returns the logits
    and tokens. EOS is impossible if terms are unmet.
    """
    R = len(logits_RV)
    unmet_BWK1 = progress.unmet_BWK[..., None]
    next_BWKA1 = _num_matched(progress.matched_BWKA)[..., None]
    next_BWKA = jnp.take_along_axis(terms_BKAM[:, None], next_BWKA1, axis=4)[..., 0]
    next_RF = jnp.where(unmet_BWK1, next_BWKA, -1).reshape(R, -1)
    tokens_RC = jnp.concatenate([tokens_RK, next_RF], axis=1)
    is_same_RCC = tokens_RC[:, :, None] == tokens_RC[:, None]
    is_first_RC = is_same_RCC.argmax(axis=2) == jnp.arange(tokens_RC.shape[1])[None]
    has_unmet_R1 = unmet_BWK1.any(axis=2).reshape(R, 1)
    is_possible_RC = is_first_RC & (tokens_RC >= 0) & ~(has_unmet_R1 & (tokens_RC == eos_id))
    logits_RC = jnp.take_along_axis(logits_RV, jnp.maximum(tokens_RC, 0), axis=1)
    return jnp.where(is_possible_RC, logits_RC, IMPOSSIBLE), tokens_RC


def allocate_beam(
    num_needed_BX: Array,
    log_probs_BX: Array,
    *,
    ends_BX: Array,
    num_remaining_B: Array,
    beam_size: int,
) -> Array:
    """Return the indices of the 2W first candidates, in order (dynamic beam allocation).

    Candidates of equal ``num_needed`` form a bank (Post and Vilar, 2018), ordered by
    log-probability. Round 0 has the best candidate of each bank, round 1 the second-best, and so
    on. In each round, the order is by log-probability minus the estimated cost of the needed
    tokens. For example, with needed tokens and log-probability,

        a (0, -9)  b (0, -12)    c (1, -3)  d (1, -4)    e (3, -2)    are three banks:
        c (-5)  e (-8)  a (-9)   is round 0, in its order;   d (-6)  b (-12)   is round 1.

    Two kinds precede all rounds: ends that rank among the first W of their bank, and the best
    candidate whose terms fit into the ``num_remaining_B`` tokens before EOS (with 0 remaining
    tokens: a). Thus all terms are met if they fit.
    """
    column_BX = jax.lax.broadcasted_iota(jnp.int32, num_needed_BX.shape, 1)
    # Candidates by bank and, in a bank, by log-probability.
    num_needed_BX, negative_log_probs_BX, original_column_BX, ends_BX = jax.lax.sort(
        (num_needed_BX, -log_probs_BX, column_BX, ends_BX), num_keys=2
    )
    log_probs_BX = -negative_log_probs_BX
    is_best_BX = jnp.diff(num_needed_BX, axis=1, prepend=-1) != 0
    start_of_bank_BX = jax.lax.cummax(jnp.where(is_best_BX, column_BX, 0), axis=1)
    rank_BX = column_BX - start_of_bank_BX

    is_possible_BX = log_probs_BX > IMPOSSIBLE / 2
    score_BX = log_probs_BX - _COST_OF_NEEDED_TOKEN * num_needed_BX
    sort_key_BX = score_BX - _ROUND_GAP * rank_BX

    is_feasible_BX = is_possible_BX & (num_needed_BX <= num_remaining_B[:, None])
    best_B1 = jnp.where(is_feasible_BX, score_BX, -jnp.inf).max(axis=1, keepdims=True)
    sort_key_BX = jnp.where(is_feasible_BX & (score_BX == best_B1), _ROUND_GAP, sort_key_BX)

    is_end_BX = ends_BX & is_possible_BX & (rank_BX < beam_size)
    end_key_BX = 1e6 - 1e3 * num_needed_BX - rank_BX
    sort_key_BX = jnp.where(is_end_BX, end_key_BX, sort_key_BX)

    _, columns_BC = jax.lax.top_k(sort_key_BX, 2 * beam_size)
    return jnp.take_along_axis(original_column_BX, columns_BC, axis=1)


def _lengths_BKA(terms_BKAM: Array) -> Array:
    return (terms_BKAM >= 0).sum(axis=3)


def _num_matched(matched: Array) -> Array:
    """Number of an alternative's tokens with which a hypothesis ends."""
    return 32 - jax.lax.clz(matched).astype(jnp.int32)
