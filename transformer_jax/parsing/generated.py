"""Generated trees, to learn from where a treebank is missing or small: those of a made-up language,
and those of a treebank with constituents exchanged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from random import Random
from typing import NamedTuple

from transformer_jax import UserError
from transformer_jax.parsing.trees import Constituent, Parse

LABELS = "SABCDEFG"
"""Labels of the made-up language, S the whole sentence's."""

_RULES = 5  # of each label
_WORDS = 60  # of each rule
_SHAPES = ((0, 1), (0, 1), (0, 2), (1, 1))  # of a rule: constituents before and after its word
_DEEPEST = 6
_LENGTHS = range(5, 31)  # in words, of a made-up sentence


class _Rule(NamedTuple):
    before: str  # labels of the constituents before the word
    words: list[str]
    after: str


class Language:
    """A made-up context-free language: rules and words are drawn from ``seed``.

    Each of eight labels has five rules: a word alone, or a word with one or two constituents before
    and after it. Each rule has sixty words of its own, as verbs with and without an object are
    different words, and so it is the words that decide what attaches where. Some words happen to
    belong to two rules. The k-th word of a rule has a frequency of about 1/k (Zipf's law).
    """

    def __init__(self, seed: int) -> None:
        draw = Random(seed)
        self._rules = dict[str, list[_Rule]]()
        for label in LABELS:
            shapes = {("", "")}
            while len(shapes) < _RULES:
                before, after = draw.choice(_SHAPES)
                inner = draw.choices(LABELS[1:], k=before + after)
                shapes.add(("".join(inner[:before]), "".join(inner[before:])))
            self._rules[label] = [
                _Rule(before, [_word(draw) for _ in range(_WORDS)], after)
                for before, after in sorted(shapes)
            ]

    def trees(self, seed: int) -> Iterator[Parse]:
        """Trees without end, of 5 to 30 words. A constituent of one word has no bracket."""
        draw = Random(seed)
        while True:
            words, constituents = list[str](), list[Constituent]()
            self._grow("S", 0, draw, words, constituents)
            if len(words) in _LENGTHS:
                yield Parse(tuple(words), ("XX",) * len(words), tuple(constituents))

    def _grow(
        self, label: str, depth: int, draw: Random, words: list[str], found: list[Constituent]
    ) -> None:
        alone, *others = self._rules[label]
        start, place = len(words), len(found)
        ends = depth == _DEEPEST or (depth and draw.random() < 0.4)
        rule = alone if ends else draw.choice(others)
        for inner in rule.before:
            self._grow(inner, depth + 1, draw, words, found)
        words.append(rule.words[int((_WORDS + 1) ** draw.random()) - 1])
        for inner in rule.after:
            self._grow(inner, depth + 1, draw, words, found)
        if len(words) > start + 1:
            found.insert(place, Constituent(label, start, len(words)))


def _word(draw: Random) -> str:
    syllables = draw.choices("bdfgklmnprstvz", k=draw.choice((2, 3)))
    return "".join(consonant + draw.choice("aeiou") for consonant in syllables)


def recombined(parses: Iterable[Parse], seed: int, *, share: float = 0.3) -> Iterator[Parse]:
    """Trees without end, each one of ``parses`` with constituents exchanged (SUB2 of Shi et al.,
    2021).

    ``share`` of a tree's constituents, at random, make way for others from anywhere in ``parses``
    that have the same label and are inside one with the same label.
    """
    draw, whole = Random(seed), list(parses)
    alike = defaultdict[tuple[str, str], list[tuple[int, int]]](list)
    for number, parse in enumerate(whole):
        for place, key in enumerate(_kinds(parse)):
            alike[key].append((number, place))
    if not whole:
        raise UserError("There is no tree to take constituents from; expected at least one.")
    while True:
        tree = draw.choice(whole)
        for _ in range(round(share * len(tree.constituents))):
            place = draw.randrange(len(tree.constituents))
            number, other = draw.choice(alike[_kinds(tree)[place]])
            tree = _exchanged(tree, place, whole[number], other)
        yield tree


def _kinds(parse: Parse) -> list[tuple[str, str]]:
    """Of each constituent: its label, and that of the constituent around it."""
    kinds, around = list[tuple[str, str]](), list[Constituent]()
    for constituent in parse.constituents:
        while around and around[-1].end <= constituent.start:
            around.pop()
        kinds.append((constituent.label, around[-1].label if around else ""))
        around.append(constituent)
    return kinds


def _exchanged(tree: Parse, place: int, giver: Parse, other: int) -> Parse:
    """``tree`` with constituent ``other`` of ``giver`` in place of its own number ``place``."""
    old, new = tree.constituents[place], giver.constituents[other]
    grown = (new.end - new.start) - (old.end - old.start)
    before = [
        c._replace(end=c.end + grown) if c.end >= old.end else c for c in tree.constituents[:place]
    ]
    inside = [_moved(c, old.start - new.start) for c in _within(giver, other)]
    after = [_moved(c, grown) for c in tree.constituents[place + len(_within(tree, place)) :]]
    return Parse(
        tree.words[: old.start] + giver.words[new.start : new.end] + tree.words[old.end :],
        tree.tags[: old.start] + giver.tags[new.start : new.end] + tree.tags[old.end :],
        (*before, *inside, *after),
    )


def _within(parse: Parse, place: int) -> list[Constituent]:
    """A constituent and those inside it."""
    end = parse.constituents[place].end
    return [c for c in parse.constituents[place:] if c.start < end]


def _moved(constituent: Constituent, by: int) -> Constituent:
    return constituent._replace(start=constituent.start + by, end=constituent.end + by)
