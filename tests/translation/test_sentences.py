"""Sentence splitting: round trip for any text, in linear time."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from transformer_jax.translation.sentences import (
    DividedText,
    SentenceJoiner,
    as_one_sentence,
    divide,
)

ROOT = Path(__file__).resolve().parents[2]
BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
LANGUAGES = st.sampled_from(["en", "de-DE", "zh_Hans", "ja", "ar", "hi", "", "nonsense"])
# Any text, and text with many sentence boundaries and unusual characters.
ODD = st.sampled_from(
    [*BREAKS, "\r\n", " ", "\t", "\xa0", "\0", "\ud800", "👩‍👩‍👧", "مرحبا؟ ", "\u200f"]
)
PLAIN = st.sampled_from(
    ["Hi there. ", "Is it?", "B", "z.B. ", "你好。", "！", "“", '"', "(a. B.) "]
)
TEXTS = st.text() | st.lists(ODD | PLAIN).map("".join)


def plain(text: str, *, language: str = "en", split: bool = True) -> DividedText:
    return divide(text, language=language) if split else as_one_sentence(text)


def joined(pieces: DividedText, translations: list[str]) -> str:
    joiner = SentenceJoiner()
    for before, source, text in zip(pieces.before, pieces.sentences, translations, strict=True):
        joiner.add(before, source, text)
    return joiner.text + pieces.after


def spaces_joined(text: str) -> str:
    """Line breaks inside sentences become spaces."""
    return re.sub(r"\s+", " ", text)


def check_sentences(cut: DividedText) -> None:
    assert len(cut.sentences) == len(cut.before)
    for sentence in cut.sentences:
        assert sentence and sentence == sentence.strip()
        assert not set(sentence) & set(BREAKS)


@given(TEXTS, LANGUAGES)
@example("Hi! \n\n You.\r\nOk", "en")
@example("a.\rb", "en")
def test_untranslated_sentences_join_to_the_text(text: str, language: str) -> None:
    pieces = plain(text, language=language)
    check_sentences(pieces)
    assert joined(pieces, pieces.sentences) == text
    assert all(re.search(r"[^\W_]", sentence) for sentence in pieces.sentences)


@given(TEXTS)
def test_text_that_is_not_split_is_one_sentence(text: str) -> None:
    whole = plain(text, split=False)
    check_sentences(whole)
    assert len(whole.sentences) == bool(text.strip())
    restored = joined(whole, whole.sentences)
    assert spaces_joined(restored) == spaces_joined(text)
    if not set(text.strip()) & set(BREAKS):
        assert restored == text


def test_sentences_of_a_text() -> None:
    text = "  He met Dr. Smith in 3.5 days. He left!\n\n* * *\n- Why?\u2028Why not? "
    pieces = plain(text)
    assert pieces.sentences == ["He met Dr. Smith in 3.5 days.", "He left!", "- Why?", "Why not?"]
    assert pieces.before == ["  ", " ", "\n\n* * *\n", "\u2028"]
    assert pieces.after == " "
    assert joined(pieces, ["A", "B", "", "D"]) == "  A B\n\n* * *\n\u2028D "
    with pytest.raises(ValueError):
        joined(pieces, ["A"])


CATEGORIES = sorted({unicodedata.category(chr(code)) for code in range(0x30000)})


@pytest.mark.parametrize("category", CATEGORIES)
def test_parts_without_a_letter_or_digit_are_copied(category: str) -> None:
    """By Unicode category: L are letters and N are digits and other numbers."""
    every = [c for c in map(chr, range(0x30000)) if unicodedata.category(c) == category]
    some = [*every[:40], *every[:: len(every) // 40 + 1]]
    for c in some:
        for part in c, c * 4, f"{c} {c}", f"_{c}-":
            expected = [part.strip()] if category[0] in "LN" else []
            pieces = plain(f"One.\n{part}\nTwo.")
            assert pieces.sentences == ["One.", *expected, "Two."], (part, pieces)
            if not expected:
                assert joined(pieces, ["A", "B"]) == f"A\n{part}\nB"
            whole = [] if part.isspace() else [spaces_joined(part.strip())]
            assert [*map(spaces_joined, plain(part, split=False).sentences)] == whole


@pytest.mark.parametrize("text", ["", " ", "\n\xa0\r\n", "\u3000"])
def test_white_space_has_no_sentences(text: str) -> None:
    for each in (plain(text), plain(text, split=False)):
        assert not each.sentences and joined(each, []) == text


def test_regional_codes_use_the_rules_of_their_language() -> None:
    text = "Am 3. Mai kam Hr. Maier. Ja."
    german = plain(text, language="de").sentences
    assert len(german) < len(plain(text).sentences)
    for code in ("de_DE", "de-AT", "deu_Latn", "deu"):
        assert plain(text, language=code).sentences == german
    assert len(plain(text, language="xx").sentences) == len(plain(text).sentences)


def test_sentences_from_a_script_without_spaces_are_joined_with_spaces() -> None:
    pieces = plain("你好。我很好！谢谢。", language="zh")
    assert pieces.sentences == ["你好。", "我很好！", "谢谢。"]
    assert joined(pieces, ["Hello.", "I'm fine!", "Thanks."]) == "Hello. I'm fine! Thanks."
    assert joined(pieces, ["", "もちろん！", "はい。"]) == "もちろん！はい。"
    assert joined(pieces, ["你好。", "我很好！", "Thanks."]) == "你好。我很好！Thanks."
    assert joined(plain("你好。 我", language="zh"), ["Hi.", "I"]) == "Hi. I"


@pytest.mark.parametrize(("space", "text"), [(" ", "One."), ("", "一。")])
@given(st.lists(st.tuples(st.sampled_from(["", " "]), st.booleans())))
def test_empty_translations_leave_no_trace(
    space: str, text: str, sentences: list[tuple[str, bool]]
) -> None:
    """The others are joined with what their script needs, whatever separates the sources."""
    translations = [text * is_translated for _, is_translated in sentences]
    before = ["", *(separator for separator, _ in sentences[1:])][: len(sentences)]
    pieces = DividedText(["Eins."] * len(sentences), before, "")
    assert joined(pieces, translations) == space.join(filter(None, translations))


SLOW = ["a.", "a. ", "1", " ", "\n", "“", '"「', '「"', "?«", "你。", 'a. "', "x\n ", " ."]


@pytest.mark.parametrize("unit", [*SLOW, "\ud800"])
def test_time_is_linear(unit: str) -> None:
    text = (unit * 20_000)[:20_000]
    for split in (False, True):
        start = time.process_time()
        pieces = plain(text, language="zh", split=split)
        joined(pieces, pieces.sentences)
        assert time.process_time() - start < 0.5


def test_long_lines_are_split_between_sentences_or_words() -> None:
    sentence = "This is a fine sentence, it is."
    assert plain(" ".join([sentence] * 1000)).sentences == [sentence] * 1000
    words = plain("word " * 2000).sentences
    assert max(map(len, words)) <= 2000 and set(" ".join(words).split()) == {"word"}


def test_splitting_does_not_import_jax() -> None:
    code = "import sys, transformer_jax.translation.sentences; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
