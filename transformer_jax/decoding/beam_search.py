"""Beam search over ``step_fn(tokens, cache)``: it knows nothing of the model.

Letters: B sentences, W beam width, V vocabulary, L positions, N hypotheses returned, K candidates of one beam,
C candidates of one sentence. Log-probabilities and scores are float32 throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from transformer_jax.errors import UserError

Cache = Any

# Stands for log 0. Finite, so that no sum or difference gives NaN; real log-probabilities stay far above half of it.
_IMPOSSIBLE = -1e9
_CHUNK = 128


class SearchResult(NamedTuple):
    """Finished hypotheses, best first. A slot that no hypothesis filled has score -inf and length 0."""

    tokens_BNL: Array
    """int32: the pieces, EOS, then PAD."""
    scores_BN: Array
    """float32: log-probability / ((5 + length) / 6)^alpha."""
    log_probs_BN: Array
    """float32: sum of the pieces' log-probabilities, EOS included."""
    lengths_BN: Array
    """int32: pieces, EOS included."""


class _State(NamedTuple):
    position: Array
    tokens_BWL: Array
    log_probs_BW: Array
    finished: SearchResult
    done_B: Array
    cache: Cache


def gather_beams(tree: Any, parents_BW: Array) -> Any:
    """Beam w of every leaf ``[B, W, ...]`` becomes a copy of its beam ``parents_BW[:, w]``."""

    def gather(x: Array) -> Array:
        return jnp.take_along_axis(x, parents_BW.reshape(parents_BW.shape + (1,) * (x.ndim - 2)), axis=1)

    return jax.tree.map(gather, tree)


