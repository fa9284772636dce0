"""Sampling follows the model's distribution under temperature, top-k, top-p and constraints."""

from __future__ import annotations

import collections
import functools
import itertools

import chains
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import EOS, IDS, random_chains

from transformer_jax.decoding.beam_search import BeamSearch
from transformer_jax.decoding.constraints import IMPOSSIBLE, Constraints
from transformer_jax.decoding.sampling import Sampling
from transformer_jax.decoding.search import search
from transformer_jax.errors import UserError

LENGTH, VOCAB = 5, 8
TOYS = random_chains(0, sentences=2, length=LENGTH, vocab=VOCAB)


@functools.partial(jax.jit, static_argnames="method")
def _search(toys, prefix_BP, seed_B, limit_B=(LENGTH, LENGTH), *, method):
    return search(
        method,
        chains.step(toys),
        chains.start(jnp.arange(2), beam_size=method.beam_size),
        limit_B=limit_B,
        max_length=LENGTH,
        prefix_BP=prefix_BP,
        seed_B=seed_B,
    )


def draw(beam_size, *, prefixes=((-1,), (-1,)), seeds=(0, 1), limits=(LENGTH, LENGTH), **settings):
    method = Sampling(**IDS, beam_size=beam_size, **settings)
    each = map(np.array, (prefixes, seeds, limits))
    return chains.hypotheses(_search(TOYS, *each, method=method))


def first_tokens(found):
    return collections.Counter(tokens[0] for tokens, _, _ in found)


def distribution(sentence, temperature=1.0):
    """Probabilities of the first token; PAD's share goes to the others."""
    logits = TOYS[sentence, 0, chains.BOS] / temperature
    chances = np.exp(logits) * (np.arange(VOCAB) != chains.PAD)
    return chances / chances.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1e9])
def test_frequencies_are_the_models(temperature):
    for sentence, found in enumerate(draw(4000, temperature=temperature)):
        counts, expected = first_tokens(found), distribution(sentence, temperature) * 4000
        assert sum(counts.values()) == 4000
        for token in range(VOCAB):
            assert abs(counts[token] - expected[token]) <= 4 * np.sqrt(expected[token] + 1)


def probabilities(logits, temperature, top_k, top_p):
    """The distribution to draw from, in float64 and step by step."""
    chances = np.exp((logits - logits.max()) / temperature)
    chances[logits <= IMPOSSIBLE / 2] = 0
    order = np.argsort(-chances, kind="stable")
    if top_k:
        chances[order[top_k:]] = 0
    chances /= chances.sum()
    before = np.cumsum(chances[order]) - chances[order]
    chances[order[before >= top_p]] = 0
    return chances / chances.sum()


def _draw_settings():
    """Each top-k with each top-p; `make test` has one temperature of each."""
    temperatures, grid = (0.3, 1.0, 2.0), itertools.product((0, 1, 4, 50), (0.4, 0.9, 1.0))
    for number, (top_k, top_p) in enumerate(grid):
        for i, temperature in enumerate(temperatures):
            marks = [] if i == (number + number // 3) % 3 else pytest.mark.exhaustive
            yield pytest.param(temperature, top_k, top_p, marks=marks)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), list(_draw_settings()))
def test_draws_follow_temperature_then_top_k_then_top_p(temperature, top_k, top_p):
    """Only tokens of the reference's set are drawn, as often as it says."""
    count = 4000
    rng = np.random.default_rng(0)
    logits = rng.normal(size=12).astype(np.float32) * 1.5
    logits[[2, 7]] = IMPOSSIBLE
    method = Sampling(**IDS, temperature=temperature, top_k=top_k, top_p=top_p)
    keys = jax.random.split(jax.random.key(1), count)
    drawn = np.asarray(method._draw_tokens(jnp.broadcast_to(logits, (count, 12)), keys))
    expected = probabilities(logits.astype(float), temperature, top_k, top_p) * count
    counts = np.bincount(drawn, minlength=12)
    assert not counts[expected == 0].any()
    assert (np.abs(counts - expected) <= 4 * np.sqrt(expected + 1)).all()


def test_top_k_and_top_p_keep_the_most_likely_tokens():
    top_p = float(np.sort(distribution(0))[-2:].sum()) + 0.01  # needs a third token
    settings = {"top_k": 3}, {"top_p": top_p}, {"top_k": 5, "top_p": 0.5}
    drawn = [draw(500, **each) for each in settings]
    for sentence in range(2):
        chances = distribution(sentence)
        order = np.argsort(-chances)
        of_k, of_p, of_both = (set(first_tokens(found[sentence])) for found in drawn)
        assert of_k == set(order[:3].tolist())
        nucleus = order[: int(np.searchsorted(np.cumsum(chances[order]), top_p)) + 1]
        assert of_p == set(nucleus.tolist())
        assert of_both <= set(order[:5].tolist())


