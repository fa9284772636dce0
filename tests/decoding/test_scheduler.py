"""Scheduler: sentences that join and leave a running search get the engine's results."""

from __future__ import annotations

import dataclasses
import functools
import random
import sys
import threading
from concurrent.futures import CancelledError
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from random_models import make_model

from transformer_jax.decoding.engine import Engine, EngineBatch
from transformer_jax.decoding.ensemble import Ensemble
from transformer_jax.decoding.length_buckets import Bucket
from transformer_jax.decoding.scheduler import (
    RunningBatch,
    Scheduler,
    SearchFailed,
    TaskQueue,
    run_until_idle,
)
from transformer_jax.decoding.search import Sentence
from transformer_jax.settings.config import DecodingConfig

VOCAB = 40


class Vocabulary:
    """The part of a tokenizer that ``make_model`` uses."""

    target = SimpleNamespace(vocab_size=VOCAB)


CONFIG = DecodingConfig(beam_size=3, max_extra_length=10, max_source_length=24, batch_size=4)
SENTENCES = [
    Sentence(
        np.random.default_rng(i).integers(4, VOCAB, 1 + 7 * i % 23).tolist(),
        prefix=[5, 6, 7][: i % 4],
        seed=i,
    )
    for i in range(30)
]


@functools.cache
def shared_engine():
    return Engine(make_model(Vocabulary, seed=8), CONFIG)


def new_scheduler(engine):
    return Scheduler([EngineBatch(engine, engine.buckets[0], is_resizable=True)])


def compiled_scheduler(engine):
    scheduler = new_scheduler(engine)
    while scheduler.compile_next(scheduler.batches[0]):
        pass
    return scheduler


def submit(scheduler, sentence):
    return scheduler.queue.submit(sentence, scheduler.batches[0].bucket)


def run(scheduler):
    while scheduler.queue.num_waiting or scheduler.num_running:
        scheduler.step()


def search_as_they_arrive(scheduler, sentences, *, seed):
    """Submit at random times. Ten times a sentence is canceled and submitted again."""
    choice = random.Random(seed)
    to_submit = choice.sample(range(len(sentences)), len(sentences))
    futures = {}
    num_canceled = 0
    while to_submit or scheduler.queue.num_unfinished:
        for _ in range(choice.randint(0, 5)):
            if to_submit:
                index = to_submit.pop()
                futures[index] = submit(scheduler, sentences[index])
        unfinished = [index for index, future in futures.items() if not future.done()]
        if unfinished and num_canceled < 10:
            index = choice.choice(unfinished)
            assert futures[index].cancel()
            to_submit.append(index)
            num_canceled += 1
        scheduler.step()
    assert num_canceled == 10
    assert not scheduler.queue.num_waiting and not scheduler.num_running
    return [futures[index].result(timeout=0) for index in range(len(sentences))]


