"""What all searches share: the state of hypotheses, and the loop over ``step_fn(tokens, cache)``.

Nothing here knows the model. ``beam_search.py`` and ``sampling.py`` choose the tokens;
``continuous_batching.py`` hands the rows of finished sentences to waiting ones.

Letters: B sentences, W beam width, V vocabulary, L positions, N hypotheses returned, P positions of
a prefix, C candidates of one sentence, R rows (B * W, or some of B). Log-probabilities and scores
are float32 throughout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from transformer_jax.decoding.constraints import IMPOSSIBLE, Constraints, History
from transformer_jax.errors import UserError

Cache = Any
StepFn = Callable[[Array, Cache], tuple[Array, Cache]]
Reorder = Callable[[Cache, Array], Cache]
Attention = Callable[[Cache], Array]

NOT_FORCED = -1
# Score of a sentence whose logits were NaN, until ``results``; finite, so that it can be sorted.
_INVALID = 1e9


class SearchResult(NamedTuple):
    """Finished hypotheses, best first. A slot that no hypothesis filled has score -inf and length
    0. A sentence whose logits were NaN (or +inf) at any step has score NaN and length 0 in all
    slots.
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
    """B sentences in progress, each at its own position; every leaf has B as its first axis."""

    position_B: Array
    limit_B: Array
    """Longest length, EOS included: at the position before it only EOS is allowed."""
    prefix_BP: Array
    """Tokens that the target must begin with, then NOT_FORCED."""
    seed_B: Array
    """Makes the random numbers of sentences differ (sampling)."""
    tokens_BWL: Array
    token_log_probs_BWL: Array
    log_probs_BW: Array
    """The model's own log-probability of each live hypothesis; IMPOSSIBLE: none lives there."""
    ranks_BW: Array
    """What live hypotheses are compared by: ``log_probs_BW`` unless a penalty changes it."""
    coverage_BWS: Array
    """Attention that each source position got so far; S = 0 without ``attention``."""
    finished: SearchResult
    done_B: Array


class NextToken(NamedTuple):
    """What the model and the constraints say of the token after each of R = B * W hypotheses."""

    logits_RV: Array
    """float32."""
    normalizer_R1: Array
    """The log-softmax is ``logits_RV - normalizer_R1``."""
    choosable_RV: Array
    """Logits to choose by: the constraints' adjustments included."""
    history: History


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """How a search chooses tokens: ``BeamSearch`` or ``Sampling``. Settings are static under
    ``jax.jit``.
    """

    bos_id: int
    """Stands before every target."""
    eos_id: int
    """Ends every target."""
    pad_id: int
    """Stands after the end of every target and is never generated."""
    num_hypotheses: int | None = None
    """Hypotheses returned for each sentence; None: as many as there are beams or samples."""
    constraints: Constraints = field(default_factory=Constraints)

    def __post_init__(self) -> None:
        N, W = self.num_hypotheses, self.num_beams
        if N is not None and not 1 <= N <= W:
            raise UserError(f"num_hypotheses is {N}; expected 1 to {W}, as many as are searched.")

    @property
    @abstractmethod
    def num_beams(self) -> int:
        """W."""

    @property
    @abstractmethod
    def num_live(self) -> int:
        """Beams that an empty hypothesis begins in."""

    @abstractmethod
    def advance(
        self, state: SearchState, scores: NextToken, attention_BWS: Array | None
    ) -> tuple[SearchState, Array | None]:
        """Add one token to every live hypothesis. Also gives the parent that each beam continues
        (None: itself). Sets ``done_B`` where no live hypothesis can improve the result.
        """

    def check(self, vocab_size: int) -> None:
        """``UserError`` for token ids outside the vocabulary."""
        ids = [("bos_id", self.bos_id), ("eos_id", self.eos_id), ("pad_id", self.pad_id)]
        suppressed = [("constraints.suppress", token) for token in self.constraints.suppress]
        for name, token in ids + suppressed:
            if not 0 <= token < vocab_size:
                raise UserError(
                    f"{name} is {token}; expected a token id of the vocabulary, "
                    f"0..{vocab_size - 1}."
                )

    def start(
        self,
        limit_B: Array,
        *,
        max_length: int,
        prefix_BP: Array,
        seed_B: Array,
        source_length: int = 0,
    ) -> SearchState:
        """Sentences of which nothing is written yet; ``limit_B`` 0: nothing to search."""
        B, W, L = limit_B.shape[0], self.num_beams, max_length
        N = self.num_hypotheses or W
        live_BW = jnp.broadcast_to(
            jnp.where(jnp.arange(W) < self.num_live, jnp.float32(0), IMPOSSIBLE), (B, W)
        )
        return SearchState(
            position_B=jnp.zeros(B, jnp.int32),
            limit_B=limit_B.astype(jnp.int32),
            prefix_BP=prefix_BP.astype(jnp.int32),
            seed_B=seed_B.astype(jnp.uint32),
            tokens_BWL=jnp.full((B, W, L), self.pad_id, jnp.int32),
            token_log_probs_BWL=jnp.zeros((B, W, L), jnp.float32),
            log_probs_BW=live_BW,
            ranks_BW=live_BW,
            coverage_BWS=jnp.zeros((B, W, source_length), jnp.float32),
            finished=SearchResult(
                jnp.full((B, N, L), self.pad_id, jnp.int32),
                jnp.full((B, N), IMPOSSIBLE, jnp.float32),
                jnp.full((B, N), IMPOSSIBLE, jnp.float32),
                jnp.zeros((B, N), jnp.int32),
                jnp.zeros((B, N, L), jnp.float32),
            ),
            done_B=limit_B <= 0,
        )


