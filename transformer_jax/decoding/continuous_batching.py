"""Many sentences through few rows, on the device: when a sentence is done, a waiting one takes its
row.

A batch that starts and ends together computes until its longest sentence is done. Here rows are
handed on in between, so that most of what is computed is of use.

Letters as in ``search.py``, and Q places in the queue, M blocks of them, R rows handed on at a
time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from transformer_jax.decoding.search import (
    Attention,
    Cache,
    Method,
    Reorder,
    SearchResult,
    SearchState,
    StepFn,
    results,
    take_step,
)


class Queue(NamedTuple):
    """What waits; every leaf has Q as its first axis. It falls into M blocks of equal size, each
    begun by its sentences.
    """

    inputs: Any
    """What ``start_cache`` asks for: an array or a tree of them."""
    limit_Q: Array
    prefix_QP: Array
    seed_Q: Array


class QueueResult(NamedTuple):
    """What came of the queue, in its order."""

    found: SearchResult
    slots_computed: Array
    """int32: rows times steps."""
    slots_used: Array
    """int32: those of them in which a sentence was under way."""


class _Carry(NamedTuple):
    state: SearchState
    cache: Cache
    owner_B: Array  # whose row it is; Q: nobody's
    block: Array  # the block that sentences are taken from
    next: Array  # the place of the next one
    found: SearchResult
    slots_computed: Array
    slots_used: Array


def search_queue(
    method: Method,
    step_fn: StepFn,
    start_cache: Callable[[Any], Cache],
    replace_rows: Callable[[Cache, Array, Cache], Cache],
    queue: Queue,
    counts_M: Array,
    cache: Cache,
    *,
    batch_size: int,
    max_length: int,
    reorder: Reorder,
    attention: Attention | None = None,
    source_length: int = 0,
) -> tuple[QueueResult, Cache]:
    """Search the first ``counts_M[m]`` sentences of every block m in ``batch_size`` rows; none gets
    what depends on another.

    ``start_cache(inputs)`` makes a cache of a block. ``replace_rows(cache, rows_R, fresh)`` puts
    its R rows into those of a cache of B rows; an index of B is ignored. ``cache``, whose rows hold
    nothing yet, is filled that way and given back for the next queue, as large caches are best made
    once and donated. Every leaf of a cache has the rows as its first axis. A block is best a good
    deal smaller than B, as it is encoded whole, however few sentences begin it. ``attention`` and
    ``source_length`` are those of ``beam_search``.

    Three loops, one in the other, so that none holds a branch through which caches would be copied:
    the outer one encodes a block, the middle one hands rows on as soon as 1/16 of them are idle, or
    enough for the rest of the block, the inner one takes steps.
    """
    B, Q, M = batch_size, queue.limit_Q.shape[0], counts_M.shape[0]
    R, block_size = max(1, B // 16), Q // M
    num_blocks = jnp.where(counts_M > 0, jnp.arange(1, M + 1), 0).max()

    def start(entries: Queue) -> SearchState:
        return method.start(
            entries.limit_Q,
            max_length=max_length,
            source_length=source_length,
            prefix_BP=entries.prefix_QP,
            seed_B=entries.seed_Q,
        )

    def step(carry: _Carry) -> _Carry:
        busy_B = ~carry.state.done_B
        state, cache = take_step(
            method, step_fn, carry.state, carry.cache, reorder=reorder, attention=attention
        )
        return carry._replace(
            state=state,
            cache=cache,
            slots_computed=carry.slots_computed + B,
            slots_used=carry.slots_used + busy_B.sum(),
        )

    def collect(carry: _Carry, rows_R: Array) -> SearchResult:
        owners_R = carry.owner_B.at[rows_R].get(mode="fill", fill_value=Q)
        return jax.tree.map(
            lambda all_of_them, new: all_of_them.at[owners_R].set(
                new.at[rows_R].get(mode="clip"), mode="drop"
            ),
            carry.found,
            carry.state.finished,
        )

    def one_block(carry: _Carry) -> _Carry:
        first = carry.block * block_size
        end = first + counts_M[carry.block]
        block: Queue = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, first, block_size), queue
        )
        encoded = start_cache(block.inputs)

        def hand_on(carry: _Carry) -> _Carry:
            def go_on(carry: _Carry) -> Array:
                num_idle = carry.state.done_B.sum()
                return (num_idle < B) & ~(
                    (carry.next < end) & (num_idle >= jnp.minimum(R, end - carry.next))
                )

            carry = jax.lax.while_loop(go_on, step, carry)
            # Up to R idle rows: their results go out, the next of the block come in. Row B is none.
            rows_R = jnp.argsort(~carry.state.done_B, stable=True)[:R]
            rows_R = jnp.where(carry.state.done_B[rows_R], rows_R, B)
            found = collect(carry, rows_R)
            places_R = carry.next + jnp.arange(R)
            come_R = (places_R < end) & (rows_R < B)
            entries, fresh = jax.tree.map(
                lambda x: x[jnp.minimum(places_R - first, block_size - 1)], (block, encoded)
            )
            entries = entries._replace(limit_Q=jnp.where(come_R, entries.limit_Q, 0))
            return carry._replace(
                state=jax.tree.map(
                    lambda old, new: old.at[rows_R].set(new, mode="drop"),
                    carry.state,
                    start(entries),
                ),
                cache=replace_rows(carry.cache, rows_R, fresh),
                owner_B=carry.owner_B.at[rows_R].set(jnp.where(come_R, places_R, Q), mode="drop"),
                next=carry.next + come_R.sum(),
                found=found,
            )

        def more(carry: _Carry) -> Array:
            is_last = carry.block == num_blocks - 1
            return (carry.next < end) | (is_last & ~carry.state.done_B.all())

        carry = jax.lax.while_loop(more, hand_on, carry._replace(next=first))
        return carry._replace(block=carry.block + 1)

    def nothing(count: int) -> Queue:
        return jax.tree.map(lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype), queue)

    carry = _Carry(
        state=start(nothing(B)),
        cache=cache,
        owner_B=jnp.full(B, Q, jnp.int32),
        block=jnp.int32(0),
        next=jnp.int32(0),
        found=start(nothing(Q)).finished,
        slots_computed=jnp.int32(0),
        slots_used=jnp.int32(0),
    )
    carry = jax.lax.while_loop(lambda carry: carry.block < num_blocks, one_block, carry)
    found = results(collect(carry, jnp.arange(B)), method.pad_id)
    return QueueResult(found, carry.slots_computed, carry.slots_used), carry.cache
