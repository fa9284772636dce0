"""Reference search: a beam that holds all sequences finds the same result as full enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from reference_search import EOS, PAD, Rules, chain, every_hypothesis, keeps_rules, reference_search


def random_chain(seed: int, *, length: int, vocab: int) -> np.ndarray:
    """log_probs_LVV of the next token given the position and the previous token."""
    logits = np.random.default_rng(seed).normal(size=(length, vocab, vocab)) * 1.5
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


RULES = {
    "plain": {},
    "no length penalty": {"length_penalty": 0.0},
    "strong length penalty": {"length_penalty": 3.0},
    "length to the power": {"length_penalty": 1.3, "length_offset": 0},
    "minimum": {"min_length": 2},
    "minimum beyond the end": {"min_length": 50},
    "prefix": {"prefix": (3, 1)},
    "prefix beyond the end": {"prefix": (3, 3, 1, 1, 3, 1, 3, 1, 3)},
    "suppressed": {"suppress": (1,)},
    "suppressed end": {"suppress": (EOS,)},
    "unigrams": {"no_repeat_ngram": 1},
    "bigrams": {"no_repeat_ngram": 2},
    "bigrams, prefix that repeats them": {"no_repeat_ngram": 2, "prefix": (3, 3, 3)},
    "all": {
        "length_penalty": 1.2,
        "min_length": 2,
        "prefix": (1,),
        "suppress": (4,),
        "no_repeat_ngram": 2,
    },
}


@pytest.mark.parametrize(("vocab", "length"), [(4, 6), (5, 5), (8, 4), (40, 2)])
@pytest.mark.parametrize("name", RULES)
def test_a_beam_that_holds_everything_equals_brute_force(name, vocab, length):
    for seed in range(3):
        log_probs = chain(random_chain(seed, length=length, vocab=vocab))
        rules = Rules(length, **RULES[name])
        expected = every_hypothesis(log_probs, rules)
        found = reference_search(log_probs, rules, beam_size=vocab**length)
        assert expected and found == expected
        assert len({hypothesis.tokens for hypothesis in found}) == len(found)


@pytest.mark.parametrize(
    ("rules", "kept", "broken"),
    [
        (Rules(3), [(3, 1, EOS)], [(3, 1, 3, EOS)]),
        (Rules(1), [(EOS,)], [(3, EOS)]),
        (Rules(5), [(3, EOS)], [(3, PAD, EOS)]),
        (Rules(5, min_length=2), [(3, 1, EOS)], [(3, EOS)]),
        (Rules(2, min_length=2), [(3, EOS)], []),
        (Rules(5, prefix=(3,)), [(3, 1, EOS)], [(1, 3, EOS)]),
        (Rules(2, prefix=(3, 4, 5)), [(3, EOS)], []),
        (Rules(3, prefix=(3, 4, 5)), [(3, 4, EOS)], [(3, EOS)]),
        (Rules(9, no_repeat_ngram=1), [], [(3, 1, 3, EOS)]),
        (Rules(9, no_repeat_ngram=2), [(3, 1, 3, EOS)], [(3, 1, 3, 1, EOS), (3, 3, 3, EOS)]),
        (Rules(9, no_repeat_ngram=2, prefix=(3, 3, 3)), [(3, 3, 3, EOS)], []),
        (Rules(9, suppress=(4,)), [], [(4, EOS)]),
        (Rules(9, suppress=(4,), prefix=(4,)), [(4, EOS)], []),
        (Rules(9, suppress=(EOS,)), [], [(4, EOS)]),
        (Rules(2, suppress=(EOS,)), [(4, EOS)], []),
    ],
)
def test_rules_by_hand(rules, kept, broken):
    assert all(keeps_rules(tokens, rules) for tokens in kept)
    assert not any(keeps_rules(tokens, rules) for tokens in broken)


def test_scores_by_hand():
    half = np.full((4, 5, 5), -math.inf)
    half[:, :, [EOS, 3]] = math.log(0.5)
    found = reference_search(chain(half), Rules(4, length_penalty=1.0), beam_size=4)
    [best] = [hypothesis for hypothesis in found if hypothesis.tokens == (3, 3, EOS)]
    assert best.log_prob == pytest.approx(3 * math.log(0.5))
    assert best.score == pytest.approx(3 * math.log(0.5) / (8 / 6))
    [short] = [hypothesis for hypothesis in found if hypothesis.tokens == (3, EOS)]
    assert short.score == pytest.approx(2 * math.log(0.5) / (7 / 6))
    assert short.token_log_probs == (math.log(0.5), math.log(0.5))


@pytest.mark.parametrize("name", RULES)
def test_a_beam_of_one_is_greedy(name):
    rules = Rules(7, **RULES[name])
    for seed in range(5):
        log_probs = chain(random_chain(seed, length=7, vocab=9))
        tokens: tuple[int, ...] = ()
        while EOS not in tokens:
            row = log_probs(tokens)
            able = [token for token in range(9) if rules.allowed(tokens, token)]
            tokens += (max(able, key=lambda token: row[token]),)
        [found] = reference_search(log_probs, rules, beam_size=1)
        assert found.tokens == tokens


def test_fewer_hypotheses_are_the_first_of_more():
    log_probs = chain(random_chain(0, length=6, vocab=9))
    five = reference_search(log_probs, Rules(6), beam_size=5)
    assert reference_search(log_probs, Rules(6), beam_size=5, num_hypotheses=2) == five[:2]


def test_eos_counts_only_among_the_best_continuations():
    row = np.full(6, -math.inf)
    row[[3, 4, EOS]] = np.log([0.5, 0.3, 0.2])
    found = reference_search(lambda tokens: row, Rules(2), beam_size=2)
    assert [hypothesis.tokens for hypothesis in found] == [(3, EOS), (4, EOS)]


def test_ties_go_to_the_better_beam_then_the_likelier_then_the_lower_token():
    even = np.zeros((4, 6, 6))
    even[..., EOS] = -1
    found = reference_search(chain(even), Rules(4), beam_size=3)
    assert [hypothesis.tokens for hypothesis in found] == [
        (1, 1, 1, EOS),
        (1, 1, 3, EOS),
        (1, 1, 4, EOS),
    ]
    half, quarter = math.log(0.5), 2 * math.log(0.5)
    trade = np.full((3, 6, 6), -math.inf)
    trade[0, 1, [3, 4]] = half, quarter
    trade[1, 3, [1, 3]], trade[1, 4, 4] = quarter, half  # 3 1, 3 3 and 4 4 are all 1/8
    trade[2, :, EOS] = 0
    found = reference_search(chain(trade), Rules(3), beam_size=3)
    assert [hypothesis.tokens for hypothesis in found] == [(3, 1, EOS), (3, 3, EOS), (4, 4, EOS)]


def test_a_hypothesis_without_continuations_dies():
    log_probs = chain(random_chain(0, length=4, vocab=5))
    assert reference_search(log_probs, Rules(4, suppress=(1, 3, 4, EOS)), beam_size=3) == []
    assert reference_search(log_probs, Rules(0), beam_size=3) == []
    never = np.full((4, 5, 5), -math.inf)
    never[0, 1, [3, 4]] = math.log(0.5)
    never[1, 4, EOS] = 0
    assert [h.tokens for h in reference_search(chain(never), Rules(4), beam_size=2)] == [(4, EOS)]
    assert reference_search(chain(never), Rules(4, prefix=(3,)), beam_size=2) == []


def test_brute_force_finds_every_sequence():
    log_probs = chain(random_chain(0, length=4, vocab=6))
    found = [hypothesis.tokens for hypothesis in every_hypothesis(log_probs, Rules(4))]
    inner = (1, 3, 4, 5)
    assert sorted(found) == sorted(
        (*text, EOS) for count in range(4) for text in itertools.product(inner, repeat=count)
    )
