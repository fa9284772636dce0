"""Continuous batching: every sentence gets what it gets alone, and few slots are wasted."""

from __future__ import annotations

import dataclasses
from functools import partial

import chains
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import IDS, random_chains
from flax import struct

from transformer_jax.decoding.beam_search import BeamSearch
from transformer_jax.decoding.constraints import Constraints
from transformer_jax.decoding.continuous_batching import Waiting, search_waiting
from transformer_jax.decoding.sampling import Sampling
from transformer_jax.decoding.search import search

SENTENCES, LENGTH, VOCAB = 48, 10, 9
TOYS = random_chains(0, sentences=SENTENCES, length=LENGTH, vocab=VOCAB)
LIMITS = np.random.default_rng(1).integers(1, LENGTH + 1, SENTENCES)


def waiting_in(order, limits=LIMITS):
    """The sentences in this order; all that is known of sentence i is its number."""
    return Waiting(
        source=jnp.asarray(order, jnp.int32),
        limit_Q=jnp.asarray(limits[order], jnp.int32),
        prefix_QP=jnp.zeros((len(order), 0), jnp.int32),
        seed_Q=jnp.asarray(order, jnp.uint32),
    )


class ToyModel:
    """The chains as a ``DecodingModel``."""

    def __init__(self, beam_size):
        self.beam_size = beam_size

    def start_cache(self, source):
        return chains.start(source, beam_size=self.beam_size)

    def attended(self, cache):
        return [LENGTH]

    def step(self, tokens_BW, cache, *, length):
        return chains.step(TOYS)(tokens_BW, cache)


@partial(jax.jit, static_argnames=("method", "batch_size"))
def run(method, waiting, counts_M, *, batch_size):
    model = ToyModel(method.num_beams)
    cache = model.start_cache(jnp.zeros(batch_size, jnp.int32))
    found, _ = search_waiting(method, model, waiting, counts_M, cache, max_length=LENGTH)
    return found


