"""Search threads for many concurrent sentences.

Each device has a thread that assigns rows to new sentences, runs a few decoding steps, and returns
finished sentences.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from operator import methodcaller
from typing import Protocol

from transformer_jax import Bucket, Hypothesis, Sentence, UserError

logger = logging.getLogger(__name__)

# Decoding steps between checks for new sentences, and of one row, whose steps are short.
_STEPS, _STEPS_OF_ONE = 8, 32


class SearchFailed(Exception):
    """Raised after the search has stopped permanently."""


@dataclass(eq=False)
class Entry:
    """A sentence and the future for its hypotheses."""

    sentence: Sentence
    future: Future[list[Hypothesis]] = field(default_factory=Future)


class Rows(Protocol):
    """What a search thread needs of ``LiveRows``. Attributes are described there."""

    largest: Bucket
    bucket: Bucket

    @property
    def running(self) -> Sized: ...
    @property
    def num_idle(self) -> int: ...
    @property
    def most(self) -> int: ...
    def compile(self) -> None: ...
    def resize(self, count: int) -> None: ...
    def turn(self, entries: list[Entry], max_steps: int) -> None: ...


class Workers:
    """Search threads for one model. Sentences can be submitted at any time, from any thread.

    The states of a sentence::

        submit           _admit              LiveRows.turn
        ------> WAITING --------> RUNNING ------------------> FINISHED
                in _waiting,      in a row of one device,     future has hypotheses
                oldest first      in LiveRows.running         or an error
                   |                 |                           ^
                   +---- cancel -----+--------> dropped          |
                   |                 |                           |
                   +-- stop, error --+---------------------------+

    A running sentence keeps its row and its device until it finishes. Its result is read at the end
    of the turn, or when the next sentence evicts it from its row.

    Attributes:
      failure: the error that stopped the search, if any; unfinished and later futures raise it.
    """

    def __init__(self, searches: Sequence[Sequence[Rows]], bucket_of: Callable[[Sentence], Bucket]):
        """Prepare one thread for each item of ``searches``, which has ``Rows`` for each bucket."""
        self.failure: SearchFailed | None = None
        self._searches, self._bucket_of = searches, bucket_of
        self._waiting: dict[Bucket, list[Entry]] = {rows.largest: [] for rows in searches[0]}
        self._unfinished: set[Future[list[Hypothesis]]] = set()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Compile everything, then start the search threads. Later calls do nothing."""
        if self._threads:
            return
        with ThreadPoolExecutor() as together:
            for searches in self._searches:  # later GPUs reuse what the first one compiled
                list(together.map(methodcaller("compile"), searches))
        for searches in self._searches:
            thread = threading.Thread(target=self._work, args=[searches], daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, reason: str) -> None:
        """Stop the search. Unfinished and later futures fail with ``reason``."""
        with self._changed:
            self.failure = self.failure or SearchFailed(reason)
            self._changed.notify_all()
            for future in list(self._unfinished):
                with suppress(InvalidStateError):  # already finished
                    future.set_exception(self.failure)

    def close(self) -> None:
        """Stop the search threads."""
        self.stop("The search was closed.")
        for thread in self._threads:
            thread.join()

    def bucket_of(self, sentence: Sentence) -> Bucket:
        """Find the sentence's bucket. Raises ``UserError`` if it has too many terms or tokens."""
        bucket = self._bucket_of(sentence)
        if bucket not in self._waiting:
            sizes = [each.terms for each in self._waiting if each.terms]
            raise UserError(
                f"A sentence's glossary needs (terms, alternatives, tokens) {bucket.terms}; "
                f"expected one of {sizes or 'none'}. A larger --max-terms accepts more."
            )
        return bucket

    def submit(self, sentence: Sentence) -> Future[list[Hypothesis]]:
        """Submit a sentence. Returns a future for its hypotheses (see ``Engine.search``).

        Raises ``UserError`` if the search has not started; see also ``bucket_of``.
        """
        if not self._threads:
            raise UserError("The search has not started; call start() first.")
        entry, bucket = Entry(sentence), self.bucket_of(sentence)
        with self._changed:
            if self.failure:
                entry.future.set_exception(self.failure)
            else:
                self._waiting[bucket].append(entry)
                self._unfinished.add(entry.future)
                entry.future.add_done_callback(self._unfinished.discard)
            self._changed.notify_all()
        return entry.future

    @property
    def num_waiting(self) -> int:
        """Number of sentences waiting for a batch row."""
        return sum(map(len, self._waiting.values()))

    @property
    def num_busy(self) -> int:
        """Number of occupied rows."""
        return sum(len(rows.running) for rows in chain(*self._searches))

    @property
    def num_rows(self) -> int:
        """Maximum number of sentences in progress, across all devices and buckets."""
        return len(self._searches) * sum(bucket.rows for bucket in self._waiting)

    def _work(self, searches: Sequence[Rows]) -> None:
        """Run one device's thread: turns of its searches, one per bucket, until ``stop``."""
        try:
            while self._wait_for_work(searches):
                self._turn(searches)
        except Exception as error:
            logger.exception("The search failed and must be restarted.")
            self.stop(str(error))

    def _turn(self, searches: Sequence[Rows]) -> None:
        """Run a turn of each search that has work."""
        alike = zip(searches, zip(*self._searches), self._waiting.values())
        work = [each for each in alike if each[2] or each[0].running]
        for rows, on_devices, waiting in work:
            # As few rows as hold this device's share of the sentences.
            num_sentences = len(waiting) + sum(len(each.running) for each in on_devices)
            share = -(-num_sentences // len(on_devices))
            rows.resize(max(len(rows.running), share))
            block = self._admit(rows, waiting, may_evict=len(work) == 1)
            num_steps = max(_STEPS, _STEPS_OF_ONE // rows.bucket.rows)
            # No steps yet if waiting sentences can take more rows.
            admits = block and waiting and len(block) != rows.num_idle
            rows.turn(block, 0 if admits else num_steps)

    def _wait_for_work(self, searches: Sequence[Rows]) -> bool:
        """Wait for a waiting or running sentence. Returns False after ``stop``."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure or self.num_waiting or any(x.running for x in searches)
            )
        return self.failure is None

    def _admit(self, rows: Rows, waiting: list[Entry], *, may_evict: bool) -> list[Entry]:
        """Take the oldest waiting sentence and others of its padded length, at most one per idle
        row. If all rows are in use and no other bucket has work (``may_evict``), a full block may
        need more rows than are idle, because ``turn`` decodes until it can evict enough sentences.
        """
        with self._changed:
            waiting[:] = [entry for entry in waiting if not entry.future.cancelled()]
            if not waiting:
                return []
            length_of = rows.bucket.length_of
            length = length_of(waiting[0].sentence)
            block = [x for x in waiting if length_of(x.sentence) == length][: rows.most]
            if len(block) < rows.most or not (may_evict and rows.bucket == rows.largest):
                del block[rows.num_idle :]
            for entry in block:
                waiting.remove(entry)
            return block
