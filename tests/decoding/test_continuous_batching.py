"""Continuous batching: results independent of other sentences, and few wasted slots."""

from __future__ import annotations

import dataclasses
import functools

import chains
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import IDS, random_chains
from flax import struct

from transformer_jax.decoding.beam_search import BeamSearch
from transformer_jax.decoding.constraints import Constraints
from transformer_jax.decoding.continuous_batching import NOBODY, Found, Rows, seat
from transformer_jax.decoding.sampling import Sampling
from transformer_jax.decoding.search import results, search

SENTENCES, LENGTH, VOCAB = 48, 10, 9
TOYS = random_chains(0, sentences=SENTENCES, length=LENGTH, vocab=VOCAB)
LIMITS = np.random.default_rng(1).integers(1, LENGTH + 1, SENTENCES)


start_toys = jax.jit(chains.start, static_argnames="beam_size")


class ToyModel:
    """The Markov chains as a model."""

    def start_cache(self, sentence_B, *, beam_size):
        return start_toys(sentence_B, beam_size=beam_size)

    def step(self, tokens_BW, cache):
        return chains.step(TOYS)(tokens_BW, cache)


TOY_MODEL = ToyModel()
results_of = jax.jit(lambda finished: results(finished, chains.PAD))


@functools.cache
def compiled(method, model, batch_size):
    """What makes empty rows, and what seats a block."""

    @jax.jit
    def start(limit_B, seed_B):
        prefix_BP = np.zeros((len(limit_B), 0), np.int32)
        return method.start(limit_B, max_length=LENGTH, prefix_BP=prefix_BP, seed_B=seed_B)

    @jax.jit
    def seat_block(rows, block, most):
        return seat(method, model.step, rows, block, most, np.int32(batch_size))

    return start, seat_block