@pytest.mark.parametrize(
    ("num_models", "settings"),
    [
        (1, {}),
        (2, {"beam_size": 1, "no_repeat_ngram": 2, "min_length": 3}),
        pytest.param(
            *(1, {"method": "sample", "temperature": 0.8, "top_k": 9}),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["beam", "greedy ensemble with rules", "sample"],
)
def test_results_equal_the_engines(num_models, settings):
    config = dataclasses.replace(CONFIG, **settings)
    models = [make_model(Vocabulary, seed=seed) for seed in (8, 9)[:num_models]]
    model = Ensemble(models) if num_models > 1 else models[0]
    engine = Engine(model, config, device=jax.devices()[0] if num_models > 1 else None)
    scheduler = compiled_scheduler(engine)
    functions = engine._compiled.encode, engine._compiled.admit_and_decode
    num_compiled = [function._cache_size() for function in functions]
    num_hypotheses = [
        [
            sentence._replace(num_hypotheses=1 + (i + seed) % config.beam_size)
            for i, sentence in enumerate(SENTENCES)
        ]
        for seed in range(2)
    ]
    results = [
        search_as_they_arrive(scheduler, sentences, seed=seed)
        for seed, sentences in enumerate(num_hypotheses)
    ]
    assert [function._cache_size() for function in functions] == num_compiled
    in_a_file = engine.search([x._replace(num_hypotheses=config.beam_size) for x in SENTENCES])
    for sentences, result in zip(num_hypotheses, results, strict=True):
        for sentence, hypotheses, expected in zip(sentences, result, in_a_file, strict=True):
            expected = expected[: sentence.num_hypotheses]
            assert [x.tokens for x in hypotheses] == [x.tokens for x in expected]
            for x, y in zip(hypotheses, expected, strict=True):
                assert x.score == pytest.approx(y.score, abs=1e-5)
                assert x.token_log_probs == pytest.approx(y.token_log_probs, abs=1e-5)


def test_sentences_move_to_the_fewest_rows_that_hold_them():
    [batch] = compiled_scheduler(shared_engine()).batches
    for count, expected in [(0, 1), (1, 1), (2, 2), (3, 4), (5, 4), (2, 2)]:
        batch.resize(count)
        batch.decode([], max_steps=0, stop_after=1)
        assert batch.num_rows == len(batch._rows.state.done_B) == expected


def test_sentences_wait_until_a_number_of_rows_is_compiled():
    """They use only compiled numbers of rows, although more sentences wait."""
    scheduler = new_scheduler(shared_engine())
    [batch] = scheduler.batches
    futures = [submit(scheduler, sentence) for sentence in SENTENCES[:6]]
    scheduler.step()
    assert not batch.is_ready and scheduler.queue.num_waiting == 6
    numbers = []
    while scheduler.compile_next(batch):
        scheduler.step()
        numbers.append(batch.num_rows)
    assert numbers == [1, 2] and not scheduler.compile_next(batch)
    run(scheduler)
    for future, expected in zip(futures, shared_engine().search(SENTENCES[:6]), strict=True):
        assert [x.tokens for x in future.result(0)] == [x.tokens for x in expected[:1]]


@pytest.mark.parametrize("state", ["waiting", "running", "finished"])
def test_a_canceled_sentence(state):
    """It gets no result, leaves no trace, and changes no other sentence."""
    scheduler = compiled_scheduler(shared_engine())
    other = submit(scheduler, SENTENCES[5])
    if state != "waiting":
        scheduler.step()
    canceled = submit(scheduler, SENTENCES[3])
    if state == "running":
        scheduler.batches[0].resize(2)
        admitted = scheduler.queue.take_waiting(scheduler.batches[0].bucket, 1)
        scheduler.batches[0].decode(admitted, max_steps=1, stop_after=1)
        scheduler.batches[0].read()
        assert canceled in [task.future for task in scheduler.batches[0].running]
    elif state == "finished":
        run(scheduler)
    assert canceled.cancel() == (state != "finished")
    if state == "running":  # the next read frees its row on the device
        [batch] = scheduler.batches
        batch.read()
        is_idle = [task is None for task in batch._tasks]
        assert any(is_idle) and batch._rows.state.done_B.tolist() == is_idle
    run(scheduler)
    expected = shared_engine().search([SENTENCES[5], SENTENCES[3]])
    assert [x.tokens for x in other.result(0)] == [x.tokens for x in expected[0]]
    if state == "finished":
        assert [x.tokens for x in canceled.result(0)] == [x.tokens for x in expected[1]]
    else:
        with pytest.raises(CancelledError):
            canceled.result(0)
    assert not scheduler.queue.num_unfinished
    assert scheduler.batches[0]._rows.state.done_B.all()


def test_positions_of_idle_rows_do_not_overflow():
    """They are int32 on the device."""
    scheduler = compiled_scheduler(shared_engine())
    [batch] = scheduler.batches
    expected = [[x.tokens for x in found] for found in shared_engine().search(SENTENCES)]
    for start in 2**31 - 5, 2**31 - 2:
        batch.resize(CONFIG.batch_size)
        batch.decode([], max_steps=0, stop_after=1)
        state, cache = batch._rows
        late = np.full_like(state.position_B, start)
        state = state._replace(position_B=late)
        batch._rows = batch._rows._replace(
            state=state, cache=dataclasses.replace(cache, position_B=late)
        )
        submit(scheduler, SENTENCES[0])
        admitted = scheduler.queue.take_waiting(batch.bucket, 1)
        batch.decode(admitted, max_steps=9, stop_after=1)  # in one row; the others stay idle
        batch.read()
        for counted in batch._rows.state, batch._rows.cache:
            assert (np.asarray(counted.position_B) >= 0).all()
        run(scheduler)
        found = search_as_they_arrive(scheduler, SENTENCES, seed=start)
        assert [[x.tokens for x in hypotheses] for hypotheses in found] == expected


def test_nan_parameters_give_no_hypotheses():
    model = make_model(Vocabulary)
    model.softmax_matrix[...] = model.softmax_matrix[...] * np.nan
    scheduler = new_scheduler(Engine(model, CONFIG))
    scheduler.compile_next(scheduler.batches[0])
    future = submit(scheduler, SENTENCES[3])
    scheduler.step()
    assert future.result(timeout=0) == []
    assert scheduler.batches[0].num_invalid == 1


class RecordingBatch(RunningBatch):
    """Batch rows that record the calls, and finish every sentence when results are read."""

    encode_batch_size = property(lambda self: 2)
    running = property(lambda self: [])

    def __init__(self, bucket, calls):
        self.bucket = bucket
        self.num_rows = bucket.num_rows
        self.calls = calls
        self.decoded = []

    def decode(self, admitted, *, max_steps, stop_after):
        self.calls.append([len(admitted), max_steps > 0])
        self.decoded += admitted

    def read(self):
        self.calls.append("read")
        for task in self.decoded:
            task.finish([])

    def release(self):
        self.calls.append("release")

    is_ready = True
    compile_next = resize = None


def test_all_work_is_dispatched_before_the_host_reads_a_result():
    """Only the last sentences of a bucket are decoded to the end."""
    short, long = Bucket((16,), 4), Bucket((32,), 4)
    calls = [], []
    schedulers = [
        Scheduler([RecordingBatch(bucket, record) for bucket in (long, short)]) for record in calls
    ]
    futures = [
        scheduler.queue.submit(Sentence([5] * length), bucket)
        for scheduler, count in zip(schedulers, (3, 1), strict=True)
        for bucket, length in ((short, 9), (long, 20))
        for _ in range(count)
    ]
    assert schedulers[0].queue.num_waiting == 6
    run_until_idle(schedulers)
    of_bucket = [2, False], [1, True], "release"
    assert calls[0] == [*of_bucket, *of_bucket, "read", "read"]
    assert calls[1] == [[1, True], "release"] * 2 + ["read", "read"]
    assert all(future.done() for future in futures)


def cancel_all(futures):
    for future in futures:
        future.cancel()


def test_stopping_fails_all_sentences_although_some_end_meanwhile():
    """Threads of other devices finish sentences, and clients cancel them, while one device stops
    the search. An error there would leave the other sentences waiting forever.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(8):
            queue = TaskQueue([Bucket((16,), 4)])
            futures = [queue.submit(Sentence([5]), Bucket((16,), 4)) for _ in range(2000)]
            canceling = threading.Thread(target=cancel_all, args=[futures])
            canceling.start()
            while queue.num_unfinished == len(futures):
                pass
            queue.stop(SearchFailed("out of memory"))
            canceling.join()
            assert all(future.done() for future in futures)
            assert not queue.num_unfinished
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("lengths", [[20, 9, 9, 9, 20, 9, 9, 20], [9, 20, 20, 20, 9, 20, 20, 9]])
def test_the_oldest_sentence_is_admitted_first_whatever_its_length(lengths):
    """Under load, a sentence would otherwise wait as long as sentences of another length arrive."""
    batch = RecordingBatch(Bucket((16, 32), 4), [])
    scheduler = Scheduler([batch])
    for number, length in enumerate(lengths):
        scheduler.queue.submit(Sentence([5] * length, seed=number), batch.bucket)
    waiting = list(range(len(lengths)))
    while waiting:
        batch.decoded.clear()
        assert scheduler.dispatch()
        admitted = [task.sentence.seed for task in batch.decoded]
        oldest = waiting[0]
        alike = [number for number in waiting if lengths[number] == lengths[oldest]]
        assert admitted == alike[: batch.encode_batch_size]
        waiting = [number for number in waiting if number not in admitted]
    assert not scheduler.dispatch()
