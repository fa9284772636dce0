"""Terms that a hypothesis must contain: compiled search against brute force, per sentence."""

from __future__ import annotations

import functools

import chains
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import EOS, IDS, assert_same, random_chains
from reference_search import Rules, chain, every_hypothesis

from transformer_jax.decoding.beam_search import BeamSearch
from transformer_jax.decoding.search import NOT_FORCED, gather_beams, results, take_step
from transformer_jax.decoding.terms import SIZES, term_table
from transformer_jax.errors import UserError

Terms = list[list[list[int]]]


@functools.partial(jax.jit, static_argnames="method")
def _search(toys, limit_B, prefix_BP, terms_BKAM, *, method):
    step_fn, max_length = chains.step(toys), toys.shape[1]
    cache = chains.start(jnp.arange(len(toys)), beam_size=method.beam_size)
    state = method.start(
        limit_B,
        max_length=max_length,
        prefix_BP=prefix_BP,
        seed_B=limit_B,
        terms_BKAM=terms_BKAM,
    )
    state, _ = jax.lax.while_loop(
        lambda carry: ~carry[0].done_B.all(),
        lambda carry: take_step(method, step_fn, *carry, reorder=gather_beams),
        (state, cache),
    )
    return results(state.finished, method.pad_id)


def found_in(
    toys: np.ndarray,
    terms: list[Terms],
    *,
    beam_size: int,
    limits: list[int] | None = None,
    prefixes: list[list[int]] | None = None,
    **settings,
):
    batch, length = toys.shape[:2]
    prefix_BP = np.full((batch, length), NOT_FORCED)
    for row, prefix in zip(prefix_BP, prefixes or []):
        row[: len(prefix)] = prefix
    tables = np.stack([padded(term_table(each)) for each in terms])
    limit_B = np.array(limits or [length] * batch)
    method = BeamSearch(**IDS, beam_size=beam_size, **settings)
    return chains.hypotheses(_search(toys, limit_B, prefix_BP, tables, method=method))


def padded(table_KAM: np.ndarray) -> np.ndarray:
    """Pad a table to the size for up to four terms."""
    if table_KAM.shape == SIZES[1]:
        return table_KAM
    table = np.full(SIZES[1], -1, np.int32)
    table[: len(table_KAM)] = table_KAM  # repeats the only alternative
    return table


def random_terms(rng: np.random.Generator, vocab: int, *, count: int, longest: int) -> Terms:
    """Terms of random tokens, which often overlap or contain each other."""
    usable = [token for token in range(vocab) if token not in (0, EOS)]

    def alternative() -> list[int]:
        return rng.choice(usable, rng.integers(1, longest, endpoint=True)).tolist()

    numbers = range(rng.integers(1, count, endpoint=True))
    return [[alternative() for _ in range(rng.integers(1, 2, endpoint=True))] for _ in numbers]


def has(tokens, alternative) -> bool:
    n = len(alternative)
    return any(list(tokens[i : i + n]) == list(alternative) for i in range(len(tokens)))


def need(tokens, terms: Terms) -> int:
    """Number of tokens in the shortest alternatives of the unmet terms."""
    unmet = [term for term in terms if not any(has(tokens, each) for each in term)]
    return sum(min(map(len, term)) for term in unmet)


def test_a_wide_beam_equals_brute_force_in_500_cases():
    """Every hypothesis of the n-best list, with prefixes, and with terms that overlap. If no
    sequence meets all terms, the best of those whose unmet terms have the fewest tokens.
    """
    batch, length, vocab, width = 500, 4, 5, 40
    toys = random_chains(1, sentences=batch, length=length, vocab=vocab)
    rng = np.random.default_rng(2)
    terms = [random_terms(rng, vocab, count=3, longest=3) for _ in toys]
    prefixes = [[3] * (i % 3 == 0) for i in range(batch)]
    found = found_in(toys, terms, beam_size=width, prefixes=prefixes)
    num_possible = 0
    for i, its in enumerate(found):
        every = every_hypothesis(
            chain(toys[i].astype(np.float64)), Rules(length, prefix=prefixes[i])
        )
        unmet = [need(each.tokens, terms[i]) for each in every]
        num_possible += not min(unmet)
        full = [each for each, n in zip(every, unmet) if n == min(unmet)]
        if min(unmet):  # EOS before the limit needs all terms
            full = [each for each in full if len(each.tokens) == length]
        assert_same(its, full[:width])
    assert 200 < num_possible < 500
