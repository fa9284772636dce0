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
_SIGNS = r"!-/:-@\[-`{-~\u00a1-\u00bf\u2010-\u205e\u3001-\u3003\u3008-\u3020\uff01-\uff20"
UNIT = re.compile(rf"[{UNSPACED_LETTERS}{_SIGNS}]|[^\s{UNSPACED_LETTERS}{_SIGNS}]+")
_IS_SIGN = re.compile(f"[{_SIGNS}]")
_IS_DENSE = re.compile(f"[{UNSPACED_LETTERS}]")
# White space without a width of its own.
_COLLAPSED = re.compile(r"[ \t\n\r\f\v\x1c-\x1f\x85\u2028\u2029]+")
# Neighbors that are parts of one word.
_FUSED = FORMATTING - {"a"}
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
    opening: Piece | None = None
    """The start tag, or the atom."""
    closing: Piece | None = None
    target_start: int = 0
    """Index of the first unit of the translation that is marked."""
    target_end: int = 0


@dataclass(eq=False, slots=True)
class Piece:
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

    def touch(self, before: str, after: str) -> None:
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
    pieces: list[Piece] = field(default_factory=list)


class Line:
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
        known: Callable[[str], bool],
        protect: Sequence[str],
    ):
        """Divide items without borders into units and gaps.

        Args:
          source: the document.
          known: says whether the model can copy a placeholder.
          protect: regular expressions of placeholders.
        """
        self.source = source
        self.units = list[Unit]()
        self.gaps = list[Gap]()
        self.marks = list[Mark | Unit]()
        self.root = Mark(True, None, 0)
        self._known = known
        self._entries = list[str | Piece]()  # white space and pieces since the last unit
        self._opened = [self.root]
        for item in _trimmed(items):
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
                while item.places[start] == item.places[start - 1] and start:
                    start -= 1  # a character reference that stands for several characters
                while end < len(item.text) and item.places[end] == item.places[end - 1]:
                    end += 1
                if start >= position:
                    self._add_words(item, position, start)
                    self._add_placeholder(
                        item.text[start:end], item.places[start], item.places[end]
                    )
                    position = end
            self._add_words(item, position, len(item.text))
        elif item.is_placeholder:
            self._add_placeholder(item.text, item.start, item.end)
        elif item.kind == "atom":
            self._add_atom(item.start, item.end, item.name, item.is_visible)
        elif item.kind == "open":
            piece = Piece("open", item.start, item.end, item.name)
            mark = Mark(True, self._opened[-1], len(self.units), opening=piece)
            self.marks.append(mark)
            self._opened.append(mark)
            self._entries.append(piece)
        else:
            self._close(item)

    def _add_words(self, item: Item, start: int, end: int) -> None:
        position = start
        for word in UNIT.finditer(item.text, start, end):
            self._add_space(item.text[position : word.start()])
            unit = Unit(word[0], item.places[word.start()], item.places[word.end()])
            if unit.start == unit.end:  # the second character of a reference joins the first
                self.units[-1].text += unit.text
            else:
                self._add_unit(unit)
            position = word.end()
        self._add_space(item.text[position:end])

    def _add_space(self, space: str) -> None:
        if space:
            self._entries.append(space)

    def _add_unit(self, unit: Unit) -> None:
        self._end_gap(unit)
        self.units.append(unit)

    def _add_placeholder(self, text: str, start: int, end: int) -> None:
        shown = " ".join(text.split())
        if self._known(shown):
            unit = Unit(shown, start, end, is_placeholder=True)
            self._add_unit(unit)
            self.marks.append(unit)
        else:
            self._add_atom(start, end)

    def _add_atom(self, start: int, end: int, name: str = "", is_visible: bool = True) -> None:
        piece = Piece("atom", start, end, name, is_visible)
        self.marks.append(Mark(False, self._opened[-1], len(self.units), opening=piece))
        self._entries.append(piece)

    def _close(self, item: Item) -> None:
        """End an element. An element without units becomes an atom."""
        mark = self._opened.pop()
        assert mark.opening
        if mark.first < len(self.units):
            mark.last = len(self.units)
            mark.closing = Piece("close", item.start, item.end, item.name)
            self._entries.append(mark.closing)
            return
        del self._entries[self._entries.index(mark.opening) :]
        del self.marks[self.marks.index(mark) :]
        self._add_atom(mark.opening.start, item.end, item.name)

    def _end_gap(self, following: Unit | None) -> None:
        """End the gap before a unit, or after the last one."""
        entries = self._entries
        self._entries = []
        pieces = [entry for entry in entries if isinstance(entry, Piece)]
        for before, after in pairwise(entries):
            if isinstance(before, Piece) and isinstance(after, str):
                before.space_after = True
            elif isinstance(before, str) and isinstance(after, Piece):
                after.space_before = True
        previous = self.units[-1] if self.units else None
        for piece in pieces:
            piece.touch(previous.text if previous else "", following.text if following else "")
        gap = Gap(0, 0, pieces=pieces)
        gap.start = previous.end if previous else pieces[0].start if pieces else -1
        if following:
            gap.end = following.start
            gap.start = gap.start if gap.start >= 0 else following.start
        else:
            gap.end = pieces[-1].end if pieces else gap.start
        if previous and following:
            spaces = [entry for entry in entries if isinstance(entry, str)]
            gap.space = _space(previous, following, spaces, pieces)
        self.gaps.append(gap)


