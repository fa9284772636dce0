"""A line of a document: the text that the model sees, and the tags between its words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from transformer_jax.translation.documents.items import Item
from transformer_jax.translation.documents.placeholders import find_spans
from transformer_jax.translation.documents.tokens import name_set
from transformer_jax.translation.scripts import UNSPACED_LETTERS

# Elements that can begin or end inside a word.
_FORMATTING = name_set(
    "a b bdi bdo big bold del em emphasis font hi i ins italic mark nobr s small strike strong tt "
    "u wbr"
)
# Neighbors that are parts of one word.
_WITHIN_ONE_WORD = _FORMATTING - {"a"}
# A character of a script without spaces, a word of any other, or a punctuation mark.
_SYMBOLS = r"!-/:-@\[-`{-~\u00a1-\u00bf\u2010-\u205e\u3001-\u3003\u3008-\u3020\uff01-\uff20"
_UNIT = re.compile(rf"[{UNSPACED_LETTERS}{_SYMBOLS}]|[^\s{UNSPACED_LETTERS}{_SYMBOLS}]+")
_SYMBOL = re.compile(f"[{_SYMBOLS}]")
_UNSPACED_LETTER = re.compile(f"[{UNSPACED_LETTERS}]")
# White space without a width of its own.
_COLLAPSIBLE_SPACE = re.compile(r"[ \t\n\r\f\v\x1c-\x1f\x85\u2028\u2029]+")
_LETTER = re.compile(r"[^\W\d_]")


@dataclass(eq=False, slots=True)
class Unit:
    """A word, a punctuation mark, a character of a script without spaces, or a placeholder."""

    text: str
    start: int
    """Place in the document."""
    end: int
    is_placeholder: bool = False


@dataclass(eq=False, slots=True)
class Mark:
    """An inline element with text, or an atom: anything else that has a place between units."""

    parent: Mark | None
    """The element around it; None: it is the whole line."""
    first: int
    """Index of the first unit of an element, or of the unit after an atom."""
    last: int = 0
    """Index of the unit after an element."""
    opening: Item | None = None
    """The start tag, or the atom; None: the mark is the whole line."""
    closing: Item | None = None
    """The end tag of an element."""
    target_start: int = 0
    """Index of the first unit of the translation that is marked."""
    target_end: int = 0


class Gap(NamedTuple):
    """What is between two units, before the first or after the last."""

    space: str
    """The white space that the model sees."""
    pieces: list[Item]
    """Tags and atoms."""


class DocumentLine:
    """A line of a document. Its place in the document is a gap, a unit, a gap, ..., and a gap.

    Attributes:
      text: the text that the model sees.
      units: words and placeholders.
      gaps: one more than units.
      marks: inline elements and atoms in the order of the document.
      root: the whole line as a mark.
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
        self.marks = list[Mark]()
        self.root = Mark(None, 0)
        self._can_copy = can_copy
        self._gap_entries = list[str | Item]()  # white space, tags and atoms since the last unit
        self._open_marks = [self.root]
        for item in _trim_items(items):
            self._add(item, protect)
        self._end_gap(None)
        self.root.last = len(self.units)
        self.text = "".join(gap.space + unit.text for gap, unit in zip(self.gaps, self.units))

    @property
    def start(self) -> int:
        """Place in the document."""
        pieces = self.gaps[0].pieces
        return pieces[0].start if pieces else self.units[0].start

    @property
    def end(self) -> int:
        """Place in the document."""
        pieces = self.gaps[-1].pieces
        return pieces[-1].end if pieces else self.units[-1].end

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

    @property
    def needs_alignment(self) -> bool:
        """Whether there is anything to place in a translation."""
        return bool(self.marks or self.placeholders)

    def gap_source(self, index: int) -> str:
        """Return a gap as the document spells it."""
        start = self.units[index - 1].end if index else self.start
        end = self.units[index].start if index < len(self.units) else self.end
        return self.source[start:end]

    def _add(self, item: Item, protect: Sequence[str]) -> None:
        if item.kind == "text":
            self._add_text(item, protect)
        elif item.is_placeholder:
            self._add_placeholder(item.text, item.start, item.end)
        elif item.kind == "atom":
            self._add_atom(item)
        elif item.kind == "open":
            mark = Mark(self._open_marks[-1], len(self.units), opening=item)
            self.marks.append(mark)
            self._open_marks.append(mark)
            self._gap_entries.append(item)
        else:
            self._close(item)

    def _add_text(self, item: Item, protect: Sequence[str]) -> None:
        position = 0
        for start, end, is_placeholder in divide_into_units(
            item.text, _placeholder_spans(item, protect)
        ):
            if start > position:
                self._gap_entries.append(item.text[position:start])
            position = end
            place = (item.offsets[start], item.offsets[end])
            if is_placeholder:
                self._add_placeholder(item.text[start:end], *place)
            elif place[0] == place[1]:  # the second character of a reference joins the first
                self.units[-1].text += item.text[start:end]
            else:
                self._add_unit(Unit(item.text[start:end], *place))
        if position < len(item.text):
            self._gap_entries.append(item.text[position:])

    def _add_unit(self, unit: Unit) -> None:
        self._end_gap(unit)
        self.units.append(unit)

    def _add_placeholder(self, text: str, start: int, end: int) -> None:
        visible_text = " ".join(text.split())
        if visible_text and self._can_copy(visible_text):
            self._add_unit(Unit(visible_text, start, end, is_placeholder=True))
        else:
            self._add_atom(Item("atom", start, end))

    def _add_atom(self, item: Item) -> None:
        self.marks.append(Mark(self._open_marks[-1], len(self.units), opening=item))
        self._gap_entries.append(item)

    def _close(self, item: Item) -> None:
        """End an element. An element without units becomes an atom."""
        mark = self._open_marks.pop()
        assert mark.opening
        if mark.first < len(self.units):
            mark.last = len(self.units)
            mark.closing = item
            self._gap_entries.append(item)
            return
        del self._gap_entries[self._gap_entries.index(mark.opening) :]
        del self.marks[self.marks.index(mark) :]
        self._add_atom(Item("atom", mark.opening.start, item.end, item.name))

    def _end_gap(self, next_unit: Unit | None) -> None:
        """End the gap before a unit, or after the last one."""
        entries = self._gap_entries
        self._gap_entries = []
        pieces = [entry for entry in entries if isinstance(entry, Item)]
        previous = self.units[-1] if self.units else None
        for piece in pieces:
            piece.before = previous.text[-1] if previous else ""
            piece.after = next_unit.text[0] if next_unit else ""
        for entry, next_entry in pairwise(entries):
            if isinstance(entry, str) and isinstance(next_entry, Item):
                next_entry.before = " "
            elif isinstance(entry, Item) and isinstance(next_entry, str):
                entry.after = " "
        space = ""
        if previous and next_unit:
            spaces = [entry for entry in entries if isinstance(entry, str)]
            space = _space_between(previous, next_unit, spaces, pieces)
        self.gaps.append(Gap(space, pieces))


