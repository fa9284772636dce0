"""Asynchronous translation: many asyncio tasks share one search across all devices.

Each device has a thread that assigns rows to new sentences, runs a few decoding steps, and returns
finished sentences.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import methodcaller
from pathlib import Path
from typing import Any, Self

import jax

from transformer_jax import (
    Bucket,
    Engine,
    Hypothesis,
    Request,
    Scorer,
    Sentence,
    Translation,
    Translator,
    UserError,
    devices_for_rows,
    load_config_file,
    local_workdir,
)

logger = logging.getLogger(__name__)

# Decoding steps between checks for new sentences, and of one row, whose steps are short.
_STEPS, _STEPS_OF_ONE = 8, 32
_ALIGNED_TOGETHER = 4
_MAX_NUMBER = 2**30  # of a block's first sentence; numbers are int32 on the device


class SearchFailed(Exception):
    """Raised after the search has stopped permanently."""


@dataclass(eq=False)
class Entry:
    """A sentence and the future for its hypotheses."""

    sentence: Sentence
    future: Future[list[Hypothesis]] = field(default_factory=Future)


class LiveRows:
    """An engine's batch rows, filled with sentences as they arrive. Not thread-safe.

    Produces the same hypotheses as ``Engine.search``. Scores can differ by rounding errors, because
    XLA sums in a different order when there are fewer rows.

    Attributes:
      largest: the engine's bucket.
      bucket: the same with the current number of rows.
      running: sentences that occupy rows, keyed by sentence number.
    """

    def __init__(self, engine: Engine, bucket: Bucket):
        self._engine, self.largest = engine, bucket
        # On a CPU a step's time is proportional to the number of rows; elsewhere it hardly grows.
        factor = 2 if jax.default_backend() == "cpu" else 8
        counts = {max(1, bucket.rows // factor**i) for i in range(8)}
        self._sizes = [bucket._replace(rows=count) for count in sorted(counts)]
        self.bucket = self._sizes[0]
        self._rows: Any = None  # until ``compile``
        self.running: dict[int, Entry] = {}
        self.next_number = 0
        self._empty_blocks = dict[Bucket, Any]()

    @property
    def num_idle(self) -> int:
        """Number of rows without a sentence."""
        return self.bucket.rows - len(self.running)

    @property
    def most(self) -> int:
        """Maximum number of sentences in a turn."""
        return self.bucket.block_size

    def compile(self) -> None:
        """Create the rows, and compile every function that the search uses."""
        self._rows = self._engine.new_rows(self.bucket)
        with ThreadPoolExecutor() as together:
            list(together.map(self._compile, self._sizes))

    def _compile(self, bucket: Bucket) -> None:
        engine, self._empty_blocks[bucket] = self._engine, self._engine.encode(bucket, {})
        rows = engine.new_rows(bucket)
        for length in bucket.lengths:
            block = engine.encode(bucket, {0: Sentence([0] * (length - 1))})
            rows, _ = engine.admit_and_decode(rows, block, max_steps=1, stop_after=1)
        engine.results(rows)
        for other in self._sizes:
            engine.resized(rows, other.rows)

    def resize(self, count: int) -> None:
        """Move the sentences to the smallest number of rows that holds ``count`` sentences, or to
        the largest.
        """
        bucket = next((each for each in self._sizes if each.rows >= count), self._sizes[-1])
        if bucket != self.bucket:
            self.bucket, self._rows = bucket, self._engine.resized(self._rows, bucket.rows)

    def turn(self, entries: Sequence[Entry], max_steps: int) -> None:
        """Assign rows to new sentences, then run up to ``max_steps`` decoding steps.

        ``entries`` has at most ``bucket.block_size`` sentences of one padded length. If too few
        rows are idle, running sentences are decoded until enough of them finish. The steps after
        the assignment stop early once a quarter of the rows are done.

        Resolves the futures of finished sentences (with an empty list if logits were NaN). Frees
        the rows of canceled futures.
        """
        if self.next_number > _MAX_NUMBER:
            # Finished sentences keep their numbers in their rows.
            self.next_number, self._rows = 0, self._engine.unnumbered(self._rows)
        admitted = dict(enumerate(entries, self.next_number))
        self.next_number += len(entries)
        self.running |= admitted
        block = self._empty_blocks[self.bucket]
        if admitted:
            sentences = {number: entry.sentence for number, entry in admitted.items()}
            block = self._engine.encode(self.bucket, sentences)
        limits = {"max_steps": max_steps, "stop_after": max(1, self.bucket.rows // 4)}
        rows, evicted = self._engine.admit_and_decode(self._rows, block, **limits)
        self._finish(evicted)
        self._finish(self._engine.results(rows))
        gone = [number for number, entry in self.running.items() if entry.future.cancelled()]
        self._rows = self._engine.freed(rows, gone) if gone else rows
        for number in gone:
            del self.running[number]

    def _finish(self, found: Any) -> None:
        for number, hypotheses in self._engine.hypotheses(found, self.running).items():
            entry = self.running.pop(number)
            with suppress(InvalidStateError):  # canceled
                entry.future.set_result(hypotheses[: entry.sentence.wanted])


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

    def __init__(self, searches: Sequence[Sequence[Any]], bucket_of: Callable[[Sentence], Bucket]):
        """Prepare one thread for each item of ``searches``, which has a ``LiveRows``, or an object
        with its methods, for each bucket.
        """
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

    def _work(self, searches: Sequence[Any]) -> None:
        """Run one device's thread: turns of its searches, one per bucket, until ``stop``."""
        try:
            while self._wait_for_work(searches):
                self._turn(searches)
        except Exception as error:
            logger.exception("The search failed and must be restarted.")
            self.stop(str(error))

    def _turn(self, searches: Sequence[Any]) -> None:
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
            rows.turn(block, 0 if block and waiting else num_steps)

    def _wait_for_work(self, searches: Sequence[Any]) -> bool:
        """Wait for a waiting or running sentence. Returns False after ``stop``."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure or self.num_waiting or any(x.running for x in searches)
            )
        return self.failure is None

    def _admit(self, rows: Any, waiting: list[Entry], *, may_evict: bool) -> list[Entry]:
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


class AsyncTranslator:
    """Translator for many concurrent tasks, with continuous batching.

    For each line, produces the same tokens as ``Translator``, no matter when the line arrives or
    which other lines are in progress.

    Attributes:
      translator: the ``Translator``.
      config: its settings; ``batch_size`` is the number of rows across all devices.
      workers: the search threads; they also count rows and waiting sentences.
    """

    def __init__(self, translator: Translator, *, max_terms: int = 0):
        """Search with the translator's model, settings and devices. ``max_terms`` is the number of
        glossary terms in a sentence for which searches are compiled: 0, 1, 4, 16 or 64.
        """
        self.translator, self.config = translator, translator.config
        engines = translator.engines
        buckets = engines[0].buckets_with_terms(max_terms)
        searches = [[LiveRows(engine, bucket) for bucket in buckets] for engine in engines]
        self.workers = Workers(searches, engines[0].bucket_of)
        together = replace(self.config, batch_size=_ALIGNED_TOGETHER)
        self._scorer = Scorer(translator.model, translator.tokenizer, together)
        self._aligning = ThreadPoolExecutor(1, thread_name_prefix="align")

    @classmethod
    def from_workdir(cls, workdir: str | Path, *, max_terms: int = 0, **settings: Any) -> Self:
        """Load the model of a training run on all devices.

        ``workdir`` is the path or URL of a work directory or of one of its checkpoints.
        ``settings`` override fields of the run's ``decoding`` config.

        Raises:
          UserError: see ``load_model`` and ``Translator``.
        """
        folder = local_workdir(workdir)
        rows = replace(load_config_file(folder).decoding, **settings).batch_size
        devices = devices_for_rows(rows)  # before JAX is initialized
        translator = Translator.from_workdir(folder, devices=devices, **settings)
        return cls(translator, max_terms=max_terms)

    def start(self) -> None:
        """Compile everything, then start the search threads."""
        self.workers.start()
        lengths = chain(*(bucket.lengths for bucket in self.translator.engines[0].buckets))
        self._scorer.align_tokens([([0] * (length - 1), [0]) for length in lengths])

    def close(self) -> None:
        """Stop the search; lines in progress fail."""
        self._aligning.shutdown(cancel_futures=True)
        self.workers.close()

    async def translate(
        self,
        line: str | Request,
        *,
        num_hypotheses: int = 1,
        alignments: bool = False,
        turns: asyncio.Semaphore | None = None,
        segments: Sequence[Sentence] | None = None,
    ) -> list[Translation]:
        """Translate a line. Returns its translations, best first (see ``Translator.stream``).
        ``alignments`` adds alignments (see ``Scorer.align``).

        The semaphore ``turns`` limits how many segments are searched at once (default: half of the
        rows). Lines that share a semaphore thus leave rows for other lines. ``segments`` is the
        result of ``translator.sentences`` if it is known. Canceling the task frees its rows.

        Raises:
          UserError: see ``Translator.stream``; ``start`` has not been called.
          SearchFailed: the search has stopped permanently.
        """
        request = Request.of(line, 1)
        turns = turns or self.new_turns()
        if segments is None:  # in a thread, because tokenizing a long line takes time
            segments = await asyncio.to_thread(self.translator.sentences, request, num_hypotheses)

        async def search_in_turn(segment: Sentence) -> list[Hypothesis]:
            async with turns:
                future = self.workers.submit(segment)
                try:
                    return await asyncio.wrap_future(future)
                finally:
                    future.cancel()

        found = await asyncio.gather(*map(search_in_turn, segments))
        translations = self.translator.translations(request, found)
        if not alignments:
            return translations
        pairs = [(request, translation) for translation in translations]
        return await asyncio.wrap_future(self._aligning.submit(self._scorer.align, pairs))

    def new_turns(self) -> asyncio.Semaphore:
        """Create a semaphore. Lines that share it use at most half of the rows."""
        return asyncio.Semaphore(max(1, self.config.batch_size // 2))