def search_in_rows(
    method, order, *, batch_size, block_size, counts=None, limits=LIMITS, model=None
):
    """The sentences in this order, block after block, of which each has its count: hypotheses by
    the places in the blocks, the number of steps, and the rows in the end.
    """
    model = model or TOY_MODEL
    start, seat_block = compiled(method, model, batch_size)
    counts = counts or [block_size] * -(-len(order) // block_size)

    def block(sentences):
        sentences = np.array([*sentences, *[NOBODY] * (block_size - len(sentences))], np.int32)
        known = np.maximum(sentences, 0)
        state = start(np.where(sentences >= 0, limits[known], 0), known.astype(np.uint32))
        return Rows(sentences, state, model.start_cache(known, beam_size=method.beam_size))

    nobody = np.zeros(batch_size, np.int32)
    cache = model.start_cache(nobody, beam_size=method.beam_size)
    rows, num_steps = Rows(np.full(batch_size, NOBODY), start(nobody, nobody), cache), 0
    found = {}
    firsts = range(0, len(order), block_size)
    for first, count in [*zip(firsts, counts, strict=True), (0, 0)]:
        its = block(order[first : first + count])
        rows, left, its_steps = seat_block(rows, its, np.int32(0 if count else 10**6))
        num_steps += int(its_steps)
        add(found, left)
    assert rows.state.done_B.all()
    add(found, Found(rows.number_B, results_of(rows.state.finished)))
    return found, num_steps, rows


def add(found, left):
    """The hypotheses by the sentences' numbers; of NaN: None."""
    left = jax.device_get(left)
    numbers, is_nan = left.number_R, np.isnan(left.results.scores_BN[:, 0])
    assert not found.keys() & set(numbers.tolist())
    found |= dict.fromkeys(numbers[is_nan].tolist())
    sound = chains.hypotheses(jax.tree.map(lambda x: x[~is_nan], left.results))
    found |= zip(numbers[~is_nan].tolist(), sound, strict=True)
    found.pop(NOBODY, None)


BEAM = BeamSearch(**IDS, beam_size=3)
REPEATS = BeamSearch(**IDS, beam_size=3, constraints=Constraints(no_repeat_ngram=1))
SAMPLES = Sampling(**IDS, beam_size=3, seed=5)


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
    found, _, _ = search_in_rows(BEAM, order, batch_size=batch_size, block_size=block_size)
    assert found == dict(enumerate(alone))


@pytest.mark.parametrize("method", [REPEATS, SAMPLES])
def test_repeats_and_samples_are_those_of_one_batch(alone, method):
    """Rows are handed over with nothing of what they held: neither tokens nor seeds."""
    order = np.random.default_rng(7).permutation(SENTENCES)
    found, _, _ = search_in_rows(method, order, batch_size=4, block_size=4)
    expected = one_batch(method)
    assert expected != alone
    assert found == dict(enumerate(expected))


def test_a_row_that_held_what_is_not_a_number_is_as_good_as_any(alone):
    with_nan = TOYS.copy()
    with_nan[::3, 1:] = np.nan

    class Broken(ToyModel):
        def step(self, tokens_BW, cache):
            return chains.step(with_nan)(tokens_BW, cache)

    order = np.arange(SENTENCES)
    found, _, _ = search_in_rows(BEAM, order, batch_size=4, block_size=4, model=Broken())
    assert found == {
        i: None if i % 3 == 0 and limit > 1 else its
        for i, (its, limit) in enumerate(zip(alone, LIMITS, strict=True))
    }


@pytest.mark.parametrize(
    ("batch_size", "block_size", "counts"),
    [
        *((16, 16, np.clip(n - 16 * np.arange(3), 0, 16).tolist()) for n in (1, 5, 16, 47)),
        *((16, 16, counts) for counts in ([5, 0, 16], [0, 0, 1], [1, 2, 0], [0, 0, 0])),
        # 33 rows, of which two are handed on at a time; blocks of odd sizes.
        *((33, 16, [16, 14, 3]), (33, 8, [7, 8, 8, 5, 2, 3])),
    ],
)
def test_blocks_may_end_early(alone, batch_size, block_size, counts):
    order = np.arange(SENTENCES)
    found, num_steps, _ = search_in_rows(
        BEAM, order, batch_size=batch_size, block_size=block_size, counts=counts
    )
    assert found == {
        i: its for i, its in enumerate(alone) if i % block_size < counts[i // block_size]
    }
    if batch_size >= len(found):  # all begin at once
        assert num_steps <= LENGTH


def test_sentences_with_nothing_to_search_do_not_stop_the_others(alone):
    limits = np.where(np.arange(SENTENCES) % 5 == 0, 0, LIMITS)
    order = np.arange(SENTENCES)
    found, _, _ = search_in_rows(BEAM, order, batch_size=4, block_size=4, limits=limits)
    assert found == {i: [] if i % 5 == 0 else its for i, its in enumerate(alone)}


@pytest.mark.parametrize(("most", "enough"), [(3, 99), (99, 2), (99, 99), (0, 5)])
def test_steps_after_a_block_has_rows(most, enough):
    """They end after ``most`` steps, with ``enough`` sentences done, or with all."""
    limits = np.full(SENTENCES, LENGTH)
    limits[:4] = [2, 5, 7, 9]
    method = BeamSearch(**IDS, beam_size=1, constraints=Constraints(min_length=LENGTH))
    model, number_Q = ToyModel(), jnp.arange(4)
    start, _ = compiled(method, model, 4)
    cache = model.start_cache(number_Q, beam_size=1)
    block = Rows(number_Q, start(jnp.asarray(limits[:4]), number_Q), cache)
    rows = Rows(jnp.full(4, NOBODY), start(jnp.zeros(4, jnp.int32), number_Q), cache)
    rows, left, num_steps = seat(
        method, model.step, rows, block, jnp.int32(most), jnp.int32(enough)
    )
    steps = min(most, {2: 5}.get(enough, 9))
    assert num_steps == steps
    assert rows.state.done_B.tolist() == [steps >= x for x in limits[:4]]
    assert (left.number_R == NOBODY).all()


def test_idle_rows_take_in_tokens_of_the_vocabulary():
    """However long a row waits for the others, past the capacity of its own history."""

    @struct.dataclass
    class WithLowest(chains.ToyCache):
        lowest_BW: jax.Array

        def replace_rows(self, rows_R, fresh):
            replaced = super().replace_rows(rows_R, fresh)
            return dataclasses.replace(replaced, lowest_BW=self.lowest_BW)

    class Watched(ToyModel):
        def start_cache(self, sentence_B, *, beam_size):
            lowest_BW = jnp.full((len(sentence_B), 1), VOCAB)
            cache = super().start_cache(sentence_B, beam_size=beam_size)
            return WithLowest(**vars(cache), lowest_BW=lowest_BW)

        def step(self, tokens_BW, cache):
            logits_BWV, cache = super().step(tokens_BW, cache)
            lowest_BW = jnp.minimum(cache.lowest_BW, tokens_BW)
            return logits_BWV, dataclasses.replace(cache, lowest_BW=lowest_BW)

    _, _, rows = search_in_rows(
        BeamSearch(**IDS, beam_size=1, constraints=Constraints(min_length=LENGTH)),
        np.arange(3),
        batch_size=2,
        block_size=3,
        limits=np.array([LENGTH, LENGTH - 1, LENGTH]),
        model=Watched(),
    )
    assert (rows.cache.lowest_BW >= 0).all() and (rows.cache.lowest_BW < VOCAB).all()


def test_few_slots_are_wasted():
    lengths = np.sort(np.random.default_rng(2).integers(2, LENGTH + 1, SENTENCES))[::-1]
    method, order = BeamSearch(**IDS, beam_size=1), np.arange(SENTENCES)
    (found, together, _), (_, handed_on, _) = (
        search_in_rows(method, order, batch_size=size, block_size=size, limits=lengths)
        for size in (48, 4)
    )
    used = sum(len(tokens) for [(tokens, *_)] in found.values())
    assert 4 * handed_on * 0.9 <= used < 48 * together * 0.7
