"""HTML and XML documents: lines of plain text to translate, and tags around translated words.

``_Reader`` reads a document as items that spell it exactly. Block elements divide it into lines.
The model sees a line without tags. Afterwards, each inline element (mark) encloses the target words
that align with its source words. Everything but the text of lines stays byte for byte.
"""

from __future__ import annotations

import html
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import chain, groupby, pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from transformer_jax.errors import short_repr
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.tokenization.words import token_words
from transformer_jax.translation.alignment import Alignment
from transformer_jax.translation.requests import Translation

logger = logging.getLogger(__name__)

PLACEHOLDERS = (
    r"\{\{.*?\}\}|\$?\{[^{}\s]*\}",
    r"(?<![\w%])%(?:\d+\$|\(\w+\))?[-+#0]*\d*(?:\.\d+)?[a-zA-Z@](?!\w)",
    r"https?://[^\s<>\"]*[^\s<>\".,;:!?)]",
    r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
)
"""Regular expressions of text that passes unchanged: {name}, {{x}}, %s, URLs, e-mail addresses."""

_INLINE = re.compile(
    "a|abbr|acronym|b|bd[io]|big|cite|code|data|del|dfn|em|embed|font|i|img|input|ins|kbd|label|"
    "mark|math|nobr|q|r[bpt]|rtc|ruby|s|samp|small|span|strike|strong|su[bp]|svg|time|tt|u|var|wbr|"
    ".*-.*"
)
_VOID = re.compile("area|base|br|col|embed|hr|img|input|link|meta|source|track|wbr")
_KEPT = re.compile("code|math|pre|script|style|svg|textarea")
_OWN_ENTITY = r"&(?!(?:amp|lt|gt|quot|apos);)\w+;"  # defined by an XML document
_WORD = re.compile(r"[^\W_]")
# A character of a script without spaces, a word of any other, or a punctuation mark.
_DENSE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3031-\u30ff\u3400-\u9fff"
_SIGNS = r"!-/:-@\[-`{-~\u00a1-\u00bf\u2010-\u205e\u3001-\u3003\u3008-\u3020\uff01-\uff20"
_UNIT = re.compile(rf"[{_DENSE}{_SIGNS}]|[^\s{_DENSE}{_SIGNS}]+")
# Limits of a line, whose matrix of weights is quadratic.
_CHUNK = re.compile(r".{1,20000}(?!\S)\s*|.{1,20000}", re.DOTALL)
_MOST_ITEMS = 200
# Attention of a copied placeholder to itself; penalty for a word of another element.
_COPIED, _NEVER = 1e3, 1e9


@dataclass(eq=False)
class _Item:
    """A token, or an element that is not translated. In a line, inline elements and atoms are marks
    of the text.
    """

    kind: str
    """text; open, close: inline tags; atom: anything else inside a line; block: between lines."""
    raw: str = ""
    name: str = ""
    kept: bool = False
    """The element is not translated."""
    shown: bool = False
    """The model sees an atom, and should copy it."""
    mate: int = -1
    """Index of the matching tag, if any."""
    parent: _Item | None = None
    start: int = 0
    """Characters of the source that are marked; the end is 0 for what the model does not see."""
    end: int = 0
    closing: str = ""
    place: tuple[int, int] | None = None
    """Characters of the translation that are marked."""
    children: list[_Item] = field(default_factory=list)


