"""What all searches share: their state, how hypotheses grow and finish, and the loop over
``step_fn(tokens, cache)``.

Nothing here knows the model. ``beam_search.py`` and ``sampling.py`` choose the tokens; ``queue.py``
hands the rows of finished sentences to waiting ones.

Letters: B sentences, W beam width, V vocabulary, L positions, N hypotheses returned, P positions of
a prefix, C candidates of one sentence, R rows (B * W, or some of B). Log-probabilities and scores
are float32 throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from transformer_jax.errors import UserError

Cache = Any
StepFn = Callable[[Array, Cache], tuple[Array, Cache]]
Reorder = Callable[[Cache, Array], Cache]
Attention = Callable[[Cache], Array]

# Stands for log 0. Finite, so that no sum or difference gives NaN; real log-probabilities stay far
# above half of it.
IMPOSSIBLE = -1e9
NOT_FORCED = -1


class SearchResult(NamedTuple):
    """Finished hypotheses, best first. A slot that no hypothesis filled has score -inf and length
    0.
    """

    tokens_BNL: Array
    """int32: the tokens, EOS, then PAD."""
    scores_BN: Array
    """float32: what the hypotheses are ranked by; without further penalties log-probability /
    ``length_divisor``.
    """
    log_probs_BN: Array
    """float32: sum of the tokens' log-probabilities, EOS included."""
    lengths_BN: Array
    """int32: tokens, EOS included."""
    token_log_probs_BNL: Array
    """float32: log-probability of each token, EOS included, given those before it; then 0."""


class SearchState(NamedTuple):
    """B sentences under way, each at a position of its own; every leaf has B as its first axis."""

    position_B: Array
    limit_B: Array
    """Longest length, EOS included: at the position before it only EOS is allowed."""
    prefix_BP: Array
    """Tokens that the target must begin with, then NOT_FORCED."""
    seed_B: Array
    """Tells the random numbers of sentences apart (sampling)."""
    tokens_BWL: Array
    token_log_probs_BWL: Array
    log_probs_BW: Array
    """The model's own log-probability of each live hypothesis; IMPOSSIBLE: none lives there."""
    ranks_BW: Array
    """What live hypotheses are compared by: ``log_probs_BW`` unless a penalty changes it."""
    coverage_BWS: Array
    """Attention that each source position got so far; S = 0 unless the search asks for it."""
    finished: SearchResult
    done_B: Array


class Method(Protocol):
    """How one search chooses tokens: ``BeamSearch`` or ``Sampling``."""

    @property
    def bos_id(self) -> int:
        """What stands before every target."""

    @property
    def pad_id(self) -> int:
        """What stands after the end of every target."""

    def start(
        self,
        limit_B: Array,
        *,
        max_length: int,
        source_length: int,
        prefix_BP: Array,
        seed_B: Array,
    ) -> SearchState:
        """Sentences of which nothing is written yet; ``limit_B`` 0: nothing to search."""

    def advance(
        self, state: SearchState, logits_BWV: Array, attention_BWS: Array | None
    ) -> tuple[SearchState, Array | None]:
        """One token more for every live hypothesis; and which hypothesis each one goes on from
        (None: itself).
        """


def length_divisor(
    lengths: Array | int, length_penalty: float, length_offset: float = 5.0
) -> Array:
    """((c + length) / (c + 1))^alpha (Wu et al., 2016, equation 14: c = 5; the paper's section 6.1
    takes alpha = 0.6).
    """
    return (
        (length_offset + jnp.asarray(lengths, jnp.float32)) / (length_offset + 1)
    ) ** length_penalty


def require_at_least(least: float, **settings: float) -> None:
    """``UserError`` unless each of them is a number of at least ``least``."""
    for name, value in settings.items():
        if not value >= least:  # NaN is not
            raise UserError(f"{name} is {value}; expected at least {least}.")


