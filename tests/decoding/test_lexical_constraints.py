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
from transformer_jax.decoding.constraints import Constraints
from transformer_jax.decoding.lexical_constraints import TABLE_SIZES, term_table
from transformer_jax.decoding.search import NOT_FORCED, gather_beams, results, take_step
from transformer_jax.errors import UserError

Terms = list[list[list[int]]]
EMPTY = np.full(TABLE_SIZES[1], -1, np.int32)


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
    terms: list[Terms] | None,
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
    tables = None
    if terms is not None:
        tables = np.stack([padded(term_table(each)) if each else EMPTY for each in terms])
    limit_B = np.array(limits or [length] * batch)
    method = BeamSearch(**IDS, beam_size=beam_size, **settings)
    return chains.hypotheses(_search(toys, limit_B, prefix_BP, tables, method=method))


def padded(table_KAM: np.ndarray) -> np.ndarray:
    """Pad a table to the size for up to four terms."""
    if table_KAM.shape == TABLE_SIZES[1]:
        return table_KAM
    table = EMPTY.copy()
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


@pytest.mark.parametrize("beam_size", [1, 2, 4])
def test_a_narrow_beam_meets_all_terms_if_they_fit(beam_size):
    """Limits are from exactly the number of tokens that the terms need."""
    batch, length, vocab = 300, 14, 12
    toys = random_chains(3, sentences=batch, length=length, vocab=vocab)
    rng = np.random.default_rng(4)
    terms = [random_terms(rng, vocab, count=4, longest=3) for _ in toys]
    prefixes = [[3] * (i % 2) for i in range(batch)]
    needed = [need((), its) + len(prefix) + 1 for its, prefix in zip(terms, prefixes)]
    limits = [min(length, n + i % 3) for i, n in enumerate(needed)]
    found = found_in(toys, terms, beam_size=beam_size, limits=limits, prefixes=prefixes)
    for its, limit, each, prefix in zip(found, limits, terms, prefixes):
        assert its
        for tokens, _, _ in its:
            assert len(tokens) <= limit and list(tokens[: len(prefix)]) == prefix
            assert not need(tokens, each)


def test_rows_without_terms_equal_the_search_without_tables():
    """Whatever the terms of other rows are, bit for bit."""
    toys = random_chains(5, sentences=40, length=9, vocab=11)
    rng = np.random.default_rng(6)
    terms = [[] if i % 2 else random_terms(rng, 11, count=4, longest=3) for i in range(40)]
    others = [[] if i % 2 else random_terms(rng, 11, count=4, longest=3) for i in range(40)]
    plain = found_in(toys, None, beam_size=4)
    found = found_in(toys, terms, beam_size=4)
    assert found[1::2] == plain[1::2] == found_in(toys, others, beam_size=4)[1::2]
    assert found[::2] != plain[::2]


def test_a_term_that_does_not_fit_is_ignored():
    toys = random_chains(7, sentences=1, length=5, vocab=6)
    long, short = [[3, 4, 5, 3, 4]], [[5], [3, 3, 3, 3, 3]]
    [[(tokens, _, _), *_]] = found_in(toys, [[long, short]], beam_size=4)
    assert tokens == found_in(toys, [[short]], beam_size=4)[0][0][0]
    assert need(tokens, [short]) == 0


def test_an_impossible_term_does_not_prevent_a_result():
    """The best hypothesis at the limit is the result."""
    toys = random_chains(8, sentences=1, length=5, vocab=6)
    [its] = found_in(toys, [[[[3]]]], beam_size=4, constraints=Constraints(suppressed_ids=(3,)))
    assert its and all(len(tokens) == 5 and 3 not in tokens for tokens, _, _ in its)


def test_tables():
    assert term_table([[[5]]]).shape == TABLE_SIZES[0]
    table = term_table([[[5, 6], [7]], [[8]]])
    assert table.shape == TABLE_SIZES[1]
    assert table[0, :, :3].tolist() == [[5, 6, -1], [7, -1, -1]]
    assert table[1, :, 0].tolist() == [8, 8] and (table[2:] == -1).all()
    assert term_table([[[9] * 32]] * 64).shape == TABLE_SIZES[-1]
    for terms in ([[[9]]] * 65, [[[9]] * 5], [[[9] * 33]]):
        with pytest.raises(UserError, match=r"at most 64 terms in a sentence, 4 alternatives and"):
            term_table(terms)
