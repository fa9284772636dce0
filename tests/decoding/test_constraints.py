"""Search constraints, alone and combined: compiled search against the reference, per sentence."""

from __future__ import annotations

import math

import chains
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import EOS, IDS, random_chains
from reference_search import Rules, chain, every_hypothesis, reference_search

from transformer_jax.decoding.beam_search import BeamSearch
from transformer_jax.decoding.constraints import Constraints
from transformer_jax.decoding.search import NOT_FORCED, search
from transformer_jax.errors import UserError

SENTENCES, LENGTH = 20, 9
RULES = {
    "length to the power": {"length_penalty": 1.3, "length_offset": 0},
    "minimum": {"min_length": 4},
    "minimum beyond the end": {"min_length": 50},
    "prefix": {"prefix": (3, 1, 3)},
    "prefix beyond the end": {"prefix": (3, 3, 1, 1, 3, 1, 3, 1, 3)},
    "suppressed": {"suppress": (1, 4)},
    "suppressed end": {"suppress": (EOS,)},
    "unigrams": {"no_repeat_ngram": 1},
    "bigrams": {"no_repeat_ngram": 2},
    "trigrams, prefix that repeats them": {"no_repeat_ngram": 3, "prefix": (3, 3, 3, 3)},
    "all": {
        "length_penalty": 1.2,
        "min_length": 2,
        "prefix": (1,),
        "suppress": (4,),
        "no_repeat_ngram": 2,
    },
}


def found_in(toys: np.ndarray, rules: Rules, *, beam_size: int):
    batch, length = toys.shape[:2]
    prefix_BP = np.full((batch, len(rules.prefix) + 1), NOT_FORCED)
    prefix_BP[:, : len(rules.prefix)] = rules.prefix
    constraints = Constraints(rules.min_length, tuple(rules.suppress), rules.no_repeat_ngram)
    method = BeamSearch(
        **IDS,
        beam_size=beam_size,
        length_penalty=rules.length_penalty,
        length_offset=rules.length_offset,
        constraints=constraints,
    )

    @jax.jit
    def run():
        return search(
            method,
            chains.step(toys),
            chains.start(jnp.arange(batch), beam_size=beam_size),
            limit_B=jnp.full(batch, length),
            max_length=length,
            prefix_BP=jnp.asarray(prefix_BP),
        )

    return chains.hypotheses(run())


def model(toys: np.ndarray, sentence: int):
    return chain(toys[sentence].astype(np.float64))


def assert_same(found, expected):
    assert [tokens for tokens, _, _ in found] == [hypothesis.tokens for hypothesis in expected]
    np.testing.assert_allclose(
        [score for _, score, _ in found], [hypothesis.score for hypothesis in expected], rtol=1e-4
    )
    np.testing.assert_allclose(
        [log_p for _, _, log_p in found],
        [hypothesis.log_prob for hypothesis in expected],
        rtol=1e-4,
    )


@pytest.mark.parametrize(
    ("name", "beam_size"), [*((name, 4) for name in RULES), ("all", 1), ("all", 2)]
)
def test_agrees_with_the_plain_search(name, beam_size):
    toys = random_chains(beam_size, sentences=SENTENCES, length=LENGTH, vocab=11)
    rules = Rules(LENGTH, **RULES[name])
    for sentence, found in enumerate(found_in(toys, rules, beam_size=beam_size)):
        assert_same(found, reference_search(model(toys, sentence), rules, beam_size=beam_size))


@pytest.mark.parametrize("name", ["suppressed", "bigrams", "all"])
def test_a_wide_beam_finds_the_best_of_all_sequences(name):
    toys = random_chains(7, sentences=3, length=4, vocab=5)
    wide = np.full((3, 4, 60, 60), -np.inf, np.float32)
    wide[..., :5, :5] = toys
    rules = Rules(4, **RULES[name])
    for sentence, found in enumerate(found_in(wide, rules, beam_size=60)):
        assert_same(found, every_hypothesis(model(toys, sentence), rules)[:60])


def test_what_is_reported_is_the_models_own_probability():
    toys = random_chains(3, sentences=10, length=LENGTH, vocab=11)
    rules = Rules(LENGTH, no_repeat_ngram=2, suppress=(5, 6), min_length=3)
    for sentence, found in enumerate(found_in(toys, rules, beam_size=3)):
        log_probs = model(toys, sentence)
        for tokens, _, log_prob in found:
            forced = sum(log_probs(tokens[:t])[token] for t, token in enumerate(tokens))
            assert log_prob == pytest.approx(forced, abs=1e-4)


def test_where_everything_is_forbidden_nothing_is_found():
    toys = random_chains(4, sentences=3, length=LENGTH, vocab=6)
    everything = Rules(LENGTH, suppress=(1, 2, 3, 4, 5))
    assert found_in(toys, everything, beam_size=2) == [[], [], []]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_length": -1}, "min_length is -1"),
        ({"no_repeat_ngram": -2}, "no_repeat_ngram is -2"),
        ({"min_length": math.nan}, "min_length is nan"),
        ({"suppress": (3, -1)}, "suppress is"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(UserError, match=message):
        Constraints(**settings)