def _trimmed(items: Sequence[Item]) -> Sequence[Item]:
    """Leave out what is at the ends of every translation: white space, comments, atoms before the
    first word, and elements around the whole line.
    """
    mates = _mates(items)
    first = 0
    last = len(items) - 1
    while first <= last:
        if _is_blank(items[first]) or (items[first].kind == "atom" and not items[first].text):
            first += 1
        elif _is_blank(items[last]):
            last -= 1
        elif mates.get(first) == last:
            first += 1
            last -= 1
        else:
            break
    return items[first : last + 1]


def _mates(items: Sequence[Item]) -> dict[int, int]:
    """Return the index of the end tag of each start tag."""
    mates = dict[int, int]()
    opened = list[int]()
    for index, item in enumerate(items):
        if item.kind == "open":
            opened.append(index)
        elif item.kind == "close":
            mates[opened.pop()] = index
    return mates


def _is_blank(item: Item) -> bool:
    if item.kind == "text":
        return not item.text.strip()
    return item.kind == "atom" and not item.is_visible


def _space(previous: Unit, following: Unit, spaces: Sequence[str], pieces: Sequence[Piece]) -> str:
    """Return the white space that the model sees between two units."""
    atoms = [piece for piece in pieces if piece.kind == "atom" and piece.is_visible]
    is_word = following.text[0].isalnum() or following.is_placeholder
    if spaces:
        # "See <img>." has no space without the image.
        if atoms and not atoms[-1].space_after and not is_word:
            return ""
        return max((_COLLAPSED.sub(" ", space) for space in spaces), key=len)
    if _IS_SIGN.match(previous.text[-1]) or _IS_SIGN.match(following.text[0]):
        return ""
    return " " if atoms or _divides_words(previous, following, pieces) else ""


def _divides_words(previous: Unit, following: Unit, pieces: Sequence[Piece]) -> bool:
    """Whether tags separate two words without white space. Tags of formatting do not."""
    is_dense = bool(_IS_DENSE.match(previous.text) and _IS_DENSE.match(following.text))
    closed: str | None = None
    for piece in pieces:
        name = piece.name.rpartition(":")[2]
        if piece.kind == "atom":
            continue
        if piece.kind == "open" and closed is not None and not {name, closed} <= _FUSED:
            return True  # two neighbors, such as <a>Home</a><a>About</a>
        if not is_dense and name not in FORMATTING:
            return True
        if piece.kind == "close":
            closed = name
    return False
