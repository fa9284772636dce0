"""Print treebank trees with swapped constituents, for training a parser on few trees.

    python examples/recombined_trees.py --like train.mrg --trees 60000 > more.trees

writes one tree per line in Penn format. Three in ten constituents of a tree, chosen at random, are
replaced with constituents that have the same label and the same parent label, from anywhere in the
treebank (SUB2 of Shi et al., 2021, https://arxiv.org/abs/2101.00411).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from random import Random

import tyro

from transformer_jax import UserError, run_program
from transformer_jax.parsing.trees import Constituent, Parse, read_parses

SHARE = 0.3  # of a tree's constituents


def recombined(parses: Iterable[Parse], seed: int) -> Iterator[Parse]:
    """Yield an infinite stream of trees from ``parses`` with swapped constituents."""
    draw = Random(seed)
    trees = list(parses)
    if not trees:
        raise UserError("There are no trees; expected at least one in the files of --like.")
    alike = defaultdict[tuple[str, str], list[tuple[int, int]]](list)
    for number, parse in enumerate(trees):
        for place, kind in enumerate(kinds(parse)):
            alike[kind].append((number, place))
    while True:
        tree = draw.choice(trees)
        for _ in range(round(SHARE * len(tree.constituents))):
            place = draw.randrange(len(tree.constituents))
            number, donor_place = draw.choice(alike[kinds(tree)[place]])
            tree = exchanged(tree, place, trees[number], donor_place)
        yield tree


def kinds(parse: Parse) -> list[tuple[str, str]]:
    """Return the label and parent label of each constituent."""
    kinds_of_constituents = list[tuple[str, str]]()
    around = list[Constituent]()
    for constituent in parse.constituents:
        while around and around[-1].end <= constituent.start:
            around.pop()
        kinds_of_constituents.append((constituent.label, around[-1].label if around else ""))
        around.append(constituent)
    return kinds_of_constituents


def exchanged(tree: Parse, place: int, donor: Parse, donor_place: int) -> Parse:
    """Replace constituent ``place`` of ``tree`` with constituent ``donor_place`` of ``donor``."""
    _, start, end = tree.constituents[place]
    _, new_start, new_end = donor.constituents[donor_place]
    grown = (new_end - new_start) - (end - start)
    before = [
        c._replace(end=c.end + grown) if c.end >= end else c for c in tree.constituents[:place]
    ]
    inside = [
        moved(c, start - new_start) for c in donor.constituents[donor_place:] if c.start < new_end
    ]
    after = [moved(c, grown) for c in tree.constituents[place:] if c.start >= end]
    return Parse(
        tree.words[:start] + donor.words[new_start:new_end] + tree.words[end:],
        tree.tags[:start] + donor.tags[new_start:new_end] + tree.tags[end:],
        (*before, *inside, *after),
    )


def moved(constituent: Constituent, by: int) -> Constituent:
    return constituent._replace(start=constituent.start + by, end=constituent.end + by)


def main(like: tuple[Path, ...], trees: int = 1000, seed: int = 0) -> None:
    parses = (parse for file in like for parse in read_parses(file))
    for tree in islice(recombined(parses, seed), trees):
        print(tree)


if __name__ == "__main__":
    raise SystemExit(run_program(lambda: tyro.cli(main)))
