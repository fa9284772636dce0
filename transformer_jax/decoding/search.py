"""Model-independent search: the state of hypotheses and the loop over ``step_fn(tokens, cache)``.

``beam_search.py`` and ``sampling.py`` choose the tokens; ``continuous_batching.py`` refills the
rows of finished sentences.

Shape letters: B sentences, W beam width, V vocabulary, L positions, N returned hypotheses (N = W),
P prefix positions, C candidates per sentence, K tokens considered per hypothesis, R rows (B * W, or
a subset of B).
Log-probabilities and scores are float32 throughout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from transformer_jax.decoding.constraints import IMPOSSIBLE, Constraints
from transformer_jax.decoding.lexical_constraints import start_progress
from transformer_jax.decoding.logits import log_sum_exp
from transformer_jax.decoding.ranking import ranking_score
from transformer_jax.errors import UserError
from transformer_jax.settings.checks import Count
from transformer_jax.settings.config import SearchSettings

Cache = Any
StepFn = Callable[[Array, Cache], tuple[Array, Cache]]
Reorder = Callable[[Cache, Array], Cache]

NOT_FORCED = -1
# Internal score of a sentence whose logits were NaN; finite, so that it can be sorted.
_INVALID_SCORE = 1e9


class Sentence(NamedTuple):
    """A sentence to translate."""

    tokens: Sequence[int]
    """Source tokens, fewer than ``Engine.max_source_length``. EOS is appended if they lack it."""
    prefix: Sequence[int] = ()
    """Target tokens that the translation must begin with."""
    seed: int = 0
    """Sampling seed of the sentence."""
    num_hypotheses: int = 1
    """Number of hypotheses to find, at most ``decoding.beam_size``."""
    terms: Any = None
    """Terms that the translation must contain (beam search only): a ``term_table``, or None."""


class Hypothesis(NamedTuple):
    """A translation as token ids, with its scores."""

    tokens: list[int]
    """Target tokens without EOS."""
    score: float
    log_prob: float
    token_log_probs: list[float]
    """Log-probabilities of ``tokens``, then of EOS."""


class SearchResult(NamedTuple):
    """Finished hypotheses, best first. An empty slot has score -inf and length 0. If a sentence's
    logits are NaN or +inf at any step, all its slots have score NaN and length 0.
    """

    tokens_BNL: Array
    """int32: the tokens, EOS, then PAD."""
    scores_BN: Array
    """float32: see ``ranking_score``."""
    log_probs_BN: Array
    """float32: sum of the tokens' log-probabilities, EOS included."""
    lengths_BN: Array
    """int32: number of tokens, EOS included."""
    token_log_probs_BNL: Array
    """float32: log-probability of each token given the previous tokens, EOS included; then 0."""


class Beams(NamedTuple):
    """W live hypotheses for each of B sentences, or candidates for them."""

    tokens_BWL: Array
    token_log_probs_BWL: Array
    log_probs_BW: Array
    """IMPOSSIBLE marks a slot without a live hypothesis."""
    progress: Any = None
    """``TermProgress``: which of the sentence's terms the hypotheses contain. None: no terms."""


class Continuations(NamedTuple):
    """C continuations of each sentence's live hypotheses, by one token each."""

    parents_BC: Array | None
    """The hypotheses that are continued. None: each of them, in order."""
    tokens_BC: Array
    token_log_probs_BC: Array
    log_probs_BC: Array
    """Log-probabilities with the new token."""


class SearchState(NamedTuple):
    """B sentences in progress, each at its own position; every leaf has B as its first axis."""

    position_B: Array
    limit_B: Array
    """Maximum length, EOS included; only EOS is allowed at the last position."""
    prefix_BP: Array
    """Tokens that the target must begin with, then at least one NOT_FORCED."""
    seed_B: Array
    """Sampling seed of each sentence."""
    num_hypotheses_B: Array
    """Beam search stops once this many hypotheses are final; any others may not be the best."""
    live: Beams
    finished: SearchResult
    done_B: Array
    num_ended_B: Array
    """Number of hypotheses that have finished, for beam search with ``patience``."""
    terms_BKAM: Array | None = None
    """Terms of each sentence, for beam search (``term_table``). None: no terms."""


class NextToken(NamedTuple):
    """Constrained logits of the next token for each of R = B * W hypotheses."""

    logits_RV: Array
    """float32; IMPOSSIBLE for tokens that may not come next, unless one is forced."""
    normalizer_R1: Array
    """The log-softmax is ``logits_RV - normalizer_R1``."""
    forced_R: Array
    """The only allowed token (from the prefix, or EOS at the last position), or NOT_FORCED."""


