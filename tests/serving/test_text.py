"""Cutting texts: what is put together again is the text, whatever it holds, and in linear time."""

from __future__ import annotations

import html
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from transformer_jax.serving.text import Cut, cut

ROOT = Path(__file__).resolve().parents[2]
BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
LANGUAGES = st.sampled_from(["en", "de-DE", "zh_Hans", "ja", "ar", "hi", "", "nonsense"])
# Any text, and text dense in what sentences are cut by and in what could go wrong.
ODD = st.sampled_from(
    [*BREAKS, "\r\n", " ", "\t", "\xa0", "\0", "\ud800", "👩‍👩‍👧", "مرحبا؟ ", "\u200f"]
)
PLAIN = st.sampled_from(
    ["Hi there. ", "Is it?", "B", "z.B. ", "你好。", "！", "“", '"', "(a. B.) "]
)
TEXTS = st.text() | st.lists(ODD | PLAIN).map("".join)
TAGS = (
    st.sampled_from(["<p>", "</p>", "<br/>", "<a href=\"x > y\" title='<b>'>", "<textarea>"])
    | st.sampled_from(["<!-- a. > <b> -->", "<!-->", "<!>", "<!doctype html>", "<?x?>", "</ x>"])
    | st.sampled_from(["<script>a < b. 'x'</script>", "<style>", "</style>", "<scripts>"])
    | st.sampled_from(["<PRE>\n a. </pre >", "<code>x</code>"])
)
UNCLOSED = st.sampled_from(["<a ", "<a href='", "<!--", "</", "<p", '<code x="'])
ENTITIES = st.sampled_from(
    ["<ſ>", "&amp;", "&lt;b>", "&nbsp;", "&#10;", "&#x85;", "&copy", "&", "<", "< 3"]
)


def plain(text: str, *, language: str = "en", split: bool = True) -> Cut:
    return cut(text, language=language, html=False, split=split)


def markup(text: str, *, language: str = "en", split: bool = True) -> Cut:
    return cut(text, language=language, html=True, split=split)


def spaces_joined(text: str) -> str:
    """Line breaks inside sentences become spaces."""
    return re.sub(r"\s+", " ", text)


def check_sentences(cut: Cut) -> None:
    assert len(cut.sentences) == len(cut.before)
    for sentence in cut.sentences:
        assert sentence and sentence == sentence.strip()
        assert not set(sentence) & set(BREAKS)


