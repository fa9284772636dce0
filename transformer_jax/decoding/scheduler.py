"""Scheduler: the waiting, running and finished sentences of the devices.

The states of a sentence::

    submit            admit              decode, read
    ------> WAITING --------> RUNNING ----------------> FINISHED
            oldest first      in a batch row            the future has hypotheses
                                                        or an error

A waiting sentence whose future is canceled leaves the queue; a running one frees its row at the
next ``read``. Otherwise, a sentence keeps its row until it is finished. ``Engine.search`` submits
all sentences, to a queue for each device, then calls ``run_until_idle``. The devices of a service
share a queue: the first that has an idle row takes the next sentence. Each calls ``Scheduler.step``
again and again, in a thread of its own.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import islice
from typing import Protocol

from transformer_jax.decoding.length_buckets import Bucket
from transformer_jax.decoding.search import Hypothesis, Sentence

# Decoding steps between reads of results, and of one row, whose steps are short.
STEPS_PER_READ = 8
STEPS_PER_READ_OF_ONE_ROW = 32

_NO_LIMIT = 2**30


class SearchFailed(Exception):
    """Raised after the search has stopped permanently."""


class Task:
    """A sentence and the future for its hypotheses."""

    def __init__(self, sentence: Sentence):
        self.sentence = sentence
        self.future: Future[list[Hypothesis]] = Future()

    def finish(self, hypotheses: list[Hypothesis]) -> None:
        """Set the future's result, unless it is canceled or has an error."""
        with suppress(InvalidStateError):
            self.future.set_result(hypotheses[: self.sentence.num_hypotheses])

    def fail(self, error: Exception) -> None:
        """Set the future's error, unless it is done."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class RunningBatch(ABC):
    """Rows of a batch on one device, for the sentences of one bucket.

    The methods that are not abstract are for a device without a compiler or rows in memory.

    Attributes:
      bucket: the bucket, with the maximum number of rows.
      num_rows: the current number of rows.
      num_invalid: number of sentences without a result because logits were NaN or infinite.
    """

    bucket: Bucket
    num_rows: int
    num_invalid: int = 0

    @property
    def encode_batch_size(self) -> int:
        """Maximum number of sentences in a call of ``decode``."""
        return self.num_rows

    @property
    @abstractmethod
    def running(self) -> list[Task]:
        """The tasks in rows, as of the last ``read``."""

    @property
    def is_ready(self) -> bool:
        """Whether at least one number of rows is compiled."""
        return True

    def compile_next(self) -> bool:
        """Compile what ``decode`` needs for the smallest number of rows that is not compiled yet.
        A thread of its own may call this. Returns whether there are more; does nothing if all are
        compiled.
        """
        return False

    @abstractmethod
    def resize(self, count: int) -> None:
        """Move the running sentences to the smallest compiled number of rows that holds ``count``
        sentences, or to the largest.
        """

    @abstractmethod
    def decode(self, admitted: Sequence[Task], *, max_steps: int, stop_after: int) -> None:
        """Assign rows to sentences of one padded length. If too few rows are idle, decode until
        enough sentences are done. Then decode up to ``max_steps`` steps, stopping early once
        ``stop_after`` more sentences are done. Returns without waiting for the device.
        """

    @abstractmethod
    def read(self) -> None:
        """Wait for the device. Finish tasks that are done, and free the rows of canceled ones."""

    def release(self) -> None:  # noqa: B027
        """Free the memory of the rows. All sentences must be done by then on the device."""


class SearchEngine(Protocol):
    """Searches on one device: ``Engine``, or ``CTranslate2Engine``."""

    def bucket_of(self, sentence: Sentence) -> Bucket:
        """Find the bucket of a sentence. Raises ``UserError`` if there is none."""

    def buckets_with_terms(self, max_terms: int) -> list[Bucket]:
        """Return the buckets for sentences with up to ``max_terms`` terms, or without terms."""

    def new_batch(self, bucket: Bucket, *, is_resizable: bool = False) -> RunningBatch:
        """Prepare batch rows for sentences of a bucket. If ``is_resizable``, ``compile_next`` and
        ``resize`` set their number.
        """


class TaskQueue:
    """Unfinished sentences of one device, or of several that share them. Thread-safe.

    Attributes:
      changed: condition that is notified of new sentences, more compiled searches, and ``stop``.
      failure: the reason of ``stop``, if it was called.
      num_devices: number of schedulers that take sentences.
    """

    def __init__(self, buckets: Sequence[Bucket]):
        self.changed = threading.Condition()
        self.failure: Exception | None = None
        self.num_devices = 0
        # Waiting tasks, oldest first, with their padded lengths. The first of a plain dict is found
        # in linear time after deletions.
        self._waiting = {bucket: OrderedDict[Task, int]() for bucket in buckets}
        self._unfinished: dict[Bucket, set[Task]] = {bucket: set() for bucket in buckets}

    def submit(self, sentence: Sentence, bucket: Bucket) -> Future[list[Hypothesis]]:
        """Add a sentence. Returns a future for its hypotheses (see ``Engine.search``)."""
        task = Task(sentence)
        with self.changed:
            if self.failure:
                task.fail(self.failure)
                return task.future
            self._waiting[bucket][task] = bucket.padded_source_length(sentence)
            self._unfinished[bucket].add(task)
            task.future.add_done_callback(lambda _: self._remove(task, bucket))
            self.changed.notify_all()
        return task.future

    def _remove(self, task: Task, bucket: Bucket) -> None:
        """Remove a task that is finished, failed or canceled."""
        with self.changed:
            self._waiting[bucket].pop(task, None)
            self._unfinished[bucket].discard(task)

    def next_group(self, bucket: Bucket, count: int) -> list[Task]:
        """Return up to ``count`` waiting tasks, the oldest one first, that can be encoded together
        because their padded length is the same.
        """
        with self.changed:
            waiting = self._waiting[bucket]
            length = next(iter(waiting.values()), None)
            group = (task for task, padded_length in waiting.items() if padded_length == length)
            return list(islice(group, count))

    def take_waiting(self, bucket: Bucket, count: int) -> list[Task]:
        """Take the ``next_group`` of waiting tasks."""
        with self.changed:
            tasks = self.next_group(bucket, count)
            for task in tasks:
                del self._waiting[bucket][task]
        return tasks

    def stop(self, failure: Exception) -> None:
        """Fail all unfinished and later sentences with ``failure``."""
        with self.changed:
            self.failure = self.failure or failure
            for tasks in self._unfinished.values():
                for task in list(tasks):  # ``fail`` removes it from ``tasks``
                    task.fail(self.failure)
            self.changed.notify_all()

    def waiting(self, bucket: Bucket) -> int:
        """Return the number of a bucket's sentences that wait for a row."""
        return len(self._waiting[bucket])

    def share_of_device(self, bucket: Bucket) -> int:
        """Return each device's share of a bucket's unfinished sentences."""
        return -(-len(self._unfinished[bucket]) // self.num_devices)

    @property
    def num_waiting(self) -> int:
        """Number of sentences waiting for a batch row."""
        return sum(map(len, self._waiting.values()))

    @property
    def num_unfinished(self) -> int:
        """Number of waiting and running sentences."""
        return sum(map(len, self._unfinished.values()))


class Scheduler:
    """Searches the sentences of a queue on one device.

    One thread may call ``compile_next`` while another calls the other methods.

    Attributes:
      batches: the batch rows of each bucket.
      queue: the sentences.
    """

    def __init__(self, batches: Sequence[RunningBatch], queue: TaskQueue | None = None):
        """Take sentences from ``queue``, which other devices may share; default: a new queue."""
        self.batches = batches
        self.queue = queue or TaskQueue([batch.bucket for batch in batches])
        self.queue.num_devices += 1

    @property
    def num_running(self) -> int:
        """Number of sentences in batch rows."""
        return sum(len(batch.running) for batch in self.batches)

    def compile_next(self, batch: RunningBatch) -> bool:
        """Compile one more number of rows of a batch, for which sentences may be waiting. Returns
        whether there are more.
        """
        has_more = batch.compile_next()
        with self.queue.changed:
            self.queue.changed.notify_all()
        return has_more

    def wait_for_work(self) -> bool:
        """Wait for a sentence that can be searched. Returns False after ``TaskQueue.stop``."""
        queue = self.queue
        with queue.changed:
            queue.changed.wait_for(lambda: queue.failure or self._busy_batches())
        return queue.failure is None

    def _busy_batches(self) -> list[RunningBatch]:
        """Return the compiled batches with waiting or running sentences."""
        return [
            batch
            for batch in self.batches
            if batch.is_ready and (batch.running or self.queue.waiting(batch.bucket))
        ]

    def step(self) -> None:
        """Admit waiting sentences, decode a few steps and read the results, for each bucket."""
        busy_batches = self._busy_batches()
        for batch in busy_batches:
            num_running = len(batch.running)
            batch.resize(max(num_running, self.queue.share_of_device(batch.bucket)))
            num_idle = batch.num_rows - num_running
            count = self._num_admissible(batch, num_idle, others_are_idle=len(busy_batches) == 1)
            admitted = self.queue.take_waiting(batch.bucket, count)
            max_steps = max(STEPS_PER_READ, STEPS_PER_READ_OF_ONE_ROW // batch.num_rows)
            # Only one padded length is admitted at a time. Fill the other rows before decoding.
            can_admit_more = self.queue.waiting(batch.bucket) and len(admitted) != num_idle
            if admitted and can_admit_more:
                max_steps = 0
            batch.decode(admitted, max_steps=max_steps, stop_after=max(1, batch.num_rows // 4))
            batch.read()

    def dispatch(self) -> bool:
        """Dispatch the search of the next waiting sentences, without waiting for the device. The
        last sentences of a bucket are decoded to the end. Returns False if no sentence is waiting.
        """
        for batch in self.batches:
            admitted = self.queue.take_waiting(batch.bucket, batch.encode_batch_size)
            if admitted:
                is_last = not self.queue.waiting(batch.bucket)
                max_steps = _NO_LIMIT if is_last else 0
                batch.decode(admitted, max_steps=max_steps, stop_after=_NO_LIMIT)
                if is_last:
                    batch.release()
                return True
        return False

    def read(self) -> None:
        """Wait for all dispatched work, and finish its tasks."""
        for batch in self.batches:
            batch.read()

    def _num_admissible(self, batch: RunningBatch, num_idle: int, *, others_are_idle: bool) -> int:
        """Return the maximum number of sentences to admit: one for each idle row. If no other
        bucket has work, a full batch of encoded sentences can wait for rows in ``decode``.
        """
        count = batch.encode_batch_size
        is_full = len(self.queue.next_group(batch.bucket, count)) == count
        if others_are_idle and is_full and batch.num_rows == batch.bucket.num_rows:
            return count
        return min(count, num_idle)


def run_until_idle(schedulers: Sequence[Scheduler]) -> None:
    """Search all waiting sentences. The work is dispatched to the devices in turn, before the host
    waits for the first result.
    """
    busy = list(schedulers)
    while busy:
        busy = [scheduler for scheduler in busy if scheduler.dispatch()]
    for scheduler in schedulers:
        scheduler.read()
