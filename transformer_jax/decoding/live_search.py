"""Continuous batching for sentences that arrive while others are being searched.

Where ``continuous_batching.py`` has all sentences from the start and stays on the device until the
last one is done, here the host looks in between: it hands the rows of finished sentences to those
that have come, and takes back the rows of those that nobody waits for any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from transformer_jax.decoding.buckets import Bucket, Sentence, waiting_arrays
from transformer_jax.decoding.continuous_batching import Rows, RowSearch, Waiting
from transformer_jax.decoding.engine import COMPILER_OPTIONS, Engine, Hypothesis, hypotheses
from transformer_jax.decoding.models import DecodingModel
from transformer_jax.decoding.search import SearchResult, results
from transformer_jax.model.transformer import Transformer
from transformer_jax.special_ids import PAD_ID

T = TypeVar("T")

# This share 1 / n of the rows must be done before the host looks, unless it asked to look earlier:
# a look takes as long as a step of a few rows.
_SHARE_DONE = 8
# Steps are compiled for all rows and for the first 1 / n of them: on a CPU a step of half the rows
# takes half as long. Each takes time to compile.
_SHARES_STEPPED = (16, 4)


class Entry(NamedTuple, Generic[T]):
    """A sentence that wants a row."""

    owner: T
    """Whatever its result is to be given back with."""
    sentence: Sentence
    wanted: int = 1
    """How many hypotheses, at most the beam size."""


class LiveSearch(Generic[T]):
    """The rows of one bucket of an engine, on the engine's one device. Not for several threads.

    Hypotheses are those of ``Engine.search``, their scores up to rounding: XLA adds up in another
    order where there are fewer rows.

    Attributes:
      busy: the entries that have a row, by row.
      slots_computed, slots_used: rows times steps so far, and those of them in which a sentence
        was in progress.
    """

    def __init__(self, engine: Engine, bucket: Bucket, models: Sequence[Transformer]):
        """``models`` are the engine's, ``with_cast_weights`` as they are for all buckets."""
        assert engine.num_devices == 1
        self._engine, self.bucket = engine, bucket
        self.busy: dict[int, Entry[T]] = {}
        self.slots_computed = self.slots_used = 0
        self._method = engine.method(engine.config.beam_size)
        self._graphs, states = zip(*(nnx.split(each, nnx.Param) for each in models))
        self._parameters = tuple(map(nnx.to_pure_dict, states))
        options = COMPILER_OPTIONS.get(jax.default_backend())
        self._enter = jax.jit(self._enter_rows, donate_argnames="rows", compiler_options=options)
        self._step = jax.jit(self._take_steps, donate_argnames="rows", compiler_options=options)
        self._counts = sorted({max(1, bucket.rows // n) for n in (*_SHARES_STEPPED, 1)})
        self._block_sizes = sorted({1, bucket.block_size})
        empty = jax.jit(self._empty_rows, donate_argnames="memory", out_shardings=engine.placement)
        memory = engine.new_memory(bucket)
        self._rows: Rows = empty(self._parameters, memory, self._waiting([], 1))

    @property
    def idle(self) -> list[int]:
        """The rows without a sentence."""
        return [row for row in range(self.bucket.rows) if row not in self.busy]

    @property
    def num_stepped(self) -> int:
        """How many rows, from the first on, the next steps are taken of: with all that are busy."""
        needed = 1 + max(self.busy, default=0)
        return next(count for count in self._counts if count >= needed)

    def compile(self) -> None:
        """Compile all that ``enter`` and ``take_steps`` need; no sentence may have a row."""
        assert not self.busy
        for size in self._block_sizes:
            self._enter_block([], size)
        for count in self._counts:
            self._steps_of(count, most=0)

    def enter(self, entries: Sequence[Entry[T]]) -> None:
        """Give rows to at most ``bucket.block_size`` sentences that are encoded in one length; as
        many must be idle.
        """
        size = self.bucket.block_size
        assert len(entries) <= size
        if len(entries) >= size / 2:
            self._enter_block(entries, size)
        else:  # a block is encoded whole
            for entry in entries:
                self._enter_block([entry], 1)

    def leave(self, row: int) -> None:
        """Take the row from a sentence that nobody waits for any more."""
        del self.busy[row]

    def take_steps(self, most: int) -> list[tuple[T, list[Hypothesis]]]:
        """Write up to ``most`` tokens of every sentence; fewer once an eighth of the rows is done.
        Returns the owners of finished sentences with the hypotheses, best first; none where the
        model's logits were NaN. Their rows are idle then.
        """
        count = self.num_stepped
        done_B, slots, found = self._steps_of(count, most=most)
        finished = sorted(self.busy.keys() & set(np.flatnonzero(np.asarray(done_B)).tolist()))
        computed, used = map(int, slots)
        self.slots_computed += computed
        self.slots_used += used
        if not finished:
            return []
        found = jax.tree.map(np.asarray, found)
        results_of = {row: hypotheses(found, row) for row in finished}
        entries = {row: self.busy.pop(row) for row in finished}
        return [(each.owner, results_of[row][: each.wanted]) for row, each in entries.items()]

    def _enter_block(self, entries: Sequence[Entry[T]], size: int) -> None:
        rows_R = np.full(size, self.bucket.rows, np.int32)  # no row
        rows_R[: len(entries)] = self.idle[: len(entries)]
        self.busy |= zip(rows_R.tolist(), entries, strict=False)
        waiting = self._waiting(entries, size)
        self._rows = self._enter(self._parameters, self._rows, waiting, rows_R)

    def _steps_of(
        self, count: int, *, most: int
    ) -> tuple[Array, tuple[Array, Array], SearchResult]:
        """Step the first ``count`` rows: which are done, slots computed and used, the results."""
        busy_B = np.zeros(count, bool)
        busy_B[list(self.busy)] = True
        self._rows, *seen = self._step(self._parameters, self._rows, busy_B, np.int32(most))
        return tuple(seen)

    def _waiting(self, entries: Sequence[Entry[T]], size: int) -> Waiting:
        engine, bucket = self._engine, self.bucket
        waiting = waiting_arrays(
            {place: entry.sentence for place, entry in enumerate(entries)},
            size=size,
            lengths=bucket.lengths,
            longest_target=engine.longest_target,
            longest_prefix=engine.config.max_extra_length,
        )
        wanted_Q = np.ones(size, np.int32)
        wanted_Q[: len(entries)] = [entry.wanted for entry in entries]
        return waiting._replace(wanted_Q=wanted_Q)

    def _search(self, parameters: Any) -> RowSearch:
        models = list(map(nnx.merge, self._graphs, parameters))
        model = DecodingModel(models, self.bucket.lengths, self._engine.config.beam_size)
        longest = self._engine.longest_target(self.bucket.lengths[-1])
        return RowSearch(self._method, model, longest)

    def _empty_rows(self, parameters: Any, memory: Any, waiting: Waiting) -> Rows:
        search = self._search(parameters)
        return search.empty(memory.cleared(), waiting)

    def _enter_rows(self, parameters: Any, rows: Rows, waiting: Waiting, rows_R: Array) -> Rows:
        search = self._search(parameters)
        return search.replace(rows, rows_R, waiting, search.model.start_cache(waiting.source))

    def _take_steps(
        self, parameters: Any, rows: Rows, busy_B: Array, most: Array
    ) -> tuple[Rows, Array, tuple[Array, Array], SearchResult]:
        """Step the first rows only, as many as ``busy_B`` is long."""
        B = busy_B.shape[0]
        state, cache = jax.tree.map(lambda x: x[:B], (rows.state, rows.cache))
        done_B = state.done_B | ~busy_B
        num_busy = (~done_B).sum()
        enough = jnp.minimum(max(1, B // _SHARE_DONE), num_busy)

        def goes_on(stepped: Rows) -> Array:
            num_done = num_busy - (~stepped.state.done_B).sum()
            return (stepped.slots_computed < most * B) & (num_done < enough)

        started = Rows(state._replace(done_B=done_B), cache, jnp.int32(0), jnp.int32(0))
        stepped = self._search(parameters).step_while(goes_on, started)
        state, cache = jax.tree.map(
            lambda old, new: old.at[:B].set(new),
            (rows.state, rows.cache),
            (stepped.state, stepped.cache),
        )
        found = results(stepped.state.finished, PAD_ID)
        slots = stepped.slots_computed, stepped.slots_used
        return rows._replace(state=state, cache=cache), stepped.state.done_B, slots, found
