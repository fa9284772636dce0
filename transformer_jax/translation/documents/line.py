"""A line of a document: the text that the model sees, and the tags between its words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from transformer_jax.translation.documents.items import FORMATTING, Item
from transformer_jax.translation.documents.placeholders import find_spans
from transformer_jax.translation.scripts import UNSPACED_LETTERS

# A character of a script without spaces, a word of any other, or a punctuation mark.
_SYMBOLS = r"!-/:-@\[-`{-~\u00a1-\u00bf\u2010-\u205e\u3001-\u3003\u3008-\u3020\uff01-\uff20"
UNIT = re.compile(rf"[{UNSPACED_LETTERS}{_SYMBOLS}]|[^\s{UNSPACED_LETTERS}{_SYMBOLS}]+")
_SYMBOL = re.compile(f"[{_SYMBOLS}]")
_UNSPACED_LETTER = re.compile(f"[{UNSPACED_LETTERS}]")
# White space without a width of its own.
_COLLAPSIBLE_SPACE = re.compile(r"[ \t\n\r\f\v\x1c-\x1f\x85\u2028\u2029]+")
# Neighbors that are parts of one word.
_WITHIN_ONE_WORD = FORMATTING - {"a"}
_LETTER = re.compile(r"[^\W\d_]")


@dataclass(eq=False, slots=True)
class Unit:
    """A word, a punctuation mark, a character of a script without spaces, or a placeholder."""

    text: str
    start: int
    """Place in the document or, for a unit of a translation, in the translation."""
    end: int
    is_placeholder: bool = False


@dataclass(eq=False, slots=True)
class Mark:
    """An inline element with text, or an atom: anything else that has a place between units."""

    is_element: bool
    parent: Mark | None
    first: int
    """Index of the first unit of an element, or of the unit after an atom."""
    last: int = 0
    """Index of the unit after an element."""
    opening: MarkupPiece | None = None
    """The start tag, or the atom."""
    closing: MarkupPiece | None = None
    target_start: int = 0
    """Index of the first unit of the translation that is marked."""
    target_end: int = 0


@dataclass(eq=False, slots=True)
class MarkupPiece:
    """A tag or an atom."""

    kind: Literal["open", "close", "atom"]
    start: int
    end: int
    name: str = ""
    is_visible: bool = True
    space_before: bool = False
    """White space separates it from what comes before it."""
    space_after: bool = False
    touches_before: bool = False
    """A letter or digit is directly before it."""
    touches_after: bool = False

    def record_neighbors(self, before: str, after: str) -> None:
        """Note which words it touches in the document."""
        self.touches_before = not self.space_before and before[-1:].isalnum()
        self.touches_after = not self.space_after and after[:1].isalnum()


@dataclass(eq=False, slots=True)
class Gap:
    """What is between two units, before the first or after the last."""

    start: int
    end: int
    space: str = ""
    """The white space that the model sees."""
    pieces: list[MarkupPiece] = field(default_factory=list)


class DocumentLine:
    """A line of a document. Its place in the document is a gap, a unit, a gap, ..., and a gap.

    Attributes:
      text: the text that the model sees.
      start, end: place in the document.
      units: words and placeholders.
      gaps: one more than units.
      marks: inline elements and atoms in the order of the document, and placeholders that the model
        sees. If there are any, a translation needs an alignment.
    """

    def __init__(
        self,
        source: str,
        items: Sequence[Item],
        can_copy: Callable[[str], bool],
        protect: Sequence[str],
    ):
        """Divide items without borders into units and gaps.

        Args:
          source: the document.
          can_copy: says whether the model can copy a placeholder.
          protect: regular expressions of placeholders.
        """
        self.source = source
        self.units = list[Unit]()
        self.gaps = list[Gap]()
        self.marks = list[Mark | Unit]()
        self.root = Mark(True, None, 0)
        self._can_copy = can_copy
        self._gap_entries = list[str | MarkupPiece]()  # white space and pieces since the last unit
        self._open_marks = [self.root]
        for item in _trim_items(items):
            self._read(item, protect)
        self._end_gap(None)
        self.root.last = len(self.units)
        self.text = ""
        for gap, unit in zip(self.gaps, self.units):
            self.text += gap.space + unit.text
        self.start = self.gaps[0].start
        self.end = self.gaps[-1].end

    @property
    def has_letters(self) -> bool:
        """Whether there is anything to translate."""
        return any(
            not unit.is_placeholder and _LETTER.search(unit.text) is not None for unit in self.units
        )

    @property
    def placeholders(self) -> list[int]:
        """Indices of the units that are placeholders."""
        return [index for index, unit in enumerate(self.units) if unit.is_placeholder]

    def _read(self, item: Item, protect: Sequence[str]) -> None:
        if item.kind == "text":
            position = 0
            for start, end in find_spans(item.text, protect):
                while item.offsets[start] == item.offsets[start - 1] and start:
                    start -= 1  # a character reference that stands for several characters
                while end < len(item.text) and item.offsets[end] == item.offsets[end - 1]:
                    end += 1
                if start >= position:
                    self._add_words(item, position, start)
                    self._add_placeholder(
                        item.text[start:end], item.offsets[start], item.offsets[end]
                    )
                    position = end
            self._add_words(item, position, len(item.text))
        elif item.is_placeholder:
            self._add_placeholder(item.text, item.start, item.end)
        elif item.kind == "atom":
            self._add_atom(item.start, item.end, item.name, item.is_visible)
        elif item.kind == "open":
            piece = MarkupPiece("open", item.start, item.end, item.name)
            mark = Mark(True, self._open_marks[-1], len(self.units), opening=piece)
            self.marks.append(mark)
            self._open_marks.append(mark)
            self._gap_entries.append(piece)
        else:
            self._close(item)

    def _add_words(self, item: Item, start: int, end: int) -> None:
        position = start
        for word in UNIT.finditer(item.text, start, end):
            self._add_space(item.text[position : word.start()])
            unit = Unit(word[0], item.offsets[word.start()], item.offsets[word.end()])
            if unit.start == unit.end:  # the second character of a reference joins the first
                self.units[-1].text += unit.text
            else:
                self._add_unit(unit)
            position = word.end()
        self._add_space(item.text[position:end])

    def _add_space(self, space: str) -> None:
        if space:
            self._gap_entries.append(space)

    def _add_unit(self, unit: Unit) -> None:
        self._end_gap(unit)
        self.units.append(unit)

    def _add_placeholder(self, text: str, start: int, end: int) -> None:
        visible_text = " ".join(text.split())
        if self._can_copy(visible_text):
            unit = Unit(visible_text, start, end, is_placeholder=True)
            self._add_unit(unit)
            self.marks.append(unit)
        else:
            self._add_atom(start, end)

    def _add_atom(self, start: int, end: int, name: str = "", is_visible: bool = True) -> None:
        piece = MarkupPiece("atom", start, end, name, is_visible)
        self.marks.append(Mark(False, self._open_marks[-1], len(self.units), opening=piece))
        self._gap_entries.append(piece)

    def _close(self, item: Item) -> None:
        """End an element. An element without units becomes an atom."""
        mark = self._open_marks.pop()
        assert mark.opening
        if mark.first < len(self.units):
            mark.last = len(self.units)
            mark.closing = MarkupPiece("close", item.start, item.end, item.name)
            self._gap_entries.append(mark.closing)
            return
        del self._gap_entries[self._gap_entries.index(mark.opening) :]
        del self.marks[self.marks.index(mark) :]
        self._add_atom(mark.opening.start, item.end, item.name)

    def _end_gap(self, next_unit: Unit | None) -> None:
        """End the gap before a unit, or after the last one."""
        entries = self._gap_entries
        self._gap_entries = []
        pieces = [entry for entry in entries if isinstance(entry, MarkupPiece)]
        for before, after in pairwise(entries):
            if isinstance(before, MarkupPiece) and isinstance(after, str):
                before.space_after = True
            elif isinstance(before, str) and isinstance(after, MarkupPiece):
                after.space_before = True
        previous = self.units[-1] if self.units else None
        for piece in pieces:
            piece.record_neighbors(
                previous.text if previous else "", next_unit.text if next_unit else ""
            )
        gap = Gap(0, 0, pieces=pieces)
        gap.start = previous.end if previous else pieces[0].start if pieces else -1
        if next_unit:
            gap.end = next_unit.start
            gap.start = gap.start if gap.start >= 0 else next_unit.start
        else:
            gap.end = pieces[-1].end if pieces else gap.start
        if previous and next_unit:
            spaces = [entry for entry in entries if isinstance(entry, str)]
            gap.space = _space_between(previous, next_unit, spaces, pieces)
        self.gaps.append(gap)


def _trim_items(items: Sequence[Item]) -> Sequence[Item]:
    """Leave out what is at the ends of every translation: white space, comments, atoms before the
    first word, and elements around the whole line.
    """
    matching_tags = _matching_tags(items)
    first = 0
    last = len(items) - 1
    while first <= last:
        if _is_blank(items[first]) or (items[first].kind == "atom" and not items[first].text):
            first += 1
        elif _is_blank(items[last]):
            last -= 1
        elif matching_tags.get(first) == last:
            first += 1
            last -= 1
        else:
            break
    return items[first : last + 1]


def _matching_tags(items: Sequence[Item]) -> dict[int, int]:
    """Return the index of the end tag of each start tag."""
    matching_tags = dict[int, int]()
    open_tags = list[int]()
    for index, item in enumerate(items):
        if item.kind == "open":
            open_tags.append(index)
        elif item.kind == "close":
            matching_tags[open_tags.pop()] = index
    return matching_tags


def _is_blank(item: Item) -> bool:
    if item.kind == "text":
        return not item.text.strip()
    return item.kind == "atom" and not item.is_visible


def _space_between(
    previous: Unit, next_unit: Unit, spaces: Sequence[str], pieces: Sequence[MarkupPiece]
) -> str:
    """Return the white space that the model sees between two units."""
    atoms = [piece for piece in pieces if piece.kind == "atom" and piece.is_visible]
    is_word = next_unit.text[0].isalnum() or next_unit.is_placeholder
    if spaces:
        # "See <img>." has no space without the image.
        if atoms and not atoms[-1].space_after and not is_word:
            return ""
        return max((_COLLAPSIBLE_SPACE.sub(" ", space) for space in spaces), key=len)
    if _SYMBOL.match(previous.text[-1]) or _SYMBOL.match(next_unit.text[0]):
        return ""
    return " " if atoms or _divides_words(previous, next_unit, pieces) else ""


def _divides_words(previous: Unit, next_unit: Unit, pieces: Sequence[MarkupPiece]) -> bool:
    """Whether tags separate two words without white space. Tags of formatting do not."""
    is_dense = bool(
        _UNSPACED_LETTER.match(previous.text) and _UNSPACED_LETTER.match(next_unit.text)
    )
    closed_name: str | None = None
    for piece in pieces:
        name = piece.name.rpartition(":")[2]
        if piece.kind == "atom":
            continue
        is_within_word = {name, closed_name} <= _WITHIN_ONE_WORD
        if piece.kind == "open" and closed_name is not None and not is_within_word:
            return True  # two neighbors, such as <a>Home</a><a>About</a>
        if not is_dense and name not in FORMATTING:
            return True
        if piece.kind == "close":
            closed_name = name
    return False
