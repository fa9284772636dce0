"""Lexical constraints: terms that a hypothesis must contain, for beam search.

A term is met once one of its alternatives, a sequence of tokens, occurs in the hypothesis. Progress
has a fixed size. For each alternative, one integer holds the states of the automaton that finds it
(Shift-And; Baeza-Yates and Gonnet, 1992), so overlapping and repetitive terms are exact.

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

SIZES = (1, 1, 8), (4, 2, 8), (16, 4, 16), (64, 4, 32)
"""Sizes (K, A, M) of tables for which searches are compiled. M is at most 32."""

# Estimated cost, in log-probability, of a token that unmet terms still need.
_COST = 2.0
# More than any log-probability.
_ROUND = 1e5


class Progress(NamedTuple):
    """Progress of each hypothesis."""

    unmet_BWK: Array
    seen_BWKA: Array
    """uint32: bit m is set if the hypothesis ends with the alternative's first m + 1 tokens."""


def term_table(terms: Sequence[Sequence[Sequence[int]]], name: str = "The sentence") -> np.ndarray:
    """Return the token ids of each term's alternatives as an array [K, A, M] of the smallest of
    ``SIZES``. Raises ``UserError``, which begins with ``name``, if they are too many or too long.

    Alternatives are padded with -1. A missing alternative is a copy of the first; a missing term
    has no tokens.
    """
    longest = max(len(tokens) for term in terms for tokens in term)
    needed = len(terms), max(map(len, terms)), longest
    fitting = [size for size in SIZES if all(n <= most for n, most in zip(needed, size))]
    if not fitting:
        raise UserError(
            f"{name}: {needed[0]} terms with up to {needed[1]} alternatives of up to {needed[2]} "
            "tokens; expected at most {} terms in a sentence, {} alternatives and {} tokens. "
            "Shorten the glossary.".format(*SIZES[-1])
        )
    table_KAM = np.full(fitting[0], -1, np.int32)
    for term, table_AM in zip(terms, table_KAM):
        for a, row_M in enumerate(table_AM):
            tokens = term[a if a < len(term) else 0]
            row_M[: len(tokens)] = tokens
    return table_KAM


def start_progress(terms_BKAM: Array, limit_B: Array, beam_size: int) -> Progress:
    """Return the progress of empty hypotheses. Terms too long for the limit are ignored."""
    shortest_BK = _lengths_BKA(terms_BKAM).min(axis=2)
    unmet_BK = (shortest_BK > 0) & (shortest_BK < limit_B[:, None])
    unmet_BWK = jnp.repeat(unmet_BK[:, None], beam_size, axis=1)
    shape = *unmet_BWK.shape, terms_BKAM.shape[2]
    return Progress(unmet_BWK, jnp.zeros(shape, jnp.uint32))


def advance(progress: Progress, terms_BKAM: Array, tokens_BX: Array) -> Progress:
    """Return the progress of hypotheses after one more token each."""
    places_BKAM = jax.lax.broadcasted_iota(jnp.uint32, terms_BKAM.shape, 3)
    is_here_BXKAM = terms_BKAM[:, None] == tokens_BX[:, :, None, None, None]
    here_BXKA = (is_here_BXKAM << places_BKAM[:, None]).sum(axis=4, dtype=jnp.uint32)
    seen_BXKA = (progress.seen_BWKA << 1 | 1) & here_BXKA
    is_met_BXKA = _num_seen(seen_BXKA) == _lengths_BKA(terms_BKAM)[:, None]
    return Progress(progress.unmet_BWK & ~is_met_BXKA.any(axis=3), seen_BXKA)


def need(progress: Progress, terms_BKAM: Array) -> Array:
    """Return the number of tokens with which each hypothesis meets all its terms, [B, W]. Fewer may
    do if terms overlap. One of the tokens of ``with_next`` lowers it by one or more.
    """
    lengths_B1KA = _lengths_BKA(terms_BKAM)[:, None]
    shortest_B1K1 = lengths_B1KA.min(axis=3, keepdims=True)
    unmet_BWK1 = progress.unmet_BWK[..., None]
    saved_BWKA = shortest_B1K1 - lengths_B1KA + _num_seen(progress.seen_BWKA)
    saved_BW = jnp.where(unmet_BWK1, saved_BWKA, 0).max(axis=(2, 3))  # only one can be continued
    return jnp.where(unmet_BWK1, shortest_B1K1, 0).sum(axis=(2, 3)) - saved_BW


