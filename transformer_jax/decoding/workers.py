"""Search threads for many concurrent sentences, one for each device."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from transformer_jax.decoding.length_buckets import Bucket
from transformer_jax.decoding.scheduler import RunningBatch, Scheduler, SearchFailed, TaskQueue
from transformer_jax.decoding.search import Hypothesis, Sentence
from transformer_jax.devices.machine import return_free_memory
from transformer_jax.errors import UserError, one_line

logger = logging.getLogger(__name__)


class Workers:
    """Search threads for one model. Sentences can be submitted at any time, from any thread.

    Each thread runs the ``Scheduler`` of one device. All take sentences from one queue. Sentences
    of short sources are searched, in a few rows, while one more thread compiles searches for long
    sources, more rows and other devices.

    Attributes:
      queue: the sentences.
      schedulers: one for each device.
    """

    def __init__(
        self,
        batches_of_devices: Sequence[Sequence[RunningBatch]],
        bucket_of: Callable[[Sentence], Bucket],
    ):
        """Prepare one thread for each device, whose batches have the same buckets in the same
        order. ``bucket_of`` finds a sentence's bucket.
        """
        self._bucket_of = bucket_of
        self._buckets = [batch.bucket for batch in batches_of_devices[0]]
        self.queue = TaskQueue(self._buckets)
        self.schedulers = [Scheduler(batches, self.queue) for batches in batches_of_devices]
        self._threads: list[threading.Thread] = []
        self._compiling: threading.Thread | None = None

    def start(self) -> None:
        """Compile one search, then start the search threads, and compile all other searches in
        another thread. Later calls do nothing.
        """
        if self._threads:
            return
        scheduler = self.schedulers[0]
        scheduler.compile_next(scheduler.batches[0])
        return_free_memory()
        for scheduler in self.schedulers:
            thread = threading.Thread(target=self._run, args=[scheduler], daemon=True)
            self._threads.append(thread)
            thread.start()
        # At exit, Python waits for this thread, because the compiler must not be interrupted.
        self._compiling = threading.Thread(target=self._compile, name="compile")
        self._compiling.start()

    def wait_until_compiled(self) -> None:
        """Wait until all searches are compiled."""
        if self._compiling:
            self._compiling.join()

    def stop(self, reason: str) -> None:
        """Stop the search. Unfinished and later futures fail with ``reason``."""
        self.queue.stop(SearchFailed(reason))

    def close(self) -> None:
        """Stop the search threads. A compilation in progress ends by itself."""
        self.stop("The search was closed.")
        for thread in self._threads:
            thread.join()

    def bucket_of(self, sentence: Sentence) -> Bucket:
        """Find the sentence's bucket. Raises ``UserError`` if it has too many terms or tokens."""
        bucket = self._bucket_of(sentence)
        if bucket not in self._buckets:
            sizes = [bucket.terms for bucket in self._buckets if bucket.terms]
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
        return self.queue.submit(sentence, self.bucket_of(sentence))

    @property
    def num_running(self) -> int:
        """Number of occupied rows."""
        return sum(scheduler.num_running for scheduler in self.schedulers)

    @property
    def num_rows(self) -> int:
        """Maximum number of sentences in progress, across all devices and buckets."""
        return len(self.schedulers) * sum(bucket.num_rows for bucket in self._buckets)

    def _run(self, scheduler: Scheduler) -> None:
        """Run one device's thread until ``stop``."""
        with self._stopping_at_errors():
            while scheduler.wait_for_work():
                scheduler.step()

    def _compile(self) -> None:
        """Compile all other searches, few rows first, until ``stop``."""
        start = time.perf_counter()
        batches_to_compile = deque(
            (scheduler, scheduler.batches[index])
            for index in range(len(self._buckets))
            for scheduler in self.schedulers
        )
        with self._stopping_at_errors():
            while batches_to_compile:
                if self.queue.failure:
                    return
                scheduler, batch = batches_to_compile.popleft()
                if scheduler.compile_next(batch):
                    batches_to_compile.append((scheduler, batch))
                return_free_memory()
            logger.info("Compiled all searches in %.0f s.", time.perf_counter() - start)

    @contextmanager
    def _stopping_at_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            logger.exception("The search failed and must be restarted.")
            self.stop(one_line(error))