def full(block_size):
    """Blocks without gaps."""
    return np.full(SENTENCES // block_size, block_size)


BEAM = BeamSearch(**IDS, beam_size=3)
REPEATS = BeamSearch(**IDS, beam_size=3, constraints=Constraints(no_repeat_ngram=1))
SAMPLES = Sampling(**IDS, num_samples=3, seed=5)


def one_batch(method):
    return chains.hypotheses(
        search(
            method,
            chains.step(TOYS),
            chains.start(jnp.arange(SENTENCES), beam_size=3),
            limit_B=jnp.asarray(LIMITS),
            max_length=LENGTH,
        )
    )


@pytest.fixture(scope="module")
def alone():
    return one_batch(BEAM)


@pytest.mark.parametrize(
    ("batch_size", "block_size"), [(1, 1), (4, 4), (16, 4), (16, 16), (32, 3), (48, 48)]
)
def test_the_results_are_those_of_one_batch(alone, batch_size, block_size):
    order = np.random.default_rng(batch_size).permutation(SENTENCES)
    result = run(BEAM, waiting_in(order), full(block_size), batch_size=batch_size)
    assert chains.hypotheses(result.results) == [alone[i] for i in order]


@pytest.mark.parametrize("method", [REPEATS, SAMPLES])
def test_repeats_and_samples_are_those_of_one_batch(method):
    """Rows are handed over with nothing of what they held: neither tokens nor seeds."""
    order = np.random.default_rng(7).permutation(SENTENCES)
    result = run(method, waiting_in(order), full(4), batch_size=4)
    expected = one_batch(method)
    assert expected != one_batch(BEAM)
    assert chains.hypotheses(result.results) == [expected[i] for i in order]


def test_a_row_that_held_what_is_not_a_number_is_as_good_as_any(alone, monkeypatch):
    with_nan = TOYS.copy()
    with_nan[::3, 1:] = np.nan
    monkeypatch.setattr(ToyModel, "step", lambda _, *given, length: chains.step(with_nan)(*given))
    result = jax.jit(partial(run.__wrapped__, BEAM, batch_size=4))(
        waiting_in(np.arange(SENTENCES)), full(4)
    )
    of_nan = np.isnan(result.results.scores_BN[:, 0])
    assert of_nan.tolist() == [i % 3 == 0 and limit > 1 for i, limit in enumerate(LIMITS)]
    sound = jax.tree.map(lambda x: x[~of_nan], result.results)
    assert chains.hypotheses(sound) == [its for its, bad in zip(alone, of_nan) if not bad]


def test_the_last_block_may_end_early(alone):
    for count in (0, 1, 5, 16, 47):
        counts = np.clip(count - 16 * np.arange(3), 0, 16)
        result = run(BEAM, waiting_in(np.arange(SENTENCES)), counts, batch_size=16)
        assert chains.hypotheses(result.results) == alone[:count] + [[]] * (SENTENCES - count)


@pytest.mark.parametrize("counts", [(5, 0, 16), (0, 0, 1), (1, 2, 0)])
def test_blocks_may_end_early(alone, counts):
    result = run(BEAM, waiting_in(np.arange(SENTENCES)), np.array(counts), batch_size=16)
    assert chains.hypotheses(result.results) == [
        its if i % 16 < counts[i // 16] else [] for i, its in enumerate(alone)
    ]


def test_all_begin_at_once_where_there_is_a_row_for_each(alone):
    """33 rows, of which two are handed on at a time; blocks of odd sizes."""
    for counts in ((16, 14, 3), (7, 8, 8, 5, 2, 3)):
        result = run(BEAM, waiting_in(np.arange(SENTENCES)), np.array(counts), batch_size=33)
        assert int(result.slots_computed) <= 33 * LENGTH
        size = SENTENCES // len(counts)
        assert chains.hypotheses(result.results) == [
            its if i % size < counts[i // size] else [] for i, its in enumerate(alone)
        ]


def test_sentences_with_nothing_to_search_do_not_stop_the_others(alone):
    limits = np.where(np.arange(SENTENCES) % 5 == 0, 0, LIMITS)
    result = run(BEAM, waiting_in(np.arange(SENTENCES), limits), full(4), batch_size=4)
    assert chains.hypotheses(result.results) == [
        [] if i % 5 == 0 else its for i, its in enumerate(alone)
    ]


def test_samples_do_not_depend_on_row_or_company():
    in_order = chains.hypotheses(
        run(SAMPLES, waiting_in(np.arange(SENTENCES)), full(16), batch_size=16).results
    )
    order = np.random.default_rng(3).permutation(SENTENCES)
    shuffled = chains.hypotheses(run(SAMPLES, waiting_in(order), full(4), batch_size=4).results)
    assert shuffled == [in_order[i] for i in order]


def test_idle_rows_take_in_tokens_of_the_vocabulary():
    """However long a row waits for the others, past the capacity of its own history."""

    @struct.dataclass
    class WithLowest(chains.ToyCache):
        lowest_BW: jax.Array

        def replace_rows(self, rows_R, fresh):
            replaced = super().replace_rows(rows_R, fresh)
            return dataclasses.replace(replaced, lowest_BW=self.lowest_BW)

    class Watched(ToyModel):
        def start_cache(self, source):
            lowest_BW = jnp.full((source.shape[0], 1), VOCAB)
            return WithLowest(**vars(super().start_cache(source)), lowest_BW=lowest_BW)

        def step(self, tokens_BW, cache, *, length):
            logits_BWV, cache = super().step(tokens_BW, cache, length=length)
            lowest_BW = jnp.minimum(cache.lowest_BW, tokens_BW)
            return logits_BWV, dataclasses.replace(cache, lowest_BW=lowest_BW)

    model = Watched(beam_size=1)
    _, cache = search_waiting(
        BeamSearch(**IDS, beam_size=1, constraints=Constraints(min_length=LENGTH)),
        model,
        waiting_in(np.arange(3), np.array([LENGTH, LENGTH - 1, LENGTH])),
        jnp.array([3]),
        model.start_cache(jnp.zeros(2, jnp.int32)),
        max_length=LENGTH,
    )
    assert (cache.lowest_BW >= 0).all() and (cache.lowest_BW < VOCAB).all()


def test_few_slots_are_wasted():
    toys_lengths = np.sort(np.random.default_rng(2).integers(2, LENGTH + 1, SENTENCES))[::-1]
    method = BeamSearch(**IDS, beam_size=1)
    together = run(method, waiting_in(np.arange(SENTENCES), toys_lengths), full(48), batch_size=48)
    handed_on = run(method, waiting_in(np.arange(SENTENCES), toys_lengths), full(4), batch_size=4)
    assert int(handed_on.slots_used) == int(together.slots_used)
    assert (
        int(handed_on.slots_computed) * 0.9
        <= int(handed_on.slots_used)
        < int(together.slots_computed) * 0.7
    )