def padded_length(length: int, smallest: int) -> int:
    """The next of s, 3/2 s, 2 s, 3 s, 4 s, 6 s, ... (s is even): what is padded to these has few
    shapes to compile.
    """
    return next(
        width << i
        for i in range(64)
        for width in (smallest, smallest * 3 // 2)
        if width << i >= length
    )


def gather_beams(tree: Any, parents_BW: Array) -> Any:
    """Beam w of every leaf ``[B, W, ...]`` becomes a copy of its beam ``parents_BW[:, w]``."""

    def gather(x: Array) -> Array:
        return jnp.take_along_axis(
            x, parents_BW.reshape(parents_BW.shape + (1,) * (x.ndim - 2)), axis=1
        )

    return jax.tree.map(gather, tree)


def start_state(
    limit_B: Array,
    *,
    num_beams: int,
    num_live: int,
    num_hypotheses: int,
    max_length: int,
    source_length: int,
    prefix_BP: Array,
    seed_B: Array,
    pad_id: int,
) -> SearchState:
    """The empty hypothesis in the first ``num_live`` beams of each sentence."""
    B, W, L, N = limit_B.shape[0], num_beams, max_length, num_hypotheses
    live_BW = jnp.broadcast_to(
        jnp.where(jnp.arange(W) < num_live, jnp.float32(0), IMPOSSIBLE), (B, W)
    )
    return SearchState(
        position_B=jnp.zeros(B, jnp.int32),
        limit_B=limit_B.astype(jnp.int32),
        prefix_BP=prefix_BP.astype(jnp.int32),
        seed_B=seed_B.astype(jnp.uint32),
        tokens_BWL=jnp.full((B, W, L), pad_id, jnp.int32),
        token_log_probs_BWL=jnp.zeros((B, W, L), jnp.float32),
        log_probs_BW=live_BW,
        ranks_BW=live_BW,
        coverage_BWS=jnp.zeros((B, W, source_length), jnp.float32),
        finished=SearchResult(
            jnp.full((B, N, L), pad_id, jnp.int32),
            jnp.full((B, N), IMPOSSIBLE, jnp.float32),
            jnp.full((B, N), IMPOSSIBLE, jnp.float32),
            jnp.zeros((B, N), jnp.int32),
            jnp.zeros((B, N, L), jnp.float32),
        ),
        done_B=limit_B <= 0,
    )


def forced_tokens(state: SearchState, eos_id: int) -> Array:
    """int32 [B]: the only token allowed at this position (of the prefix; or EOS, at the last one),
    or NOT_FORCED.
    """
    position_B1, width = state.position_B[:, None], state.prefix_BP.shape[1]
    forced_B = jnp.full_like(state.position_B, NOT_FORCED)
    if width:
        prefix_B = jnp.take_along_axis(
            state.prefix_BP, jnp.minimum(position_B1, width - 1), axis=1
        )[:, 0]
        forced_B = jnp.where(state.position_B < width, prefix_B, forced_B)
    return jnp.where(state.position_B + 1 >= state.limit_B, eos_id, forced_B)


def extend(
    state: SearchState, parents_BC: Array | None, tokens_BC: Array, token_log_probs_BC: Array
) -> tuple[Array, Array]:
    """Histories of candidates: what their parents have (None: beam c is candidate c), and one token
    more; each [B, C, L].
    """
    old = state.tokens_BWL, state.token_log_probs_BWL
    tokens_BCL, log_probs_BCL = old if parents_BC is None else gather_beams(old, parents_BC)
    here_B1L = (jnp.arange(tokens_BCL.shape[-1])[None] == state.position_B[:, None])[:, None]
    return (
        jnp.where(here_B1L, tokens_BC[:, :, None], tokens_BCL),
        jnp.where(here_B1L, token_log_probs_BC[:, :, None], log_probs_BCL),
    )


def keep_best(finished: SearchResult, new: SearchResult) -> SearchResult:
    """The N best of the N that were finished and the new ones; the older one goes before its
    equal.
    """
    both = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), finished, new)
    _, best_BN = jax.lax.top_k(both.scores_BN, finished.scores_BN.shape[1])
    return gather_beams(both, best_BN)


def results(finished: SearchResult, pad_id: int) -> SearchResult:
    """What is finished, as users see it."""
    tokens_BNL, scores_BN, log_probs_BN, lengths_BN, token_log_probs_BNL = finished
    filled_BN = scores_BN > IMPOSSIBLE / 2
    return SearchResult(
        jnp.where(filled_BN[:, :, None], tokens_BNL, pad_id),
        jnp.where(filled_BN, scores_BN, -jnp.inf),
        jnp.where(filled_BN, log_probs_BN, -jnp.inf),
        jnp.where(filled_BN, lengths_BN, 0),
        jnp.where(filled_BN[:, :, None], token_log_probs_BNL, 0),
    )


def take_step(
    method: Method,
    step_fn: StepFn,
    state: SearchState,
    cache: Cache,
    *,
    reorder: Reorder,
    attention: Attention | None,
) -> tuple[SearchState, Cache]:
    """One position of every sentence."""
    # A row whose sentence is done may run on beyond its end; it takes in some token of the
    # vocabulary all the same.
    before_B11 = jnp.clip(state.position_B - 1, 0, state.tokens_BWL.shape[2] - 1)[:, None, None]
    last_BW = jnp.take_along_axis(state.tokens_BWL, before_B11, axis=2)[:, :, 0]
    logits_BWV, cache = step_fn(
        jnp.where(state.position_B[:, None] == 0, method.bos_id, last_BW), cache
    )
    state, parents_BW = method.advance(
        state, logits_BWV, None if attention is None else attention(cache)
    )
    return state, cache if parents_BW is None else reorder(cache, parents_BW)


def run(
    method: Method,
    step_fn: StepFn,
    cache: Cache,
    *,
    limit_B: Array,
    max_length: int,
    prefix_BP: Array | None = None,
    seed_B: Array | None = None,
    reorder: Reorder = gather_beams,
    attention: Attention | None = None,
    source_length: int = 0,
) -> SearchResult:
    """Search a batch from its start until every sentence is done."""
    if max_length < 1:
        raise UserError(f"max_length is {max_length}; expected at least 1.")
    B = limit_B.shape[0]
    state = method.start(
        jnp.minimum(limit_B, max_length),
        max_length=max_length,
        source_length=source_length,
        prefix_BP=jnp.zeros((B, 0), jnp.int32) if prefix_BP is None else prefix_BP,
        seed_B=jnp.arange(B) if seed_B is None else seed_B,
    )
    state, _ = jax.lax.while_loop(
        lambda carry: ~carry[0].done_B.all(),
        lambda carry: take_step(method, step_fn, *carry, reorder=reorder, attention=attention),
        (state, cache),
    )
    return results(state.finished, method.pad_id)
