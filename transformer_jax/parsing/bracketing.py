"""Labeled bracket F1 for constituency parsing (Black et al., 1991; section 6.3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from transformer_jax import UserError
from transformer_jax.parsing.trees import Constituent, Parse

_PUNCTUATION = {",", ":", "``", "''", "."}
_SAME_LABEL = {"PRT": "ADVP"}


class BracketScore(NamedTuple):
    """Counts over all sentences, and scores computed from them."""

    matched: int
    gold: int
    """Number of constituents in the gold trees."""
    parsed: int
    """Number of constituents in the trees to score."""
    num_exact_sentences: int
    """Number of sentences in which all constituents match."""
    sentences: int

    @property
    def precision(self) -> float:
        """Percentage of parsed constituents that match."""
        return 100 * self.matched / max(self.parsed, 1)

    @property
    def recall(self) -> float:
        """Percentage of gold constituents that match."""
        return 100 * self.matched / max(self.gold, 1)

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall, 0 to 100."""
        return 200 * self.matched / max(self.gold + self.parsed, 1)

    def __str__(self) -> str:
        """Format all scores on one line."""
        exact = 100 * self.num_exact_sentences / max(self.sentences, 1)
        return (
            f"labeled bracket F1 = {self.f1:.2f} (precision {self.precision:.2f}, "
            f"recall {self.recall:.2f}, exact match {exact:.2f}%, {self.sentences} sentences)"
        )


def bracket_score(gold: Iterable[Parse], parses: Iterable[Parse]) -> BracketScore:
    """Score trees as EVALB does with Collins' parameters, but for sentences of any length.

    Punctuation (gold tags , : `` '' .) is removed from both trees, along with constituents that
    contain only punctuation. ADVP and PRT count as the same label. Duplicate constituents count
    separately.

    Raises:
        UserError: there are no sentences, or the two inputs differ in length or words.
    """
    gold_parses = list(gold)
    scored_parses = list(parses)
    matched = num_gold = num_parsed = num_exact = 0
    for tree_number, (gold_parse, parse) in enumerate(zip(gold_parses, scored_parses), 1):
        if gold_parse.words != parse.words:
            raise UserError(
                f"Tree {tree_number}: the words are {' '.join(parse.words)!r}; expected the words "
                f"of the gold tree, {' '.join(gold_parse.words)!r}."
            )
        gold_brackets = _brackets(gold_parse.constituents, gold_parse.tags)
        brackets = _brackets(parse.constituents, gold_parse.tags)
        matched += (gold_brackets & brackets).total()
        num_gold += gold_brackets.total()
        num_parsed += brackets.total()
        num_exact += gold_brackets == brackets
    if len(gold_parses) != len(scored_parses):
        raise UserError(
            f"There are {len(gold_parses)} gold trees and {len(scored_parses)} to score; expected "
            "the same number of each."
        )
    if not gold_parses:
        raise UserError("There are no gold trees; expected at least one, with a tree to score.")
    return BracketScore(matched, num_gold, num_parsed, num_exact, len(gold_parses))


def _brackets(constituents: Iterable[Constituent], tags: Iterable[str]) -> Counter[Constituent]:
    """Count constituents as EVALB compares them, with word positions that skip punctuation."""
    before = [0, *accumulate(tag not in _PUNCTUATION for tag in tags)]
    scored = (
        Constituent(_SAME_LABEL.get(c.label, c.label), before[c.start], before[c.end])
        for c in constituents
    )
    return Counter(c for c in scored if c.start < c.end)
