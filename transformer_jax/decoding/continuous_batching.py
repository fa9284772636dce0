"""Continuous batching: when a sentence is done, a waiting sentence takes its row.

A static batch runs until its longest sentence is done. ``admit_and_decode`` refills rows as soon as
sentences finish, in a loop on the device: the host neither waits for a result nor chooses the rows.
It learns the rows from the results, which it can read later.

Shape suffixes (B, W, ...): ``search.py``. In addition, Q is the number of sentences that are
encoded together, and R is the number of rows refilled at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from transformer_jax.decoding.search import (
    SearchMethod,
    SearchResult,
    SearchState,
    StepFn,
    results,
    take_step,
)


class Rows(NamedTuple):
    """Rows of a batch with running or finished sentences, or Q encoded sentences waiting for rows.
    B or Q is the first axis of every leaf.
    """

    state: SearchState
    cache: Any
    """KV cache. Of encoded sentences, only its source part is used."""


class Admitted(NamedTuple):
    """The rows of Q admitted sentences. Q is the first axis of every leaf."""

    row_Q: Array
    results: SearchResult
    """Results of the sentences that were in these rows before."""


class _RefillLoop(NamedTuple):
    """State of the loop over refills."""

    rows: Rows
    admitted: Admitted
    num_admitted: Array
    num_steps: Array
    has_decoded: Array
    """True once the steps after the last refill are done."""


def admit_and_decode(
    method: SearchMethod,
    step_fn: StepFn,
    rows: Rows,
    encoded: Rows,
    num_encoded: Array,
    max_steps: Array,
    stop_after: Array,
) -> tuple[Rows, Admitted, Array]:
    """Assign a row to each of the first ``num_encoded`` sentences of ``encoded``, running steps
    until enough rows are idle. Then run up to ``max_steps`` steps, stopping early once
    ``stop_after`` more sentences (or all) are done.

    Returns the rows, the rows of the sentences, and the number of steps. Each row's result is
    independent of other rows.

    Refilling waits until 1/16 of the rows are idle (1/8 on a GPU), or until enough rows are idle
    for the remaining sentences. The loops have no branches, because a branch would copy the caches.
    """
    B = len(rows.state.done_B)
    Q = len(encoded.state.done_B)
    min_idle = max(1, B // (8 if jax.default_backend() == "gpu" else 16))

    def step(carry: tuple[Rows, Array]) -> tuple[Rows, Array]:
        (state, cache), num_steps = carry
        state, cache = take_step(method, step_fn, state, cache, reorder=type(cache).reorder)
        return Rows(state, cache), num_steps + 1

    def decode_and_refill(loop: _RefillLoop) -> _RefillLoop:
        num_waiting = num_encoded - loop.num_admitted
        num_idle_before = loop.rows.state.done_B.sum()

        def should_continue(carry: tuple[Rows, Array]) -> Array:
            rows, num_steps = carry
            num_idle = rows.state.done_B.sum()
            needs_rows = num_idle < jnp.minimum(min_idle, num_waiting)
            has_steps = num_steps - loop.num_steps < max_steps
            has_steps &= num_idle - num_idle_before < stop_after
            return (num_idle < B) & jnp.where(num_waiting > 0, needs_rows, has_steps)

        rows, num_steps = jax.lax.while_loop(should_continue, step, (loop.rows, loop.num_steps))
        loop = loop._replace(rows=rows, num_steps=num_steps, has_decoded=num_waiting == 0)
        return _refill(loop, encoded, num_encoded)

    loop = _RefillLoop(
        rows=rows,
        admitted=Admitted(jnp.zeros(Q, jnp.int32), encoded.state.finished),
        num_admitted=jnp.int32(0),
        num_steps=jnp.int32(0),
        has_decoded=max_steps <= 0,
    )
    loop = jax.lax.while_loop(
        lambda loop: (loop.num_admitted < num_encoded) | ~loop.has_decoded, decode_and_refill, loop
    )
    previous_results = results(loop.admitted.results, method.pad_id)
    return loop.rows, Admitted(loop.admitted.row_Q, previous_results), loop.num_steps


def _refill(loop: _RefillLoop, encoded: Rows, num_encoded: Array) -> _RefillLoop:
    """Refill up to R idle rows: copy their results out and the next sentences in."""
    state, cache = loop.rows
    B = len(state.done_B)
    Q = len(encoded.state.done_B)
    R = min(Q, max(1, B // (4 if jax.default_backend() == "gpu" else 16)))
    row_R = jnp.argsort(~state.done_B, stable=True)[:R].astype(jnp.int32)
    next_index_R = loop.num_admitted + jnp.arange(R)
    is_admitted_R = state.done_B[row_R] & (next_index_R < num_encoded)
    next_encoded = jax.tree.map(lambda x: x[jnp.minimum(next_index_R, Q - 1)], encoded)
    previous_results = jax.tree.map(lambda x: x[row_R], state.finished)
    # B and Q are out of range, so these values are dropped.
    to_row_R = jnp.where(is_admitted_R, row_R, B)
    to_index_R = jnp.where(is_admitted_R, next_index_R, Q)
    return loop._replace(
        rows=Rows(
            _set_rows(state, to_row_R, next_encoded.state),
            cache.replace_rows(to_row_R, next_encoded.cache),
        ),
        admitted=_set_rows(loop.admitted, to_index_R, Admitted(row_R, previous_results)),
        num_admitted=loop.num_admitted + is_admitted_R.sum(dtype=jnp.int32),
    )


def _set_rows(tree: Any, index_R: Array, values: Any) -> Any:
    """Set ``values`` at ``index_R`` in every leaf; out-of-range indices are dropped."""
    return jax.tree.map(lambda x, value: x.at[index_R].set(value, mode="drop"), tree, values)


@jax.jit
def select_rows(rows: Rows, to_index_R: Array) -> Rows:
    """Return R rows: copies of rows ``to_index_R``, or idle rows where it is negative."""
    state, cache = jax.tree.map(lambda x: x[jnp.maximum(to_index_R, 0)], rows)
    return Rows(state._replace(done_B=state.done_B | (to_index_R < 0)), cache)
