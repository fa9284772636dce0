"""Batch rows of an engine that take sentences as they arrive (continuous batching)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import jax

from transformer_jax import Bucket, Engine, Sentence
from transformer_jax.serving.workers import Entry

_MAX_NUMBER = 2**30  # of a block's first sentence; numbers are int32 on the device


class LiveRows:
    """An engine's batch rows, filled with sentences as they arrive. Not thread-safe.

    Produces the same hypotheses as ``Engine.search``. On accelerators and in float32, scores can
    differ by rounding errors, because XLA sums in a different order when there are fewer rows.

    Attributes:
      largest: the engine's bucket.
      bucket: the same with the current number of rows.
      running: sentences that occupy rows, keyed by sentence number.
    """

    def __init__(self, engine: Engine, bucket: Bucket):
        self._engine, self.largest = engine, bucket
        # On a CPU a step's time is proportional to the number of rows; elsewhere it hardly grows.
        factor = 2 if jax.default_backend() == "cpu" else 8
        counts = {max(engine.fewest_rows, bucket.rows // factor**i) for i in range(8)}
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