def gather_beams(tree: Any, parents_BW: Array) -> Any:
    """Beam w of every leaf ``[B, W, ...]`` becomes a copy of its beam ``parents_BW[:, w]``."""

    def gather(x: Array) -> Array:
        return jnp.take_along_axis(
            x, parents_BW.reshape(parents_BW.shape + (1,) * (x.ndim - 2)), axis=1
        )

    return jax.tree.map(gather, tree)


def search(
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
) -> SearchResult:
    """Search a batch of sentences, each by itself: no result depends on the others.

    Args:
      method: ``BeamSearch(...)`` or ``Sampling(...)``; says how tokens are chosen.
      step_fn: ``step_fn(tokens_BW, cache)`` gives ``(logits_BWV, cache)`` for the token that
        follows each beam's last one (at first BOS).
      cache: a pytree that keeps its structure, shapes and types from step to step.
      limit_B: longest length of each sentence's results, EOS included, at most ``max_length``; 0:
        nothing to search. At the last position only EOS is allowed, so that every hypothesis ends.
      max_length: length of the result's arrays; static under ``jax.jit``.
      prefix_BP: tokens that the targets must begin with, -1 after their ends.
      seed_B: for ``Sampling``, a number that makes a sentence's samples its own (default: its row).
      reorder: ``reorder(cache, parents_BW)`` makes beam w continue what was beam
        ``parents_BW[b, w]``. By default axis 1 of every leaf is gathered.
      attention: ``attention(cache)`` gives where the last step looked: [B, W, S], 0 for padding.
        ``coverage_penalty`` needs it.

    Raises:
      UserError: a beam wider than the vocabulary, a token id outside it, a ``max_length`` below 1,
        a ``coverage_penalty`` without ``attention``.
    """
    if max_length < 1:
        raise UserError(f"max_length is {max_length}; expected at least 1.")
    limit_B = jnp.asarray(limit_B)
    B = limit_B.shape[0]
    state = method.start(
        jnp.minimum(limit_B, max_length),
        max_length=max_length,
        prefix_BP=jnp.zeros((B, 0), jnp.int32) if prefix_BP is None else prefix_BP,
        seed_B=jnp.arange(B) if seed_B is None else seed_B,
        source_length=0 if attention is None else attention(cache).shape[2],
    )
    state, _ = jax.lax.while_loop(
        lambda carry: ~carry[0].done_B.all(),
        lambda carry: take_step(method, step_fn, *carry, reorder=reorder, attention=attention),
        (state, cache),
    )
    return results(state.finished, method.pad_id)


