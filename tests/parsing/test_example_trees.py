"""Trees from examples/: reproducible, well-formed and consistent with their rules."""

import dataclasses
import re
import runpy
from itertools import islice
from pathlib import Path

import pytest

from transformer_jax.parsing.trees import Parse, from_sequence, read_parses
from transformer_jax.settings.config_files import load_config_file
from transformer_jax.tokenization.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
ARTIFICIAL = runpy.run_path(str(ROOT / "examples" / "artificial_trees.py"))
RECOMBINED = runpy.run_path(str(ROOT / "examples" / "recombined_trees.py"))
TREES = """
( (S (NP (D the) (N dog)) (VP (V saw) (NP (NP (D a) (N cat)) (PP (P on) (NP (D the) (N mat)))))))
( (S (PP (P at) (NP (N night))) (NP (N dogs)) (VP (V bark))))
( (S (NP (N cats)) (VP (V sleep) (PP (P at) (NP (N home))))))
"""


@pytest.fixture
def treebank(tmp_path: Path) -> Path:
    path = tmp_path / "bank.mrg"
    path.write_text(TREES)
    return path


def artificial_trees(folder: Path, count: int, *, language: int = 0, seed: int = 1) -> list[Parse]:
    file = folder / "artificial.mrg"
    file.write_text("\n".join(islice(ARTIFICIAL["make_trees"](language, seed), count)))
    return list(read_parses(file))


def productions(parse: Parse) -> set[tuple[str, str]]:
    """Each label with the labels and tags inside it, found by folding innermost brackets."""
    text, found = re.sub(r"\((\S+) [^\s()]+\)", r"\1", str(parse)), set()
    while inner := re.search(r"\((\S+) ([^()]+)\)", text):
        found.add((inner[1], inner[2]))
        text = text[: inner.start()] + inner[1] + text[inner.end() :]
    return found


def test_trees_depend_on_language_and_seed_alone(tmp_path: Path) -> None:
    def trees(language: int, seed: int) -> list[Parse]:
        return artificial_trees(tmp_path, 20, language=language, seed=seed)

    assert trees(0, 1) == trees(0, 1)
    assert trees(0, 1) != trees(0, 2)
    assert {word for parse in trees(0, 1) for word in parse.words} & {
        word for parse in trees(0, 2) for word in parse.words
    }
    assert trees(0, 1)[0].words != trees(1, 1)[0].words


def test_a_language_has_few_rules_and_many_words(tmp_path: Path) -> None:
    trees = artificial_trees(tmp_path, 3000)
    assert len(trees) == 3000
    for parse in trees:
        assert 5 <= len(parse.words) <= 30
        assert parse.constituents[0] == ("S", 0, len(parse.words))
        restored, whole = from_sequence(parse.words, parse.sequence())
        assert whole and restored.constituents == parse.constituents
        assert all(
            c.end - c.start > 1 and c.label in ARTIFICIAL["LABELS"] for c in parse.constituents
        )
    assert len({word for parse in trees for word in parse.words}) > 1500
    # 32 rules with constituents, each constituent in them a bracket or a single word
    assert len(set().union(*map(productions, trees))) <= 32 * 4


def test_recombined_trees_are_new_but_follow_the_rules_of_the_treebank(treebank: Path) -> None:
    given = list(read_parses(treebank))
    trees = list(islice(RECOMBINED["recombined"](given, 1), 200))
    assert trees == list(islice(RECOMBINED["recombined"](given, 1), 200))
    rules = set().union(*map(productions, given))
    for parse in trees:
        restored, whole = from_sequence(parse.words, parse.sequence())
        assert whole and restored.constituents == parse.constituents
        assert len(parse.tags) == len(parse.words)
        assert productions(parse) <= rules
    assert len(set(trees) - set(given)) > 20


@pytest.mark.parametrize("config", ["pcfg_parsing", "wsj_parsing"])
def test_each_bracket_is_one_token(config: str, tmp_path: Path) -> None:
    settings = load_config_file(ROOT / "configs" / f"{config}.py").tokenizer
    parses = [
        parse._replace(constituents=tuple(c._replace(label="S") for c in parse.constituents))
        for parse in artificial_trees(tmp_path, 300)
    ]
    pairs = [(" ".join(parse.words), parse.sequence()) for parse in parses]
    tokenizer = Tokenizer.train(pairs, dataclasses.replace(settings, vocab_size=300))
    for _, sequence in pairs:
        (ids,) = tokenizer.target.encode([sequence])
        assert len(ids) == len(sequence.split()) and tokenizer.target.decode(ids) == sequence
