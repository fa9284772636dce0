"""Continuous batching on the device: when a sentence is done, a waiting one takes its row.

A batch that starts and ends together computes until its longest sentence is done. Handing rows over
in between wastes few of them.

Letters as in ``search.py``, and Q waiting sentences, M blocks of them, R rows handed over at a
time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from transformer_jax.decoding.models import DecodingModel
from transformer_jax.decoding.search import (
    Method,
    SearchResult,
    SearchState,
    results,
    take_step,
)


class Waiting(NamedTuple):
    """Sentences that wait for a row, in M blocks of equal size; every leaf has Q as its first axis.
    The places at the end of a block may be empty.
    """

    source: Any
    """What the model's ``start_cache`` takes: a pytree."""
    limit_Q: Any
    prefix_QP: Any
    seed_Q: Any
    wanted_Q: Any = None
    """How many hypotheses of each are wanted; None: as many as the method returns."""


class Found(NamedTuple):
    """Results in the order of the waiting sentences."""

    results: SearchResult
    slots_computed: Array
    """int32: rows times steps."""
    slots_used: Array
    """int32: those of them in which a sentence was in progress."""


def search_waiting(
    method: Method,
    model: DecodingModel,
    waiting: Waiting,
    counts_M: Array,
    cache: Any,
    *,
    max_length: int,
) -> tuple[Found, Any]:
    """Search the first ``counts_M[m]`` sentences of every block m in the rows of ``cache``; no
    result depends on the other sentences.

    ``cache``, whose rows hold no sentence yet, comes back for the next search: large caches are
    best made once and donated. Every leaf of it has the rows as its first axis. A block is best a
    good deal smaller than that, as it is encoded whole, however few sentences it has.

    Three nested loops, so that none holds a branch through which caches would be copied: the outer
    one encodes a block, the middle one hands rows over as soon as 1/16 of them are idle (on a GPU
    1/8), or enough for the rest of the block, the inner one takes steps (on a GPU it is several in
    a row, by how many positions the steps attend to).
    """
    M, Q = counts_M.shape[0], waiting.limit_Q.shape[0]
    B = jax.tree.leaves(cache)[0].shape[0]
    rows = RowSearch(method, model, max_length)
    run = _Run(rows, waiting, counts_M, B)
    num_blocks = jnp.where(counts_M > 0, jnp.arange(1, M + 1), 0).max()
    carry = _Carry(
        rows=rows.empty(cache, waiting),
        owner_B=jnp.full(B, Q, jnp.int32),
        next=jnp.int32(0),
        finished=rows.start(waiting).finished,
    )
    # Up to the last block that has a sentence.
    carry = jax.lax.fori_loop(0, num_blocks, partial(run.search_block, num_blocks), carry)
    found = results(run.collect(carry, jnp.arange(B)), method.pad_id)
    return Found(found, carry.rows.slots_computed, carry.rows.slots_used), carry.rows.cache


class Rows(NamedTuple):
    """Sentences in progress in the rows of a batch; every leaf but the counts has B first."""

    state: SearchState
    cache: Any
    slots_computed: Array
    slots_used: Array


@dataclass(frozen=True)
class RowSearch:
    """What is done with rows, whatever decides who gets them."""

    method: Method
    model: DecodingModel
    max_length: int

    def empty(self, cache: Any, waiting: Waiting) -> Rows:
        """Rows without a sentence, for sentences like ``waiting``, in the rows of ``cache``."""
        B = jax.tree.leaves(cache)[0].shape[0]
        nothing = jax.tree.map(lambda x: jnp.zeros((B, *x.shape[1:]), x.dtype), waiting)
        return Rows(self.start(nothing), cache, jnp.int32(0), jnp.int32(0))

    def start(self, entries: Waiting) -> SearchState:
        """Waiting sentences as they begin."""
        return self.method.start(
            entries.limit_Q,
            max_length=self.max_length,
            prefix_BP=entries.prefix_QP,
            seed_B=entries.seed_Q,
            wanted_B=entries.wanted_Q,
        )

    def replace(self, rows: Rows, rows_R: Array, entries: Waiting, fresh: Any) -> Rows:
        """Put these R sentences, of which ``fresh`` is the cache, into rows ``rows_R``. A row
        number of B is skipped; a sentence with a limit of 0 leaves its row idle.
        """
        started = self.start(entries)
        return rows._replace(
            state=jax.tree.map(
                lambda old, new: old.at[rows_R].set(new, mode="drop"), rows.state, started
            ),
            cache=rows.cache.replace_rows(rows_R, fresh),
        )

    def step_while(self, goes_on: Callable[[Rows], Array], rows: Rows) -> Rows:
        """Take steps while ``goes_on(rows)``.

        There is a loop for each length that steps may attend to: as rows take more tokens in, the
        next loop goes on.
        """

        def suffices(length: int, rows: Rows) -> Array:
            needed_B = jnp.where(rows.state.done_B, 0, rows.cache.needed_B)
            return goes_on(rows) & (needed_B.max() <= length)

        *shorter, longest = self.model.attended(rows.cache)
        for length in shorter:
            step = partial(self.step, length=length)
            rows = jax.lax.while_loop(partial(suffices, length), step, rows)
        return jax.lax.while_loop(goes_on, partial(self.step, length=longest), rows)

    def step(self, rows: Rows, *, length: int) -> Rows:
        """Write one token of every row's sentence, attending to ``length`` positions."""
        busy_B = ~rows.state.done_B
        state, cache = take_step(
            self.method,
            partial(self.model.step, length=length),
            rows.state,
            rows.cache,
            reorder=lambda cache, parents_BW: cache.reorder(parents_BW),
        )
        return Rows(
            state,
            cache,
            rows.slots_computed + len(busy_B),
            rows.slots_used + busy_B.sum(),
        )


