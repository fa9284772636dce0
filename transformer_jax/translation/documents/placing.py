"""Puts the tags of a line around the words of its translation, by alignment."""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from transformer_jax.errors import short_repr
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.tokenization.words import token_words
from transformer_jax.translation.alignment import Alignment
from transformer_jax.translation.documents.line import UNIT, DocumentLine, Mark, MarkupPiece, Unit
from transformer_jax.translation.documents.placeholders import (
    PLACEHOLDERS,
    copies_pattern,
    find_spans,
)
from transformer_jax.translation.requests import Translation

logger = logging.getLogger(__name__)

# Strength of the link of a placeholder to its copy.
_COPY_STRENGTH = 1e3
_EXCLUDED_SCORE = -1e9


class TargetLine:
    """The translation of a line: units, each with a link to the source unit that it attends to.

    Attributes:
      units: words and placeholders.
      spaces: white space before each unit, and "" at the end.
      links_T: index of the source unit of each unit; -1: none.
      link_strengths_T: how strong each link is.
      dropped: source units of placeholders that the translation lacks.
    """

    def __init__(
        self,
        line: DocumentLine,
        translation: Translation,
        tokenizer: Tokenizer,
        protect: Sequence[str],
    ):
        self.dropped = list[int]()
        self._line = line
        text = translation.text.strip()
        self.units = [Unit(word[0], *word.span()) for word in UNIT.finditer(text)]
        self.is_unchanged = text.split() == line.text.split()
        if self.is_unchanged:
            self.units = line.units
            self.spaces = [gap.space for gap in line.gaps]
            self.links_T = np.arange(len(line.units))
            self.link_strengths_T = np.ones(len(line.units))
            return
        self._find_placeholders(text, protect)
        ends = [0, *(unit.end for unit in self.units)]
        self.spaces = [text[end : unit.start] for end, unit in zip(ends, self.units)]
        self.spaces.append("")
        self._link(translation.alignment, tokenizer)
        self._copy_placeholders()

    def _find_placeholders(self, text: str, protect: Sequence[str]) -> None:
        """Divide the text into units, so that placeholders are whole."""
        originals = [self._line.units[index].text for index in self._line.placeholders]
        patterns = [pattern for pattern in protect if pattern in PLACEHOLDERS]
        copies = copies_pattern(originals, self._line.text)
        units = list[Unit]()
        position = 0
        for copy in copies.finditer(text):
            units += _divide_into_units(text, position, copy.start(), patterns)
            units.append(Unit(copy[0], *copy.span(), is_placeholder=True))
            position = copy.end()
        self.units = units + _divide_into_units(text, position, len(text), patterns)
        # The same text can also be in the source without being protected, as in "5%s %s".
        self._unprotected = Counter(copies.findall(self._line.text)) - Counter(originals)
        for unit in self.units:
            if unit.is_placeholder and unit.text not in originals:
                self._unprotected[unit.text] = self._line.text.count(unit.text)

    def _link(self, alignment: Alignment | None, tokenizer: Tokenizer) -> None:
        """Link each unit to the source unit with the strongest attention of its tokens or, without
        an alignment, to the one at its relative position.
        """
        sources = [unit.text for unit in self._line.units]
        targets = [unit.text for unit in self.units]
        self.link_strengths_T = np.ones(len(targets))
        if alignment is None or not targets or min(alignment.weights_TS.shape) < 2:
            self.links_T = _relative_links(sources, targets)
            return
        row_units = np.array(token_words(tokenizer.target, alignment.target[:-1], targets), int)
        column_units = np.array(token_words(tokenizer.source, alignment.source[:-1], sources), int)
        row_units[np.array(alignment.target[:-1]) == tokenizer.target.eos_token] = -1
        weights = np.where(column_units >= 0, alignment.weights_TS[:-1, :-1], -1)
        best = weights.argmax(1)
        strengths = weights[np.arange(len(weights)), best]
        self.links_T = np.full(len(targets), -1)
        self.link_strengths_T = np.zeros(len(targets))
        for row in np.argsort(strengths, kind="stable"):  # the strongest of a unit is the last
            if row_units[row] >= 0:
                self.links_T[row_units[row]] = column_units[best[row]]
                self.link_strengths_T[row_units[row]] = strengths[row]

    def _copy_placeholders(self) -> None:
        """Link placeholders to their copies. What the model has written in place of a missing one
        is replaced, and what the source does not have is left out.
        """
        pending: dict[str, deque[int]] = {}
        for source_index in self._line.placeholders:
            pending.setdefault(self._line.units[source_index].text, deque()).append(source_index)
        unmatched = list[int]()
        for target_index, unit in enumerate(self.units):
            if unit.is_placeholder and pending.get(unit.text):
                self._link_copy(target_index, pending[unit.text].popleft())
            elif unit.is_placeholder and self._unprotected[unit.text] > 0:
                self._unprotected[unit.text] -= 1
            elif unit.is_placeholder:
                unmatched.append(target_index)
        self.dropped = sorted(chain.from_iterable(pending.values()))
        for target_index in unmatched[: len(self.dropped)]:
            source_index = self.dropped.pop(0)
            original = self._line.units[source_index].text
            message = "The model wrote %s in place of %s, which replaces it."
            logger.warning(message, short_repr(self.units[target_index].text), short_repr(original))
            self._link_copy(target_index, source_index)
        surplus = [i for i in unmatched if self.link_strengths_T[i] < _COPY_STRENGTH]
        for target_index in surplus:
            message = "The model added %s, which is left out."
            logger.warning(message, short_repr(self.units[target_index].text))
        self._remove(surplus)
        for source_index in self.dropped:
            message = "The model dropped %s; it is put back next to the aligned word."
            logger.warning(message, short_repr(self._line.units[source_index].text))

    def _link_copy(self, target_index: int, source_index: int) -> None:
        self.links_T[target_index] = source_index
        self.link_strengths_T[target_index] = _COPY_STRENGTH

    def _remove(self, target_indices: Sequence[int]) -> None:
        for target_index in reversed(target_indices):
            del self.units[target_index]
            space = self.spaces.pop(target_index)
            self.spaces[target_index] = self.spaces[target_index] or space
        if target_indices:
            self.spaces[0] = ""
            self.spaces[-1] = ""
            self.links_T = np.delete(self.links_T, target_indices)
            self.link_strengths_T = np.delete(self.link_strengths_T, target_indices)