def divide_into_units(
    text: str, placeholder_spans: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int, bool]]:
    """Yield the places of words, punctuation marks and placeholders in a text, from left to right,
    and whether each is a placeholder.
    """
    position = 0
    for start, end in placeholder_spans:
        for word in _UNIT.finditer(text, position, start):
            yield word.start(), word.end(), False
        yield start, end, True
        position = end
    for word in _UNIT.finditer(text, position):
        yield word.start(), word.end(), False


def _placeholder_spans(item: Item, protect: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the places of placeholders, each with the whole of its character references: one
    reference can stand for several characters.
    """
    position = 0
    for start, end in find_spans(item.text, protect):
        while start and item.offsets[start] == item.offsets[start - 1]:
            start -= 1
        while end < len(item.text) and item.offsets[end] == item.offsets[end - 1]:
            end += 1
        if start >= position:
            yield start, end
            position = end


def _trim_items(items: Sequence[Item]) -> Sequence[Item]:
    """Leave out what is at the ends of every translation: white space, comments, atoms before the
    first word, and elements around the whole line.
    """
    first = 0
    last = len(items) - 1
    while first <= last:
        if _is_blank(items[first]) or (items[first].kind == "atom" and not items[first].text):
            first += 1
        elif _is_blank(items[last]):
            last -= 1
        elif items[last].opening is items[first]:
            first += 1
            last -= 1
        else:
            break
    return items[first : last + 1]


def _is_blank(item: Item) -> bool:
    if item.kind == "text":
        return not item.text.strip()
    return item.kind == "atom" and not item.is_visible


def _space_between(
    previous: Unit, next_unit: Unit, spaces: Sequence[str], pieces: Sequence[Item]
) -> str:
    """Return the white space that the model sees between two units."""
    atoms = [piece for piece in pieces if piece.kind == "atom" and piece.is_visible]
    is_word = next_unit.text[0].isalnum() or next_unit.is_placeholder
    if spaces:
        # "See <img>." has no space without the image.
        if atoms and atoms[-1].after != " " and not is_word:
            return ""
        return max((_COLLAPSIBLE_SPACE.sub(" ", space) for space in spaces), key=len)
    if _SYMBOL.match(previous.text[-1]) or _SYMBOL.match(next_unit.text[0]):
        return ""
    return " " if atoms or _divides_words(previous, next_unit, pieces) else ""


def _divides_words(previous: Unit, next_unit: Unit, pieces: Sequence[Item]) -> bool:
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
        if not is_dense and name not in _FORMATTING:
            return True
        if piece.kind == "close":
            closed_name = name
    return False