@dataclass(frozen=True, kw_only=True)
class SearchMethod(SearchSettings, ABC):
    """Base class of ``BeamSearch`` and ``Sampling``. All settings are static under ``jax.jit``.

    Adds token ids and constraints to the settings of a search, which ``DecodingConfig`` shares.
    """

    bos_id: Count
    """First decoder input of every target."""
    eos_id: Count
    """Ends every target."""
    pad_id: Count
    """Padding after EOS; never generated."""
    constraints: Constraints = Constraints()
    """Rules for the next token."""
    unscored_prefix_length: Count = 0
    """Number of tokens at the start of each prefix whose log-probability counts as 0, such as the
    language that a many-to-many model translates to.
    """

    # True if beams never mix. Otherwise the search starts with one empty hypothesis, because others
    # would be duplicates.
    has_independent_beams = False

    @abstractmethod
    def advance(self, state: SearchState, scores: NextToken) -> tuple[SearchState, Array | None]:
        """Add one token to every live hypothesis. Returns the state and each beam's parent (None:
        the beam itself). Sets ``done_B`` if no live hypothesis can improve the result.
        """

    def start(
        self,
        limit_B: Array,
        *,
        max_length: int = 0,
        prefix_BP: Array,
        seed_B: Array,
        num_hypotheses_B: Array | None = None,
        terms_BKAM: Array | None = None,
    ) -> SearchState:
        """Return the initial search state, for hypotheses of up to ``max_length`` tokens (default:
        the width of ``prefix_BP``). Sentences whose ``limit_B`` is 0 are skipped. Beam search stops
        once it has the ``num_hypotheses_B`` best (default: W); any others may not be the best.
        """
        B = limit_B.shape[0]
        W = self.beam_size
        L = max_length or prefix_BP.shape[1]
        progress = None if terms_BKAM is None else start_progress(terms_BKAM, limit_B, W)
        num_live = W if self.has_independent_beams else 1
        tokens_BWL = jnp.full((B, W, L), self.pad_id, jnp.int32)
        zeros_BWL = jnp.zeros_like(tokens_BWL, jnp.float32)
        impossible_BW = jnp.full((B, W), jnp.float32(IMPOSSIBLE))
        if self.pad_id != self.eos_id:
            prefix_BP = jnp.where(prefix_BP == self.pad_id, NOT_FORCED, prefix_BP)
        live_BW = jnp.broadcast_to(
            jnp.where(jnp.arange(W) < num_live, jnp.float32(0), IMPOSSIBLE), (B, W)
        )
        return SearchState(
            position_B=jnp.zeros(B, jnp.int32),
            limit_B=limit_B.astype(jnp.int32),
            prefix_BP=jnp.pad(
                prefix_BP.astype(jnp.int32), ((0, 0), (0, 1)), constant_values=NOT_FORCED
            ),
            seed_B=seed_B.astype(jnp.uint32),
            num_hypotheses_B=jnp.full(B, W)
            if num_hypotheses_B is None
            else jnp.clip(num_hypotheses_B, 1, W),
            live=Beams(tokens_BWL, zeros_BWL, live_BW, progress),
            finished=SearchResult(
                tokens_BWL, impossible_BW, impossible_BW, jnp.zeros((B, W), jnp.int32), zeros_BWL
            ),
            done_B=limit_B <= 0,
            num_ended_B=jnp.zeros(B, jnp.int32),
            terms_BKAM=terms_BKAM,
        )


def gather_beams(tree: Any, parents_BW: Array) -> Any:
    """Replace beam w of every leaf ``[B, W, ...]`` with a copy of beam ``parents_BW[:, w]``."""

    def gather(x: Array) -> Array:
        return jnp.take_along_axis(
            x, parents_BW.reshape(parents_BW.shape + (1,) * (x.ndim - 2)), axis=1, mode="clip"
        )

    return jax.tree.map(gather, tree)


def pick(x_BC: Array, index_BN: Array) -> Array:
    """Return ``x_BC[b, index_BN[b, n]]``, for few columns: a masked sum, which XLA merges with its
    neighbors. A gather would be several operations on a CPU.
    """
    is_picked_BNC = index_BN[:, :, None] == jnp.arange(x_BC.shape[1])[None, None]
    return jnp.where(is_picked_BNC, x_BC[:, None], 0).sum(axis=2, dtype=x_BC.dtype)