class Tags(HTMLParser):
    """The tags, comments and declarations of a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[object] = []
        self.handle_starttag = self.handle_endtag = self.add  # type: ignore[method-assign]
        self.handle_comment = self.handle_decl = self.handle_pi = self.add  # type: ignore[method-assign]
        self.feed(text)

    def add(self, *what: object) -> None:
        self.found.append(what)


@given(TEXTS, LANGUAGES)
@example("Hi! \n\n You.\r\nOk", "en")
@example("a.\rb", "en")
def test_untranslated_sentences_give_the_text(text: str, language: str) -> None:
    pieces = plain(text, language=language)
    check_sentences(pieces)
    assert pieces.joined(pieces.sentences) == text
    assert all(re.search(r"[^\W_]", sentence) for sentence in pieces.sentences)


@given(TEXTS)
def test_an_uncut_text_is_one_sentence(text: str) -> None:
    whole = plain(text, split=False)
    check_sentences(whole)
    assert len(whole.sentences) == bool(text.strip())
    joined = whole.joined(whole.sentences)
    assert spaces_joined(joined) == spaces_joined(text)
    if not set(text.strip()) & set(BREAKS):
        assert joined == text


@given(st.lists(TAGS | PLAIN | st.sampled_from([" ", "\t", "é"])).map("".join), LANGUAGES)
def test_html_comes_back_exactly(text: str, language: str) -> None:
    pieces = markup(text, language=language)
    check_sentences(pieces)
    assert pieces.joined(pieces.sentences) == text


@given(
    st.lists(TAGS | UNCLOSED | ENTITIES | PLAIN | ODD).map("".join) | st.text("<>&/!-='\" abp;#1\n")
)
def test_html_comes_back_up_to_the_spelling_of_entities_and_white_space(text: str) -> None:
    for split in (True, False):
        pieces = markup(text, split=split)
        check_sentences(pieces)
        joined = pieces.joined(pieces.sentences)
        assert spaces_joined(html.unescape(joined)) == spaces_joined(html.unescape(text))
        assert markup(joined, split=split).sentences == pieces.sentences


@given(st.lists(st.sampled_from(["<p>", "<b x='>'>", "<!-- a -->", "Hi. ", "a < b", "&", "<"])))
def test_translations_bring_no_tags(parts: list[str]) -> None:
    text = "".join(parts)
    pieces = markup(text)
    hostile = [f"<script>{i}</script>&lt;<" for i in range(len(pieces.sentences))]
    joined = pieces.joined(hostile)
    assert Tags(joined).found == Tags(text).found
    assert joined.count("&lt;script&gt;") == len(hostile)


def test_sentences_of_a_text() -> None:
    text = "  He met Dr. Smith in 3.5 days. He left!\n\n* * *\n- Why?\u2028Why not? "
    pieces = plain(text)
    assert pieces.sentences == ["He met Dr. Smith in 3.5 days.", "He left!", "- Why?", "Why not?"]
    assert pieces.before == ["  ", " ", "\n\n* * *\n", "\u2028"]
    assert pieces.after == " "
    assert pieces.joined(["A", "B", "", "D"]) == "  A B\n\n* * *\n\u2028D "
    with pytest.raises(ValueError):
        pieces.joined(["A"])


@pytest.mark.parametrize("text", ["", " ", "\n\xa0\r\n", "\u3000"])
def test_white_space_has_no_sentences(text: str) -> None:
    for each in (plain(text), plain(text, split=False), markup(text), markup(f"<p>{text}</p>")):
        assert not each.sentences and text in each.joined([])


def test_a_regional_code_means_its_language() -> None:
    text = "Das gilt z. B. Bienen. Ja."
    assert plain(text, language="de_DE").sentences == plain(text, language="de").sentences
    assert len(plain(text, language="xx").sentences) == len(plain(text).sentences)


def test_spaces_join_sentences_where_only_the_source_writes_none() -> None:
    pieces = plain("你好。我很好！谢谢。", language="zh")
    assert pieces.sentences == ["你好。", "我很好！", "谢谢。"]
    assert pieces.joined(["Hello.", "I'm fine!", "Thanks."]) == "Hello. I'm fine! Thanks."
    assert pieces.joined(["", "もちろん！", "はい。"]) == "もちろん！はい。"
    assert pieces.gap(1) == "" and pieces.gap(1, "Hello.") == " " and pieces.gap(1, "你好。") == ""
    assert plain("你好。 我", language="zh").joined(["Hi.", "I"]) == "Hi. I"


def test_sentences_of_html() -> None:
    text = (
        "<!DOCTYPE html><title>A &amp; B</title>\n<p class='x>y'>One\n  line. Two&nbsp;"
        "<b>three</b>, &raquo;<code>a. b</code>&lt;/p&gt; 4 < 5</p><script>a<b; f('x.')</script>"
    )
    pieces = markup(text)
    assert pieces.sentences == ["A & B", "One line.", "Two", "three", "</p> 4 < 5"]
    assert pieces.joined([each.upper() for each in pieces.sentences]) == (
        "<!DOCTYPE html><title>A &amp; B</title>\n<p class='x>y'>ONE LINE. TWO\xa0"
        "<b>THREE</b>, &raquo;<code>a. b</code>&lt;/P&gt; 4 &lt; 5</p><script>a<b; f('x.')</script>"
    )
    assert markup("<p>One. Two.</p>", split=False).sentences == ["One. Two."]
    assert markup(f"a &#{'9' * 5000}; b").sentences == ["a \ufffd b"]


SLOW = [
    "<",
    "&",
    "a.",
    "a. ",
    "<a ",
    "<a b='",
    "</",
    "<!--",
    "<script>",
    "&#1",
    "1",
    " ",
    "\n",
    "“",
]
SLOW += ['"「', '「"', "?«", "你。", 'a. "', "<pre ", "x\n ", " .", "=", "<b =", "<p>a", "\ud800"]


@pytest.mark.parametrize("unit", SLOW)
def test_time_is_linear(unit: str) -> None:
    text = (unit * 20_000)[:20_000]
    for of_html in (False, True):
        for split in (False, True):
            start = time.process_time()
            pieces = cut(text, language="zh", html=of_html, split=split)
            pieces.joined(pieces.sentences)
            assert time.process_time() - start < 0.5


def test_long_lines_are_cut_between_sentences_or_words() -> None:
    sentence = "This is a fine sentence, it is."
    assert plain(" ".join([sentence] * 1000)).sentences == [sentence] * 1000
    words = plain("word " * 2000).sentences
    assert max(map(len, words)) <= 2000 and set(" ".join(words).split()) == {"word"}


def test_it_needs_no_jax() -> None:
    code = "import sys, transformer_jax.serving.text; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
