"""Divides text into sentences, and joins their translations with the white space between them.

sentencex knows the abbreviations and end marks of some 300 languages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import sentencex

from transformer_jax.translation.scripts import CHINESE_JAPANESE

_BREAK = r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]"
_LINE_BREAKS = re.compile(f"({_BREAK}+)")
_SPACES = re.compile(r"\s+")
_LETTER_OR_DIGIT = re.compile(r"[^\W_]")
_NON_SPACE = re.compile(r"\S")
# sentencex panics on unpaired surrogates and on some multi-byte whitespace.
_UNSAFE_FOR_SENTENCEX = re.compile(rf"{_BREAK}|[\ud800-\udfff]|[^\S\x00-\x7f]")
# The end of a text whose last letter is Chinese or Japanese (or a text of only CJK punctuation).
_NEEDS_NO_SPACE_AFTER = re.compile(rf"[{CHINESE_JAPANESE}]\W*$")
# sentencex knows two-letter codes; NLLB's have three. Other languages have no rules of their own.
_CODE_PAIRS = (
    "amh:am bak:ba bul:bg cat:ca ces:cs dan:da deu:de ell:el fin:fi fra:fr glg:gl grn:gn hat:ht "
    "hye:hy ita:it kaz:kk lim:li lin:ln ltz:lb nld:nl oci:oc pol:pl por:pt rus:ru slk:sk spa:es "
    "tam:ta tat:tt ukr:uk wol:wo"
)
_TWO_LETTER_CODES = dict(code.split(":") for code in _CODE_PAIRS.split())
# sentencex takes quadratic time on some texts.
_WINDOW_CHARACTERS = 2000


class DividedText(NamedTuple):
    """A text divided into sentences."""

    sentences: list[str]
    """Sentences to translate, without line breaks or surrounding whitespace."""
    before: list[str]
    """Text before each sentence."""
    after: str
    """Text after the last sentence; the whole text if it has no sentences."""


def divide(text: str, *, language: str = "", copy_symbols: bool = True) -> DividedText:
    """Divide a text into sentences. An unknown ``language`` code is treated as English; codes such
    as de, de-AT, de_DE and deu_Latn are German.

    Lines are divided separately. Parts without a letter or digit are not sentences: they belong to
    the text between sentences or, if ``copy_symbols`` is false, to the sentence after or before
    them. Unpaired surrogates are kept, so check texts first.
    """
    language = re.split("[-_]", language.lower())[0]
    language = _TWO_LETTER_CODES.get(language, language)
    pieces = (
        piece for line in _LINE_BREAKS.split(text) for piece in _sentences_of_line(line, language)
    )
    if copy_symbols:
        return _select_sentences(pieces, _LETTER_OR_DIGIT)
    return _select_sentences(_merge_symbols(pieces), _NON_SPACE)


def as_one_sentence(text: str) -> DividedText:
    """Return a text as one sentence, whose line breaks become spaces."""
    return _select_sentences([text], _NON_SPACE)


def _select_sentences(pieces: Iterable[str], required: re.Pattern[str]) -> DividedText:
    """Collect the pieces that have a ``required`` character as sentences."""
    sentences = list[str]()
    before = list[str]()
    separator = ""
    for piece in pieces:
        sentence = piece.strip()
        if not required.search(sentence):
            separator += piece
            continue
        start, end = piece.split(sentence, 1)
        before.append(separator + start)
        sentences.append(_SPACES.sub(_replace_line_break, sentence))
        separator = end
    return DividedText(sentences, before, separator)


def _merge_symbols(pieces: Iterable[str]) -> Iterator[str]:
    """Merge pieces without a letter or digit into the piece after them, or the last one."""
    piece = ""
    pending = ""
    for next_piece in pieces:
        pending += next_piece
        if _LETTER_OR_DIGIT.search(next_piece):
            yield piece
            piece = pending
            pending = ""
    yield piece + pending


def _sentences_of_line(line: str, language: str) -> Iterator[str]:
    """Yield the sentences of a line with surrounding whitespace. A sentence of more than 1,000
    characters may be cut between words.
    """
    safe_line = _UNSAFE_FOR_SENTENCEX.sub(" ", line)
    start = 0
    while start < len(safe_line):
        pieces = _segment(language, safe_line[start : start + _WINDOW_CHARACTERS])
        if start + _WINDOW_CHARACTERS < len(safe_line):
            *pieces, last = pieces
            if len(last) > _WINDOW_CHARACTERS // 2:  # otherwise it starts the next window
                pieces.append(last[: last.rfind(" ", -_WINDOW_CHARACTERS // 2) + 1 or None])
        for piece in pieces:
            yield line[start : start + len(piece)]
            start += len(piece)


def _segment(language: str, text: str) -> list[str]:
    try:
        return list(sentencex.segment(language, text))
    except BaseException as error:  # a Rust panic is not an Exception
        if type(error).__name__ != "PanicException":
            raise
        return [text]


def _replace_line_break(spaces: re.Match[str]) -> str:
    return " " if _LINE_BREAKS.search(spaces[0]) else spaces[0]


class SentenceJoiner:
    """Joins the translations of consecutive sentences.

    White space between sentences stays as it was, with one exception: a single space, or none,
    becomes what the target script needs (none after Chinese or Japanese), unless the translation
    before it equals its source.

    Attributes:
      text: the translations so far.
    """

    def __init__(self) -> None:
        self.text = ""
        self._source = ""
        self._translation = ""

    def add(self, before: str, source: str, translation: str) -> str:
        """Add the translation of a sentence. ``before`` is the source text between it and the
        previous sentence. Returns the separator that precedes the translation.
        """
        separator = self._separator(before, translation)
        self.text += separator + translation
        self._source = source
        if translation or separator:
            self._translation = translation
        return separator

    def _separator(self, before: str, translation: str) -> str:
        if before not in ("", " ") or self._translation == self._source:
            return before
        return space_after(self._translation) if translation else ""


def space_after(translation: str) -> str:
    """Return the separator after a translation: a space, or nothing after Chinese or Japanese."""
    return "" if not translation or _NEEDS_NO_SPACE_AFTER.search(translation) else " "