def _divide_into_units(text: str, start: int, end: int, patterns: Sequence[str]) -> list[Unit]:
    """Divide a part of a text into words and what looks like a placeholder."""
    part = text[start:end]
    units = list[Unit]()
    position = 0
    for span in [*find_spans(part, patterns), (len(part), len(part))]:
        for word in UNIT.finditer(part, position, span[0]):
            units.append(Unit(word[0], start + word.start(), start + word.end()))
        if span[1] > span[0]:
            text_span = slice(*span)
            units.append(
                Unit(part[text_span], start + span[0], start + span[1], is_placeholder=True)
            )
        position = span[1]
    return units


def _maximum_sum_interval(scores_T: np.ndarray) -> tuple[int, int]:
    """Return the first and last index of the interval with the largest sum (Kadane's algorithm).

    An interval's sum is the difference of two cumulative sums: after its last index, and before its
    first. Scores of 1 -2 3 1 -5 2 give the interval 3 1, (2, 3).
    """
    sums_T = np.cumsum(scores_T)
    sums_before_T = np.concatenate([[0], sums_T[:-1]])
    best_sums_T = sums_T - np.minimum.accumulate(sums_before_T)  # of intervals that end here
    last = int(np.argmax(best_sums_T))
    first = int(np.argmin(sums_before_T[: last + 1]))
    return first, last


def _relative_links(sources: Sequence[str], targets: Sequence[str]) -> np.ndarray:
    """Link each target to the source at its relative position in characters."""
    ends_S = np.cumsum([len(source) for source in sources])
    lengths_T = np.array([len(target) for target in targets], int)
    middles_T = np.cumsum(lengths_T) - lengths_T / 2
    return np.searchsorted(ends_S, middles_T * ends_S[-1] / max(1, lengths_T.sum()))


