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
from transformer_jax.decoding.continuous_batching import (
    EMPTY,
    Found,
    Rows,
    admit_and_decode,
    resized,
)
from transformer_jax.decoding.sampling import Sampling
from transformer_jax.decoding.search import results, search

SENTENCES, LENGTH, VOCAB = 48, 10, 9
TOYS = random_chains(0, sentences=SENTENCES, length=LENGTH, vocab=VOCAB)
LIMITS = np.random.default_rng(1).integers(1, LENGTH + 1, SENTENCES)
BEAM = BeamSearch(**IDS, beam_size=3)
REPEATS = BeamSearch(**IDS, beam_size=3, constraints=Constraints(no_repeat_ngram=1))
PATIENT = BeamSearch(**IDS, beam_size=3, length_penalty=4.0, patience=1.0)
SAMPLES = Sampling(**IDS, beam_size=3, seed=5)
TO_THE_LIMIT = BeamSearch(**IDS, beam_size=1, constraints=Constraints(min_length=LENGTH))


class ToyModel:
    """The Markov chains as a model, compiled for any ``toys`` of the same shape."""

    start_cache = staticmethod(jax.jit(chains.start, static_argnames="beam_size"))

    def step(self, toys, tokens_BW, cache):
        return chains.step(toys)(tokens_BW, cache)


TOY_MODEL = ToyModel()
results_of = jax.jit(lambda finished: results(finished, chains.PAD))


@functools.cache
def compiled(method, model, batch_size):
    """Jitted functions that make empty rows and that admit_and_decode a block."""

    @jax.jit
    def start(limit_B, seed_B):
        prefix_BP = np.zeros((len(limit_B), 0), np.int32)
        return method.start(limit_B, max_length=LENGTH, prefix_BP=prefix_BP, seed_B=seed_B)

    @jax.jit
    def seat_block(toys, rows, block, most, enough):
        step = functools.partial(model.step, toys)
        return admit_and_decode(method, step, rows, block, most, enough)

    return start, seat_block


def new_rows(method, batch_size, model=TOY_MODEL):
    nobody = np.zeros(batch_size, np.int32)
    cache = model.start_cache(nobody, beam_size=method.beam_size)
    state = compiled(method, model, batch_size)[0](nobody, nobody)
    return Rows(np.full(batch_size, EMPTY), state, cache)


def new_block(method, sentences, block_size, limits, model=TOY_MODEL):
    sentences = np.array([*sentences, *[EMPTY] * (block_size - len(sentences))], np.int32)
    known = np.maximum(sentences, 0)
    limit_Q = np.where(sentences >= 0, limits[known], 0)
    state = compiled(method, model, block_size)[0](limit_Q, known)
    return Rows(sentences, state, model.start_cache(known, beam_size=method.beam_size))


