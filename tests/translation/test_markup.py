"""Markup: tags move with their words, and everything but text stays byte for byte."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lxml import etree
from random_models import lines_of_words, make_model, train_tokenizer

from transformer_jax.errors import UserError
from transformer_jax.settings.config import DecodingConfig
from transformer_jax.tokenization.words import token_words
from transformer_jax.translation.alignment import Alignment
from transformer_jax.translation.documents.line import Line, Unit
from transformer_jax.translation.markup import Document
from transformer_jax.translation.requests import Request, Translation
from transformer_jax.translation.translator import Translator

TOKENIZER = train_tokenizer(lines_of_words(60))
TAG = re.compile(r"<[^>]*>")


def aligned(text: str, target: str, pairs: dict[int, int]) -> Translation:
    """A translation whose token alignment follows from that of words (target: source)."""
    sides = (TOKENIZER.source, text), (TOKENIZER.target, target)
    source, tokens = (side.tokens(side.encode([line])[0]) for side, line in sides)
    rows = token_words(TOKENIZER.target, tokens, target.split())
    columns = token_words(TOKENIZER.source, source, text.split())
    weights = [[float(pairs.get(row) == column) for column in columns] + [0.1] for row in rows]
    weights_TS = np.array([*weights, [0.0] * len(columns) + [1.0]])
    alignment = Alignment((*source, "</s>"), (*tokens, "</s>"), weights_TS, columns, rows)
    return Translation(target, 0, 0, len(tokens) + 1, tuple(tokens), alignment=alignment)


def joined(document: Document, *translations: Translation | str) -> str:
    """Join a document with translations; those that are only text are not aligned."""
    return document.joined(
        Translation(found, 0, 0, 0) if isinstance(found, str) else found for found in translations
    )


def placeholders(text: str, **settings) -> list[str]:
    """Source text of the placeholders in a document of one line, and of its other marks."""
    [line] = Document(text, "html", TOKENIZER, **settings).lines
    places = [mark if isinstance(mark, Unit) else mark.opening for mark in line.marks]
    return [text[place.start : place.end] for place in places]


def reverse(line: Line) -> Translation:
    """Translate: uppercase words in reverse order."""
    words = line.text.split()
    last = len(words) - 1
    target = " ".join(reversed(words)).upper()
    return aligned(line.text, target, {i: last - i for i in range(len(words))})


def translated(text: str, format: str = "html", **settings) -> str:
    document = Document(text, format, TOKENIZER, **settings)
    return document.joined(map(reverse, document.lines))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<p>one <b>two</b> three</p>", "<p>THREE <b>TWO</b> ONE</p>"),
        ("<b>one</b> two", "TWO <b>ONE</b>"),
        ("one <a href='x'><i>two</i> three</a>", "<a href='x'>THREE <i>TWO</i></a> ONE"),
        ("one <img src=x> two three", "THREE TWO ONE <img src=x>"),
        ("one two<wbr> three", "THREE TWO<wbr> ONE"),
        ("one <code>x < y</code> two", "TWO ONE <code>x < y</code>"),
        ("one <span translate=no>two</span> three", "THREE ONE <span translate=no>two</span>"),
        ("one <i class='x notranslate'>a <b></i>", "ONE <i class='x notranslate'>a <b></i>"),
        ("one<br>two three", "ONE<br>THREE TWO"),
        ("<li>one two<li>three", "<li>TWO ONE<li>THREE"),
        ("<td> one\n two </td><td>***</td>", "<td> TWO ONE </td><td>***</td>"),
        ("one &lt;two&gt; &amp; &eacute;", "É &amp; &lt;TWO&gt; ONE"),
        ("one <!-- <b> two --> three", "THREE ONE <!-- <b> two -->"),
        ("<script>if (a < b) one();</script>one two", "<script>if (a < b) one();</script>TWO ONE"),
        # A tag without its partner, or with a block inside, divides the text.
        ("one <b>two", "ONE <b>TWO"),
        ("<b>one <i>two</b> three</i> four", "<b>ONE <i>TWO</b> THREE</i> FOUR"),
        ("<b>one<p>two</p></b> three", "<b>ONE<p>TWO</p></b> THREE"),
        ("<a><img></a> one two", "<a><img></a> TWO ONE"),
        ("<p></p>", "<p></p>"),
        ("", ""),
    ],
)  # fmt: skip
def test_tags_move_with_their_words(text, expected):
    assert translated(text) == expected


def test_an_element_takes_one_range_of_words():
    """Its own words decide, and words of siblings are never inside."""
    document = Document("<b>one two</b> three <i>four</i>", "html", TOKENIZER)
    [line] = document.lines
    found = aligned(line.text, "TWO THREE ONE FOUR", {0: 1, 1: 2, 2: 0, 3: 3})
    assert joined(document, found) == "<b>TWO</b> THREE ONE <i>FOUR</i>"
    found = aligned(line.text, "ONE TWO TWO FOUR FOUR", {0: 0, 1: 1, 2: 1, 3: 3, 4: 3})
    assert joined(document, found) == "<b>ONE TWO TWO</b> <i>FOUR FOUR</i>"
    for text in ("", "ONE"):  # not enough words: the elements are empty
        written = joined(document, aligned(line.text, text, {0: 0}))
        assert TAG.findall(written) == ["<b>", "</b>", "<i>", "</i>"]
    assert joined(document, "ONE TWO").count("<") == 4  # not aligned


def test_xml_elements_are_inline_beside_text():
    text = (
        '<?xml version="1.0"?>\n<!DOCTYPE r [<!ENTITY foo "one two">]>\n'
        "<R a='1'><t>one <e>two</e> &foo; <x/>three</t><code/><u>two <![CDATA[ <b> one ]]></u></R>"
    )
    expected = text.replace("one <e>two</e> &foo; <x/>three", "THREE <e>TWO</e> &foo; <x/> ONE")
    assert translated(text, "xml") == expected.replace("<u>two ", "<u>TWO ")
    assert translated("<a><title>one <b>two</b></title></a>", "xml") == (
        "<a><title><b>TWO</b> ONE</title></a>"
    )


def test_a_placeholder_is_copied_or_put_back(caplog):
    text = "<p>one {one} two <b>three</b></p>"
    protect = (r"\{one\}|one(?=!)",)
    known = train_tokenizer([*lines_of_words(60), "one {one} two {one} three {one}"])
    document = Document(text, "html", known, protect=protect)
    [line] = document.lines
    assert line.text == "one {one} two three"
    copied = joined(document, "DREI {one} ONE")
    assert TAG.sub("", copied) == "DREI {one} ONE"
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert "{one}" in joined(document, "THREE ONE")
    assert "The model dropped '{one}'; it is put back" in caplog.text
    # The model has no token for the braces: it does not see the placeholder.
    assert translated(text, protect=protect) == "<p><b>THREE</b> TWO ONE {one}</p>"


@pytest.mark.parametrize(
    "placeholder",
    [
        *["{name}", "${a}", "%s", "%(n)d", "%1$s", "%.2f", "{{ x }}"],
        *["https://a.b/c?d=e&amp;f=g", "me.x@example.org"],
    ],
)
def test_placeholders_pass_unchanged(placeholder):
    parts = translated(f"<p>one two {placeholder}, three</p>")
    assert placeholder in parts
    [line] = Document(f"one {placeholder}.", "html", TOKENIZER).lines
    assert line.text == "one."
    assert placeholders("one 42 %", protect=[r"\d+"]) == ["42"]


def test_a_placeholder_that_the_model_drops_replaces_no_words():
    document = Document("one two three", "html", TOKENIZER, protect=["two"])
    [line] = document.lines
    found = aligned(line.text, "ONE FIVE SIX THREE", {0: 0, 1: 1, 2: 1, 3: 2})
    assert joined(document, found) == "ONE two FIVE SIX THREE"
    written = joined(document, "FIVE SIX")
    assert sorted(written.split()) == ["FIVE", "SIX", "two"]


@pytest.mark.parametrize(
    ("protect", "expected"),
    [
        ([r"(x)\1", r"(y)\1"], ["xx", "yy"]),
        (["(?P<a>x+)", "(?P<a>y+)"], ["xx", "yy"]),
        (["(?i)X+|ONE", "y+"], ["one", "xx", "yy"]),
        (["yy xx", "one yy", "y xx|xx"], ["one yy", "xx"]),
        (["x*", r"x+|\w+e"], ["one", "xx"]),
    ],
)
def test_patterns_are_independent(protect, expected):
    assert sorted(placeholders("one yy xx two", protect=protect)) == expected


@pytest.mark.parametrize("protect", [(), ("x*",), (r"\d*",)])
def test_an_empty_match_is_no_placeholder(protect):
    [line] = Document("one two 3x.", "html", TOKENIZER, protect=protect).lines
    assert line.text.startswith("one two") and len(line.marks) == len(protect)


WORDS = st.sampled_from(["one", "two ", " three", " ", "\n", "&amp;", "four.", "{x}", "é", ""])
NAMES = st.sampled_from(["b", "i", "a", "p", "div", "code", "span", "x-y", "pre", "td", "h1"])
ATTRIBUTES = st.sampled_from(["", " a='>\"'", ' B="&lt;"', " c", " class=notranslate", "\nd=1 "])
VOID = st.sampled_from(["<br>", "<img src=1>", "<!-- one -->", "<WBR/>"])
NODES = st.recursive(
    WORDS | VOID,
    lambda inner: st.tuples(NAMES, ATTRIBUTES, st.lists(inner, max_size=4)).map(
        lambda x: f"<{x[0]}{x[1]}>{''.join(x[2])}</{x[0].upper()}>"
    ),
    max_leaves=12,
)
PARTS = st.sampled_from(["<b>", "</b>", "</p>", "<", "<i", "&", "<!x", "\0", "<![CDATA[", "]]>"])
BROKEN = st.lists(NODES | PARTS, max_size=6).map("".join)


@settings(max_examples=300, deadline=None)
@given(NODES)
def test_the_structure_of_random_documents_is_kept(text):
    document = Document(text, "html", TOKENIZER)
    kept = re.findall(r"(?s)<(code|pre)[^>]*>.*?</(?:CODE|PRE)>", text)
    for found in (document.joined(map(reverse, document.lines)),):
        assert Counter(TAG.findall(found)) == Counter(TAG.findall(text))
        assert Counter(re.findall(r"\{x\}", found)) == Counter(re.findall(r"\{x\}", text))
        assert len(re.findall(r"(?s)<(?:code|pre)[^>]*>.*?</(?:CODE|PRE)>", found)) == len(kept)
        names = []
        for closing, name in re.findall(r"<(/?)([\w-]+)", found.lower()):
            if closing:
                assert names.pop() == name
            elif name not in ("br", "img", "wbr"):
                names.append(name)
        assert not names


@settings(max_examples=300, deadline=None)
@given(BROKEN)
def test_any_html_is_spelled_exactly(text):
    """Tags of broken documents stay, too, and only text changes."""
    document = Document(text, "html", TOKENIZER)
    unchanged = [Translation(line.text, 0, 0, 0) for line in document.lines]
    assert document.joined(unchanged) == text
    for translations in (map(reverse, document.lines), [Translation("", 0, 0, 0)] * 99):
        found = document.joined(translations)
        for tag in ("<b>", "</b>", "<br>", "<!-- one -->", "<![CDATA["):
            assert found.count(tag) == text.count(tag)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<a>\n<b>one</a>", "not well-formed XML (mismatched tag: line 2, column 9)"),
        ("one <b>two", "not well-formed XML (mismatched tag: line 1, column 13)"),
        ("AT & T", "not well-formed XML (not well-formed (invalid token): line 1, column 5)"),
        ("<?xml version='1.0'?><a/><a/>", "junk after document element: line 1, column 26"),
        ("<xliff version='1.2'><file/></xliff>", "The document is XLIFF; expected a document."),
        ("<!DOCTYPE TS><TS><source>one</source></TS>", "is a Qt translation file"),
        ("<resources><string name='x'>one</string></resources>", "an Android resource file"),
        ("<tmx><body/></tmx>", "is TMX"),
    ],
)
def test_other_xml_is_an_error(text, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Document(text, "xml", TOKENIZER)


@pytest.mark.parametrize(
    "text",
    [
        "<p>" + "<b>" * 10_000 + "one two" + "</b>" * 10_000,
        "<b>one " * 10_000 + "</b>" * 10_000,
        "<b>one<i> two</b> three</i>" * 2_000,
        "<p>one</p></b>" * 10_000,
        "one " + "<img>" * 10_000 + " two",
        *(20_000 * x for x in ("<!--", "<a ", "</", "<![", "<![x[", "<?", "&#", "<x y='")),
        "<![x[" * 10_000 + ">",
        "one two three " * 20_000 + "<b>four</b>",
    ],
    ids=lambda text: text[:12],
)
def test_bad_documents_take_linear_time(text):
    start = time.perf_counter()
    document = Document(text, "html", TOKENIZER)
    found = document.joined(Translation(line.text.upper(), 0, 0, 0) for line in document.lines)
    assert [found.count(each) for each in "<>"] == [text.count(each) for each in "<>"]
    assert time.perf_counter() - start < 30


CONFIG = DecodingConfig(beam_size=2, max_extra_length=6, max_source_length=16, batch_size=4)


def test_a_translator_translates_documents():
    """Every line gets the translation that it has as plain text."""
    translator = Translator(make_model(TOKENIZER), TOKENIZER, CONFIG)
    page = "<html><p>one <b>two</b>\n three</p><p>four <code>x</code></p><!-- x --></html>"
    requests = [Request(page, format="html"), Request("<r>five</r>", format="xml")]
    requests.append(Request("", format="html"))
    found = [each.text for each in translator.documents(requests)]
    first, second, third = translator.translate(["one two three", "four", "five"])
    assert TAG.sub("", found[0].split("</p>")[0]).split() == first.split()
    words = TAG.sub(" ", found[0].split("</p>")[1]).split()
    assert sorted(words) == sorted([*second.split(), "x"])
    root = etree.fromstring(found[0])
    assert [child.tag for child in root if isinstance(child.tag, str)] == ["p", "p"]
    assert root.findtext(".//code") == "x" and root[0].find("b") is not None
    assert found[1] == f"<r>{third}</r>" and found[2] == ""
    translator.parameters = translator.parameters  # the aligner follows
    assert [each.text for each in translator.documents(requests)] == found