class _Reader(HTMLParser):
    """Reads a document into ``items``. XML has no void elements and no elements of raw text."""

    def __init__(self, text: str, is_html: bool):
        super().__init__()
        if not is_html:
            self.CDATA_CONTENT_ELEMENTS = self.RCDATA_CONTENT_ELEMENTS = ()  # type: ignore
        self.items, self._starts, self._is_html = list[_Item](), list[int](), is_html
        self._lines = [0, *(found.end() for found in re.finditer("\n", text))]
        # Some versions of the base class take quadratic time for unfinished tags.
        unfinished = re.compile("<[a-zA-Z/!?]").search(text, text.rfind(">") + 1)
        end = unfinished.start() if unfinished else len(text)
        self.feed(text[:end])
        self.close()
        self.items.append(_Item("block"))
        for item, place in zip(self.items, pairwise([*self._starts, end, len(text)])):
            item.raw = text[slice(*place)]

    def _add(self, kind: str, name: str = "", kept: bool = False) -> None:
        line, column = self.getpos()
        self._starts.append(self._lines[line - 1] + column)
        self.items.append(_Item(kind, "", name, kept))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        kept = bool(_KEPT.fullmatch(tag)) or given.get("translate") == "no"
        kept |= "notranslate" in (given.get("class") or "").split()
        is_void = self._is_html and _VOID.fullmatch(tag)
        kind = "open" if not is_void else "atom" if _INLINE.fullmatch(tag) else "block"
        self._add(kind, tag, kept)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._is_html:  # there HTML, <b/> is <b>
            self.handle_starttag(tag, attrs)
        else:
            self._add("atom")

    def handle_endtag(self, tag: str) -> None:
        self._add("close", tag)

    def handle_data(self, data: str) -> None:
        self._add("text")

    def handle_comment(self, data: str) -> None:
        self._add("atom")

    handle_pi = handle_comment

    def parse_html_declaration(self, i: int) -> int:
        """Read <!...>. Some versions of the base class fail here, or take quadratic time."""
        end = {"<!--": "-->", "<![C": "]]>"}.get(self.rawdata[i : i + 4], ">")
        place = self.rawdata.find(end, i + 2)
        self._add("atom")
        return len(self.rawdata) if place < 0 else place + len(end)


def _read(
    text: str, is_html: bool, protect: Sequence[str], split: Callable[[str], Iterable[str]]
) -> Iterator[_Item]:
    """Read a document. Inline tags match; all others are blocks. In XML, an element is inline if
    its parent has text of its own.

    An untranslated element is one item. Text is divided into sentences and placeholders, with empty
    blocks between sentences.
    """
    items = _Reader(text, is_html).items
    stack, parents, mixed, names = [-1], list[int](), set[int](), Counter[str]()
    for i, item in enumerate(items):
        parents.append(stack[-1])
        if item.kind == "text" and item.raw.strip():
            mixed.add(stack[-1])
        elif item.kind == "open":
            stack.append(i)
            names[item.name] += 1
        while item.kind == "close" and names[item.name] and item.mate < 0:
            opened = items[j := stack.pop()]
            names[opened.name] -= 1
            if opened.name == item.name:
                item.mate, opened.mate = j, i
    done = 0
    for i, item in enumerate(items):
        tag = min(i, item.mate)
        inline = _INLINE.fullmatch(item.name) if is_html else parents[tag] in mixed
        if item.kind in ("open", "close") and (item.mate < 0 or not inline):
            item.kind = "block"
        if i < done:
            continue
        if item.kept and item.mate > i:
            done = item.mate + 1
            raw = "".join(each.raw for each in items[i:done])
            yield _Item("atom" if item.kind == "open" else "block", raw)
        elif item.kind == "text":
            yield from _divided(item.raw, protect, split)
        else:
            yield item


def _divided(
    text: str, protect: Sequence[str], split: Callable[[str], Iterable[str]]
) -> Iterator[_Item]:
    chunks = (chunk for part in split(text) for chunk in _CHUNK.findall(part))
    for number, chunk in enumerate(chunks):
        if number:
            yield _Item("block")
        places = [0, *chain.from_iterable(find_spans(chunk, protect)), len(chunk)]
        for odd, place in enumerate(pairwise(places)):
            yield _Item(("text", "atom")[odd % 2], chunk[slice(*place)], shown=odd % 2 > 0)


