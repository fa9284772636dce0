"""Threads that search the sentences of many clients together, one for each device.

Each seats the sentences that have arrived, takes a few steps, and answers those that are done.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TypeAlias

import jax
import numpy as np

from transformer_jax.decoding.buckets import Bucket, Sentence, bucket_index
from transformer_jax.decoding.continuous_batching import Block, Found
from transformer_jax.decoding.engine import Engine, Hypothesis, hypotheses

logger = logging.getLogger(__name__)

FutureHypotheses: TypeAlias = "Future[list[Hypothesis]]"

# New sentences wait until so many steps are done.
_STEPS = 8
# A step takes the longer the more rows it has. So there are sets of so many rows, of which the
# smallest suffices for what is there: 1, and these shares 1 / n of all.
_SHARES = (4, 1)


class SearchFailed(Exception):
    """The search has stopped for good."""


@dataclass(eq=False)
class Entry:
    """A sentence, and whoever waits for its hypotheses."""

    sentence: Sentence
    future: FutureHypotheses = field(default_factory=Future)


class LiveRows:
    """Rows of an engine's one device. Hypotheses are those of ``Engine.search``, their scores up to
    rounding: XLA adds up in another order where there are fewer rows. Not for several threads.

    Attributes:
      busy: the sentences in the rows, by number.
    """

    def __init__(self, engine: Engine, bucket: Bucket):
        self._engine, self.bucket = engine, bucket
        self.busy: dict[int, Entry] = {}
        self._numbers = itertools.count()
        self._rows = engine.new_rows(bucket)

    @property
    def num_idle(self) -> int:
        """Rows without a sentence."""
        return self.bucket.rows - len(self.busy)

    def compile(self) -> None:
        """Compile all that sentences need."""
        self._nobody = self._encode({})
        for length in self.bucket.lengths:
            entry = Entry(Sentence([0] * (length - 1)))
            self.turn([entry], 0)
            entry.future.cancel()
            self.turn([], 0)

    def turn(self, entries: Sequence[Entry], most: int) -> None:
        """Give rows to at most ``bucket.block_size`` sentences of one encoded length, taking steps
        until enough are idle. Then write up to ``most`` tokens of every sentence, fewer once a
        block of them is done.

        Sets the results of futures: no hypotheses where the model's logits were NaN. Rows of
        cancelled futures become idle.
        """
        entered = dict(zip(self._numbers, entries, strict=False))
        self.busy |= entered
        block = self._encode(entered) if entered else self._nobody
        limits = {"most": most, "enough": self.bucket.block_size}
        rows, left = self._engine.seat(self.bucket, self._rows, block, **limits)
        self._answer(left)
        self._answer(self._engine.results(rows))
        gone = [number for number, entry in self.busy.items() if entry.future.cancelled()]
        if gone:
            done_B = np.asarray(rows.state.done_B) | np.isin(rows.number_B, gone)
            done_B = jax.device_put(done_B, rows.state.done_B.sharding)
            rows = rows._replace(state=rows.state._replace(done_B=done_B))
        for number in gone:
            del self.busy[number]
        self._rows = rows

    def _answer(self, found: Found) -> None:
        numbers = np.asarray(found.number_R).tolist()
        if self.busy.keys().isdisjoint(numbers):
            return
        results = jax.device_get(found.results)
        for row, number in enumerate(numbers):
            entry = self.busy.pop(number, None)
            if entry is not None and entry.future.set_running_or_notify_cancel():
                entry.future.set_result(hypotheses(results, row)[: entry.sentence.wanted])

    def _encode(self, entries: dict[int, Entry]) -> Block:
        return self._engine.encode(
            self.bucket, {number: entry.sentence for number, entry in entries.items()}
        )


class Workers:
    """The search of one model for all who submit sentences, at any time and from any thread.

    A sentence gets the next free row of any device. To give up on a sentence, cancel its future:
    that frees its row.

    Attributes:
      failure: why they stopped working, if they did; all futures fail with it from then on.
    """

    def __init__(self, engines: Sequence[Engine]):
        """One engine for each device, all alike."""
        self.failure: SearchFailed | None = None
        self._buckets = engines[0].buckets
        self._searches = [
            [_sets_of_rows(engine, bucket) for bucket in self._buckets] for engine in engines
        ]
        self._waiting: list[list[Entry]] = [[] for _ in self._buckets]
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, args=[searches], name="search", daemon=True)
            for searches in self._searches
        ]

    def start(self) -> None:
        """Compile everything, then begin to work."""
        first, *others = [list(chain(*searches)) for searches in self._searches]
        with ThreadPoolExecutor() as together:
            if jax.default_backend() != "cpu":  # then the others find it in the compilation cache
                list(together.map(LiveRows.compile, first))
                first = []
            list(together.map(LiveRows.compile, chain(first, *others)))
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop working; futures that are not done are cancelled."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def submit(self, sentences: Sequence[Sentence]) -> list[FutureHypotheses]:
        """The hypotheses of each sentence, best first, as ``Engine.search`` gives them."""
        entries = list(map(Entry, sentences))
        with self._changed:
            if self._has_ended:
                _end(entries, self.failure)
            else:
                for entry in entries:
                    self._waiting[bucket_index(self._buckets, entry.sentence)].append(entry)
            self._changed.notify_all()
        return [entry.future for entry in entries]

    async def search(self, sentence: Sentence) -> list[Hypothesis]:
        """The hypotheses of one sentence; whoever cancels this gives up on it."""
        [future] = self.submit([sentence])
        try:
            return await asyncio.wrap_future(future)
        finally:
            future.cancel()

    @property
    def num_waiting(self) -> int:
        """Sentences without a row."""
        return sum(map(len, self._waiting))

    @property
    def num_busy(self) -> int:
        """Rows with a sentence."""
        return sum(len(rows.busy) for searches in self._searches for rows in chain(*searches))

    @property
    def num_rows(self) -> int:
        """Sentences that can be in progress, on all devices and in all buckets."""
        return len(self._searches) * sum(bucket.rows for bucket in self._buckets)

    @property
    def _has_ended(self) -> bool:
        return self._closed or self.failure is not None

    def _work(self, searches: list[list[LiveRows]]) -> None:
        def has_work() -> bool:
            is_busy = any(rows.busy for rows in chain(*searches))
            return self._has_ended or is_busy or self.num_waiting > 0

        block: list[Entry] = []
        try:
            while not self._has_ended:
                with self._changed:
                    self._changed.wait_for(has_work)
                work = [
                    (sets, waiting)
                    for sets, waiting in zip(searches, self._waiting, strict=True)
                    if waiting or any(rows.busy for rows in sets)
                ]
                for sets, waiting in work:
                    chosen = self._smallest(sets, waiting)
                    block = self._next_block(chosen, waiting, may_step=len(work) == 1)
                    for rows in sets:
                        if rows is chosen and block:
                            rows.turn(block, 0 if waiting else _STEPS)
                        elif rows.busy:
                            rows.turn([], _STEPS)
        except Exception as error:
            logger.exception("The search failed; it must be started again.")
            self.failure = SearchFailed(str(error))
        with self._changed:
            self._changed.notify_all()  # the other devices' threads end, too
            _end(chain(*self._waiting), self.failure)
            for waiting in self._waiting:
                waiting.clear()
        busy = (rows.busy.values() for rows in chain(*searches))
        _end(chain(block, *busy), self.failure)

    def _smallest(self, sets: list[LiveRows], waiting: list[Entry]) -> LiveRows:
        """The set of rows that suffices for all sentences, or the largest."""
        num_sentences = len(waiting) + sum(len(rows.busy) for rows in sets)
        return next((rows for rows in sets if rows.bucket.rows >= num_sentences), sets[-1])

    def _next_block(self, rows: LiveRows, waiting: list[Entry], *, may_step: bool) -> list[Entry]:
        """Sentences of the length of the one that has waited for longest, as many as rows are idle.
        Or a whole block, for whose rows ``turn`` takes steps, if no other bucket waits meanwhile.
        """
        with self._changed:
            waiting[:] = [entry for entry in waiting if not entry.future.cancelled()]
            if not waiting:
                return []
            size, length_of = rows.bucket.block_size, rows.bucket.length_of
            length = length_of(waiting[0].sentence)
            same = (entry for entry in waiting if length_of(entry.sentence) == length)
            block = list(islice(same, size))
            if len(block) < size or not may_step:
                del block[rows.num_idle :]
            for entry in block:
                waiting.remove(entry)
            return block


def _sets_of_rows(engine: Engine, bucket: Bucket) -> list[LiveRows]:
    """Smallest first."""
    counts = sorted({1, *(max(1, bucket.rows // n) for n in _SHARES)})
    return [LiveRows(engine, bucket._replace(rows=count)) for count in counts]


def _end(entries: Iterable[Entry], failure: SearchFailed | None) -> None:
    """Fail their futures, or cancel them if there was no failure."""
    for entry in entries:
        if failure is None:
            entry.future.cancel()
        elif not entry.future.done() and entry.future.set_running_or_notify_cancel():
            entry.future.set_exception(failure)
