"""Search threads: all sentences end, whatever happens to a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from transformer_jax import Bucket, Hypothesis, SearchFailed, Sentence, UserError
from transformer_jax.decoding.scheduler import RunningBatch, Task
from transformer_jax.decoding.workers import Workers

BUCKET = Bucket((16,), num_rows=4)
SENTENCES = [Sentence([number]) for number in range(40)]


class EchoBatch(RunningBatch):
    """A device that returns each source; ``before`` is called with each batch of sentences."""

    def __init__(self, before: Callable[[Sequence[Task]], object]):
        self.bucket = BUCKET
        self.num_rows = BUCKET.num_rows
        self.before = before
        self.num_compiled = 0
        self.compiles = threading.Event()
        self.can_compile = threading.Event()
        self.can_compile.set()
        self._running: list[Task] = []

    encode_batch_size = property(lambda self: 2)
    running = property(lambda self: self._running)

    is_ready = property(lambda self: self.num_compiled > 0)

    def compile_next(self) -> bool:
        self.compiles.set()
        self.can_compile.wait(10)
        self.num_compiled += 1
        return self.num_compiled < 3

    def resize(self, count: int) -> None:
        pass

    def decode(self, admitted: Sequence[Task], *, max_steps: int, stop_after: int) -> None:
        self._running += admitted
        self.before(admitted)

    def read(self) -> None:
        for task in self._running:
            task.finish([Hypothesis(list(task.sentence.tokens), 0.0, 0.0, [])])
        self._running = []

    def release(self) -> None:
        pass


def make_workers(*before: Callable[[Sequence[Task]], object]) -> Workers:
    return Workers([[EchoBatch(each)] for each in before], lambda _: BUCKET)


def test_threads_share_the_sentences() -> None:
    both_have_sentences = threading.Barrier(2, timeout=10)
    batches: list[list[Sequence[Task]]] = [[], []]

    def append(to: list[Sequence[Task]], admitted: Sequence[Task]) -> None:
        if not to:
            both_have_sentences.wait()
        to.append(admitted)

    workers = make_workers(*(partial(append, each) for each in batches))
    workers.start()
    workers.start()  # does nothing
    workers.wait_until_compiled()
    futures = [workers.submit(sentence) for sentence in SENTENCES]
    found = [future.result(10) for future in futures]
    assert [hypothesis.tokens for [hypothesis] in found] == [x.tokens for x in SENTENCES]
    assert all(batches)
    assert [each.batches[0].num_compiled for each in workers.schedulers] == [3, 3]  # type: ignore[attr-defined]
    workers.close()
    assert not workers.queue.num_waiting and not workers.num_running
    with pytest.raises(SearchFailed, match="was closed"):
        workers.submit(SENTENCES[0]).result(0)


def test_sentences_are_searched_while_more_is_compiled() -> None:
    """They go to a device that is ready."""
    workers = make_workers(lambda _: None, lambda _: None)
    second = workers.schedulers[1].batches[0]
    second.can_compile.clear()  # type: ignore[attr-defined]
    workers.start()
    futures = [workers.submit(sentence) for sentence in SENTENCES]
    for future in futures:
        future.result(10)
    assert not second.is_ready
    assert second.compiles.wait(10)  # type: ignore[attr-defined]
    workers.close()
    second.can_compile.set()  # type: ignore[attr-defined]
    workers.wait_until_compiled()
    assert second.num_compiled == 1  # type: ignore[attr-defined]


def test_a_failed_compilation_ends_all_sentences(caplog: pytest.LogCaptureFixture) -> None:
    workers = make_workers(lambda _: None, lambda _: None)
    second = workers.schedulers[1].batches[0]

    def compile_next() -> bool:
        raise RuntimeError("out of memory")

    second.compile_next = compile_next  # type: ignore[method-assign]
    workers.start()
    workers.wait_until_compiled()
    with pytest.raises(SearchFailed, match="out of memory"):
        workers.submit(SENTENCES[0]).result(0)
    workers.close()
    assert "The search failed and must be restarted" in caplog.text


def test_a_device_that_fails_ends_all_sentences(caplog: pytest.LogCaptureFixture) -> None:
    """Waiting, running and later sentences fail, on all devices."""
    has_sentences = threading.Event()
    goes_on = threading.Event()
    all_failed = threading.Event()

    def fail(_: Sequence[Task]) -> None:
        has_sentences.set()
        goes_on.wait(10)
        raise RuntimeError("out of memory")

    workers = make_workers(fail, lambda _: all_failed.wait(10))
    workers.start()
    workers.wait_until_compiled()
    futures = [workers.submit(sentence) for sentence in SENTENCES]
    futures[-1].cancel()
    assert has_sentences.wait(10)
    assert workers.queue.num_unfinished == 39
    goes_on.set()
    for future in futures[:-1]:
        with pytest.raises(SearchFailed, match="out of memory"):
            future.result(10)
    all_failed.set()
    workers.close()
    with pytest.raises(SearchFailed, match="out of memory"):
        workers.submit(SENTENCES[0]).result(0)
    assert str(workers.queue.failure) == "out of memory"
    assert "The search failed and must be restarted" in caplog.text
    assert not any(thread.is_alive() for thread in workers._threads)


def test_a_failure_without_a_message_has_a_name() -> None:
    def fail(_: Sequence[Task]) -> None:
        raise MemoryError

    workers = make_workers(fail)
    workers.start()
    with pytest.raises(SearchFailed, match="MemoryError"):
        workers.submit(SENTENCES[0]).result(10)
    workers.close()


def test_a_canceled_sentence_is_never_decoded() -> None:
    goes_on = threading.Event()
    decoded: list[int] = []

    def wait(admitted: Sequence[Task]) -> None:
        goes_on.wait(10)
        decoded.extend(task.sentence.tokens[0] for task in admitted)

    workers = make_workers(wait)
    workers.start()
    futures = [workers.submit(sentence) for sentence in SENTENCES[:10]]
    assert futures[9].cancel()
    goes_on.set()
    for future in futures[:9]:
        future.result(10)
    workers.close()
    assert decoded == list(range(9))


def test_sentences_need_threads() -> None:
    with pytest.raises(UserError, match="has not started; call start"):
        make_workers(print).submit(SENTENCES[0])
