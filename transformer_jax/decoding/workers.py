"""Threads that search the sentences of many clients together, one for each device."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

import jax

from transformer_jax.decoding.buckets import Sentence, length_index
from transformer_jax.decoding.engine import Engine, Hypothesis
from transformer_jax.decoding.live_search import Entry, LiveSearch
from transformer_jax.model.transformer import with_cast_weights

logger = logging.getLogger(__name__)

Found: TypeAlias = "Future[list[Hypothesis]]"
Search: TypeAlias = LiveSearch[Found]

# New sentences wait until the steps under way are done. These take the shortest time at first, and
# twice as long whenever nothing has come meanwhile, up to the longest; in seconds.
_SHORTEST, _LONGEST = 0.01, 0.08


class SearchFailed(Exception):
    """The search has stopped for good."""


class Waiting(NamedTuple):
    """A sentence without a row; the lowest number came first."""

    number: int
    entry: Entry[Found]


class Workers:
    """The search of one model for all who submit sentences, at any time and from any thread.

    A sentence gets the next free row of any device. To give up on a sentence, cancel its future:
    that frees its row.

    Attributes:
      failure: why they stopped working, if they did; all futures fail with it from then on.
    """

    def __init__(self, engines: Sequence[Engine]):
        """One engine for each device, all alike; ``UserError`` as ``LiveSearch``."""
        self.failure: SearchFailed | None = None
        self._buckets = engines[0].buckets
        self._searches: list[list[Search]] = []
        for engine in engines:
            models = list(map(with_cast_weights, engine.models))  # once, not at every look
            self._searches.append([LiveSearch(engine, each, models) for each in engine.buckets])
        # By bucket and encoded length: a block is of one length.
        self._waiting: list[list[deque[Waiting]]] = [
            [deque() for _ in bucket.lengths] for bucket in self._buckets
        ]
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, args=[searches], name="search", daemon=True)
            for searches in self._searches
        ]

    def start(self) -> None:
        """Compile everything, then begin to work."""
        first, *others = self._searches
        with ThreadPoolExecutor() as together:
            if jax.default_backend() != "cpu":  # then the others find it in the compilation cache
                list(together.map(LiveSearch.compile, first))
                first = []
            list(together.map(LiveSearch.compile, itertools.chain(first, *others)))
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

    def submit(self, sentences: Sequence[Sentence], *, wanted: int = 1) -> list[Found]:
        """The hypotheses of each sentence, best first, as ``Engine.search`` gives them."""
        entries: list[Entry[Found]] = [Entry(Future(), each, wanted) for each in sentences]
        with self._changed:
            if self._closed or self.failure is not None:
                _end(entries, self.failure)
            else:
                for entry in entries:
                    self._queue(entry.sentence).append(Waiting(next(self._numbers), entry))
            self._changed.notify_all()
        return [entry.owner for entry in entries]

    async def search(self, sentence: Sentence, *, wanted: int = 1) -> list[Hypothesis]:
        """The hypotheses of one sentence; whoever cancels this gives up on it."""
        [future] = self.submit([sentence], wanted=wanted)
        try:
            return await asyncio.wrap_future(future)
        finally:
            future.cancel()

    def _queue(self, sentence: Sentence) -> deque[Waiting]:
        """Where it waits."""
        longest = [bucket.lengths[-1] for bucket in self._buckets]
        bucket = length_index(sentence, longest)
        return self._waiting[bucket][length_index(sentence, self._buckets[bucket].lengths)]

    @property
    def num_waiting(self) -> int:
        """Sentences without a row."""
        return sum(len(queue) for queues in self._waiting for queue in queues)

    @property
    def num_busy(self) -> int:
        """Rows with a sentence."""
        return sum(len(search.busy) for searches in self._searches for search in searches)

    @property
    def num_rows(self) -> int:
        """Rows, of all devices and buckets."""
        return sum(search.bucket.rows for searches in self._searches for search in searches)

    def _work(self, searches: list[Search]) -> None:
        def has_work() -> bool:
            return self._has_ended or self.num_waiting > 0 or any(each.busy for each in searches)

        seconds = dict.fromkeys(searches, _SHORTEST)
        slot_seconds = dict.fromkeys(searches, _SHORTEST)
        try:
            while not self._has_ended:
                with self._changed:
                    self._changed.wait_for(has_work)
                for search, queues in zip(searches, self._waiting, strict=True):
                    came = self._hand_over(search, queues)
                    seconds[search] = _SHORTEST if came else min(2 * seconds[search], _LONGEST)
                    if search.busy:
                        # Without an idle row nothing is to be gained from looking early.
                        until_look = seconds[search] if search.idle else _LONGEST
                        step_seconds = slot_seconds[search] * search.num_stepped
                        most = max(1, round(until_look / step_seconds))
                        slot_seconds[search] = self._take_steps(search, most)
        except Exception as error:
            logger.exception("The search failed; it must be started again.")
            self.failure = SearchFailed(str(error))
        with self._changed:
            self._changed.notify_all()  # the other devices' threads end, too
            queues = [queue for queues in self._waiting for queue in queues]
            _end([waiting.entry for queue in queues for waiting in queue], self.failure)
            for queue in queues:
                queue.clear()
        _end([entry for search in searches for entry in search.busy.values()], self.failure)

    @property
    def _has_ended(self) -> bool:
        return self._closed or self.failure is not None

    def _hand_over(self, search: Search, queues: list[deque[Waiting]]) -> bool:
        """Free the rows of cancelled sentences, and give idle ones to those that have waited for
        longest; returns whether there were any.
        """
        for row, entry in list(search.busy.items()):
            if entry.owner.cancelled():
                search.leave(row)
        came = False
        while block := self._next_block(len(search.idle), search.bucket.block_size, queues):
            try:
                search.enter(block)
            except Exception as error:
                _end(block, SearchFailed(str(error)))
                raise
            came = True
        return came

    def _next_block(
        self, num_idle: int, block_size: int, queues: list[deque[Waiting]]
    ) -> list[Entry[Found]]:
        block: list[Entry[Found]] = []
        with self._changed:
            for queue in queues:
                while queue and queue[0].entry.owner.cancelled():
                    queue.popleft()
            if oldest := min((queue for queue in queues if queue), default=None, key=_age):
                while oldest and len(block) < min(num_idle, block_size):
                    entry = oldest.popleft().entry
                    if not entry.owner.cancelled():
                        block.append(entry)
        return block

    def _take_steps(self, search: Search, most: int) -> float:
        """Returns how many seconds a step took for each row that was stepped."""
        start, slots = time.perf_counter(), search.slots_computed
        for future, hypotheses in search.take_steps(most):
            if future.set_running_or_notify_cancel():
                future.set_result(hypotheses)
        return (time.perf_counter() - start) / max(1, search.slots_computed - slots)


def _end(entries: Iterable[Entry[Found]], failure: SearchFailed | None) -> None:
    """Fail their futures, or cancel them if there was no failure."""
    for entry in entries:
        if failure is None:
            entry.owner.cancel()
        elif not entry.owner.done() and entry.owner.set_running_or_notify_cancel():
            entry.owner.set_exception(failure)


def _age(queue: deque[Waiting]) -> int:
    return queue[0].number
