"""Bracket F1, checked with hand-worked cases, EVALB's output and a text-based reference."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest

from transformer_jax.errors import UserError
from transformer_jax.parsing.bracketing import bracket_score
from transformer_jax.parsing.trees import Parse, from_sequence, read_parses

WORDS = ["John", ",", "has", "a", "dog", "."]
TAGS = ("NNP", ",", "VBZ", "DT", "NN", ".")
GOLD = "(S (NP XX )NP XX (VP XX (NP XX XX )NP )VP XX )S"


def tree(sequence: str) -> Parse:
    return from_sequence(WORDS, sequence)[0]._replace(tags=TAGS)


@pytest.mark.parametrize(
    ("sequence", "matched", "parsed"),
    [
        (GOLD, 4, 4),
        ("(S (NP XX XX )NP (VP XX (NP XX XX )NP XX )VP )S", 4, 4),  # punctuation does not count
        ("(S (NP XX )NP XX (VP XX XX (NP XX )NP )VP XX )S", 3, 4),
        ("", 0, 0),
    ],
)
def test_constituents_match_a_count_by_hand(sequence: str, matched: int, parsed: int) -> None:
    score = bracket_score([tree(GOLD)], [tree(sequence)])
    exact = matched == parsed == 4
    assert score == (matched, 4, parsed, exact, 1)


def test_precision_and_recall_are_over_all_sentences() -> None:
    score = bracket_score([tree(GOLD)] * 2, [tree(GOLD), tree("(S XX XX XX XX XX XX )S")])
    assert (score.precision, score.recall) == (100 * 5 / 5, 100 * 5 / 8)
    assert score.f1 == pytest.approx(100 * 2 * 5 / 13)
    assert str(score) == (
        "labeled bracket F1 = 76.92 "
        "(precision 100.00, recall 62.50, exact match 50.00%, 2 sentences)"
    )


def test_gold_trees_and_parses_must_match() -> None:
    other = tree(GOLD)._replace(words=("Jane", ",", "has", "a", "dog", "."))
    message = "Tree 2: the words are 'Jane , has .*the words of the gold tree, 'John , has"
    with pytest.raises(UserError, match=message):
        bracket_score([tree(GOLD)] * 2, [tree(GOLD), other])
    with pytest.raises(UserError, match="There are 3 gold trees and 1 to score"):
        bracket_score([tree(GOLD)] * 3, [tree(GOLD)])
    with pytest.raises(UserError, match="There are no gold trees"):
        bracket_score([], [])


# Gold tree, tree to score, and output of EVALB (compiled from its C source, with COLLINS.prm):
# matched, gold and test brackets. SAMPLE is the tree in EVALB's own sample.
SAMPLE = "(S (A (P this)) (B (Q is) (A (R a) (T test))))"
BY_EVALB = [
    (SAMPLE, SAMPLE, (4, 4, 4)),
    (SAMPLE, "(S (A (P this)) (B (Q is) (C (R a) (T test))))", (3, 4, 4)),
    (SAMPLE, "(S (A (P this) (Q is)) (A (R a) (T test)))", (2, 4, 3)),
    (SAMPLE, "(S (P this) (Q is) (R a) (T test))", (1, 4, 1)),
    (SAMPLE, "(S (A (P this)) (B (Q is) (A (A (A (A (A (R a) (T test))))))))", (4, 4, 8)),
    # the root, functions and traces
    (
        "(TOP (S-1 (NP-SBJ=2 (D it)) (VP (V barks) (NP (-NONE- *)))))",
        "(S (NP (D it)) (VP (V barks)))",
        (3, 3, 3),
    ),
    # attachment of punctuation, and constituents of punctuation alone
    (
        "(S (NP (N dogs)) (, ,) (VP (V bark)) (. .))",
        "(S (NP (N dogs) (, ,)) (VP (V bark) (. .)))",
        (3, 3, 3),
    ),
    (
        "(S (`` ``) (NP (N dogs)) (: -) (VP (V bark)) ('' ''))",
        "(S (NP (`` ``)) (NP (N dogs) (: -)) (VP (V bark) (NP ('' ''))))",
        (3, 3, 3),
    ),
    # currency signs and brackets are words
    (
        "(NP (QP ($ $) (CD 5)) (-LRB- -LRB-) (N net) (-RRB- -RRB-))",
        "(NP ($ $) (NP (CD 5) (-LRB- -LRB-)) (N net) (-RRB- -RRB-))",
        (1, 2, 2),
    ),
    # PRT and ADVP are the same label
    (
        "(VP (V come) (PRT (R in)) (ADVP (R now)))",
        "(VP (V come) (ADVP (R in)) (PRT (R now)))",
        (3, 3, 3),
    ),
    ("(VP (V come) (PRT (ADVP (R in))))", "(VP (V come) (ADVP (R in)))", (2, 3, 2)),
    # the same bracket twice
    ("(NP (NP (N dogs)))", "(NP (N dogs))", (1, 2, 1)),
    ("(NP (N dogs))", "(NP (NP (NP (N dogs))))", (1, 1, 3)),
]


def read(folder: Path, trees: Iterable[str]) -> list[Parse]:
    (folder / "trees.mrg").write_text("".join(f"{tree}\n" for tree in trees))
    return list(read_parses(folder / "trees.mrg"))


@pytest.mark.parametrize(("gold", "parse", "printed"), BY_EVALB)
def test_counts_match_the_output_of_evalb(
    tmp_path: Path, gold: str, parse: str, printed: tuple[int, int, int]
) -> None:
    assert bracket_score(read(tmp_path, [gold]), read(tmp_path, [parse]))[:3] == printed


LABELS = ["S", "NP-SBJ", "NP", "VP", "PP=2", "ADVP", "PRT", "TOP"]
LEAVES = ["NN dog", "VBZ barks", "RP in", ", ,", ": --", "`` ``", "'' ''", ". ?", "$ $"]
LEAVES += ["-LRB- -LRB-"]


def random_tree(draw: Random, leaves: list[str], depth: int = 0) -> str:
    """Random brackets over these leaves; the outermost is S."""
    inner = []
    while leaves:
        count = draw.randint(1, len(leaves))
        if depth < 5 and draw.random() < 0.6:
            inner.append(random_tree(draw, leaves[:count], depth + 1))
        else:
            inner += leaves[:count]
        leaves = leaves[count:]
    return f"({draw.choice(LABELS) if depth else 'S'} {' '.join(inner)})"


def brackets_by_cutting(tree: str) -> Counter[tuple[str, int, int]]:
    """Labeled spans from the text of a tree. Follows each bracket to its end and counts the words
    before and inside it.
    """
    found = Counter[tuple[str, int, int]]()
    for opening in re.finditer(r"\((\S+) (?=\()", tree):
        end = opening.end()
        while tree[opening.start() : end].count("(") > tree[opening.start() : end].count(")"):
            end += 1
        label = re.split("[-=]", opening[1])[0].replace("PRT", "ADVP")
        before, inside = words_in(tree[: opening.start()]), words_in(tree[opening.start() : end])
        if label != "TOP" and inside:
            found[label, before, before + inside] += 1
    return found


def words_in(text: str) -> int:
    tags = re.findall(r"\((\S+) [^\s()]+\)", text)
    return sum(tag not in [",", ":", "``", "''", "."] for tag in tags)


def test_random_trees_match_the_reference_and_evalb(tmp_path: Path) -> None:
    draw = Random(0)
    golds, parses, by_cutting = list[str](), list[str](), list[tuple[int, int, int, int]]()
    for _ in range(300):
        leaves = [f"({leaf})" for leaf in ["NN dog", *draw.choices(LEAVES, k=draw.randint(1, 12))]]
        golds.append(random_tree(draw, leaves))
        parses.append(random_tree(draw, leaves))
        a, b = brackets_by_cutting(golds[-1]), brackets_by_cutting(parses[-1])
        by_cutting.append(((a & b).total(), a.total(), b.total(), int(a == b)))
    pairs = list(zip(read(tmp_path, golds), read(tmp_path, parses), strict=True))
    for (gold, parse), counts in zip(pairs, by_cutting, strict=True):
        assert bracket_score([gold], [parse])[:4] == counts, (gold, parse)
    score = bracket_score(*zip(*pairs, strict=True))
    assert score[:4] == tuple(map(sum, zip(*by_cutting, strict=True)))
    # Output of EVALB, compiled from its C source, for the same 300 trees (2026-11-23)
    assert score[:4] == (400, 1290, 1317, 22)  # complete match: 7.33% of 300
    figures = score.recall, score.precision, score.f1
    assert [f"{figure:.2f}" for figure in figures] == ["31.01", "30.37", "30.69"]
