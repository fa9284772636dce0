"""Texts cut into the sentences to translate and the white space between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import sentencex

from transformer_jax import joint

_BREAK = r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]"
_LINE_BREAKS = re.compile(f"({_BREAK}+)")
_SPACES = re.compile(r"\s+")
# sentencex panics at half a surrogate pair and at some white space that takes several bytes.
_UNSAFE = re.compile(rf"{_BREAK}|[\ud800-\udfff]|[^\S\x00-\x7f]")
# The time that sentencex takes grows with the square of some texts' length.
_WINDOW = 2000


@dataclass(frozen=True)
class Cut:
    """What ``cut`` makes of a text."""

    sentences: list[str]
    """To translate: no line breaks, no white space around them."""
    before: list[str]
    """What stands before each sentence."""
    after: str
    """What stands after the last sentence; the whole text if there is none."""

    def gap(self, index: int, previous: str = "") -> str:
        """What goes before the translation of sentence ``index``, where ``previous`` is that of the
        sentence before: ``before`` or, where that is empty, what joins two sentences.
        """
        gap = self.before[index]
        if gap or not index or previous == self.sentences[index - 1]:
            return gap
        return joint(previous)

    def joined(self, translations: Sequence[str]) -> str:
        """The text with each sentence's translation in its place."""
        text = ""
        for index, (translation, _) in enumerate(zip(translations, self.sentences, strict=True)):
            text += self.gap(index, translations[index - 1]) + translation
        return text + self.after


def cut(text: str, *, language: str, split: bool) -> Cut:
    """Cut a text in ``language`` (a code such as "en"; of unknown ones: as English) into sentences.

    Lines are cut one by one, and what has neither letter nor digit stays. Not with ``split``:
    the text is one sentence, its line breaks spaces. Half a surrogate pair stays where it is: check
    texts before.
    """
    language = re.split("[-_]", language.lower())[0]
    wanted = re.compile(r"[^\W_]" if split else r"\S")
    units: Iterable[str] = [text]
    if split:
        units = (unit for line in _LINE_BREAKS.split(text) for unit in _units(line, language))
    sentences, before, kept = list[str](), list[str](), ""
    for unit in units:
        sentence = unit.strip()
        if not wanted.search(sentence):
            kept += unit
            continue
        start, after = unit.split(sentence, 1)
        before.append(kept + start)
        sentences.append(_SPACES.sub(_without_break, sentence))
        kept = after
    return Cut(sentences, before, kept)


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