def top_k(x_RV: Array, k: int) -> tuple[Array, Array]:
    """``jax.lax.top_k`` of each row, in two exact stages: several times faster on wide rows on a CPU.

    The k chunks with the largest maxima hold the k largest values, since each of those chunks has at least one value that
    goes before anything outside them. Sorted chunks keep the order among equal values: the lowest index first.
    """
    rows, width = x_RV.shape
    num_chunks = -(-width // _CHUNK)
    if num_chunks < 2 * k:
        return jax.lax.top_k(x_RV, k)
    padding = num_chunks * _CHUNK - width
    x_RQC = jnp.pad(x_RV, ((0, 0), (0, padding)), constant_values=-jnp.inf).reshape(rows, num_chunks, _CHUNK)
    _, chunks_RK = jax.lax.top_k(x_RQC.max(axis=-1), k)
    chunks_RK = jnp.sort(chunks_RK, axis=-1)
    x_RKC = jnp.take_along_axis(x_RQC, chunks_RK[:, :, None], axis=1)
    values_RK, places_RK = jax.lax.top_k(x_RKC.reshape(rows, k * _CHUNK), k)
    return values_RK, jnp.take_along_axis(chunks_RK, places_RK // _CHUNK, axis=-1) * _CHUNK + places_RK % _CHUNK


def length_divisor(lengths: Array | int, length_penalty: float) -> Array:
    """((5 + length) / 6)^alpha (Wu et al., 2016, equation 14; the paper's section 6.1 takes alpha = 0.6)."""
    return ((5 + jnp.asarray(lengths, jnp.float32)) / 6) ** length_penalty


def beam_search(
    step_fn: Callable[[Array, Cache], tuple[Array, Cache]],
    cache: Cache,
    *,
    batch_size: int,
    beam_size: int,
    max_length: int,
    bos_id: int,
    eos_id: int,
    pad_id: int,
    max_lengths_B: Array | None = None,
    length_penalty: float = 0.6,
    num_hypotheses: int | None = None,
    reorder: Callable[[Cache, Array], Cache] = gather_beams,
) -> SearchResult:
    """The ``num_hypotheses`` best-scored hypotheses that a beam of ``beam_size`` meets, for each sentence by itself.

    ``step_fn(tokens_BW, cache)`` gives ``(logits_BWV, cache)`` for the piece that follows each beam's last one;
    ``reorder(cache, parents_BW)`` makes beam w continue what was beam ``parents_BW[b, w]`` (by default by a gather along axis
    1 of every leaf). Lengths count EOS. All arguments but ``cache`` and ``max_lengths_B`` are static under ``jax.jit``.

    At each position a sentence looks at the 2W best continuations of its W live hypotheses, of which at most W are ends. An
    end among the first W of them is finished; the best W others live on. The order among equals is fixed: the better
    beam, then the likelier piece, then the lower id.

    A sentence stops when no live hypothesis can still enter its best ``num_hypotheses``: log-probabilities only fall and the
    divisor only grows, so the best live log-probability over the divisor of the longest length is a bound. At its last
    position (``max_lengths_B``, by default and at most ``max_length``; 0: nothing to search) only EOS is allowed. So every
    hypothesis ends in EOS, its score is that of the same pieces force-decoded, and it does not depend on the neighbours
    in the batch. PAD is never generated. With ``beam_size`` 1 the search is greedy: it takes the likeliest piece until EOS.

    Raises:
        UserError: a beam wider than the vocabulary, more hypotheses than beams, a length or penalty out of range.
    """
    B, W, L, N = batch_size, beam_size, max_length, beam_size if num_hypotheses is None else num_hypotheses
    if not (W >= 1 and 1 <= N <= W):
        raise UserError(f"num_hypotheses is {N} and beam_size {W}; expected 1 <= num_hypotheses <= beam_size.")
    if L < 1 or length_penalty < 0:
        raise UserError(f"max_length is {L} and length_penalty {length_penalty}; expected at least 1 and at least 0.")
    limits_B = jnp.full(B, L, jnp.int32) if max_lengths_B is None else jnp.minimum(max_lengths_B, L).astype(jnp.int32)
    divisors_L = length_divisor(jnp.arange(L + 1), length_penalty)

    def search_step(state: _State) -> _State:
        position = state.position
        previous_BW = jax.lax.dynamic_index_in_dim(state.tokens_BWL, jnp.maximum(position - 1, 0), axis=2, keepdims=False)
        logits_BWV, cache = step_fn(jnp.where(position == 0, bos_id, previous_BW), state.cache)
        vocab_size = logits_BWV.shape[-1]
        if vocab_size < W:
            raise UserError(f"beam_size is {W}; expected at most the vocabulary's {vocab_size} pieces.")

        only_eos_B = position + 1 >= limits_B
        parents_BC, pieces_BC, log_probs_BC = _candidates(
            logits_BWV, state.log_probs_BW, only_eos_B, eos_id=eos_id, pad_id=pad_id
        )
        tokens_BCL = jax.lax.dynamic_update_index_in_dim(
            gather_beams(state.tokens_BWL, parents_BC), pieces_BC, position, axis=2
        )
        ends_BC = pieces_BC == eos_id

        # Finish: only ends among the first W, so that a beam of 1 is greedy and a hypothesis must earn its end.
        may_end_BW = ends_BC[:, :W] & (log_probs_BC[:, :W] > _IMPOSSIBLE / 2) & ~state.done_B[:, None]
        new = SearchResult(
            tokens_BCL[:, :W],
            jnp.where(may_end_BW, log_probs_BC[:, :W] / divisors_L[position + 1], _IMPOSSIBLE),
            log_probs_BC[:, :W],
            jnp.broadcast_to(position + 1, (B, W)),
        )
        both = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), state.finished, new)
        _, best_BN = jax.lax.top_k(both.scores_BN, N)
        finished: SearchResult = gather_beams(both, best_BN)

        # Live on.
        log_probs_BW, survivors_BW = jax.lax.top_k(jnp.where(ends_BC, _IMPOSSIBLE, log_probs_BC), W)
        parents_BW = jnp.take_along_axis(parents_BC, survivors_BW, axis=1)

        bound_B = log_probs_BW[:, 0] / divisors_L[limits_B]
        hopeless_B = (bound_B <= finished.scores_BN[:, -1]) | (log_probs_BW[:, 0] <= _IMPOSSIBLE / 2)
        if W == 1:
            hopeless_B |= may_end_BW[:, 0]
        return _State(
            position + 1,
            gather_beams(tokens_BCL, survivors_BW),
            log_probs_BW,
            finished,
            state.done_B | only_eos_B | hopeless_B,
            reorder(cache, parents_BW),
        )

    none_yet = SearchResult(
        jnp.full((B, N, L), pad_id, jnp.int32),
        jnp.full((B, N), _IMPOSSIBLE, jnp.float32),
        jnp.full((B, N), _IMPOSSIBLE, jnp.float32),
        jnp.zeros((B, N), jnp.int32),
    )
    first_beam_BW = jnp.broadcast_to(jnp.arange(W) == 0, (B, W))  # the others would be its copies
    start = _State(
        jnp.int32(0),
        jnp.full((B, W, L), pad_id, jnp.int32),
        jnp.where(first_beam_BW, jnp.float32(0), _IMPOSSIBLE),
        none_yet,
        limits_B <= 0,
        cache,
    )
    end = jax.lax.while_loop(lambda s: (s.position < L) & ~s.done_B.all(), search_step, start)
    filled_BN = end.finished.scores_BN > _IMPOSSIBLE / 2
    tokens_BNL, scores_BN, log_probs_BN, lengths_BN = end.finished
    return SearchResult(
        jnp.where(filled_BN[:, :, None], tokens_BNL, pad_id),
        jnp.where(filled_BN, scores_BN, -jnp.inf),
        jnp.where(filled_BN, log_probs_BN, -jnp.inf),
        jnp.where(filled_BN, lengths_BN, 0),
    )


