"""Search threads for many concurrent sentences, one for each device."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import methodcaller

from transformer_jax.decoding.length_buckets import Bucket
from transformer_jax.decoding.scheduler import Scheduler, SearchFailed
from transformer_jax.decoding.search import Hypothesis, Sentence
from transformer_jax.errors import UserError, one_line

logger = logging.getLogger(__name__)


class Workers:
    """Search threads for one model. Sentences can be submitted at any time, from any thread.

    Each thread runs the ``Scheduler`` of one device. A sentence goes to the device with the fewest
    unfinished sentences, and stays there.

    Attributes:
      failure: the error that stopped the search, if any; unfinished and later futures raise it.
      schedulers: one for each device; all have the same buckets.
    """

    def __init__(self, schedulers: Sequence[Scheduler], bucket_of: Callable[[Sentence], Bucket]):
        """Prepare one thread for each scheduler. ``bucket_of`` finds a sentence's bucket."""
        self.failure: SearchFailed | None = None
        self.schedulers = schedulers
        self._bucket_of = bucket_of
        self._buckets = [batch.bucket for batch in schedulers[0].batches]
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Compile everything, then start the search threads. Later calls do nothing."""
        if self._threads:
            return
        with ThreadPoolExecutor() as pool:
            for scheduler in self.schedulers:  # later GPUs reuse what the first one compiled
                list(pool.map(methodcaller("compile"), scheduler.batches))
        for scheduler in self.schedulers:
            thread = threading.Thread(target=self._run, args=[scheduler], daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, reason: str) -> None:
        """Stop the search. Unfinished and later futures fail with ``reason``."""
        self.failure = self.failure or SearchFailed(reason)
        for scheduler in self.schedulers:
            scheduler.stop(self.failure)

    def close(self) -> None:
        """Stop the search threads."""
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
        bucket = self.bucket_of(sentence)
        scheduler = min(self.schedulers, key=lambda scheduler: scheduler.num_unfinished)
        return scheduler.submit(sentence, bucket)

    @property
    def num_waiting(self) -> int:
        """Number of sentences waiting for a batch row."""
        return sum(scheduler.num_waiting for scheduler in self.schedulers)

    @property
    def num_running(self) -> int:
        """Number of occupied rows."""
        return sum(scheduler.num_running for scheduler in self.schedulers)

    @property
    def num_rows(self) -> int:
        """Maximum number of sentences in progress, across all devices and buckets."""
        return len(self.schedulers) * sum(bucket.rows for bucket in self._buckets)

    def _run(self, scheduler: Scheduler) -> None:
        """Run one device's thread until ``stop``."""
        try:
            while scheduler.wait_for_work():
                scheduler.step()
        except Exception as error:
            logger.exception("The search failed and must be restarted.")
            self.stop(one_line(error))