@pytest.mark.parametrize("parts", [(5, 3, 1, 1), (6, 2, 2), (25, 25, 25, 25), (90, 5, 5)])
def test_top_p_keeps_no_token_beyond_the_boundary(parts):
    """Tokens whose probabilities add up to exactly p are enough."""
    chances = np.array(parts) / sum(parts)
    shifts_R1 = np.random.default_rng(0).normal(0, 5, (1000, 1))
    values_RV = np.float32(np.pad(np.log(chances), (0, 4), constant_values=-1e6) + shifts_R1)
    for count in range(1, len(parts)):
        method = Sampling(**IDS, top_p=float(chances[:count].sum()))
        drawn = jax.jit(method._draw_tokens)(values_RV, jax.random.split(jax.random.key(0), 1000))
        assert set(drawn.tolist()) == set(range(count))


def test_the_most_likely_tokens_alone_are_greedy():
    """Top-k of 1 and low temperatures are greedy, even if all allowed tokens have low logits."""
    rules = Constraints(suppressed_ids=(3, 4, 5))
    method = BeamSearch(**IDS, beam_size=1, constraints=rules)
    greedy = chains.hypotheses(_search(TOYS, np.full((2, 1), -1), np.arange(2), method=method))
    for settings in (
        {"top_k": 1},
        {"temperature": 1e-9, "top_p": 0.9},
        {"temperature": 1e-38},
        {"temperature": 1e-300},
        {"temperature": 1e-300, "top_p": 0.9},
    ):
        assert draw(1, constraints=rules, **settings) == greedy, settings


def test_seeds_choose_the_samples():
    assert draw(5, seed=1) == draw(5, seed=1) != draw(5, seed=2)
    one, other = draw(5, seeds=(3, 4), seed=1), draw(5, seeds=(4, 4), seed=1)
    assert one[0] != other[0] and one[1] == other[1]


def test_limits_above_the_maximum_length_are_the_maximum_length():
    assert draw(20, limits=(LENGTH + 1, LENGTH + 9)) == draw(20)


def test_nan_logits_give_a_nan_score_and_leave_the_neighbors_alone():
    with_nan = TOYS.copy()
    with_nan[0, 1:] = np.nan
    method = Sampling(**IDS, beam_size=5, seed=1)
    given = np.full((2, 1), -1), np.arange(2)
    result = jax.device_get(_search(with_nan, *given, method=method))
    assert np.isnan(result.scores_BN[0]).all() and (result.lengths_BN[0] == 0).all()
    sound = jax.tree.map(lambda x: x[1:], result)
    assert chains.hypotheses(sound) == draw(5, seed=1)[1:]


def test_log_probabilities_are_the_models_at_temperature_1():
    for sentence, found in enumerate(draw(20, temperature=3.0, top_k=4)):
        for tokens, score, log_prob in found:
            before = (chains.BOS, *tokens)
            forced = sum(TOYS[sentence, t, before[t], token] for t, token in enumerate(tokens))
            assert log_prob == pytest.approx(forced, abs=1e-4)
            assert score == pytest.approx(forced / ((5 + len(tokens)) / 6) ** 0.6, abs=1e-4)


def test_an_unscored_prefix_has_log_probability_0():
    """The samples do not change."""
    prefixes = ((4, 5), (3, -1))
    counted, free = (draw(20, prefixes=prefixes, unscored_prefix_length=count) for count in (0, 1))
    for sentence, (all_counted, all_free) in enumerate(zip(counted, free, strict=True)):
        first = prefixes[sentence][0]
        log_prob_of = {tokens: log_prob for tokens, _, log_prob in all_counted}
        assert log_prob_of.keys() == {tokens for tokens, _, _ in all_free}
        for tokens, score, log_prob in all_free:
            expected = log_prob_of[tokens] - TOYS[sentence, 0, chains.BOS, first]
            assert log_prob == pytest.approx(expected, abs=1e-4)
            assert score == pytest.approx(log_prob / ((5 + len(tokens)) / 6) ** 0.6, abs=1e-4)


def test_samples_keep_the_rules():
    rules = Constraints(min_length=2, suppressed_ids=(3,), no_repeat_ngram=1)
    forced, free = draw(200, constraints=rules, prefixes=((4,), (-1,)))
    for tokens, _, _ in forced + free:
        *text, end = tokens
        assert end == EOS and len(text) >= 2 and 3 not in text and len(set(text)) == len(text)
    assert set(first_tokens(forced)) == {4} and len(first_tokens(free)) > 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"beam_size": 0}, "beam_size is 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"length_penalty": -1.0}, "length_penalty is -1.0"),
        ({"length_offset": float("nan")}, "length_offset is nan"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(UserError, match=message):
        draw(**{"beam_size": 2, **settings})


@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_64_bit_types_and_no_sentences(top_p):
    method = Sampling(**IDS, beam_size=2, top_p=top_p)
    for limit_B in (np.array([4, 3]), np.zeros(0, int)):
        with jax.enable_x64(True):
            found = search(method, _markov_step, {}, limit_B=limit_B, max_length=4)
        assert found.tokens_BNL.shape == (len(limit_B), 2, 4)
        assert [x.dtype.name for x in found] == ["int32", *["float32"] * 2, "int32", "float32"]


def _markov_step(tokens_BW, cache):
    return jnp.asarray(TOYS[0, 0])[tokens_BW], cache