def search_in_rows(
    method, order, *, batch_size, block_size, counts=None, limits=LIMITS, toys=TOYS, model=TOY_MODEL
):
    """Search the sentences in this order, block by block; block i holds ``counts[i]`` sentences.
    Returns the hypotheses by sentence number, the number of steps, and the final rows.
    """
    _, seat_block = compiled(method, model, batch_size)
    counts = counts or [block_size] * -(-len(order) // block_size)
    rows, num_steps = new_rows(method, batch_size, model), 0
    found = {}
    firsts = range(0, len(order), block_size)
    for first, count in [*zip(firsts, counts, strict=True), (0, 0)]:
        its = new_block(method, order[first : first + count], block_size, limits, model)
        most = np.int32(0 if count else 10**6)
        rows, left, its_steps = seat_block(toys, rows, its, most, np.int32(batch_size))
        num_steps += int(its_steps)
        add(found, left)
    assert rows.state.done_B.all()
    add(found, Found(rows.number_B, results_of(rows.state.finished)))
    return found, num_steps, rows


def add(found, left):
    """Add the hypotheses by sentence number; None for NaN."""
    left = jax.device_get(left)
    numbers, is_nan = left.number_R, np.isnan(left.results.scores_BN[:, 0])
    assert not found.keys() & set(numbers.tolist())
    found |= dict.fromkeys(numbers[is_nan].tolist())
    sound = chains.hypotheses(jax.tree.map(lambda x: x[~is_nan], left.results))
    found |= zip(numbers[~is_nan].tolist(), sound, strict=True)
    found.pop(EMPTY, None)


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


@pytest.mark.parametrize(("batch_size", "block_size"), [(1, 1), (4, 4), (33, 8), (48, 48)])
def test_results_equal_those_of_one_batch(alone, batch_size, block_size):
    order = np.random.default_rng(batch_size).permutation(SENTENCES)
    found, _, _ = search_in_rows(BEAM, order, batch_size=batch_size, block_size=block_size)
    assert found == dict(enumerate(alone))


@pytest.mark.parametrize("method", [REPEATS, PATIENT, SAMPLES])
def test_refilled_rows_keep_no_tokens_seeds_or_counts(alone, method):
    order = np.random.default_rng(7).permutation(SENTENCES)
    found, _, _ = search_in_rows(method, order, batch_size=4, block_size=4)
    expected = one_batch(method)
    assert expected != alone
    assert found == dict(enumerate(expected))


def test_rows_recover_from_nan(alone):
    with_nan = TOYS.copy()
    with_nan[::3, 1:] = np.nan
    order = np.arange(SENTENCES)
    found, _, _ = search_in_rows(BEAM, order, batch_size=4, block_size=4, toys=with_nan)
    assert found == {
        i: None if i % 3 == 0 and limit > 1 else its
        for i, (its, limit) in enumerate(zip(alone, LIMITS, strict=True))
    }


@pytest.mark.parametrize(
    ("batch_size", "block_size", "counts"),
    [
        *((16, 16, np.clip(n - 16 * np.arange(3), 0, 16).tolist()) for n in (1, 5, 16, 47)),
        *((16, 16, counts) for counts in ([5, 0, 16], [0, 0, 1], [1, 2, 0], [0, 0, 0])),
        (33, 8, [7, 8, 8, 5, 2, 3]),  # refills two rows at a time, from blocks of odd sizes
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


def test_sentences_with_a_limit_of_0_do_not_stop_others(alone):
    limits = np.where(np.arange(SENTENCES) % 5 == 0, 0, LIMITS)
    order = np.arange(SENTENCES)
    found, _, _ = search_in_rows(BEAM, order, batch_size=4, block_size=4, limits=limits)
    assert found == {i: [] if i % 5 == 0 else its for i, its in enumerate(alone)}


@pytest.mark.parametrize(("most", "enough"), [(3, 99), (99, 2), (99, 99), (0, 5)])
def test_steps_after_a_block_is_seated(most, enough):
    """Steps stop after ``most`` steps, or once ``enough`` sentences or all are done."""
    limits = np.array([2, 5, 7, 9])
    _, seat_block = compiled(TO_THE_LIMIT, TOY_MODEL, 4)
    rows, block = new_rows(TO_THE_LIMIT, 4), new_block(TO_THE_LIMIT, range(4), 4, limits)
    rows, left, num_steps = seat_block(TOYS, rows, block, np.int32(most), np.int32(enough))
    steps = min(most, {2: 5}.get(enough, 9))
    assert num_steps == steps
    assert rows.state.done_B.tolist() == [steps >= x for x in limits]
    assert (left.number_R == EMPTY).all()


def test_inputs_of_idle_rows_stay_in_the_vocabulary():
    """A row may wait for others longer than its history has positions."""

    @struct.dataclass
    class WithLowest(chains.ToyCache):
        lowest_BW: jax.Array

        def replace_rows(self, rows_R, fresh):
            replaced = super().replace_rows(rows_R, fresh)
            return dataclasses.replace(replaced, lowest_BW=self.lowest_BW)

    class Watched(ToyModel):
        def start_cache(self, sentence_B, *, beam_size):
            lowest_BW = jnp.full((len(sentence_B), 1), VOCAB)
            cache = ToyModel.start_cache(sentence_B, beam_size=beam_size)
            return WithLowest(**vars(cache), lowest_BW=lowest_BW)

        def step(self, toys, tokens_BW, cache):
            logits_BWV, cache = super().step(toys, tokens_BW, cache)
            lowest_BW = jnp.minimum(cache.lowest_BW, tokens_BW)
            return logits_BWV, dataclasses.replace(cache, lowest_BW=lowest_BW)

    limits = np.array([LENGTH, LENGTH - 1, LENGTH])
    _, _, rows = search_in_rows(
        TO_THE_LIMIT, np.arange(3), batch_size=2, block_size=3, limits=limits, model=Watched()
    )
    assert (rows.cache.lowest_BW >= 0).all() and (rows.cache.lowest_BW < VOCAB).all()


def test_few_slots_are_wasted():
    lengths = np.sort(np.random.default_rng(2).integers(2, LENGTH + 1, SENTENCES))[::-1]
    (found, static, _), (_, refilled, _) = (
        search_in_rows(
            TO_THE_LIMIT, np.arange(SENTENCES), batch_size=size, block_size=size, limits=lengths
        )
        for size in (48, 4)
    )
    used = sum(len(tokens) for [(tokens, *_)] in found.values())
    assert 4 * refilled * 0.9 <= used < 48 * static * 0.7


@pytest.mark.parametrize(
    ("done_B", "numbers"), [([0, 1, 0], [7, 9]), ([0, 0, 0], [7, 8, 9, EMPTY, EMPTY])]
)
def test_resized_rows_hold_the_running_sentences_and_are_idle_otherwise(done_B, numbers):
    rows = new_rows(BEAM, 3)._replace(number_B=np.array([7, 8, 9]))
    rows = rows._replace(state=rows.state._replace(done_B=np.array(done_B, bool)))
    found = resized(rows, len(numbers))
    assert found.number_B.tolist() == numbers
    assert found.state.done_B.tolist() == [number == EMPTY for number in numbers]
