"""Rows that are handed on: every sentence gets what it gets alone, and few slots are computed in
vain.
"""

from __future__ import annotations

from functools import partial

import chains
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import IDS, random_chains

from transformer_jax.decoding.beam_search import BeamSearch, beam_search
from transformer_jax.decoding.constraints import Constraints
from transformer_jax.decoding.continuous_batching import Queue, search_queue
from transformer_jax.decoding.sampling import Sampling
from transformer_jax.decoding.search import gather_beams

QUEUE, LENGTH, VOCAB = 48, 10, 9
TOYS = random_chains(0, sentences=QUEUE, length=LENGTH, vocab=VOCAB)
LIMITS = np.random.default_rng(1).integers(1, LENGTH + 1, QUEUE)


def queue_of(order, limits=LIMITS):
    """The sentences in this order; all that is known of sentence i is its number."""
    return Queue(
        inputs=jnp.asarray(order, jnp.int32),
        limit_Q=jnp.asarray(limits[order], jnp.int32),
        prefix_QP=jnp.zeros((len(order), 0), jnp.int32),
        seed_Q=jnp.asarray(order, jnp.uint32),
    )


@partial(jax.jit, static_argnames=("method", "batch_size", "beam_size"))
def run(method, queue, counts_M, *, batch_size, beam_size):
    result, _ = search_queue(
        method,
        chains.step(TOYS),
        lambda numbers_B: chains.start(TOYS, numbers_B, beam_size=beam_size),
        lambda cache, rows_R, fresh: jax.tree.map(
            lambda old, new: old.at[rows_R].set(new, mode="drop"), cache, fresh
        ),
        queue,
        counts_M,
        chains.start(TOYS, jnp.zeros(batch_size, jnp.int32), beam_size=beam_size),
        batch_size=batch_size,
        max_length=LENGTH,
        reorder=gather_beams,
    )
    return result


def full(block_size):
    """Blocks without gaps."""
    return np.full(QUEUE // block_size, block_size)


BEAM = BeamSearch(1, 2, 0, beam_size=3)
SAMPLES = Sampling(1, 2, 0, num_samples=3, seed=5)


@pytest.fixture(scope="module")
def alone():
    result = beam_search(
        chains.step(TOYS),
        chains.start(TOYS, jnp.arange(QUEUE), beam_size=3),
        batch_size=QUEUE,
        beam_size=3,
        max_length=LENGTH,
        max_lengths_B=jnp.asarray(LIMITS),
        **IDS,
    )
    return chains.hypotheses(result)


@pytest.mark.parametrize(
    ("batch_size", "block_size"), [(1, 1), (4, 4), (16, 4), (16, 16), (32, 3), (48, 48)]
)
def test_a_queue_gives_what_a_batch_gives(alone, batch_size, block_size):
    order = np.random.default_rng(batch_size).permutation(QUEUE)
    result = run(BEAM, queue_of(order), full(block_size), batch_size=batch_size, beam_size=3)
    assert chains.hypotheses(result.found) == [alone[i] for i in order]


def test_the_last_block_may_end_early(alone):
    for count in (0, 1, 5, 16, 47):
        counts = np.clip(count - 16 * np.arange(3), 0, 16)
        result = run(BEAM, queue_of(np.arange(QUEUE)), counts, batch_size=16, beam_size=3)
        assert chains.hypotheses(result.found) == alone[:count] + [[]] * (QUEUE - count)


@pytest.mark.parametrize("counts", [(5, 0, 16), (0, 0, 1), (1, 2, 0)])
def test_blocks_may_end_early(alone, counts):
    result = run(BEAM, queue_of(np.arange(QUEUE)), np.array(counts), batch_size=16, beam_size=3)
    assert chains.hypotheses(result.found) == [
        its if i % 16 < counts[i // 16] else [] for i, its in enumerate(alone)
    ]


def test_all_begin_at_once_where_there_is_a_row_for_each(alone):
    """33 rows, of which two are handed on at a time; blocks of odd sizes."""
    for counts in ((16, 14, 3), (7, 8, 8, 5, 2, 3)):
        result = run(BEAM, queue_of(np.arange(QUEUE)), np.array(counts), batch_size=33, beam_size=3)
        assert int(result.slots_computed) <= 33 * LENGTH
        size = QUEUE // len(counts)
        assert chains.hypotheses(result.found) == [
            its if i % size < counts[i // size] else [] for i, its in enumerate(alone)
        ]


def test_sentences_with_nothing_to_search_do_not_stop_the_others(alone):
    limits = np.where(np.arange(QUEUE) % 5 == 0, 0, LIMITS)
    result = run(BEAM, queue_of(np.arange(QUEUE), limits), full(4), batch_size=4, beam_size=3)
    assert chains.hypotheses(result.found) == [
        [] if i % 5 == 0 else its for i, its in enumerate(alone)
    ]


def test_samples_do_not_depend_on_row_or_company():
    in_order = chains.hypotheses(
        run(SAMPLES, queue_of(np.arange(QUEUE)), full(16), batch_size=16, beam_size=3).found
    )
    order = np.random.default_rng(3).permutation(QUEUE)
    shuffled = chains.hypotheses(
        run(SAMPLES, queue_of(order), full(4), batch_size=4, beam_size=3).found
    )
    assert shuffled == [in_order[i] for i in order]


def test_idle_rows_take_in_tokens_of_the_vocabulary():
    """However long a row waits for the others, past the room of its own history."""

    def step(tokens_BW, cache):
        logits_BWV, toys = chains.step(TOYS)(tokens_BW, cache["toys"])
        return logits_BWV, {
            "toys": toys,
            "lowest_B": jnp.minimum(cache["lowest_B"], tokens_BW.min(axis=1)),
        }

    _, cache = search_queue(
        BeamSearch(1, 2, 0, beam_size=1, constraints=Constraints(min_length=LENGTH)),
        step,
        lambda numbers_B: chains.start(TOYS, numbers_B, beam_size=1),
        lambda cache, rows_R, fresh: {
            **cache,
            "toys": jax.tree.map(
                lambda old, new: old.at[rows_R].set(new, mode="drop"), cache["toys"], fresh
            ),
        },
        queue_of(np.arange(3), np.array([LENGTH, LENGTH - 1, LENGTH])),
        jnp.array([3]),
        {
            "toys": chains.start(TOYS, jnp.zeros(2, jnp.int32), beam_size=1),
            "lowest_B": jnp.full(2, VOCAB),
        },
        batch_size=2,
        max_length=LENGTH,
        reorder=lambda cache, _: cache,
    )
    assert (cache["lowest_B"] >= 0).all()


def test_few_slots_are_wasted():
    toys_lengths = np.sort(np.random.default_rng(2).integers(2, LENGTH + 1, QUEUE))[::-1]
    method = BeamSearch(1, 2, 0, beam_size=1)
    together = run(
        method, queue_of(np.arange(QUEUE), toys_lengths), full(48), batch_size=48, beam_size=1
    )
    handed_on = run(
        method, queue_of(np.arange(QUEUE), toys_lengths), full(4), batch_size=4, beam_size=1
    )
    assert int(handed_on.slots_used) == int(together.slots_used)
    assert (
        int(handed_on.slots_computed) * 0.9
        <= int(handed_on.slots_used)
        < int(together.slots_computed) * 0.7
    )