def _candidates(
    logits_BWV: Array, live_BW: Array, only_eos_B: Array, *, eos_id: int, pad_id: int
) -> tuple[Array, Array, Array]:
    """The 2W likeliest continuations of each sentence: parent beam, piece, log-probability of the whole; each ``[B, 2W]``.

    Each beam's best come from its logits, whose order is that of the log-probabilities: those of the whole vocabulary are
    never written out.
    """
    B, W, V = logits_BWV.shape
    K = min(2 * W, V)
    logits_RV = logits_BWV.reshape(B * W, V).astype(jnp.float32)
    # A row may forbid every piece (-inf throughout); its normaliser must not turn that into NaN.
    normalizer_BW1 = jnp.maximum(jax.nn.logsumexp(logits_RV, axis=-1), _IMPOSSIBLE).reshape(B, W, 1)
    if pad_id != eos_id:
        logits_RV = jnp.where((jnp.arange(V) == pad_id)[None, :], _IMPOSSIBLE, logits_RV)
    values_RK, pieces_RK = top_k(logits_RV, K)

    # At the last position a beam has one continuation, its end.
    eos_BW1 = logits_BWV[:, :, eos_id, None].astype(jnp.float32)
    eos_alone_BWK = jnp.where((jnp.arange(K) == 0)[None, None, :], eos_BW1, _IMPOSSIBLE)
    only_eos_B11 = only_eos_B[:, None, None]
    values_BWK = jnp.where(only_eos_B11, eos_alone_BWK, values_RK.reshape(B, W, K))
    pieces_BWK = jnp.where(only_eos_B11, eos_id, pieces_RK.reshape(B, W, K))

    log_probs_BWK = jnp.maximum(live_BW[:, :, None] + (values_BWK - normalizer_BW1), _IMPOSSIBLE)
    log_probs_BC, places_BC = jax.lax.top_k(log_probs_BWK.reshape(B, W * K), 2 * W)
    return places_BC // K, jnp.take_along_axis(pieces_BWK.reshape(B, W * K), places_BC, axis=1), log_probs_BC