def search(
    method: SearchMethod,
    step_fn: StepFn,
    cache: Cache,
    *,
    limit_B: Array,
    max_length: int,
    prefix_BP: Array | None = None,
    seed_B: Array | None = None,
    reorder: Reorder = gather_beams,
) -> SearchResult:
    """Search a batch of sentences; each result is independent of other sentences.

    Args:
      method: ``BeamSearch(...)`` or ``Sampling(...)``.
      step_fn: ``step_fn(tokens_BW, cache)`` takes each beam's last token (at first BOS) and returns
        the next token's ``(logits_BWV, cache)``.
      cache: a pytree that keeps its structure, shapes and types from step to step.
      limit_B: maximum length of each sentence's results, EOS included, up to ``max_length``; 0
        skips the sentence. Only EOS is allowed at the last position, so that every hypothesis ends.
      max_length: length of the result's arrays; static under ``jax.jit``.
      prefix_BP: tokens that the targets must begin with, padded with -1 or PAD. Their
        log-probabilities count toward the scores, unlike in t5x.
      seed_B: seed of each sentence for ``Sampling`` (default: its index in the batch).
      reorder: ``reorder(cache, parents_BW)`` makes beam w of sentence b continue beam
        ``parents_BW[b, w]``. The default gathers axis 1 of every leaf.

    Raises:
      UserError: EOS is outside the vocabulary; an array has the wrong shape.
    """
    limit_B = jnp.asarray(limit_B)
    if limit_B.ndim != 1:
        raise UserError(
            f"limit_B has shape {limit_B.shape}; expected one axis: the maximum length of each "
            "sentence, such as jnp.full(num_sentences, 50)."
        )
    B = limit_B.shape[0]
    prefix_BP = jnp.zeros((B, 0), jnp.int32) if prefix_BP is None else jnp.asarray(prefix_BP)
    seed_B = jnp.arange(B) if seed_B is None else jnp.asarray(seed_B)
    _check_shape("prefix_BP", prefix_BP, (B,), ndim=2)
    _check_shape("seed_B", seed_B, (B,), ndim=1)
    for name, array in {"limit_B": limit_B, "prefix_BP": prefix_BP, "seed_B": seed_B}.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise UserError(f"{name} is {array.dtype}; expected integers.")
    if isinstance(max_length, int) and max_length < 1:
        raise UserError(f"max_length is {max_length}; expected a positive number of tokens.")
    _check_step(method, step_fn, cache, B, needs_beams=reorder is gather_beams)
    state = method.start(
        jnp.minimum(limit_B, max_length),
        max_length=max_length,
        prefix_BP=prefix_BP,
        seed_B=seed_B,
    )
    state, _ = jax.lax.while_loop(
        lambda carry: ~carry[0].done_B.all(),
        lambda carry: take_step(method, step_fn, *carry, reorder=reorder),
        (state, cache),
    )
    return results(state.finished, method.pad_id)


def _check_shape(name: str, x: Any, leading: tuple[int, ...], ndim: int | None = None) -> None:
    """Check the first axes (sentences, beams) and the number of axes."""
    shape = getattr(x, "shape", ())
    if shape[: len(leading)] != leading or ndim not in (None, len(shape)):
        raise UserError(
            f"{name} has shape {shape}; expected {ndim or 'any number of'} axes that begin with "
            f"{leading}, the number of sentences{' and beams' if len(leading) > 1 else ''}."
        )


def _check_step(
    method: SearchMethod, step_fn: StepFn, cache: Cache, B: int, *, needs_beams: bool
) -> None:
    """Check the logits and the cache that ``step_fn`` returns, without running it."""
    tokens_BW = jax.ShapeDtypeStruct((B, method.beam_size), jnp.int32)
    for leaf in jax.tree.leaves(cache) if needs_beams else []:
        _check_shape("An array of the cache", leaf, tokens_BW.shape)
    outputs = jax.eval_shape(step_fn, tokens_BW, cache)
    if not (isinstance(outputs, tuple) and len(outputs) == 2):
        raise UserError(
            f"step_fn returns {_describe_tree(outputs)}; expected a tuple (logits_BWV, cache)."
        )
    logits_BWV, new_cache = outputs
    _check_shape("The first result of step_fn, the logits,", logits_BWV, tokens_BW.shape, ndim=3)
    before = _describe_tree(cache)
    after = _describe_tree(new_cache)
    if before != after:
        raise UserError(
            f"step_fn returns the cache {after}; expected the structure, shapes and types of its "
            f"argument, {before}."
        )


