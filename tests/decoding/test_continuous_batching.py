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
from transformer_jax.decoding.continuous_batching import Rows, admit_and_decode, select_rows
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
    """Jitted functions that start sentences, and that admit encoded sentences to rows."""

    @jax.jit
    def start(limit_B, seed_B):
        prefix_BP = np.zeros((len(limit_B), 0), np.int32)
        return method.start(limit_B, max_length=LENGTH, prefix_BP=prefix_BP, seed_B=seed_B)

    @jax.jit
    def admit(toys, rows, encoded, *counts):
        step = functools.partial(model.step, toys)
        return admit_and_decode(method, step, rows, encoded, *counts)

    return start, admit


def new_rows(method, batch_size, model=TOY_MODEL):
    nobody = np.zeros(batch_size, np.int32)
    cache = model.start_cache(nobody, beam_size=method.beam_size)
    return Rows(compiled(method, model, batch_size)[0](nobody, nobody), cache)


def encode(method, sentences, encode_batch_size, limits, model=TOY_MODEL):
    padding = [0] * (encode_batch_size - len(sentences))
    sentences = np.array([*sentences, *padding], np.int32)
    state = compiled(method, model, encode_batch_size)[0](limits[sentences], sentences)
    return Rows(state, model.start_cache(sentences, beam_size=method.beam_size))


