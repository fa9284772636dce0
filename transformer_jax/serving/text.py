"""Sentence splitting that keeps the whitespace between sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import sentencex

from transformer_jax.translation.segments import joint

_BREAK = r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]"
_LINE_BREAKS = re.compile(f"({_BREAK}+)")
_SPACE, _SPACES = re.compile(r"\s"), re.compile(r"\s+")
# sentencex panics on unpaired surrogates and on some multi-byte whitespace.
_UNSAFE = re.compile(rf"{_BREAK}|[\ud800-\udfff]|[^\S\x00-\x7f]")
# sentencex knows two-letter codes; NLLB's have three. Other languages have no rules of their own.
_CODES = (
    "amh:am bak:ba bul:bg cat:ca ces:cs dan:da deu:de ell:el fin:fi fra:fr glg:gl grn:gn hat:ht "
    "hye:hy ita:it kaz:kk lim:li lin:ln ltz:lb nld:nl oci:oc pol:pl por:pt rus:ru slk:sk spa:es "
    "tam:ta tat:tt ukr:uk wol:wo"
)
_TWO_LETTERS = dict(code.split(":") for code in _CODES.split())
# sentencex takes quadratic time on some texts.
_WINDOW = 2000


@dataclass(frozen=True)
class Cut:
    """A text split into sentences."""

    sentences: list[str]
    """Sentences to translate, without line breaks or surrounding whitespace."""
    before: list[str]
    """Text before each sentence."""
    after: str
    """Text after the last sentence; the whole text if it has no sentences."""

    def gap(self, index: int, previous: str = "") -> str:
        """Return the separator before the translation of sentence ``index``, given the ``previous``
        translation: ``before[index]`` or, if it is empty, ``joint(previous)``.
        """
        gap = self.before[index]
        if gap or not index or previous == self.sentences[index - 1]:
            return gap
        return joint(previous)

    def joined(self, translations: Sequence[Any]) -> str:
        """Return the text with each sentence replaced by its ``Translation``."""
        text = previous = ""
        for index, (translation, _) in enumerate(zip(translations, self.sentences, strict=True)):
            text += self.gap(index, previous) + translation.text
            previous = translation.text
        return text + self.after


def cut(text: str, *, language: str, split: bool) -> Cut:
    """Split a text into sentences. An unknown ``language`` code is treated as English; codes such
    as de, de-AT, de_DE and deu_Latn are German.

    Lines are split separately. Parts without a letter or digit are not translated. If ``split`` is
    false, the text is one sentence and its line breaks become spaces. Unpaired surrogates are kept,
    so check texts first.
    """
    language = re.split("[-_]", language.lower())[0]
    language = _TWO_LETTERS.get(language, language)
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


def sentences(text: str, *, language: str, split: bool) -> Iterator[str]:
    """Yield the sentences of a text of markup, with everything between them: whitespace has no
    meaning. They add up to the text.
    """
    found = cut(_SPACE.sub(" ", text), language=language, split=split)
    sizes = [len(before) + len(each) for before, each in zip(found.before, found.sentences)]
    for start, end in pairwise([0, *list(accumulate(sizes))[:-1], len(text)]):
        yield text[start:end]


def _units(line: str, language: str) -> Iterator[str]:
    """Yield the sentences of a line with surrounding whitespace. A sentence of more than 1,000
    characters may be cut between words.
    """
    safe = _UNSAFE.sub(" ", line)
    start = 0
    while start < len(safe):
        units = _segment(language, safe[start : start + _WINDOW])
        if start + _WINDOW < len(safe):
            *units, last = units
            if len(last) > _WINDOW // 2:  # otherwise it starts the next window
                units.append(last[: last.rfind(" ", -_WINDOW // 2) + 1 or None])
        for unit in units:
            yield line[start : start + len(unit)]
            start += len(unit)


def _segment(language: str, text: str) -> list[str]:
    try:
        return list(sentencex.segment(language, text))
    except BaseException as error:  # a Rust panic is not an Exception
        if type(error).__name__ != "PanicException":
            raise
        return [text]


def _without_break(spaces: re.Match[str]) -> str:
    return " " if _LINE_BREAKS.search(spaces[0]) else spaces[0]
