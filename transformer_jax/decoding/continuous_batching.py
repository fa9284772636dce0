"""Continuous batching: when a sentence is done, a waiting sentence takes its row.

A static batch runs until its longest sentence is done. ``admit_and_decode`` refills rows as soon as
sentences finish. It is compiled once and has two callers. ``Engine.search`` passes it all sentences
of a file, block by block, and reads the results at the end. ``AsyncTranslator`` passes it the
sentences that have arrived and reads results every few steps.

Shape suffixes (B, W, ...): ``search.py``. In addition, Q is the number of sentences in a
block, and R is the number of rows refilled at a time.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from transformer_jax.decoding.search import (
    Method,
    SearchResult,
    SearchState,
    StepFn,
    results,
    take_step,
)

EMPTY = -1


class Rows(NamedTuple):
    """Rows of a batch with running or finished sentences, or a block of Q sentences waiting for
    rows, the last of which may be empty. B or Q is the first axis of every leaf.
    """

    number_B: Array
    """Number of the sentence in each row, or EMPTY."""
    state: SearchState
    cache: Any
    """KV cache. In a block, only its source part is used."""


class Found(NamedTuple):
    """Results of the sentences in R rows. R is the first axis of every leaf."""

    number_R: Array
    results: SearchResult


def admit_and_decode(
    method: Method, step_fn: StepFn, rows: Rows, block: Rows, max_steps: Array, stop_after: Array
) -> tuple[Rows, Found, Array]:
    """Assign a row to every sentence of the block, running steps until enough rows are idle. Then
    run up to ``max_steps`` steps, stopping early once ``stop_after`` more sentences (or all) are
    done.

    Returns the rows, the results of the (up to Q) sentences that the block replaced, and the number
    of steps. Each row's result is independent of other rows.

    Refilling waits until 1/16 of the rows are idle (1/8 on a GPU), or until enough rows are idle
    for the rest of the block. The loops have no branches, because a branch would copy the caches.
    """
    B = len(rows.number_B)
    least = max(1, B // (8 if jax.default_backend() == "gpu" else 16))
    num_sentences = (block.number_B != EMPTY).sum()

    def step(stepped: tuple[Rows, Array]) -> tuple[Rows, Array]:
        (number_B, state, cache), num_steps = stepped
        state, cache = take_step(method, step_fn, state, cache, reorder=type(cache).reorder)
        return Rows(number_B, state, cache), num_steps + 1

    def admit(carry: _Carry) -> _Carry:
        num_waiting, num_idle_before = num_sentences - carry.next, carry.rows.state.done_B.sum()

        def continues(stepped: tuple[Rows, Array]) -> Array:
            rows, num_steps = stepped
            num_idle = rows.state.done_B.sum()
            admits = num_idle < jnp.minimum(least, num_waiting)
            advances = num_steps - carry.num_steps < max_steps
            advances &= num_idle - num_idle_before < stop_after
            return (num_idle < B) & jnp.where(num_waiting > 0, admits, advances)

        rows, num_steps = jax.lax.while_loop(continues, step, (carry.rows, carry.num_steps))
        carry = carry._replace(rows=rows, num_steps=num_steps, has_advanced=num_waiting == 0)
        return _admit(carry, block, num_sentences)

    evicted = Found(jnp.full_like(block.number_B, EMPTY), block.state.finished)
    carry = jax.lax.while_loop(
        lambda carry: (carry.next < num_sentences) | ~carry.has_advanced,
        admit,
        _Carry(rows, jnp.int32(0), evicted, jnp.int32(0), max_steps <= 0),
    )
    found = Found(carry.evicted.number_R, results(carry.evicted.results, method.pad_id))
    return carry.rows, found, carry.num_steps


@partial(jax.jit, static_argnames="count")
def resized(rows: Rows, count: int) -> Rows:
    """Move the running sentences to ``count`` rows, which must be enough."""
    B, place_R = len(rows.number_B), jnp.arange(count)
    running_first_B = jnp.argsort(rows.state.done_B, stable=True)
    from_R = running_first_B[jnp.minimum(place_R, B - 1)]
    number_R, state, cache = jax.tree.map(lambda x: x[from_R], rows)
    number_R = jnp.where(place_R < B, number_R, EMPTY)
    return Rows(number_R, state._replace(done_B=state.done_B | (place_R >= B)), cache)


class _Carry(NamedTuple):
    rows: Rows
    num_steps: Array
    evicted: Found  # results from the refilled rows
    next: Array  # position of the next sentence in the block
    has_advanced: Array


def _admit(carry: _Carry, block: Rows, num_sentences: Array) -> _Carry:
    """Refill up to R idle rows: copy their results out and the next sentences in."""
    number_B, state, cache = carry.rows
    B, Q = len(number_B), len(block.number_B)
    R = min(Q, max(1, B // (4 if jax.default_backend() == "gpu" else 16)))
    rows_R = jnp.argsort(~state.done_B, stable=True)[:R]
    next_R = carry.next + jnp.arange(R)
    is_admitted_R = state.done_B[rows_R] & (next_R < num_sentences)
    new = jax.tree.map(lambda x: x[jnp.minimum(next_R, Q - 1)], block)
    evicted = jax.tree.map(lambda x: x[rows_R], Found(number_B, state.finished))
    into_R = jnp.where(is_admitted_R, rows_R, B)  # index B is out of range, so _put drops it
    rows = Rows(
        _put(number_B, into_R, new.number_B),
        _put(state, into_R, new.state),
        cache.replace_rows(into_R, new.cache),
    )
    return carry._replace(
        rows=rows,
        evicted=_put(carry.evicted, jnp.where(is_admitted_R, next_R, Q), evicted),
        next=carry.next + is_admitted_R.sum(dtype=jnp.int32),
    )


def _put(tree: Any, index_R: Array, values: Any) -> Any:
    """Set ``values`` at ``index_R`` in every leaf; out-of-range indices are dropped."""
    return jax.tree.map(lambda x, new: x.at[index_R].set(new, mode="drop"), tree, values)