def search_in_rows(
    method,
    order,
    *,
    batch_size,
    encode_batch_size,
    counts=None,
    limits=LIMITS,
    toys=TOYS,
    model=TOY_MODEL,
):
    """Search the sentences in this order, some at a time; batch i of encoded sentences holds
    ``counts[i]``. Returns the hypotheses by sentence number, the number of steps, and the rows.
    """
    _, admit = compiled(method, model, batch_size)
    counts = counts or [encode_batch_size] * -(-len(order) // encode_batch_size)
    rows = new_rows(method, batch_size, model)
    sentence_in_row = {}
    num_steps = 0
    found = {}
    firsts = range(0, len(order), encode_batch_size)
    for first, count in [*zip(firsts, counts, strict=True), (0, 0)]:
        sentences = order[first : first + count]
        encoded = encode(method, sentences, encode_batch_size, limits, model)
        limits_of_call = np.int32([count, 0 if count else 10**6, batch_size])
        rows, admitted, steps = admit(toys, rows, encoded, *limits_of_call)
        num_steps += int(steps)
        hypotheses = read(admitted.results)
        for place, sentence in enumerate(sentences):
            row = int(admitted.row_Q[place])
            if row in sentence_in_row:
                found[sentence_in_row[row]] = hypotheses[place]
            sentence_in_row[row] = int(sentence)
    assert rows.state.done_B.all()
    hypotheses = read(results_of(rows.state.finished))
    return (
        found | {sentence: hypotheses[row] for row, sentence in sentence_in_row.items()},
        num_steps,
        rows,
    )


def read(results):
    """Hypotheses of each sentence; None for NaN."""
    results = jax.device_get(results)
    is_nan = np.isnan(results.scores_BN[:, 0])
    sound = iter(chains.hypotheses(jax.tree.map(lambda x: x[~is_nan], results)))
    return [None if nan else next(sound) for nan in is_nan]


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


@pytest.mark.parametrize(("batch_size", "encode_batch_size"), [(1, 1), (4, 4), (33, 8), (48, 48)])
def test_results_equal_those_of_one_batch(alone, batch_size, encode_batch_size):
    order = np.random.default_rng(batch_size).permutation(SENTENCES)
    found, _, _ = search_in_rows(
        BEAM, order, batch_size=batch_size, encode_batch_size=encode_batch_size
    )
    assert found == dict(enumerate(alone))


@pytest.mark.parametrize("method", [REPEATS, PATIENT, SAMPLES])
def test_refilled_rows_keep_no_tokens_seeds_or_counts(alone, method):
    order = np.random.default_rng(7).permutation(SENTENCES)
    found, _, _ = search_in_rows(method, order, batch_size=4, encode_batch_size=4)
    expected = one_batch(method)
    assert expected != alone
    assert found == dict(enumerate(expected))


def test_rows_recover_from_nan(alone):
    with_nan = TOYS.copy()
    with_nan[::3, 1:] = np.nan
    order = np.arange(SENTENCES)
    found, _, _ = search_in_rows(BEAM, order, batch_size=4, encode_batch_size=4, toys=with_nan)
    assert found == {
        i: None if i % 3 == 0 and limit > 1 else its
        for i, (its, limit) in enumerate(zip(alone, LIMITS, strict=True))
    }


@pytest.mark.parametrize(
    ("batch_size", "encode_batch_size", "counts"),
    [
        *((16, 16, np.clip(n - 16 * np.arange(3), 0, 16).tolist()) for n in (1, 5, 16, 47)),
        *((16, 16, counts) for counts in ([5, 0, 16], [0, 0, 1], [1, 2, 0], [0, 0, 0])),
        (33, 8, [7, 8, 8, 5, 2, 3]),  # refills two rows at a time, in odd numbers
    ],
)
def test_encoded_batches_may_end_early(alone, batch_size, encode_batch_size, counts):
    order = np.arange(SENTENCES)
    found, num_steps, _ = search_in_rows(
        BEAM, order, batch_size=batch_size, encode_batch_size=encode_batch_size, counts=counts
    )
    assert found == {
        i: its
        for i, its in enumerate(alone)
        if i % encode_batch_size < counts[i // encode_batch_size]
    }
    if batch_size >= len(found):  # all begin at once
        assert num_steps <= LENGTH


def test_sentences_with_a_limit_of_0_do_not_stop_others(alone):
    limits = np.where(np.arange(SENTENCES) % 5 == 0, 0, LIMITS)
    order = np.arange(SENTENCES)
    found, _, _ = search_in_rows(BEAM, order, batch_size=4, encode_batch_size=4, limits=limits)
    assert found == {i: [] if i % 5 == 0 else its for i, its in enumerate(alone)}


@pytest.mark.parametrize(("most", "enough"), [(3, 99), (99, 2), (99, 99), (0, 5)])
def test_steps_after_all_sentences_are_admitted(most, enough):
    """Steps stop after ``most`` steps, or once ``enough`` sentences or all are done."""
    limits = np.array([2, 5, 7, 9])
    _, admit = compiled(TO_THE_LIMIT, TOY_MODEL, 4)
    rows = new_rows(TO_THE_LIMIT, 4)
    encoded = encode(TO_THE_LIMIT, range(4), 4, limits)
    rows, admitted, num_steps = admit(TOYS, rows, encoded, *np.int32([4, most, enough]))
    steps = min(most, {2: 5}.get(enough, 9))
    assert num_steps == steps
    assert rows.state.done_B.tolist() == [steps >= x for x in limits]
    assert admitted.row_Q.tolist() == [0, 1, 2, 3]


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
        TO_THE_LIMIT,
        np.arange(3),
        batch_size=2,
        encode_batch_size=3,
        limits=limits,
        model=Watched(),
    )
    assert (rows.cache.lowest_BW >= 0).all() and (rows.cache.lowest_BW < VOCAB).all()


def test_few_slots_are_wasted():
    lengths = np.sort(np.random.default_rng(2).integers(2, LENGTH + 1, SENTENCES))[::-1]
    (found, static, _), (_, refilled, _) = (
        search_in_rows(
            TO_THE_LIMIT,
            np.arange(SENTENCES),
            batch_size=size,
            encode_batch_size=size,
            limits=lengths,
        )
        for size in (48, 4)
    )
    used = sum(len(tokens) for [(tokens, *_)] in found.values())
    assert 4 * refilled * 0.9 <= used < 48 * static * 0.7


def test_moved_rows_hold_the_same_sentences_and_are_idle_otherwise():
    rows = new_rows(BEAM, 3)
    state = rows.state._replace(seed_B=np.uint32([7, 8, 9]), done_B=np.array([False, True, False]))
    found = select_rows(rows._replace(state=state), np.array([2, 0, -1, -1]))
    assert found.state.seed_B[:2].tolist() == [9, 7]
    assert found.state.done_B.tolist() == [False, False, True, True]
