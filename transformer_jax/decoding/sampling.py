"""Sampling over ``step_fn(tokens, cache)``: independent draws from the model, by the same loop.
Letters as in ``search.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array

from transformer_jax.decoding.beam_search import top_k
from transformer_jax.decoding.constraints import Constraints, history_of
from transformer_jax.decoding.search import (
    IMPOSSIBLE,
    Cache,
    SearchResult,
    SearchState,
    StepFn,
    extend,
    keep_best,
    length_divisor,
    require_at_least,
    run,
    start_state,
)
from transformer_jax.errors import UserError

_LOWEST = -1e6  # of a possible token: its chance is 0 beside one at 0


@dataclass(frozen=True)
class Sampling:
    """How samples are drawn; ``sample`` says what the fields do."""

    bos_id: int
    eos_id: int
    pad_id: int
    num_samples: int = 1
    num_hypotheses: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    length_penalty: float = 0.6
    length_offset: float = 5.0
    constraints: Constraints = field(default_factory=Constraints)

    def __post_init__(self) -> None:
        if self.num_samples < 1 or not 1 <= (self.num_hypotheses or 1) <= self.num_samples:
            raise UserError(
                f"num_hypotheses is {self.num_hypotheses} and num_samples {self.num_samples}; "
                "expected 1 <= num_hypotheses <= num_samples."
            )
        require_at_least(0, length_penalty=self.length_penalty, length_offset=self.length_offset)
        if not self.temperature > 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise UserError(
                f"temperature is {self.temperature}, top_k {self.top_k}, top_p {self.top_p}; "
                "expected a temperature above 0, top_k of at least 0 (off), top_p in (0, 1]."
            )

    def start(
        self,
        limit_B: Array,
        *,
        max_length: int,
        source_length: int,
        prefix_BP: Array,
        seed_B: Array,
    ) -> SearchState:
        """One empty sample in every place."""
        return start_state(
            limit_B,
            num_beams=self.num_samples,
            num_live=self.num_samples,
            num_hypotheses=self.num_hypotheses or self.num_samples,
            max_length=max_length,
            source_length=0,
            prefix_BP=prefix_BP,
            seed_B=seed_B,
            pad_id=self.pad_id,
        )

    def advance(
        self, state: SearchState, logits_BWV: Array, attention_BWS: Array | None
    ) -> tuple[SearchState, None]:
        """One token more for every sample that has not ended."""
        B, W, V = logits_BWV.shape
        logits_RV = logits_BWV.reshape(B * W, V).astype(jnp.float32)
        normalizer_R1 = jnp.maximum(jax.nn.logsumexp(logits_RV, axis=-1, keepdims=True), IMPOSSIBLE)
        history = history_of(state, self.eos_id)
        choosable_RV = self.constraints.adjust(logits_RV, normalizer_R1, history)
        allowed_RV = self.constraints.allowed(
            jnp.arange(V)[None], history, eos_id=self.eos_id, pad_id=self.pad_id
        )
        drawn_R = self._draw(jnp.where(allowed_RV, choosable_RV, IMPOSSIBLE), self._keys(state))
        is_forced_R = history.forced_R >= 0
        tokens_R = jnp.where(is_forced_R, history.forced_R, drawn_R)
        chosen_R1 = tokens_R[:, None]
        possible_RV = allowed_RV & (choosable_RV > IMPOSSIBLE / 2)
        possible_R1 = jnp.take_along_axis(possible_RV, chosen_R1, axis=1) | is_forced_R[:, None]
        token_log_probs_R1 = jnp.take_along_axis(logits_RV, chosen_R1, axis=1) - normalizer_R1
        token_log_probs_BW = jnp.where(possible_R1, token_log_probs_R1, IMPOSSIBLE).reshape(B, W)
        tokens_BW = tokens_R.reshape(B, W)

        log_probs_BW = jnp.maximum(state.log_probs_BW + token_log_probs_BW, IMPOSSIBLE)
        tokens_BWL, token_log_probs_BWL = extend(state, None, tokens_BW, token_log_probs_BW)
        length_B = state.position_B + 1
        ends_BW = (
            (tokens_BW == self.eos_id) & (log_probs_BW > IMPOSSIBLE / 2) & ~state.done_B[:, None]
        )
        scores_BW = (
            log_probs_BW
            / length_divisor(length_B, self.length_penalty, self.length_offset)[:, None]
        )
        finished = keep_best(
            state.finished,
            SearchResult(
                tokens_BWL,
                jnp.where(ends_BW, scores_BW, IMPOSSIBLE),
                log_probs_BW,
                jnp.broadcast_to(length_B[:, None], ends_BW.shape),
                token_log_probs_BWL,
            ),
        )
        log_probs_BW = jnp.where(tokens_BW == self.eos_id, IMPOSSIBLE, log_probs_BW)
        all_ended_B = (log_probs_BW <= IMPOSSIBLE / 2).all(axis=1)
        state = state._replace(
            position_B=length_B,
            tokens_BWL=tokens_BWL,
            token_log_probs_BWL=token_log_probs_BWL,
            log_probs_BW=log_probs_BW,
            ranks_BW=log_probs_BW,
            finished=finished,
            done_B=state.done_B | (length_B >= state.limit_B) | all_ended_B,
        )
        return state, None

    def _keys(self, state: SearchState) -> Array:
        """A key for each sample and position of each sentence, whatever row the sentence is in."""
        start = jax.random.key(self.seed)

        def key(sentence: Array, position: Array, number: Array) -> Array:
            return jax.random.fold_in(
                jax.random.fold_in(jax.random.fold_in(start, sentence), number), position
            )

        of_samples = jax.vmap(key, in_axes=(None, None, 0))
        return jax.vmap(of_samples, in_axes=(0, 0, None))(
            state.seed_B, state.position_B, jnp.arange(self.num_samples)
        ).ravel()

    def _draw(self, values_RV: Array, keys_R: Array) -> Array:
        """One token a row: the largest of the logits plus Gumbel noise is a draw from their
        softmax.
        """
        # However cold, the likeliest token stays at 0 and what is possible far above what is not.
        temperature = max(self.temperature, float(jnp.finfo(jnp.float32).tiny))
        warmed_RV = (values_RV - values_RV.max(axis=1, keepdims=True)) / temperature
        warmed_RV = jnp.maximum(warmed_RV, _LOWEST)
        values_RK, tokens_RK = jnp.where(values_RV > IMPOSSIBLE / 2, warmed_RV, IMPOSSIBLE), None
        if self.top_k:
            values_RK, tokens_RK = top_k(values_RK, min(self.top_k, values_RK.shape[1]))
        elif self.top_p < 1:
            values_RK, tokens_RK = jax.lax.top_k(values_RK, values_RK.shape[1])
        if self.top_p < 1:
            chances_RK = jax.nn.softmax(values_RK, axis=-1)
            before_RK = jnp.cumsum(chances_RK, axis=-1) - chances_RK
            values_RK = jnp.where(before_RK < self.top_p, values_RK, IMPOSSIBLE)
        noise_RK = jax.vmap(lambda key: jax.random.gumbel(key, values_RK.shape[1:]))(keys_R)
        choice_R1 = jnp.argmax(values_RK + noise_RK, axis=-1)[:, None]
        return (
            choice_R1 if tokens_RK is None else jnp.take_along_axis(tokens_RK, choice_R1, axis=1)
        )[:, 0]


def sample(
    step_fn: StepFn,
    cache: Cache,
    *,
    batch_size: int,
    num_samples: int,
    max_length: int,
    bos_id: int,
    eos_id: int,
    pad_id: int,
    max_lengths_B: Array | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    seed_B: Array | None = None,
    length_penalty: float = 0.6,
    length_offset: float = 5.0,
    constraints: Constraints | None = None,
    prefix_BP: Array | None = None,
) -> SearchResult:
    """``num_samples`` independent translations of each sentence, drawn token by token; sorted by
    score, equals are possible.

    ``step_fn`` and the lengths are those of ``beam_search``; nothing is reordered, sample w stays
    in beam w.

    Args:
      temperature: logits are divided by it: below 1 likely tokens gain.
      top_k: draw from the likeliest k tokens only (Fan et al., 2018); 0: from all.
      top_p: draw from the fewest likeliest tokens whose probability reaches p (Holtzman et al.,
        2020), after ``top_k``.
      seed, seed_B: what is drawn depends on ``seed`` and on the sentence's own number in ``seed_B``
        (default: its row), not on the rest of the batch.

    Returns:
      Log-probabilities are the model's own: at temperature 1 and over the whole vocabulary.

    Raises:
      UserError: a number out of range.
    """
    method = Sampling(
        bos_id,
        eos_id,
        pad_id,
        num_samples=num_samples,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        length_penalty=length_penalty,
        length_offset=length_offset,
        constraints=constraints or Constraints(),
    )
    limit_B = jnp.full(batch_size, max_length) if max_lengths_B is None else max_lengths_B
    return run(
        method,
        step_fn,
        cache,
        limit_B=limit_B,
        max_length=max_length,
        prefix_BP=prefix_BP,
        seed_B=seed_B,
    )
