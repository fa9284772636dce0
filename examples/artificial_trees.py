"""Print trees of an artificial language, for training a parser without a treebank.

    python examples/artificial_trees.py --trees 2000 --seed 3 > test.trees

writes one tree per line in Penn format. The language is a random context-free grammar. Each of its
eight labels has five rules: a single word, or a word with one or two constituents around it. Each
rule has its own sixty words, much as transitive and intransitive verbs differ, so the words
determine the attachment. By chance, some words belong to two rules. A rule's k-th word has a
frequency roughly proportional to 1/k (Zipf's law).
"""

from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import NamedTuple

import tyro

from transformer_jax import run_program

LABELS = "SABCDEFG"  # S labels the whole sentence
RULES = 5
WORDS = 60  # per label; per rule
SHAPES = ((0, 1), (0, 1), (0, 2), (1, 1))  # constituents before and after a rule's word
DEEPEST = 6
LENGTHS = range(5, 31)  # of a tree, in levels; of a sentence, in words


class Rule(NamedTuple):
    before: str  # labels of constituents before the word
    words: list[str]
    after: str


def make_language(seed: int) -> dict[str, list[Rule]]:
    """Return the rules of each label; the first is a single word."""
    draw = Random(seed)
    rules = {}
    for label in LABELS:
        shapes = {("", "")}
        while len(shapes) < RULES:
            before, after = draw.choice(SHAPES)
            inner = draw.choices(LABELS[1:], k=before + after)
            shapes.add(("".join(inner[:before]), "".join(inner[before:])))
        rules[label] = [
            Rule(before, [make_word(draw) for _ in range(WORDS)], after)
            for before, after in sorted(shapes)
        ]
    return rules


def make_word(draw: Random) -> str:
    syllables = draw.choices("bdfgklmnprstvz", k=draw.choice((2, 3)))
    return "".join(consonant + draw.choice("aeiou") for consonant in syllables)


def grow(rules: dict[str, list[Rule]], label: str, depth: int, draw: Random) -> str:
    """Return a random constituent. One-word constituents get no brackets of their own."""
    alone, *longer_rules = rules[label]
    ends = depth == DEEPEST or (depth and draw.random() < 0.4)
    rule = alone if ends else draw.choice(longer_rules)
    parts = [grow(rules, inner, depth + 1, draw) for inner in rule.before]
    parts.append(f"(XX {rule.words[int((WORDS + 1) ** draw.random()) - 1]})")
    parts += [grow(rules, inner, depth + 1, draw) for inner in rule.after]
    return f"({label} {' '.join(parts)})" if len(parts) > 1 else parts[0]


def make_trees(language: int, seed: int) -> Iterator[str]:
    """Yield an infinite stream of trees of 5 to 30 words."""
    rules = make_language(language)
    draw = Random(seed)
    while True:
        tree = grow(rules, "S", 0, draw)
        if tree.count("(XX ") in LENGTHS:
            yield f"( {tree})"


def main(trees: int = 1000, seed: int = 0, language: int = 0) -> None:
    for tree in islice(make_trees(language, seed), trees):
        print(tree)


if __name__ == "__main__":
    raise SystemExit(run_program(lambda: tyro.cli(main)))
