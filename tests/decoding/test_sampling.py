"""Sampling follows the model's distribution under temperature, top-k, top-p and constraints."""

from __future__ import annotations

import collections
import functools

import chains
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import EOS, IDS, random_chains

from transformer_jax.decoding.beam_search import BeamSearch
from transformer_jax.decoding.constraints import Constraints
from transformer_jax.decoding.sampling import Sampling
from transformer_jax.decoding.search import search
from transformer_jax.errors import UserError

LENGTH, VOCAB = 5, 8
TOYS = random_chains(0, sentences=2, length=LENGTH, vocab=VOCAB)


def draw(beam_size, *, toys=TOYS, **settings):
    batch = len(toys)
    length = toys.shape[1]
    of_sentences = {
        name: settings.pop(name) for name in ("prefix_BP", "seed_B") if name in settings
    }
    method = Sampling(**{**IDS, "beam_size": beam_size, **settings})
    result = jax.jit(
        lambda: search(
            method,
            chains.step(toys),
            chains.start(jnp.arange(batch), beam_size=beam_size),
            limit_B=jnp.full(batch, length),
            max_length=length,
            **of_sentences,
        )
    )()
    return chains.hypotheses(result)


@functools.cache
def greedy(rules=None):
    method = BeamSearch(**IDS, beam_size=1, constraints=rules or Constraints())
    result = jax.jit(
        lambda: search(
            method,
            chains.step(TOYS),
            chains.start(jnp.arange(2), beam_size=1),
            limit_B=jnp.full(2, LENGTH),
            max_length=LENGTH,
        )
    )()
    return chains.hypotheses(result)


def first_tokens(found):
    return collections.Counter(tokens[0] for tokens, _, _ in found)


def distribution(sentence, temperature=1.0):
    """Of the first token: what PAD had is shared out."""
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


def test_top_k_and_top_p_leave_the_likeliest():
    settings = {"top_k": 3}, {"top_p": 0.7}, {"top_k": 5, "top_p": 0.5}
    drawn = [draw(500, **each) for each in settings]
    for sentence in range(2):
        chances = distribution(sentence)
        order = np.argsort(-chances)
        of_k, of_p, of_both = (set(first_tokens(found[sentence])) for found in drawn)
        assert of_k == set(order[:3].tolist())
        nucleus = order[: int(np.searchsorted(np.cumsum(chances[order]), 0.7)) + 1]
        assert of_p == set(nucleus.tolist())
        assert of_both <= set(order[:5].tolist())


def test_the_likeliest_alone_is_greedy():
    assert draw(1, top_k=1) == greedy()


@pytest.mark.parametrize("temperature", [1e-9, 1e-38, 1e-300])
def test_the_coldest_samples_are_greedy(temperature):
    """Whatever the likeliest token is worth: here every allowed one is a good deal below 0."""
    rules = Constraints(suppress=(3, 4, 5))
    assert draw(1, temperature=temperature, constraints=rules) == greedy(rules)
    assert draw(1, temperature=temperature, constraints=rules, top_p=0.9) == greedy(rules)


def test_seeds_choose_the_samples():
    assert draw(5, seed=1) == draw(5, seed=1) != draw(5, seed=2)
    one, other = draw(5, seed_B=jnp.array([3, 4])), draw(5, seed_B=jnp.array([4, 4]))
    assert one[0] != other[0] and one[1] == other[1]


def test_logits_that_are_not_numbers_give_a_score_of_nan_and_leave_the_neighbors():
    with_nan = TOYS.copy()
    with_nan[0, 1:] = np.nan
    limit_B = np.array([LENGTH, LENGTH])

    @jax.jit
    def drawn():
        start = chains.start(jnp.arange(2), beam_size=3)
        method, step = Sampling(**IDS, beam_size=3), chains.step(with_nan)
        return search(method, step, start, limit_B=limit_B, max_length=5)

    result = jax.device_get(drawn())
    assert np.isnan(result.scores_BN[0]).all() and (result.lengths_BN[0] == 0).all()
    sound = jax.tree.map(lambda x: x[1:], result)
    assert chains.hypotheses(sound) == draw(3)[1:]


def test_log_probabilities_are_the_models_at_temperature_one():
    for sentence, found in enumerate(draw(20, temperature=3.0, top_k=4)):
        for tokens, score, log_prob in found:
            before = (chains.BOS, *tokens)
            forced = sum(TOYS[sentence, t, before[t], token] for t, token in enumerate(tokens))
            assert log_prob == pytest.approx(forced, abs=1e-4)
            assert score == pytest.approx(forced / ((5 + len(tokens)) / 6) ** 0.6, abs=1e-4)


def test_rules_hold_for_samples():
    rules = Constraints(min_length=2, suppress=(3,), no_repeat_ngram=1)
    for found in draw(200, constraints=rules, prefix_BP=jnp.array([[4], [5]])):
        for tokens, _, _ in found:
            *text, end = tokens
            assert end == EOS and len(text) >= 2 and 3 not in text and len(set(text)) == len(text)
    assert {tokens[0] for tokens, _, _ in draw(50, prefix_BP=jnp.array([[4], [-1]]))[0]} == {4}


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
