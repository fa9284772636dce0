"""Trees: round trip, trees from arbitrary sequences, and errors in treebanks."""

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.errors import UserError
from transformer_jax.parsing.trees import (
    Constituent,
    Parse,
    from_sequence,
    read_parses,
    with_numbers,
    without_numbers,
)

PENN = """
( (S
    (NP-SBJ-1 (NNP John) )
    (VP (VBZ has)
      (NP (DT a) (NN dog) )
      (PP=2 (IN with) (NP (-NONE- *T*-1) )) (PRT|ADVP (RP off)))
    (. .) ))
"""


def parse_tree(draw: st.DrawFn, start: int, end: int, depth: int) -> Iterator[Constituent]:
    """Constituents over these words, in order of their opening brackets."""
    for _ in range(draw(st.integers(0 if depth else 1, 2))):
        yield Constituent(draw(st.sampled_from(["S", "NP", "VP", "PRT"])), start, end)
    while depth < 4 and start < end:
        middle = draw(st.integers(start + 1, end))
        yield from parse_tree(draw, start, middle, depth + 1)
        start = middle


@st.composite
def parses(draw: st.DrawFn) -> Parse:
    words = draw(st.lists(st.sampled_from(["John", "has", "dogs", ",", "-LRB-", "XX"]), max_size=7))
    tags = [draw(st.sampled_from(["NNP", "VBZ", ",", "."])) for _ in words]
    return Parse(
        tuple(words), tuple(tags), tuple(parse_tree(draw, 0, len(words), 0) if words else ())
    )


@settings(deadline=None)
@given(st.lists(parses(), max_size=3))
def test_round_trip_through_a_treebank_file(
    tmp_path_factory: pytest.TempPathFactory, written: list[Parse]
) -> None:
    path = tmp_path_factory.mktemp("trees") / "trees.mrg"
    path.write_text("".join(f"{parse}\n" for parse in written))
    assert list(read_parses(path)) == written


@settings(deadline=None)
@given(parses())
def test_round_trip_through_a_sequence(parse: Parse) -> None:
    restored, faultless = from_sequence(parse.words, parse.sequence())
    assert faultless
    assert (restored.words, restored.constituents) == (parse.words, parse.constituents)
    numbered = parse.sequence(numbered=True)
    assert from_sequence(parse.words, numbered) == (restored, True)
    assert re.findall(r"(?<!\S)(?!#\d)[^()\s]+", numbered) == list(parse.tags)
    assert without_numbers(with_numbers(parse.words)) == list(parse.words)
    assert without_numbers(parse.words) == parse.words


@settings(deadline=None)
@given(
    st.integers(0, 5),
    st.lists(
        st.sampled_from(["(S", "(NP", ")S", ")NP", "XX", "?", "(", ")", "((S", "(S)"]), max_size=14
    ),
)
def test_any_sequence_gives_a_tree_and_malformed_ones_are_detected(
    count: int, tokens: list[str]
) -> None:
    words = [f"w{i}" for i in range(count)]
    parse, faultless = from_sequence(words, " ".join(tokens))
    assert parse.words == tuple(words)
    assert all(0 <= c.start < c.end <= count for c in parse.constituents)
    assert from_sequence(words, parse.sequence()) == (parse, True)  # constituents nest
    assert faultless == (
        parse.sequence() == " ".join("XX" if token == "?" else token for token in tokens)
    )


@pytest.mark.parametrize("count", [0, 1, 2])
def test_every_short_sequence_is_well_formed_only_if_its_tree_has_that_sequence(count: int) -> None:
    """All sequences of up to five tokens, also with numbers. Restored trees nest and are whole."""
    words = [f"w{i}" for i in range(count)]
    well_formed = set()
    for length in range(6):
        for tokens in product(["(S", "(NP", ")S", ")NP", "XX", "("], repeat=length):
            parse, faultless = from_sequence(words, sequence := " ".join(tokens))
            assert faultless == (parse.sequence() == sequence), sequence
            assert all(0 <= c.start < c.end <= count for c in parse.constituents), sequence
            if faultless:
                well_formed.add(sequence)
            if "XX" in tokens:
                numbered = [f"#{n} NNP" if t == "XX" else t for n, t in enumerate(tokens)]
                assert from_sequence(words, " ".join(numbered)) == (parse, faultless), sequence
    assert len(well_formed) == (1, 7, 7)[count]


def test_traces_function_tags_and_the_root_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "penn.mrg"
    path.write_text(PENN)
    (parse,) = read_parses(path)
    assert parse.words == ("John", "has", "a", "dog", "with", "off", ".")
    assert parse.tags == ("NNP", "VBZ", "DT", "NN", "IN", "RP", ".")
    assert (
        parse.sequence() == "(S (NP XX )NP (VP XX (NP XX XX )NP (PP XX )PP (PRT XX )PRT )VP XX )S"
    )
    assert str(parse).startswith("( (S (NP (NNP John)) (VP (VBZ has) (NP (DT a) (NN dog))")


def test_a_malformed_sequence_keeps_its_well_formed_constituents() -> None:
    words = ["John", "has", "a", "dog", "."]
    for sequence, restored in (
        # one word too few
        (
            "(S (NP XX )NP (VP XX (NP XX XX )NP )VP )S",
            "(S (NP XX )NP (VP XX (NP XX XX )NP )VP XX )S",
        ),
        # a wrong label, no closing brackets and too many words
        ("(S (NP XX )VP (VP XX XX XX XX XX XX", "(S (NP XX )NP (VP XX XX XX XX )VP )S"),
        ("", "XX XX XX XX XX"),
    ):
        assert from_sequence(words, sequence)[0].sequence() == restored


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("((S (NN dog)))\n\n(S (NN dog)))", "line 3: '\\)' outside all brackets"),
        ("dog", "line 1: 'dog' outside"),
        ("(S (NP the dog))", "line 1: unexpected word 'dog' after a word"),
        ("(S (NP (DT the) dog))", "line 1: unexpected word 'dog' after"),
        ("(S (NN dog (NN cat)))", "line 1: \\( after the word 'dog'"),
        ("(S (NP))", "line 1: \\(NP\\) has no word"),
        ("(S ())", "line 1: \\(\\) has no word"),
        ("(S\n(NN dog)", "line 1: the tree that starts here lacks 1 of its closing brackets"),
        # the next tree is read as one of its constituents
        ("(S (A a))\n(S (A a)\n(S (A a))\n", "line 2: the tree that starts here lacks 1 of its"),
    ],
)
def test_a_malformed_tree_is_an_error_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "bad.mrg"
    path.write_text(text)
    with pytest.raises(UserError, match=f"bad.mrg, {message}.*expected trees such as"):
        list(read_parses(path))
