"""Generated trees for training without a large treebank: trees of a made-up language, and treebank
trees with swapped constituents.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from random import Random
from typing import NamedTuple

from transformer_jax import UserError
from transformer_jax.parsing.trees import Constituent, Parse

LABELS = "SABCDEFG"
"""Labels of the made-up language; S labels the whole sentence."""

_RULES = 5  # per label
_WORDS = 60  # per rule
_SHAPES = ((0, 1), (0, 1), (0, 2), (1, 1))  # constituents before and after a rule's word
_DEEPEST = 6
_LENGTHS = range(5, 31)  # sentence lengths in words


class _Rule(NamedTuple):
    before: str  # labels of constituents before the word
    words: list[str]
    after: str


class Language:
    """A made-up context-free language with random rules and words, drawn from ``seed``.

    Each of eight labels has five rules: a single word, or a word with one or two constituents
    around it. Each rule has its own sixty words, much as transitive and intransitive verbs
    differ, so the words determine the attachment. By chance, some words belong to two rules. A
    rule's k-th word has a frequency roughly proportional to 1/k (Zipf's law).
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
        """Yield an infinite stream of trees of 5 to 30 words. One-word constituents get no
        brackets.
        """
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
    """Yield an infinite stream of trees from ``parses`` with swapped constituents (SUB2 of Shi et
    al., 2021).

    A random ``share`` of a tree's constituents is replaced with constituents from anywhere in
    ``parses`` with the same label and the same parent label.
    """
    draw, whole = Random(seed), list(parses)
    alike = defaultdict[tuple[str, str], list[tuple[int, int]]](list)
    for number, parse in enumerate(whole):
        for place, key in enumerate(_kinds(parse)):
            alike[key].append((number, place))
    if not whole:
        raise UserError("No trees found; expected some to take constituents from.")
    while True:
        tree = draw.choice(whole)
        for _ in range(round(share * len(tree.constituents))):
            place = draw.randrange(len(tree.constituents))
            number, other = draw.choice(alike[_kinds(tree)[place]])
            tree = _exchanged(tree, place, whole[number], other)
        yield tree


def _kinds(parse: Parse) -> list[tuple[str, str]]:
    """Return the label and parent label of each constituent."""
    kinds, around = list[tuple[str, str]](), list[Constituent]()
    for constituent in parse.constituents:
        while around and around[-1].end <= constituent.start:
            around.pop()
        kinds.append((constituent.label, around[-1].label if around else ""))
        around.append(constituent)
    return kinds


def _exchanged(tree: Parse, place: int, donor: Parse, other: int) -> Parse:
    """Replace constituent ``place`` of ``tree`` with constituent ``other`` of ``donor``."""
    old, new = tree.constituents[place], donor.constituents[other]
    grown = (new.end - new.start) - (old.end - old.start)
    before = [
        c._replace(end=c.end + grown) if c.end >= old.end else c for c in tree.constituents[:place]
    ]
    inside = [_moved(c, old.start - new.start) for c in _within(donor, other)]
    after = [_moved(c, grown) for c in tree.constituents[place + len(_within(tree, place)) :]]
    return Parse(
        tree.words[: old.start] + donor.words[new.start : new.end] + tree.words[old.end :],
        tree.tags[: old.start] + donor.tags[new.start : new.end] + tree.tags[old.end :],
        (*before, *inside, *after),
    )


def _within(parse: Parse, place: int) -> list[Constituent]:
    """Return a constituent and all constituents inside it."""
    end = parse.constituents[place].end
    return [c for c in parse.constituents[place:] if c.start < end]


def _moved(constituent: Constituent, by: int) -> Constituent:
    return constituent._replace(start=constituent.start + by, end=constituent.end + by)
