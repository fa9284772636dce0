"""Search constraints, alone and combined: compiled search against the reference, per sentence."""

from __future__ import annotations

import functools
import math

import chains
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import EOS, IDS, assert_same, random_chains
from reference_search import Rules, chain, every_hypothesis, reference_search

from transformer_jax.decoding.beam_search import BeamSearch
from transformer_jax.decoding.constraints import Constraints
from transformer_jax.decoding.search import NOT_FORCED, search
from transformer_jax.errors import UserError

SENTENCES, LENGTH = 20, 9
RULES = {
    "length to the power, minimum": {"length_penalty": 1.3, "length_offset": 0, "min_length": 4},
    "minimum beyond the end": {"min_length": 50},
    "prefix": {"prefix": (3, 1, 3)},
    "prefix beyond the end": {"prefix": (3, 3, 1, 1, 3, 1, 3, 1, 3)},
    "suppressed": {"suppress": (1, 4)},
    "suppressed end": {"suppress": (EOS,)},
    "everything suppressed": {"suppress": tuple(range(1, 11))},
    "unigrams": {"no_repeat_ngram": 1},
    "bigrams": {"no_repeat_ngram": 2},
    "n-grams longer than any translation": {"no_repeat_ngram": 2**31 - 1},
    "trigrams, prefix that repeats them": {"no_repeat_ngram": 3, "prefix": (3, 3, 3, 3)},
    "all": {
        "length_penalty": 1.2,
        "min_length": 2,
        "prefix": (1,),
        "suppress": (4,),
        "no_repeat_ngram": 2,
    },
}


@functools.partial(jax.jit, static_argnames="method")
def _search(toys, prefix_BP, *, method):
    batch, length = toys.shape[:2]
    return search(
        method,
        chains.step(toys),
        chains.start(jnp.arange(batch), beam_size=method.beam_size),
        limit_B=jnp.full(batch, length),
        max_length=length,
        prefix_BP=prefix_BP,
    )


def found_in(toys: np.ndarray, rules: Rules, *, beam_size: int):
    prefix_BP = np.full((len(toys), LENGTH + 1), NOT_FORCED)
    prefix_BP[:, : len(rules.prefix)] = rules.prefix
    method = BeamSearch(
        **IDS,
        beam_size=beam_size,
        length_penalty=rules.length_penalty,
        length_offset=rules.length_offset,
        constraints=Constraints(
            min_length=rules.min_length,
            suppressed_ids=tuple(rules.suppress),
            no_repeat_ngram=rules.no_repeat_ngram,
        ),
    )
    return chains.hypotheses(_search(toys, prefix_BP, method=method))


def model(toys: np.ndarray, sentence: int):
    return chain(toys[sentence].astype(np.float64))


@pytest.mark.parametrize(("name", "beam_size"), [*((name, 4) for name in RULES), ("all", 1)])
def test_equals_the_reference_search(name, beam_size):
    """Reported log-probabilities are the model's own."""
    toys = random_chains(beam_size, sentences=SENTENCES, length=LENGTH, vocab=11)
    rules = Rules(LENGTH, **RULES[name])
    for sentence, found in enumerate(found_in(toys, rules, beam_size=beam_size)):
        assert_same(found, reference_search(model(toys, sentence), rules, beam_size=beam_size))


@pytest.mark.parametrize("name", ["bigrams", "all"])
def test_a_wide_beam_equals_brute_force(name):
    toys = random_chains(7, sentences=3, length=4, vocab=5)
    wide = np.full((3, 4, 60, 60), -np.inf, np.float32)
    wide[..., :5, :5] = toys
    rules = Rules(4, **RULES[name])
    for sentence, found in enumerate(found_in(wide, rules, beam_size=60)):
        assert_same(found, every_hypothesis(model(toys, sentence), rules)[:60])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_length": -1}, "min_length is -1"),
        ({"no_repeat_ngram": -2}, "no_repeat_ngram is -2"),
        ({"min_length": math.nan}, "min_length is nan"),
        ({"suppressed_ids": (3, -1)}, "suppressed_ids is"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(UserError, match=message):
        Constraints(**settings)
