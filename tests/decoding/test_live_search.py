"""Sentences that enter and leave while others are searched get what the engine gives them."""

from __future__ import annotations

import dataclasses
import random

import jax
import numpy as np
import pytest
from random_models import make_model

from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.buckets import length_index
from transformer_jax.decoding.engine import Engine, Sentence
from transformer_jax.decoding.live_search import Entry, LiveSearch
from transformer_jax.model.transformer import with_cast_weights

VOCAB = 40


class Vocabulary:
    """All that ``make_model`` asks of a tokenizer."""

    target_vocab_size = VOCAB


CONFIG = DecodingConfig(beam_size=3, max_extra_length=10, max_source_length=32, batch_size=8)
SENTENCES = [
    Sentence(
        np.random.default_rng(i).integers(4, VOCAB, 1 + 7 * i % 29).tolist(),
        prefix=[5, 6, 7][: i % 4],
        seed=i,
    )
    for i in range(40)
]


def live_search(engine):
    models = list(map(with_cast_weights, engine.models))
    return LiveSearch(engine, engine.buckets[0], models)


def search_live(live, sentences, wanted, *, seed):
    """Each sentence's hypotheses; the order in which they come, the moments at which they do and
    the numbers of steps are random, and so are those who leave and come again.
    """
    chance, lengths = random.Random(seed), live.bucket.lengths
    waiting = chance.sample(range(len(sentences)), len(sentences))
    found, left = {}, 0
    while waiting or live.busy:
        if waiting and live.idle and chance.random() < 0.7:
            same = [
                i
                for i in waiting
                if length_index(sentences[i], lengths)
                == length_index(sentences[waiting[0]], lengths)
            ]
            most = chance.randint(1, min(len(live.idle), live.bucket.block_size))
            for i in same[:most]:
                waiting.remove(i)
            live.enter([Entry(i, sentences[i], wanted[i]) for i in same[:most]])
        found |= live.take_steps(chance.randint(1, 9))
        if live.busy and left < 10 and chance.random() < 0.2:
            row = chance.choice(list(live.busy))
            waiting.append(live.busy[row].owner)
            live.leave(row)
            left += 1
    assert left == 10
    return [found[i] for i in range(len(sentences))]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beam_size": 1},
        {"no_repeat_ngram": 2, "min_length": 3},
        {"method": "sample", "temperature": 0.8, "top_k": 9},
    ],
    ids=["beam", "greedy", "rules", "sample"],
)
def test_every_sentence_gets_what_the_engine_gives_it(settings):
    config = dataclasses.replace(CONFIG, **settings)
    models = [make_model(Vocabulary), make_model(Vocabulary, seed=9)]
    engine = Engine(models, config, devices=jax.devices()[:1])
    live = live_search(engine)
    live.compile()
    compiled = live._enter._cache_size(), live._step._cache_size()
    alone = {
        count: engine.search(SENTENCES, num_hypotheses=count)
        for count in range(1, config.beam_size + 1)
    }
    if config.method == "sample":  # each draw is made, whoever wants them
        alone = dict.fromkeys(alone, alone[config.beam_size])
    for seed in range(3):
        wanted = [1 + (i + seed) % config.beam_size for i in range(len(SENTENCES))]
        found = search_live(live, SENTENCES, wanted, seed=seed)
        for i, count in enumerate(wanted):
            its = alone[count][i][:count]
            assert [each.tokens for each in found[i]] == [each.tokens for each in its]
            for got, expected in zip(found[i], its, strict=True):
                assert got.score == pytest.approx(expected.score, abs=1e-5)
                assert got.token_log_probs == pytest.approx(expected.token_log_probs, abs=1e-5)
    assert compiled == (live._enter._cache_size(), live._step._cache_size())
    assert 0 < live.slots_used <= live.slots_computed


def test_a_row_that_is_left_takes_no_more_steps():
    engine = Engine([make_model(Vocabulary)], CONFIG)
    live = live_search(engine)
    live.enter([Entry("gone", SENTENCES[3])])
    live.take_steps(1)
    live.leave(0)
    assert live.idle == list(range(CONFIG.batch_size)) and not live.busy
    before = live.slots_used
    assert live.take_steps(5) == [] and live.slots_used == before


def test_broken_parameters_give_a_sentence_no_hypotheses():
    model = make_model(Vocabulary)
    model.softmax_matrix[...] = model.softmax_matrix[...] * np.nan
    engine = Engine([model], CONFIG)
    live = live_search(engine)
    live.enter([Entry("broken", SENTENCES[3])])
    assert live.take_steps(3) == [("broken", [])]