def find_spans(text: str, patterns: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the places that match a pattern, from left to right. The first pattern has priority.
    Patterns are not joined, because each has groups of its own.
    """
    none = (len(text), 0)
    end = 0
    places = dict.fromkeys(patterns, (-1, 0))  # of the next match
    while True:
        for pattern, (start, _) in places.items():
            if start < end:
                matches = re.compile(pattern).finditer(text, end)
                places[pattern] = next((match.span() for match in matches if match[0]), none)
        place = min(places.values(), key=itemgetter(0), default=none)
        if place == none:
            return
        yield place
        end = place[1]


def _bounded(items: Iterable[_Item]) -> list[_Item]:
    """Turn inline elements that contain blocks, or too many items, into blocks."""
    found, stack, whole, size = list[_Item](), list[_Item](), 0, 0
    for item in items:
        if item.kind == "open":
            stack.append(item)
        elif item.kind == "close":
            item.kind = "close" if stack.pop().kind == "open" else "block"
            whole = min(whole, len(stack))
        found.append(item)
        size += 1
        if size > _MOST_ITEMS:
            found.append(_Item("block"))
        if found[-1].kind == "block":
            for each in stack[whole:]:
                each.kind = "block"
            whole, size = len(stack), 0
    return found


class Line:
    """A line of a document.

    Attributes:
      text: the text that the model sees, with single spaces.
      marks: inline elements and atoms, outer ones first.
    """

    def __init__(self, items: Iterable[_Item], known: Callable[[str], bool]):
        """``known`` says whether the model can copy a placeholder."""
        self.text, self._root, self.marks = "", _Item("open"), list[_Item]()
        stack, taken = [self._root], False
        for item in items:
            shown = re.sub(r"\s+", " ", html.unescape(item.raw))
            if item.kind == "close":
                stack[-1].end = len(self.text)
                stack.pop().closing = item.raw
                continue
            if item.kind != "text":
                item.parent, item.start = stack[-1], len(self.text)
                self.marks.append(item)
                stack[-1].children.append(item)
                if item.kind == "open":
                    stack.append(item)
                    continue
                item.shown = item.shown and known(shown)
                if not item.shown:  # a space before it moves with it
                    if self.text.endswith(" "):
                        item.raw, self.text, taken = " " + item.raw, self.text[:-1], True
                    continue
                item.end = len(self.text + shown)
            elif not self.text and stack[-1].children and shown.startswith(" "):
                stack[-1].children[-1].closing += " "
            if taken and shown[:1].isalnum():
                self.text += " "
            taken = False
            self.text += shown if self.text[-1:].strip() else shown.lstrip()
        self.text = self.text.rstrip()

    def joined(self, translation: Translation, tokenizer: Tokenizer) -> str:
        """Return the translation with its marks."""
        text = translation.text
        self._root.place, self._root.end = (0, len(text)), len(self.text)
        if self.marks:
            sides = [np.array([x.span() for x in _UNIT.finditer(t)]) for t in (self.text, text)]
            sources_S2, targets_T2 = (side.reshape(-1, 2) for side in sides)
            texts = [
                [t[a:b] for a, b in its] for t, its in ((self.text, sources_S2), (text, targets_T2))
            ]
            weights_TS = _weights(translation.alignment, tokenizer, *texts)
            self._find_copies(text, sources_S2, targets_T2, weights_TS)
            self._place(sources_S2, targets_T2, weights_TS)
        return self._written(self._root, text)

    def _find_copies(self, text: str, sources_S2: Any, targets_T2: Any, weights_TS: Any) -> None:
        """Set the places of placeholders that the model has copied, and align them exactly."""
        ends = dict[str, int]()
        for mark in self.marks:
            mark.place = None
            if not mark.shown:
                continue
            copy = re.escape(self.text[mark.start : mark.end])
            if found := re.compile(rf"(?<!\w){copy}(?!\w)").search(text, ends.get(copy, 0)):
                mark.place, ends[copy] = found.span(), found.end()
                weights_TS[rows_T := _within(targets_T2, *found.span())] = 0
                columns_S = _within(sources_S2, mark.start, mark.end)
                weights_TS[np.ix_(rows_T, columns_S)] = _COPIED
            else:
                said = "The model dropped %s; it is put back next to the aligned word."
                logger.warning(said, short_repr(mark.raw))

    def _place(self, sources_S2: Any, targets_T2: Any, weights_TS: Any) -> None:
        """Set the other places. An element takes the units that attend more to its words than to
        others; an atom follows the unit that attends most to the word before it.
        """
        owners_T = np.array([self._root] * len(targets_T2), object)
        for mark in self.marks:
            parent, free_T = mark.parent, owners_T == mark.parent
            assert parent and parent.place
            words_S = _within(sources_S2, mark.start, mark.end)
            taken: Any = slice(0)
            if mark.place:
                taken = _within(targets_T2, *mark.place)
                mark.place = mark.place if free_T[taken].all() else None
            elif mark.kind == "open" and words_S.any() and free_T.any():
                inside_T = weights_TS[:, words_S].max(1)
                scores_T = inside_T - weights_TS[:, ~words_S].max(1, initial=0)
                sums_T = np.cumsum(np.where(free_T, scores_T, -_NEVER))
                before_T = np.concatenate([[0], sums_T])
                end = (sums_T - np.minimum.accumulate(before_T)[:-1]).argmax()
                taken = slice(before_T[: end + 1].argmin(), end + 1)
                mark.place = targets_T2[taken][0, 0], targets_T2[end, 1]
            if mark.place:
                owners_T[taken] = mark
                continue
            start, stop = parent.place
            inside_T = (targets_T2[:, 0] >= start) & (targets_T2[:, 1] <= stop)
            before = np.flatnonzero(
                (sources_S2[:, 0] >= parent.start) & (sources_S2[:, 1] <= mark.start)
            )
            if len(before) and inside_T.any():
                start = targets_T2[np.where(inside_T, weights_TS[:, before[-1]], -1).argmax(), 1]
            mark.place = start, start

    def _written(self, mark: _Item, text: str) -> str:
        assert mark.place
        written, (at, end) = mark.raw, mark.place
        if mark.kind != "open":
            if at == end and mark.shown:
                return f" {written}" if at else f"{written} "
            return written + mark.closing
        for child in sorted(mark.children, key=lambda child: child.place or ()):
            assert child.place
            written += html.escape(text[at : child.place[0]], quote=False)
            written += self._written(child, text)
            at = max(at, child.place[1])
        return written + html.escape(text[at:end], quote=False) + mark.closing


def _within(units_U2: np.ndarray, start: int, end: int) -> np.ndarray:
    """Return which units have characters from ``start`` to ``end``."""
    return (units_U2[:, 0] < end) & (units_U2[:, 1] > start)


def _weights(
    alignment: Alignment | None, tokenizer: Tokenizer, source: list[str], target: list[str]
) -> np.ndarray:
    """Return the largest attention of each target unit's tokens to each source unit's tokens."""
    weights_TS = np.zeros((len(target), len(source)))
    if alignment:
        rows = np.array(token_words(tokenizer.target, alignment.target[:-1], target), int)
        columns = np.array(token_words(tokenizer.source, alignment.source[:-1], source), int)
        used = np.ix_((rows >= 0) & (np.array(alignment.target[:-1]) != "</s>"), columns >= 0)
        at = np.ix_(rows[used[0][:, 0]], columns[used[1][0]])
        np.maximum.at(weights_TS, at, alignment.weights_TS[:-1, :-1][used])
    return weights_TS


class Document:
    """A document, divided into ``pieces``: text that stays as it is, and lines to translate."""

    def __init__(
        self,
        text: str,
        format: str,
        tokenizer: Tokenizer,
        *,
        protect: Sequence[str] = PLACEHOLDERS,
        split: Callable[[str], Iterable[str]] = lambda text: [text],
    ):
        """Read a document.

        Args:
          protect: regular expressions of placeholders, which match the text as it is written.
          split: divides a text into sentences, which add up to the text.
        """
        self._tokenizer, self.pieces = tokenizer, list[str | Line]()

        def known(shown: str) -> bool:
            [ids] = tokenizer.source.encode([shown])
            return tokenizer.source.unk_id not in ids

        is_html = format == "html"
        protect = *protect, *[_OWN_ENTITY][is_html:]
        items = _bounded(_read(text, is_html, protect, split))
        for is_block, group in groupby(items, lambda item: item.kind == "block"):
            its = list(group)
            raw = "".join(item.raw for item in its)
            words = "".join(item.raw for item in its if item.kind == "text")
            if is_block or not _WORD.search(html.unescape(words)):
                self.pieces.append(raw)
            else:
                start, end = len(raw) - len(raw.lstrip()), len(raw.rstrip())
                self.pieces += [raw[:start], Line(its, known), raw[end:]]
        self.lines = [piece for piece in self.pieces if isinstance(piece, Line)]
        self.sentences = [line.text for line in self.lines]

    def joined(self, translations: Iterable[Translation]) -> str:
        """Return the document with a translation of each line. Marks follow its alignment or, if it
        has none, keep their relative positions.
        """
        found = iter(translations)
        return "".join(
            piece if isinstance(piece, str) else piece.joined(next(found), self._tokenizer)
            for piece in self.pieces
        )