def with_next(
    progress: Progress, terms_BKAM: Array, tokens_RK: Array, logits_RV: Array, eos_id: int
) -> tuple[Array, Array]:
    """Add the next tokens of unmet terms to the best tokens of each hypothesis. Returns the logits
    and tokens. EOS is impossible if terms are unmet.
    """
    R, unmet_BWK1 = len(logits_RV), progress.unmet_BWK[..., None]
    next_BWKA1 = _num_seen(progress.seen_BWKA)[..., None]
    next_BWKA = jnp.take_along_axis(terms_BKAM[:, None], next_BWKA1, axis=4)[..., 0]
    next_RF = jnp.where(unmet_BWK1, next_BWKA, -1).reshape(R, -1)
    tokens_RC = jnp.concatenate([tokens_RK, next_RF], axis=1)
    is_same_RCC = tokens_RC[:, :, None] == tokens_RC[:, None]
    is_first_RC = is_same_RCC.argmax(axis=2) == jnp.arange(tokens_RC.shape[1])[None]
    is_early_R1 = unmet_BWK1.any(axis=2).reshape(R, 1)
    possible_RC = is_first_RC & (tokens_RC >= 0) & ~(is_early_R1 & (tokens_RC == eos_id))
    values_RC = jnp.take_along_axis(logits_RV, jnp.maximum(tokens_RC, 0), axis=1)
    return jnp.where(possible_RC, values_RC, IMPOSSIBLE), tokens_RC


def top_candidates(
    need_BX: Array, log_probs_BX: Array, ends_BX: Array, left_B: Array, beam_size: int
) -> Array:
    """Return the indices of the 2W first candidates, in order.

    Candidates of equal ``need`` form a bank (Post and Vilar, 2018), ordered by log-probability. The
    beam takes the best of each bank, then the second-best, and so on. In each round, the order is
    by log-probability minus the estimated cost of the needed tokens. Two kinds precede all rounds:
    ends that rank among the first W of their bank, and the best candidate whose terms fit into the
    ``left_B`` tokens before EOS. Thus all terms are met if they fit.
    """
    place_BX = jax.lax.broadcasted_iota(jnp.int32, need_BX.shape, 1)
    need_BX, minus_BX, index_BX, ends_BX = jax.lax.sort(
        (need_BX, -log_probs_BX, place_BX, ends_BX), num_keys=2
    )
    is_best_BX = jnp.diff(need_BX, axis=1, prepend=-1) != 0
    rank_BX = place_BX - jax.lax.cummax(jnp.where(is_best_BX, place_BX, 0), axis=1)
    possible_BX = minus_BX < -IMPOSSIBLE / 2
    value_BX = -minus_BX - _COST * need_BX
    fits_BX = possible_BX & (need_BX <= left_B[:, None])
    best_B1 = jnp.where(fits_BX, value_BX, -jnp.inf).max(axis=1, keepdims=True)
    key_BX = jnp.where(fits_BX & (value_BX == best_B1), _ROUND, value_BX - _ROUND * rank_BX)
    is_end_BX = ends_BX & possible_BX & (rank_BX < beam_size)
    key_BX = jnp.where(is_end_BX, 1e6 - 1e3 * need_BX - rank_BX, key_BX)
    _, places_BC = jax.lax.top_k(key_BX, 2 * beam_size)
    return jnp.take_along_axis(index_BX, places_BC, axis=1)


def _lengths_BKA(terms_BKAM: Array) -> Array:
    return (terms_BKAM >= 0).sum(axis=3)


def _num_seen(seen: Array) -> Array:
    """Number of an alternative's tokens with which a hypothesis ends."""
    return 32 - jax.lax.clz(seen).astype(jnp.int32)
