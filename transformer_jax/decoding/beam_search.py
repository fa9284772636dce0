"""Beam search over ``step_fn(tokens, cache)``: it knows nothing of the model. Letters as in
``search.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array

from transformer_jax.decoding.constraints import Constraints, history_of
from transformer_jax.decoding.search import (
    IMPOSSIBLE,
    Attention,
    Cache,
    Reorder,
    SearchResult,
    SearchState,
    StepFn,
    extend,
    gather_beams,
    keep_best,
    length_divisor,
    require_at_least,
    run,
    start_state,
)
from transformer_jax.errors import UserError

_CHUNK = 32
_MOST_ON_GPU = 16  # above that XLA sorts whole rows


def top_k(
    x_RV: Array, k: int, *, allowed: Callable[[Array], Array] | None = None, num_forbidden: int = 0
) -> tuple[Array, Array]:
    """``jax.lax.top_k`` of each row, in two exact stages.

    ``allowed(indices_RC)`` says which indices take part in their row, all but ``num_forbidden`` at
    most; the others count as IMPOSSIBLE. The ``k + num_forbidden`` largest values hold the k
    largest that take part, so that no second array as wide as ``x_RV`` is written for those that do
    not.

    On a CPU the first stage takes chunks by their maxima, which is several times faster on wide
    rows. They hold those k values too: of the chunks that go before the chunk of such a value, each
    has a larger one, or a forbidden one on top. Sorted chunks keep the order among equal values:
    the lowest index first.
    """

    def masked(x_RC: Array, ids_RC: Array) -> Array:
        return x_RC if allowed is None else jnp.where(allowed(ids_RC), x_RC, IMPOSSIBLE)

    rows, width = x_RV.shape
    num_chunks, num_chosen = -(-width // _CHUNK), k + num_forbidden
    if jax.default_backend() != "cpu" and num_forbidden and num_chosen <= _MOST_ON_GPU:
        x_RC, ids_RC = jax.lax.top_k(x_RV, min(num_chosen, width))
        values_RK, places_RK = jax.lax.top_k(masked(x_RC, ids_RC), k)
        return values_RK, jnp.take_along_axis(ids_RC, places_RK, axis=1)
    if num_chunks < 2 * num_chosen or jax.default_backend() != "cpu":
        return jax.lax.top_k(masked(x_RV, jnp.arange(width)[None]), k)
    padding = num_chunks * _CHUNK - width
    largest_RQ = jax.lax.reduce_window(
        x_RV, -jnp.inf, jax.lax.max, (1, _CHUNK), (1, _CHUNK), ((0, 0), (0, padding))
    )
    _, chunks_RK = jax.lax.top_k(largest_RQ, num_chosen)
    ids_RKC = jnp.sort(chunks_RK, axis=-1)[:, :, None] * _CHUNK + jnp.arange(_CHUNK)[None, None]
    ids_RC = ids_RKC.reshape(rows, num_chosen * _CHUNK)
    x_RC = jnp.take_along_axis(x_RV, jnp.minimum(ids_RC, width - 1), axis=1)
    values_RK, places_RK = jax.lax.top_k(
        jnp.where(ids_RC < width, masked(x_RC, ids_RC), -jnp.inf), k
    )
    return values_RK, jnp.take_along_axis(ids_RC, places_RK, axis=1)


@dataclass(frozen=True)
class BeamSearch:
    """The rules of a beam search; ``beam_search`` says what they do."""

    bos_id: int
    eos_id: int
    pad_id: int
    beam_size: int = 4
    length_penalty: float = 0.6
    length_offset: float = 5.0
    num_hypotheses: int | None = None
    coverage_penalty: float = 0.0
    constraints: Constraints = field(default_factory=Constraints)

    def __post_init__(self) -> None:
        W, N = self.beam_size, self._num_hypotheses
        if not (W >= 1 and 1 <= N <= W):
            raise UserError(
                f"num_hypotheses is {N} and beam_size {W}; expected 1 <= num_hypotheses <= beam_size."
            )
        require_at_least(0, length_penalty=self.length_penalty, length_offset=self.length_offset)
        require_at_least(0, coverage_penalty=self.coverage_penalty)

    @property
    def _num_hypotheses(self) -> int:
        return self.beam_size if self.num_hypotheses is None else self.num_hypotheses

    def start(
        self,
        limit_B: Array,
        *,
        max_length: int,
        source_length: int,
        prefix_BP: Array,
        seed_B: Array,
    ) -> SearchState:
        """One empty hypothesis a sentence: further ones would be its copies."""
        return start_state(
            limit_B,
            num_beams=self.beam_size,
            num_live=1,
            num_hypotheses=self._num_hypotheses,
            max_length=max_length,
            source_length=source_length if self.coverage_penalty else 0,
            prefix_BP=prefix_BP,
            seed_B=seed_B,
            pad_id=self.pad_id,
        )

    def advance(
        self, state: SearchState, logits_BWV: Array, attention_BWS: Array | None
    ) -> tuple[SearchState, Array | None]:
        """One token more for every live hypothesis, and the beams they go on from."""
        W, vocab_size = self.beam_size, logits_BWV.shape[-1]
        if vocab_size < W:
            raise UserError(
                f"beam_size is {W}; expected at most the vocabulary's {vocab_size} tokens."
            )
        length_B = state.position_B + 1
        parents_BC, tokens_BC, ranks_BC, token_log_probs_BC = self._candidates(state, logits_BWV)
        log_probs_BC = (
            jnp.take_along_axis(state.log_probs_BW, parents_BC, axis=1) + token_log_probs_BC
        )
        tokens_BCL, token_log_probs_BCL = extend(state, parents_BC, tokens_BC, token_log_probs_BC)
        ends_BC = tokens_BC == self.eos_id
        coverage_BCS = state.coverage_BWS
        if self.coverage_penalty:
            if attention_BWS is None or attention_BWS.shape != coverage_BCS.shape:
                raise UserError(
                    f"coverage_penalty is {self.coverage_penalty} without attention weights [B, W, S] of S = "
                    f"{coverage_BCS.shape[2]} positions; expected `attention` and its `source_length` S of at least 1."
                )
            coverage_BCS = gather_beams(state.coverage_BWS + attention_BWS, parents_BC)

        # Finish: only ends among the first W, so that a beam of 1 is greedy and a hypothesis must
        # earn its end.
        may_end_BW = ends_BC[:, :W] & (ranks_BC[:, :W] > IMPOSSIBLE / 2) & ~state.done_B[:, None]
        scores_BW = (
            ranks_BC[:, :W]
            / length_divisor(length_B, self.length_penalty, self.length_offset)[:, None]
        )
        if self.coverage_penalty:
            scores_BW += self.coverage_penalty * _coverage(coverage_BCS[:, :W])
        finished = keep_best(
            state.finished,
            SearchResult(
                tokens_BCL[:, :W],
                jnp.where(may_end_BW, scores_BW, IMPOSSIBLE),
                log_probs_BC[:, :W],
                jnp.broadcast_to(length_B[:, None], may_end_BW.shape),
                token_log_probs_BCL[:, :W],
            ),
        )

        # Live on.
        ranks_BW, survivors_BW = jax.lax.top_k(jnp.where(ends_BC, IMPOSSIBLE, ranks_BC), W)
        tokens_BWL, token_log_probs_BWL, log_probs_BW, parents_BW = gather_beams(
            (tokens_BCL, token_log_probs_BCL, log_probs_BC, parents_BC), survivors_BW
        )
        bound_B = ranks_BW[:, 0] / length_divisor(
            state.limit_B, self.length_penalty, self.length_offset
        )
        hopeless_B = (bound_B <= finished.scores_BN[:, -1]) | (ranks_BW[:, 0] <= IMPOSSIBLE / 2)
        if W == 1:
            hopeless_B |= may_end_BW[:, 0]
        state = state._replace(
            position_B=length_B,
            tokens_BWL=tokens_BWL,
            token_log_probs_BWL=token_log_probs_BWL,
            log_probs_BW=log_probs_BW,
            ranks_BW=ranks_BW,
            coverage_BWS=gather_beams(coverage_BCS, survivors_BW)
            if self.coverage_penalty
            else state.coverage_BWS,
            finished=finished,
            done_B=state.done_B | (length_B >= state.limit_B) | hopeless_B,
        )
        return state, parents_BW

    def _candidates(
        self, state: SearchState, logits_BWV: Array
    ) -> tuple[Array, Array, Array, Array]:
        """The 2W best continuations of each sentence: parent beam, token, rank of the whole,
        log-probability of the token.

        Each is ``[B, 2W]``. Each beam's best come from its logits, whose order is that of the
        log-probabilities: those of the whole vocabulary are never written out.
        """
        B, W, V = logits_BWV.shape
        K = min(2 * W, V)
        logits_RV = logits_BWV.reshape(B * W, V).astype(jnp.float32)
        # A row may forbid every token (-inf throughout); its normaliser must not turn that into
        # NaN.
        normalizer_R1 = jnp.maximum(jax.nn.logsumexp(logits_RV, axis=-1, keepdims=True), IMPOSSIBLE)
        history, ids = (
            history_of(state, self.eos_id),
            {"eos_id": self.eos_id, "pad_id": self.pad_id},
        )
        choosable_RV = self.constraints.adjust(logits_RV, normalizer_R1, history)
        values_RK, tokens_RK = top_k(
            choosable_RV,
            K,
            allowed=lambda ids_RC: self.constraints.allowed(ids_RC, history, **ids),
            num_forbidden=len(self.constraints.forbidden(**ids)),
        )
        # Where one token is forced it is the only continuation, whatever the rules say.
        forced_R1, first_1K = history.forced_R[:, None], (jnp.arange(K) == 0)[None]
        forced_value_R1 = jnp.take_along_axis(choosable_RV, jnp.maximum(forced_R1, 0), axis=1)
        values_RK = jnp.where(
            forced_R1 < 0, values_RK, jnp.where(first_1K, forced_value_R1, IMPOSSIBLE)
        )
        tokens_RK = jnp.where(forced_R1 < 0, tokens_RK, forced_R1)
        token_log_probs_RK = jnp.take_along_axis(logits_RV, tokens_RK, axis=1) - normalizer_R1
        # Impossible tokens stay so where the normaliser is as low as they are.
        gains_RK = jnp.where(values_RK > IMPOSSIBLE / 2, values_RK - normalizer_R1, IMPOSSIBLE)
        ranks_BWK = state.ranks_BW[:, :, None] + gains_RK.reshape(B, W, K)
        ranks_BC, places_BC = jax.lax.top_k(
            jnp.maximum(ranks_BWK, IMPOSSIBLE).reshape(B, W * K), 2 * W
        )
        tokens_BC, token_log_probs_BC = (
            jnp.take_along_axis(x.reshape(B, W * K), places_BC, axis=1)
            for x in (tokens_RK, token_log_probs_RK)
        )
        return places_BC // K, tokens_BC, ranks_BC, jnp.maximum(token_log_probs_BC, IMPOSSIBLE)


def _coverage(coverage_BCS: Array) -> Array:
    """sum over source positions of log(min(attention it got, 1)) (Wu et al., 2016, equation 14)."""
    # Padding gets no attention from any hypothesis, and real positions always get some.
    seen_BCS = jnp.where(coverage_BCS > 0, jnp.minimum(coverage_BCS, 1), 1)
    return jnp.log(seen_BCS).sum(axis=-1)


def beam_search(
    step_fn: StepFn,
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
    length_offset: float = 5.0,
    num_hypotheses: int | None = None,
    constraints: Constraints | None = None,
    prefix_BP: Array | None = None,
    coverage_penalty: float = 0.0,
    attention: Attention | None = None,
    source_length: int = 0,
    reorder: Reorder = gather_beams,
) -> SearchResult:
    """The ``num_hypotheses`` best-scored hypotheses that a beam of ``beam_size`` meets, for each
    sentence by itself.

    ``step_fn(tokens_BW, cache)`` gives ``(logits_BWV, cache)`` for the token that follows each
    beam's last one; ``reorder(cache, parents_BW)`` makes beam w continue what was beam
    ``parents_BW[b, w]`` (by default by a gather along axis 1 of every leaf). Lengths count EOS. All
    arguments but ``cache``, ``max_lengths_B`` and ``prefix_BP`` are static under ``jax.jit``.

    At each position a sentence looks at the 2W best continuations of its W live hypotheses, of
    which at most W are ends. An end among the first W of them is finished; the best W others live
    on. The order among equals is fixed: the better beam, then the likelier token, then the lower
    id.

    A sentence stops when no live hypothesis can still enter its best ``num_hypotheses``:
    log-probabilities only fall and the divisor only grows, so the best live log-probability over
    the divisor of the longest length is a bound. At its last position (``max_lengths_B``, by
    default and at most ``max_length``; 0: nothing to search) only EOS is allowed. So every
    hypothesis ends in EOS, its score is that of the same tokens force-decoded, and it does not
    depend on the neighbours in the batch. PAD is never generated. With ``beam_size`` 1 the search
    is greedy: it takes the likeliest token until EOS.

    Finished hypotheses are ranked by log-probability over ((c + length) / (c + 1))^alpha, alpha
    being ``length_penalty`` and c ``length_offset`` (Wu et al., 2016, equation 14).

    ``prefix_BP`` holds tokens that the targets must begin with, -1 after their ends;
    ``constraints`` rules for the others. ``coverage_penalty`` beta adds beta * sum_s log(min(sum_t
    a_ts, 1)) to the score of a finished hypothesis (Wu et al., 2016, equation 14), where a_ts is
    what ``attention(cache)`` gives after a step: [B, W, S], S = ``source_length``, 0 for padding.

    Raises:
        UserError: a beam wider than the vocabulary, more hypotheses than beams, a length or penalty
          out of range, a ``coverage_penalty`` without ``attention`` weights over ``source_length``
          positions.
    """
    method = BeamSearch(
        bos_id,
        eos_id,
        pad_id,
        beam_size=beam_size,
        length_penalty=length_penalty,
        length_offset=length_offset,
        num_hypotheses=num_hypotheses,
        coverage_penalty=coverage_penalty,
        constraints=constraints or Constraints(),
    )
    return run(
        method,
        step_fn,
        cache,
        limit_B=jnp.full(batch_size, max_length) if max_lengths_B is None else max_lengths_B,
        max_length=max_length,
        prefix_BP=prefix_BP,
        reorder=reorder,
        attention=attention,
        source_length=source_length,
    )