class TargetWriter:
    """Writes the translation of a line with its marks."""

    def __init__(self, line: DocumentLine, target: TargetLine, escape: Callable[[str], str]):
        """``escape`` spells text as the document has it."""
        self._line = line
        self._target = target
        self._escape = escape
        self._owners_T = np.zeros(len(target.units), int)
        self._mark_ids: dict[Mark, int] = {line.root: 0}
        self._children: dict[Mark, list[Mark]] = {line.root: []}
        line.root.target_start = 0
        line.root.target_end = len(target.units)

    def write(self) -> str:
        """Return the translation, spelled as the document spells it where it is the same."""
        marks = [mark for mark in self._line.marks if isinstance(mark, Mark)]
        marks += [self._restore_placeholder(index) for index in self._target.dropped]
        for mark in marks:
            assert mark.parent
            self._mark_ids[mark] = len(self._mark_ids)
            self._children[mark] = []
            self._children[mark.parent].append(mark)
            if mark.is_element:
                self._place_element(mark)
            else:
                mark.target_start = self._gap_after_previous(mark)
                mark.target_end = mark.target_start
        gaps = self._pieces_by_gap()
        parts = list[str]()
        for index, pieces in enumerate(gaps):
            parts.append(self._write_gap(index, pieces))
            if index < len(self._target.units):
                parts.append(self._write_unit(index))
        return "".join(parts)

    def _restore_placeholder(self, index: int) -> Mark:
        """Return an atom in place of a placeholder that the translation lacks."""
        unit = self._line.units[index]
        parent = self._line.root
        for mark in self._line.marks:
            if isinstance(mark, Mark) and mark.is_element and mark.first <= index < mark.last:
                parent = mark
        piece = MarkupPiece("atom", unit.start, unit.end)
        piece.space_before = bool(self._line.gaps[index].space)
        piece.space_after = bool(self._line.gaps[index + 1].space)
        units = self._line.units
        before = units[index - 1].text if index else ""
        after = units[index + 1].text if index + 1 < len(units) else ""
        piece.record_neighbors(before, after)
        return Mark(False, parent, index, opening=piece)

    def _place_element(self, mark: Mark) -> None:
        """Give an element the units of its parent that link to its words rather than to others."""
        assert mark.parent
        start = mark.parent.target_start
        end = mark.parent.target_end
        links_T = self._target.links_T[start:end]
        link_strengths_T = self._target.link_strengths_T[start:end]
        is_available_T = self._owners_T[start:end] == self._mark_ids[mark.parent]
        if is_available_T.any():
            is_linked_inside_T = (links_T >= mark.first) & (links_T < mark.last)
            scores_T = np.where(is_linked_inside_T, link_strengths_T, -link_strengths_T)
            scores_T = np.where(is_available_T, scores_T, _EXCLUDED_SCORE)
            if scores_T.max() > 0:
                first, last = _maximum_sum_interval(scores_T)
            else:  # no unit links to it; it takes one
                available = np.flatnonzero(is_available_T)
                preferred = int(np.searchsorted(available, self._gap_after_previous(mark) - start))
                first = int(available[min(preferred, len(available) - 1)])
                last = first
            mark.target_start = start + first
            mark.target_end = start + last + 1
            self._owners_T[mark.target_start : mark.target_end] = self._mark_ids[mark]
        else:
            mark.target_start = self._gap_after_previous(mark)
            mark.target_end = mark.target_start

    def _gap_after_previous(self, mark: Mark) -> int:
        """Return the gap after the unit that links to the last linked word before a mark."""
        assert mark.parent
        start = mark.parent.target_start
        end = mark.parent.target_end
        links_T = self._target.links_T[start:end]
        is_before_T = (links_T >= mark.parent.first) & (links_T < mark.first)
        if not is_before_T.any():
            return start
        previous = np.max(links_T[is_before_T])
        strengths_T = self._target.link_strengths_T[start:end]
        offset = int(np.argmax(np.where(links_T == previous, strengths_T, -1)))
        while offset + 1 < len(links_T) and links_T[offset + 1] == previous:
            offset += 1
        return start + offset + 1

    def _pieces_by_gap(self) -> list[list[MarkupPiece]]:
        """Return the pieces in each gap of the translation, in order."""
        gaps: list[list[MarkupPiece]] = [[] for _ in range(len(self._target.units) + 1)]
        cursor = 0
        pending: list[Mark | MarkupPiece] = [self._line.root]
        ends: dict[MarkupPiece, int] = {}
        while pending:
            mark = pending.pop()
            if isinstance(mark, MarkupPiece):
                cursor = max(cursor, ends[mark])
                gaps[cursor].append(mark)
                continue
            cursor = max(cursor, mark.target_start)
            if mark.opening:
                gaps[cursor].append(mark.opening)
            if mark.closing:
                ends[mark.closing] = mark.target_end
                pending.append(mark.closing)
            children = sorted(
                self._children[mark], key=lambda child: (child.target_start, child.target_end)
            )
            pending += reversed(children)
        return gaps

    def _write_unit(self, index: int) -> str:
        """Return a unit of the translation: as the document spells it if it is the same."""
        unit = self._target.units[index]
        link = self._target.links_T[index]
        if link >= 0:
            original = self._line.units[link]
            source_text = self._line.source[original.start : original.end]
            is_copy = (
                original.is_placeholder and self._target.link_strengths_T[index] == _COPY_STRENGTH
            )
            if self._target.is_unchanged or is_copy:
                return source_text
            is_safe = source_text not in ("&", "<", ">") and not re.search("&[^;]*$", source_text)
            if unit.text == original.text and is_safe:
                return source_text
        return self._escape(unit.text)

    def _write_gap(self, index: int, pieces: Sequence[MarkupPiece]) -> str:
        """Return the pieces of a gap with white space. A gap between the words that it separates in
        the document is copied.
        """
        links_T = self._target.links_T
        is_last = index == len(links_T)
        source_gap = len(self._line.units) if is_last else int(links_T[index])
        previous = int(links_T[index - 1]) if index else -1
        space = self._target.spaces[index] if len(links_T) else ""
        if previous + 1 == source_gap and (index or source_gap == 0):
            gap = self._line.gaps[source_gap]
            if gap.pieces == list(pieces) and bool(gap.space) == bool(space):
                return self._line.source[gap.start : gap.end]
        before = self._target.units[index - 1].text if index else ""
        after = "" if is_last else self._target.units[index].text
        return self._write_pieces(pieces, space, before, after)

    def _write_pieces(
        self, pieces: Sequence[MarkupPiece], space: str, before: str, after: str
    ) -> str:
        """Return pieces with the ``space`` after end tags and atoms. Atoms also have white space
        before them if they have it in the document, and where they would touch a word that they do
        not touch there.
        """
        spaces = [""] * (len(pieces) + 1)
        space_index = 0
        for index, piece in enumerate(pieces):
            if piece.kind != "open":
                space_index = index + 1
            if piece.kind == "atom":
                if piece.space_before and (before or index):
                    spaces[index] = " "
                if piece.space_after and after and not before:
                    spaces[index + 1] = " "
        visible_atoms = [
            index for index, piece in enumerate(pieces) if piece.kind == "atom" and piece.is_visible
        ]
        if visible_atoms and before[-1:].isalnum() and not pieces[visible_atoms[0]].touches_before:
            spaces[visible_atoms[0]] = " "
        if visible_atoms and after[:1].isalnum() and not pieces[visible_atoms[-1]].touches_after:
            space = space or " "
        if space:
            spaces[space_index] = self._escape(space)
        parts = [spaces[0]]
        for piece, following in zip(pieces, spaces[1:]):
            parts.append(self._line.source[piece.start : piece.end])
            parts.append(following)
        return "".join(parts)
