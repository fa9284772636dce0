"""A text cut into sentences to translate and what stays between them: white space and HTML tags."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape, unescape

import sentencex

from transformer_jax.decoding.segments import joint

_BREAK = r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]"
_LINE_BREAKS = re.compile(f"({_BREAK}+)")
_SPACES = re.compile(r"\s+")
# sentencex panics at half a surrogate pair and at some white space that takes several bytes, and
# ends a paragraph, in HTML too, at two line breaks.
_UNSAFE = re.compile(rf"{_BREAK}|[\ud800-\udfff]|[^\S\x00-\x7f]")
# The time that sentencex takes grows with the square of some texts' length.
_WINDOW = 2000

# As browsers read it: a tag ends at the first ">" outside a quoted value, an unclosed one at the
# end of the text, and "<" with anything else behind it is text. Possessive (*+), so linear.
_REST_OF_TAG = r"""(?:[^>=]|=\s*+(?:"[^"]*+"?|'[^']*+'?)?+)*+>?"""
_MARKUP = re.compile(
    r"<!--(?:-?>|.*?(?:--!?>|\Z))"
    # In these nothing is translated: programs, and text whose white space matters.
    rf"|<(script|style|pre|code)(?![^\s/>]){_REST_OF_TAG}.*?(?=</\1(?![^\s/>])|\Z)"
    rf"|</?[a-z]{_REST_OF_TAG}"
    r"|<[!?/][^>]*+>?",
    re.ASCII | re.DOTALL | re.IGNORECASE,
)
_HUGE_REFERENCE = re.compile(r"&#\d{1000,};?")  # int() raises at more than 4,300 digits


@dataclass(frozen=True)
class Cut:
    """What ``cut`` makes of a text."""

    sentences: list[str]
    """To translate: no line breaks, no white space around them, no entities."""
    before: list[str]
    """What stands before each sentence."""
    after: str
    """What stands after the last sentence; the whole text if there is none."""
    html: bool

    def gap(self, index: int, previous: str = "") -> str:
        """What goes before the translation of sentence ``index``, where ``previous`` is that of the
        sentence before: ``before`` or, where that is empty, what joins two sentences.
        """
        gap = self.before[index]
        if gap or not index or previous == self.sentences[index - 1]:
            return gap
        return joint(previous)

    def joined(self, translations: Sequence[str]) -> str:
        """The text with each sentence's translation in its place (in HTML, escaped)."""
        text = ""
        for index, (translation, _) in enumerate(zip(translations, self.sentences, strict=True)):
            text += self.gap(index, translations[index - 1])
            text += escape(translation, quote=False) if self.html else translation
        return text + self.after


def cut(text: str, *, language: str, html: bool, split: bool) -> Cut:
    """Cut a text in ``language`` (a code such as "en"; of unknown ones: as English) into sentences.

    Lines are cut one by one, and what has neither letter nor digit stays. Not with ``split``:
    the text is one sentence, its line breaks spaces.

    In HTML the text between two tags is cut by itself; its line breaks are white space, so those
    inside a sentence become spaces. Tags, comments, and the content of script, style, pre and code
    stay. Half a surrogate pair stays where it is: check texts before.
    """
    language = re.split("[-_]", language.lower())[0]
    wanted = re.compile(r"[^\W_]" if split or html else r"\S")
    sentences, before, kept = list[str](), list[str](), list[str]()
    for markup, raw in _stretches(text) if html else [("", text)]:
        kept.append(markup)
        plain = unescape(_HUGE_REFERENCE.sub("\ufffd", raw)) if html else raw
        if not wanted.search(plain):
            kept.append(raw)
            continue
        lines = [plain] if html or not split else _LINE_BREAKS.split(plain)
        units = (unit for line in lines for unit in _units(line, language)) if split else lines
        for unit in units:
            sentence = unit.strip()
            if not wanted.search(sentence):
                kept.append(escape(unit, quote=False) if html else unit)
                continue
            start, sentence_after = unit.split(sentence, 1)
            before.append("".join([*kept, start]))
            sentences.append(_SPACES.sub(_without_break, sentence))
            kept = [sentence_after]
    return Cut(sentences, before, "".join(kept), html)


def _stretches(html: str) -> Iterator[tuple[str, str]]:
    """Tags and such, each with the text that follows it."""
    markup, end = "", 0
    for match in _MARKUP.finditer(html):
        yield markup, html[end : match.start()]
        markup, end = match[0], match.end()
    yield markup, html[end:]


def _units(line: str, language: str) -> Iterator[str]:
    """A line's sentences, with the white space around them. A sentence of above 1,000 characters
    may be cut between words.
    """
    safe = _UNSAFE.sub(" ", line)
    start = 0
    while start < len(safe):
        units = _segment(language, safe[start : start + _WINDOW])
        if start + _WINDOW < len(safe):
            *units, last = units
            if len(last) > _WINDOW // 2:  # otherwise it waits for what follows
                units.append(last[: last.rfind(" ", -_WINDOW // 2) + 1 or None])
        for unit in units:
            yield line[start : start + len(unit)]
            start += len(unit)


def _segment(language: str, text: str) -> list[str]:
    try:
        return list(sentencex.segment(language, text))
    except BaseException as error:  # what Rust raises is no Exception
        if type(error).__name__ != "PanicException":
            raise
        return [text]


def _without_break(spaces: re.Match[str]) -> str:
    return " " if _LINE_BREAKS.search(spaces[0]) else spaces[0]