class _Carry(NamedTuple):
    rows: Rows
    owner_B: Array  # the sentence in each row; Q: none
    next: Array  # the next waiting sentence
    finished: SearchResult  # of all Q sentences


@dataclass(frozen=True)
class _Run:
    search: RowSearch
    waiting: Waiting
    counts_M: Array
    batch_size: int

    def search_block(self, num_blocks: Array, m: Array, carry: _Carry) -> _Carry:
        """Encode block m and give its sentences rows; in the last block, until all are done."""
        size = self.waiting.limit_Q.shape[0] // self.counts_M.shape[0]
        first = m * size
        end = first + self.counts_M[m]
        block: Waiting = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, first, size), self.waiting
        )
        encoded = self.search.model.start_cache(block.source)

        def is_unfinished(carry: _Carry) -> Array:
            is_last = m == num_blocks - 1
            return (carry.next < end) | (is_last & ~carry.rows.state.done_B.all())

        def hand_over(carry: _Carry) -> _Carry:
            goes_on = partial(self.goes_on, end - carry.next)
            carry = carry._replace(rows=self.search.step_while(goes_on, carry.rows))
            # Up to R idle rows: their results go out, the next sentences come in. Row B is none.
            B, R = self.batch_size, max(1, self.batch_size // self.shares[1])
            done_B = carry.rows.state.done_B
            rows_R = jnp.argsort(~done_B, stable=True)[:R]
            rows_R = jnp.where(done_B[rows_R], rows_R, B)
            places_R = carry.next + jnp.arange(R)
            come_R = (places_R < end) & (rows_R < B)
            entries, fresh = jax.tree.map(
                lambda x: x[jnp.minimum(places_R - first, size - 1)], (block, encoded)
            )
            entries = entries._replace(limit_Q=jnp.where(come_R, entries.limit_Q, 0))
            owners_R = jnp.where(come_R, places_R, self.waiting.limit_Q.shape[0])
            return _Carry(
                rows=self.search.replace(carry.rows, rows_R, entries, fresh),
                owner_B=carry.owner_B.at[rows_R].set(owners_R, mode="drop"),
                next=carry.next + come_R.sum(),
                finished=self.collect(carry, rows_R),
            )

        return jax.lax.while_loop(is_unfinished, hand_over, carry._replace(next=first))

    def goes_on(self, num_waiting: Array, rows: Rows) -> Array:
        """Whether too few rows are idle for a hand-over, but not all."""
        B, least = self.batch_size, max(1, self.batch_size // self.shares[0])
        num_idle = rows.state.done_B.sum()
        enough = num_idle >= jnp.minimum(least, num_waiting)
        return (num_idle < B) & ~((num_waiting > 0) & enough)

    @property
    def shares(self) -> tuple[int, int]:
        """The shares 1 / n of the rows that must be idle for a hand-over, and that it can hand
        over. On a GPU one is some forty kernels, however many rows it hands over.
        """
        return (8, 4) if jax.default_backend() == "gpu" else (16, 16)

    def collect(self, carry: _Carry, rows_R: Array) -> SearchResult:
        """What these rows have finished, put to the results of all."""
        Q = self.waiting.limit_Q.shape[0]
        owners_R = carry.owner_B.at[rows_R].get(mode="fill", fill_value=Q)
        return jax.tree.map(
            lambda of_all, new: of_all.at[owners_R].set(
                new.at[rows_R].get(mode="clip"), mode="drop"
            ),
            carry.finished,
            carry.rows.state.finished,
        )