def _describe_tree(tree: Any) -> str:
    """Return the structure, shapes and types of a tree of arrays."""
    return str(jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", tree))


def take_step(
    method: SearchMethod,
    step_fn: StepFn,
    state: SearchState,
    cache: Cache,
    *,
    reorder: Reorder,
) -> tuple[SearchState, Cache]:
    """Decode one token for every sentence."""
    # A row whose sentence is done may run past its end; its input must stay in the vocabulary.
    tokens_BWL = state.live.tokens_BWL
    previous_B11 = jnp.clip(state.position_B - 1, 0, tokens_BWL.shape[2] - 1)[:, None, None]
    last_BW = jnp.take_along_axis(tokens_BWL, previous_B11, axis=2)[:, :, 0]
    tokens_BW = jnp.where(state.position_B[:, None] == 0, method.bos_id, last_BW)
    logits_BWV, cache = step_fn(tokens_BW, cache)
    logits_BWV = jnp.asarray(logits_BWV)
    if method.eos_id >= logits_BWV.shape[-1]:
        raise UserError(
            f"eos_id is {method.eos_id}; expected a token id in the vocabulary of "
            f"{logits_BWV.shape[-1]} tokens, because no hypothesis could end."
        )

    scores = _next_token(method, state, logits_BWV)
    is_invalid_BW = ~(scores.normalizer_R1 < jnp.inf).reshape(tokens_BW.shape)
    is_invalid_BW &= state.live.log_probs_BW > IMPOSSIBLE / 2
    is_invalid_B = is_invalid_BW.any(axis=1) & ~state.done_B
    new_state, parents_BW = method.advance(state, scores)
    scores_BN = jnp.where(is_invalid_B[:, None], _INVALID_SCORE, new_state.finished.scores_BN)
    length_B = state.position_B + 1
    new_state = new_state._replace(
        position_B=jnp.minimum(length_B, state.limit_B),  # idle rows never overflow
        finished=new_state.finished._replace(scores_BN=scores_BN),
        done_B=state.done_B | new_state.done_B | (length_B >= state.limit_B) | is_invalid_B,
    )
    return new_state, cache if parents_BW is None else reorder(cache, parents_BW)


def _next_token(method: SearchMethod, state: SearchState, logits_BWV: Array) -> NextToken:
    B, W, V = logits_BWV.shape
    logits_RV = logits_BWV.reshape(B * W, V).astype(jnp.float32)
    # All logits of a row may be -inf; the normalizer must not turn them into NaN.
    normalizer_R1 = jnp.maximum(log_sum_exp(logits_RV), IMPOSSIBLE)
    position_R = jnp.repeat(state.position_B, W)
    position_B1 = state.position_B[:, None]
    forced_B1 = jnp.take_along_axis(state.prefix_BP, position_B1, axis=1, mode="clip")
    is_last_B = state.position_B + 1 >= state.limit_B
    forced_R = jnp.repeat(jnp.where(is_last_B, method.eos_id, forced_B1[:, 0]), W)
    if method.unscored_prefix_length:
        forced_logit_R1 = jnp.take_along_axis(logits_RV, jnp.maximum(forced_R[:, None], 0), axis=1)
        is_unscored_R = (forced_R >= 0) & (position_R < method.unscored_prefix_length)
        normalizer_R1 = jnp.where(is_unscored_R[:, None], forced_logit_R1, normalizer_R1)
    logits_RV = method.constraints.apply(
        logits_RV,
        tokens_RL=jax.lax.collapse(state.live.tokens_BWL, 0, 2),
        position_R=position_R,
        forced_R=forced_R,
        eos_id=method.eos_id,
        pad_id=method.pad_id,
    )
    return NextToken(logits_RV, normalizer_R1, forced_R)


def extend(live: Beams, position_B: Array, added: Continuations) -> Beams:
    """Add the tokens of ``added`` to copies of the hypotheses that they continue."""
    old = live.tokens_BWL, live.token_log_probs_BWL
    progress = live.progress
    if added.parents_BC is not None:
        old = gather_beams(old, added.parents_BC)
        progress = None  # depends on the tokens as well
    tokens_BWL, token_log_probs_BWL = old
    is_position_B1L = (jnp.arange(tokens_BWL.shape[-1])[None] == position_B[:, None])[:, None]
    return Beams(
        jnp.where(is_position_B1L, added.tokens_BC[:, :, None], tokens_BWL),
        jnp.where(is_position_B1L, added.token_log_probs_BC[:, :, None], token_log_probs_BWL),
        added.log_probs_BC,
        progress,
    )


def add_tokens(
    method: SearchMethod, state: SearchState, scores: NextToken, tokens_R: Array
) -> SearchState:
    """Add one token to every hypothesis: the forced one, or the chosen ``tokens_R``. A hypothesis
    is finished if this is EOS.
    """
    logits_RV, normalizer_R1, forced_R = scores
    is_forced_R = forced_R >= 0
    tokens_R = jnp.where(is_forced_R, forced_R, tokens_R)
    logit_R1 = jnp.take_along_axis(logits_RV, tokens_R[:, None], axis=1)
    is_possible_R1 = (logit_R1 > IMPOSSIBLE / 2) | is_forced_R[:, None]
    token_log_probs_R1 = jnp.where(is_possible_R1, logit_R1 - normalizer_R1, IMPOSSIBLE)
    live_BW = state.live.log_probs_BW
    tokens_BW = tokens_R.reshape(live_BW.shape)
    token_log_probs_BW = token_log_probs_R1.reshape(live_BW.shape)
    log_probs_BW = jnp.maximum(live_BW + token_log_probs_BW, IMPOSSIBLE)
    added = Continuations(None, tokens_BW, token_log_probs_BW, log_probs_BW)
    ends_BW = tokens_BW == method.eos_id
    finished = finish(method, state, added, ends_BW)
    added = added._replace(log_probs_BC=jnp.where(ends_BW, IMPOSSIBLE, log_probs_BW))
    return state._replace(
        live=extend(state.live, state.position_B, added),
        finished=finished,
        done_B=(added.log_probs_BC <= IMPOSSIBLE / 2).all(axis=1),
    )


def finish(
    method: SearchMethod, state: SearchState, added: Continuations, ends_BC: Array
) -> SearchResult:
    """Keep the N best of finished and newly ended hypotheses; ties go to the older hypothesis."""
    old = state.finished
    N = old.scores_BN.shape[1]
    may_end_BC = ends_BC & (added.log_probs_BC > IMPOSSIBLE / 2) & ~state.done_B[:, None]
    length_B = state.position_B + 1
    scores_BC = ranking_score(added.log_probs_BC, length_B, method)
    scores_BX = [old.scores_BN, jnp.where(may_end_BC, scores_BC, IMPOSSIBLE)]
    scores_BN, best_BN = jax.lax.top_k(jnp.concatenate(scores_BX, axis=1), N)
    is_new_BN = best_BN >= N
    index_BN = jnp.maximum(best_BN - N, 0)
    best_added = jax.tree.map(lambda x: pick(x, index_BN), added)
    if added.parents_BC is None:
        best_added = best_added._replace(parents_BC=index_BN)
    new = extend(state.live, state.position_B, best_added)
    index_BN = jnp.minimum(best_BN, N - 1)
    old_tokens_BNL, old_token_log_probs_BNL = gather_beams(
        (old.tokens_BNL, old.token_log_probs_BNL), index_BN
    )
    return SearchResult(
        jnp.where(is_new_BN[:, :, None], new.tokens_BWL, old_tokens_BNL),
        scores_BN,
        jnp.where(is_new_BN, new.log_probs_BW, pick(old.log_probs_BN, index_BN)),
        jnp.where(is_new_BN, length_B[:, None], pick(old.lengths_BN, index_BN)),
        jnp.where(is_new_BN[:, :, None], new.token_log_probs_BWL, old_token_log_probs_BNL),
    )


def results(finished: SearchResult, pad_id: int) -> SearchResult:
    """Convert finished hypotheses to their public form, which marks empty and invalid slots."""
    tokens_BNL, scores_BN, log_probs_BN, lengths_BN, token_log_probs_BNL = finished
    is_invalid_BN = scores_BN == _INVALID_SCORE
    is_filled_BN = (scores_BN > IMPOSSIBLE / 2) & ~is_invalid_BN
    empty_score_BN = jnp.where(is_invalid_BN, jnp.nan, -jnp.inf)
    return SearchResult(
        jnp.where(is_filled_BN[:, :, None], tokens_BNL, pad_id),
        jnp.where(is_filled_BN, scores_BN, empty_score_BN),
        jnp.where(is_filled_BN, log_probs_BN, empty_score_BN),
        jnp.where(is_filled_BN, lengths_BN, 0),
        jnp.where(is_filled_BN[:, :, None], token_log_probs_BNL, 0),
    )