def take_step(
    method: Method,
    step_fn: StepFn,
    state: SearchState,
    cache: Cache,
    *,
    reorder: Reorder,
    attention: Attention | None,
) -> tuple[SearchState, Cache]:
    """Write one token of every sentence."""
    # A row whose sentence is done may run beyond its end; its input must stay in the vocabulary.
    before_B11 = jnp.clip(state.position_B - 1, 0, state.tokens_BWL.shape[2] - 1)[:, None, None]
    last_BW = jnp.take_along_axis(state.tokens_BWL, before_B11, axis=2)[:, :, 0]
    tokens_BW = jnp.where(state.position_B[:, None] == 0, method.bos_id, last_BW)
    logits_BWV, cache = step_fn(tokens_BW, cache)
    method.check(logits_BWV.shape[-1])

    scores = _next_token(method, state, logits_BWV)
    is_invalid_BW = ~(scores.normalizer_R1 < jnp.inf).reshape(state.ranks_BW.shape)
    is_invalid_BW &= state.ranks_BW > IMPOSSIBLE / 2
    invalid_B = is_invalid_BW.any(axis=1) & ~state.done_B
    new, parents_BW = method.advance(state, scores, None if attention is None else attention(cache))
    scores_BN = jnp.where(invalid_B[:, None], _INVALID, new.finished.scores_BN)
    length_B = state.position_B + 1
    new = new._replace(
        position_B=length_B,
        finished=new.finished._replace(scores_BN=scores_BN),
        done_B=state.done_B | new.done_B | (length_B >= state.limit_B) | invalid_B,
    )
    return new, cache if parents_BW is None else reorder(cache, parents_BW)


def _next_token(method: Method, state: SearchState, logits_BWV: Array) -> NextToken:
    B, W, V = logits_BWV.shape
    logits_RV = logits_BWV.reshape(B * W, V).astype(jnp.float32)
    # A row may forbid every token (-inf throughout); its normaliser must not turn that into NaN.
    normalizer_R1 = jnp.maximum(jax.nn.logsumexp(logits_RV, axis=-1, keepdims=True), IMPOSSIBLE)
    history = History(
        state.tokens_BWL.reshape(B * W, -1),
        jnp.repeat(state.position_B, W),
        jnp.repeat(_forced_tokens(state, method.eos_id), W),
    )
    choosable_RV = method.constraints.adjust(logits_RV, normalizer_R1, history)
    return NextToken(logits_RV, normalizer_R1, choosable_RV, history)


def _forced_tokens(state: SearchState, eos_id: int) -> Array:
    """int32 [B]: the only token allowed at this position (the prefix's; EOS at the last one), or
    NOT_FORCED.
    """
    position_B1, width = state.position_B[:, None], state.prefix_BP.shape[1]
    forced_B = jnp.full_like(state.position_B, NOT_FORCED)
    if width:
        prefix_B1 = jnp.take_along_axis(
            state.prefix_BP, jnp.minimum(position_B1, width - 1), axis=1
        )
        forced_B = jnp.where(state.position_B < width, prefix_B1[:, 0], forced_B)
    return jnp.where(state.position_B + 1 >= state.limit_B, eos_id, forced_B)


def extend(
    state: SearchState, parents_BC: Array | None, tokens_BC: Array, token_log_probs_BC: Array
) -> tuple[Array, Array]:
    """Tokens and log-probabilities of candidates, each [B, C, L]: their parents' (None: beam c is
    candidate c's), and one more.
    """
    old = state.tokens_BWL, state.token_log_probs_BWL
    tokens_BCL, log_probs_BCL = old if parents_BC is None else gather_beams(old, parents_BC)
    here_B1L = (jnp.arange(tokens_BCL.shape[-1])[None] == state.position_B[:, None])[:, None]
    return (
        jnp.where(here_B1L, tokens_BC[:, :, None], tokens_BCL),
        jnp.where(here_B1L, token_log_probs_BC[:, :, None], log_probs_BCL),
    )


def keep_best(finished: SearchResult, new: SearchResult) -> SearchResult:
    """The N best of the N finished hypotheses and the new ones; of equals the older one."""
    both = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), finished, new)
    _, best_BN = jax.lax.top_k(both.scores_BN, finished.scores_BN.shape[1])
    return gather_beams(both, best_BN)


def results(finished: SearchResult, pad_id: int) -> SearchResult:
    """Finished hypotheses as users see them."""
    tokens_BNL, scores_BN, log_probs_BN, lengths_BN, token_log_probs_BNL = finished
    invalid_BN = scores_BN == _INVALID
    filled_BN = (scores_BN > IMPOSSIBLE / 2) & ~invalid_BN
    nothing_BN = jnp.where(invalid_BN, jnp.nan, -jnp.inf)
    return SearchResult(
        jnp.where(filled_BN[:, :, None], tokens_BNL, pad_id),
        jnp.where(filled_BN, scores_BN, nothing_BN),
        jnp.where(filled_BN, log_probs_BN, nothing_BN),
        jnp.where(filled_BN, lengths_BN, 0),
        jnp.where(filled_BN[:, :, None], token_log_probs_BNL, 0),
    )
