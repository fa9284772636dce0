"""Live rows: sentences that join and leave a running search get the engine's results."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from random_models import make_model

from transformer_jax.decoding.engine import Engine
from transformer_jax.decoding.ensemble import Ensemble
from transformer_jax.decoding.search import Sentence
from transformer_jax.serving.live_rows import LiveRows
from transformer_jax.serving.workers import Entry
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


def live_rows(engine):
    rows = LiveRows(engine, engine.buckets[0])
    rows.compile()
    return rows


def search_live(rows, sentences, wanted, *, seed):
    """Search with random arrivals, batch sizes and step counts. Returns each sentence's
    hypotheses. Ten times a sentence is canceled and arrives again.
    """
    chance, length_of = random.Random(seed), rows.bucket.length_of
    waiting = chance.sample(range(len(sentences)), len(sentences))
    entries, left = {}, 0
    while waiting or rows.running:
        rows.resize(max(len(rows.running), chance.randint(1, CONFIG.batch_size)))
        if waiting and chance.random() < 0.7:
            length = length_of(sentences[waiting[0]])
            same = [i for i in waiting if length_of(sentences[i]) == length]
            same = same[: chance.randint(1, rows.bucket.block_size)]
            for i in same:
                waiting.remove(i)
                entries[i] = Entry(sentences[i]._replace(wanted=wanted[i]))
            rows.turn([entries[i] for i in same], 0)
        running = [i for i, entry in entries.items() if entry in rows.running.values()]
        if running and left < 10 and chance.random() < 0.5:
            number = chance.choice(running)
            waiting.append(number)
            entries[number].future.cancel()
            left += 1
        rows.turn([], chance.randint(1, 9))
    assert left == 10
    return [entries[i].future.result(timeout=0) for i in range(len(sentences))]


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
    rows = live_rows(engine)
    compiled = (
        engine._compiled.encode._cache_size(),
        engine._compiled.admit_and_decode._cache_size(),
    )
    of_seeds = [
        search_live(rows, SENTENCES, wanted_by(seed, config), seed=seed) for seed in range(2)
    ]
    assert compiled == (
        engine._compiled.encode._cache_size(),
        engine._compiled.admit_and_decode._cache_size(),
    )
    every = [sentence._replace(wanted=config.beam_size) for sentence in SENTENCES]
    alone = engine.search(every)
    for seed, found in enumerate(of_seeds):
        for i, count in enumerate(wanted_by(seed, config)):
            its = alone[i][:count]
            assert [each.tokens for each in found[i]] == [each.tokens for each in its]
            for got, expected in zip(found[i], its, strict=True):
                assert got.score == pytest.approx(expected.score, abs=1e-5)
                assert got.token_log_probs == pytest.approx(expected.token_log_probs, abs=1e-5)


def wanted_by(seed, config):
    return [1 + (i + seed) % config.beam_size for i in range(len(SENTENCES))]


def test_sentences_move_to_the_fewest_rows_that_hold_them():
    rows = live_rows(Engine(make_model(Vocabulary), CONFIG))
    for count, expected in [(0, 1), (1, 1), (2, 2), (3, 4), (5, 4), (2, 2)]:
        rows.resize(count)
        assert rows.bucket.rows == len(rows._rows.number_B) == rows.num_idle == expected


def test_a_canceled_sentence_leaves_its_row():
    rows = live_rows(Engine(make_model(Vocabulary), CONFIG))
    entry = Entry(SENTENCES[3])
    rows.turn([entry], 1)
    assert rows.num_idle == rows.bucket.rows - 1 and not entry.future.done()
    entry.future.cancel()
    rows.turn([], 1)
    assert rows.num_idle == rows.bucket.rows and not rows.running
    assert rows._rows.state.done_B.all()


@pytest.mark.parametrize("counter", ["numbers", "positions of idle rows"])
def test_counters_do_not_overflow(counter):
    """Numbers of sentences, and positions in rows that stay idle, are int32 on the device."""
    engine = Engine(make_model(Vocabulary, seed=8), CONFIG)
    rows = live_rows(engine)
    expected = [[each.tokens for each in found] for found in engine.search(SENTENCES)]
    for start in 2**31 - 5, 2**31 - 2:
        if counter == "numbers":
            rows.next_number = start
        else:
            rows.resize(CONFIG.batch_size)
            state, cache = rows._rows.state, rows._rows.cache
            late = np.full_like(state.position_B, start)
            state = state._replace(position_B=late)
            cache = dataclasses.replace(cache, position_B=late)
            rows._rows = rows._rows._replace(state=state, cache=cache)
        rows.turn([Entry(SENTENCES[0])], 9)  # in one row; the others stay idle
        for counted in rows._rows.state, rows._rows.cache:
            assert (np.asarray(counted.position_B) >= 0).all()
        found = search_live(rows, SENTENCES, [1] * len(SENTENCES), seed=start)
        assert [[each.tokens for each in hypotheses] for hypotheses in found] == expected


def test_nan_parameters_give_no_hypotheses():
    model = make_model(Vocabulary)
    model.softmax_matrix[...] = model.softmax_matrix[...] * np.nan
    rows = live_rows(Engine(model, CONFIG))
    entry = Entry(SENTENCES[3])
    rows.turn([entry], 3)
    assert entry.future.result(timeout=0) == []
