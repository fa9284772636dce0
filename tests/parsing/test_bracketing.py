"""Bracket F1 by hand-worked cases, and its bounds."""

import pytest

from transformer_jax.errors import UserError
from transformer_jax.parsing.bracketing import bracket_score
from transformer_jax.parsing.trees import Parse, from_sequence

WORDS = ["John", ",", "has", "a", "dog", "."]
TAGS = ("NNP", ",", "VBZ", "DT", "NN", ".")
GOLD = "(S (NP XX )NP XX (VP XX (NP XX XX )NP )VP XX )S"


def tree(sequence: str) -> Parse:
    return from_sequence(WORDS, sequence)[0]._replace(tags=TAGS)


@pytest.mark.parametrize(
    ("sequence", "matched", "parsed"),
    [
        (GOLD, 4, 4),
        # where punctuation hangs does not count
        ("(S (NP XX XX )NP (VP XX (NP XX XX )NP XX )VP )S", 4, 4),
        # nor what has nothing else
        ("(S (NP XX )NP (NP XX )NP (VP XX (NP XX XX )NP )VP XX )S", 4, 4),
        ("(S (NP XX )NP XX (VP XX XX (NP XX )NP )VP XX )S", 3, 4),
        ("(S (NP (NP XX )NP )NP XX (VP XX (NP XX XX )NP )VP XX )S", 4, 5),  # twice, and right once
        ("(S XX XX XX XX XX XX )S", 1, 1),
        ("", 0, 0),
    ],
)
def test_constituents_are_counted_as_by_hand(sequence: str, matched: int, parsed: int) -> None:
    score = bracket_score([tree(GOLD)], [tree(sequence)])
    assert (score.matched, score.gold, score.parsed, score.exact) == (
        matched,
        4,
        parsed,
        matched == parsed == 4,
    )


def test_figures_are_of_all_sentences_together() -> None:
    score = bracket_score([tree(GOLD)] * 2, [tree(GOLD), tree("(S XX XX XX XX XX XX )S")])
    assert (score.precision, score.recall) == (100 * 5 / 5, 100 * 5 / 8)
    assert score.f1 == pytest.approx(100 * 2 * 5 / 13)
    assert str(score) == (
        "labelled bracket F1 = 76.92 "
        "(precision 100.00, recall 62.50, exact match 50.00%, 2 sentences)"
    )


def test_particles_and_adverbs_are_the_same() -> None:
    gold, parse = (tree(f"(S XX XX XX XX ({label} XX ){label} XX )S") for label in ("PRT", "ADVP"))
    assert bracket_score([gold], [parse]).f1 == 100


def test_other_words_and_other_numbers_of_trees_are_refused() -> None:
    other = tree(GOLD)._replace(words=("Jane", ",", "has", "a", "dog", "."))
    with pytest.raises(
        UserError,
        match="Tree 2: the words are 'Jane , has .*expected those of the gold tree, 'John , has",
    ):
        bracket_score([tree(GOLD)] * 2, [tree(GOLD), other])
    with pytest.raises(UserError, match="There are 3 gold trees and 1 to score"):
        bracket_score([tree(GOLD)] * 3, [tree(GOLD)])
    with pytest.raises(UserError, match="0 trees"):
        bracket_score([], [])
