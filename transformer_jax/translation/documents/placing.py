"""Puts the tags of a line around the words of its translation, by alignment."""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from transformer_jax.errors import short_repr
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.tokenization.words import token_words
from transformer_jax.translation.alignment import Alignment
from transformer_jax.translation.documents.items import Item
from transformer_jax.translation.documents.line import DocumentLine, Mark, divide_into_units
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


@dataclass(eq=False, slots=True)
class TargetUnit:
    """A word, a punctuation mark or a placeholder of a translation."""

    text: str
    space: str
    """White space before it."""
    is_placeholder: bool = False
    link: int = -1
    """Index of the source unit that it attends to most; -1: none."""
    strength: float = 0.0
    """How strong the link is."""
    is_copy: bool = False
    """It is spelled as the source unit."""

    def copy(self, source_index: int) -> None:
        """Link a placeholder to the one in the source that it copies."""
        self.link = source_index
        self.strength = _COPY_STRENGTH
        self.is_copy = True


class TargetLine:
    """The translation of a line.

    Attributes:
      units: words and placeholders.
      dropped: source units of placeholders that the translation lacks.
    """

    def __init__(
        self,
        line: DocumentLine,
        translation: Translation,
        tokenizer: Tokenizer,
        protect: Sequence[str],
    ):
        self.units = list[TargetUnit]()
        self.dropped = list[int]()
        self._line = line
        text = translation.text.strip()
        if text.split() == line.text.split():
            for index, (gap, unit) in enumerate(zip(line.gaps, line.units)):
                copy = TargetUnit(unit.text, gap.space, link=index, strength=1.0, is_copy=True)
                self.units.append(copy)
            return
        originals = [line.units[index].text for index in line.placeholders]
        copies = copies_pattern(originals, line.text)
        end = 0
        for start, stop, is_placeholder in divide_into_units(
            text, _placeholder_spans(text, copies, protect)
        ):
            self.units.append(TargetUnit(text[start:stop], text[end:start], is_placeholder))
            end = stop
        self._link(translation.alignment, tokenizer)
        # The same text can also be in the source without being protected, as in "5%s %s".
        unprotected = Counter(copies.findall(line.text))
        unprotected.subtract(originals)
        self._copy_placeholders(unprotected)

    def _link(self, alignment: Alignment | None, tokenizer: Tokenizer) -> None:
        """Link each unit to the source unit with the strongest attention of its tokens or, without
        an alignment, to the one at its relative position.
        """
        sources = [unit.text for unit in self._line.units]
        targets = [unit.text for unit in self.units]
        if alignment is None or not targets or min(alignment.weights_TS.shape) < 2:
            for unit, link in zip(self.units, _relative_links(sources, targets)):
                unit.link = link
                unit.strength = 1.0
            return
        rows = token_words(tokenizer.target, alignment.target[:-1], targets)
        columns = token_words(tokenizer.source, alignment.source[:-1], sources)
        weights = np.where(np.array(columns) >= 0, alignment.weights_TS[:-1, :-1], -1)
        for token, row, weights_S in zip(alignment.target, rows, weights):
            best = int(weights_S.argmax())
            if row >= 0 and token != tokenizer.target.eos_token:
                unit = self.units[row]
                if weights_S[best] >= unit.strength:
                    unit.link = columns[best]
                    unit.strength = float(weights_S[best])

    def _copy_placeholders(self, unprotected: Counter[str]) -> None:
        """Link placeholders to their copies. What the model has written in place of a missing one
        is replaced, and what the source does not have is left out. ``unprotected`` counts the
        copies in the source that are not placeholders.
        """
        pending = defaultdict[str, deque[int]](deque)
        for index in self._line.placeholders:
            pending[self._line.units[index].text].append(index)
        unmatched = list[TargetUnit]()
        for unit in self.units:
            if not unit.is_placeholder:
                continue
            num_unprotected = unprotected.setdefault(unit.text, self._line.text.count(unit.text))
            if pending[unit.text]:
                unit.copy(pending[unit.text].popleft())
            elif num_unprotected > 0:
                unprotected[unit.text] -= 1
            else:
                unmatched.append(unit)
        self.dropped = sorted(chain.from_iterable(pending.values()))
        for unit in unmatched:
            written = short_repr(unit.text)
            if self.dropped:
                source_index = self.dropped.pop(0)
                original = short_repr(self._line.units[source_index].text)
                logger.warning(
                    "The model wrote %s in place of %s, which replaces it.", written, original
                )
                unit.copy(source_index)
            else:
                logger.warning("The model added %s, which is left out.", written)
                self._remove(unit)
        for source_index in self.dropped:
            message = "The model dropped %s; it is put back next to the aligned word."
            logger.warning(message, short_repr(self._line.units[source_index].text))

    def _remove(self, unit: TargetUnit) -> None:
        index = self.units.index(unit)
        del self.units[index]
        if index < len(self.units):
            following = self.units[index]
            following.space = (following.space or unit.space) if index else ""


def _placeholder_spans(
    text: str, copies: re.Pattern[str], protect: Sequence[str]
) -> Iterator[tuple[int, int]]:
    """Yield the places of copies in a translation, and of other text that looks like a placeholder,
    from left to right.
    """
    patterns = [pattern for pattern in protect if pattern in PLACEHOLDERS]
    position = 0
    copy_spans = [copy.span() for copy in copies.finditer(text)]
    for copy_start, copy_end in [*copy_spans, (len(text), len(text))]:
        for start, end in find_spans(text[position:copy_start], patterns):
            yield position + start, position + end
        if copy_end > copy_start:
            yield copy_start, copy_end
        position = copy_end


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


def _relative_links(sources: Sequence[str], targets: Sequence[str]) -> list[int]:
    """Link each target to the source at its relative position in characters."""
    ends_S = np.cumsum([len(source) for source in sources])
    lengths_T = np.array([len(target) for target in targets], int)
    middles_T = np.cumsum(lengths_T) - lengths_T / 2
    links_T = np.searchsorted(ends_S, middles_T * ends_S[-1] / max(1, lengths_T.sum()))
    return [int(link) for link in links_T]


class TargetWriter:
    """Writes the translation of a line with its marks."""

    def __init__(self, line: DocumentLine, target: TargetLine, escape: Callable[[str], str]):
        """``escape`` spells text as the document has it."""
        self._line = line
        self._units = target.units
        self._dropped = target.dropped
        self._escape = escape
        self._links_T = np.array([unit.link for unit in target.units], int)
        self._strengths_T = np.array([unit.strength for unit in target.units])
        self._children = defaultdict[Mark, list[Mark]](list)
        line.root.target_end = len(target.units)

    def write(self) -> str:
        """Return the translation, spelled as the document spells it where it is the same."""
        restored = [self._restore_placeholder(index) for index in self._dropped]
        for mark in [*self._line.marks, *restored]:
            assert mark.parent
            mark.target_start = self._gap_after_previous(mark, mark.parent)
            mark.target_end = mark.target_start
            if mark.closing:
                self._place_element(mark, mark.parent)
            self._children[mark.parent].append(mark)
        parts = list[str]()
        for index, pieces in enumerate(self._pieces_by_gap()):
            parts.append(self._write_gap(index, pieces))
            if index < len(self._units):
                parts.append(self._write_unit(index))
        return "".join(parts)

    def _restore_placeholder(self, index: int) -> Mark:
        """Return an atom in place of a placeholder that the translation lacks."""
        units = self._line.units
        gaps = self._line.gaps
        parent = self._line.root
        for mark in self._line.marks:
            if mark.first <= index < mark.last:
                parent = mark
        atom = Item("atom", units[index].start, units[index].end)
        if gaps[index].space:
            atom.before = " "
        elif index:
            atom.before = units[index - 1].text[-1]
        if gaps[index + 1].space:
            atom.after = " "
        elif index + 1 < len(units):
            atom.after = units[index + 1].text[0]
        return Mark(parent, index, opening=atom)

    def _place_element(self, mark: Mark, parent: Mark) -> None:
        """Give an element the units of its parent that link to its words rather than to others. It
        stays empty if its siblings have all units.
        """
        start = parent.target_start
        end = parent.target_end
        is_available_T = np.ones(end - start, bool)
        for sibling in self._children[parent]:
            is_available_T[sibling.target_start - start : sibling.target_end - start] = False
        available = np.flatnonzero(is_available_T)
        if not len(available):
            return
        links_T = self._links_T[start:end]
        strengths_T = self._strengths_T[start:end]
        is_linked_inside_T = (links_T >= mark.first) & (links_T < mark.last)
        scores_T = np.where(is_linked_inside_T, strengths_T, -strengths_T)
        scores_T = np.where(is_available_T, scores_T, _EXCLUDED_SCORE)
        if scores_T.max() > 0:
            first, last = _maximum_sum_interval(scores_T)
        else:  # no unit links to it; it takes one
            preferred = int(np.searchsorted(available, mark.target_start - start))
            first = int(available[min(preferred, len(available) - 1)])
            last = first
        mark.target_start = start + first
        mark.target_end = start + last + 1

    def _gap_after_previous(self, mark: Mark, parent: Mark) -> int:
        """Return the gap after the unit that links to the last linked word before a mark."""
        start = parent.target_start
        links_T = self._links_T[start : parent.target_end]
        is_before_T = (links_T >= parent.first) & (links_T < mark.first)
        if not is_before_T.any():
            return start
        previous = np.max(links_T[is_before_T])
        strengths_T = self._strengths_T[start : parent.target_end]
        offset = int(np.argmax(np.where(links_T == previous, strengths_T, -1)))
        is_other_T = np.append(links_T[offset:] != previous, True)
        return start + offset + int(np.argmax(is_other_T))

    def _pieces_by_gap(self) -> list[list[Item]]:
        """Return the tags and atoms in each gap of the translation, in order."""
        gaps: list[list[Item]] = [[] for _ in range(len(self._units) + 1)]
        cursor = 0
        pending: list[Mark | tuple[int, Item]] = [self._line.root]
        while pending:
            mark = pending.pop()
            if isinstance(mark, tuple):
                end, closing = mark
                cursor = max(cursor, end)
                gaps[cursor].append(closing)
                continue
            cursor = max(cursor, mark.target_start)
            if mark.opening:
                gaps[cursor].append(mark.opening)
            if mark.closing:
                pending.append((mark.target_end, mark.closing))
            children = sorted(
                self._children[mark], key=lambda child: (child.target_start, child.target_end)
            )
            pending += reversed(children)
        return gaps

    def _write_unit(self, index: int) -> str:
        """Return a unit of the translation: as the document spells it if it is the same."""
        unit = self._units[index]
        if unit.link >= 0:
            original = self._line.units[unit.link]
            source_text = self._line.source[original.start : original.end]
            is_safe = source_text not in ("&", "<", ">") and not re.search("&[^;]*$", source_text)
            if unit.is_copy or (unit.text == original.text and is_safe):
                return source_text
        return self._escape(unit.text)

    def _write_gap(self, index: int, pieces: Sequence[Item]) -> str:
        """Return the pieces of a gap with white space. A gap between the words that it separates in
        the document is copied.
        """
        is_last = index == len(self._units)
        source_gap = len(self._line.units) if is_last else self._units[index].link
        previous = self._units[index - 1].link if index else -1
        space = "" if is_last else self._units[index].space
        if previous + 1 == source_gap:
            gap = self._line.gaps[source_gap]
            if gap.pieces == list(pieces) and bool(gap.space) == bool(space):
                return self._line.gap_source(source_gap)
        before = self._units[index - 1].text if index else ""
        after = "" if is_last else self._units[index].text
        return self._write_pieces(pieces, space, before, after)

    def _write_pieces(self, pieces: Sequence[Item], space: str, before: str, after: str) -> str:
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
                if piece.before == " " and (before or index):
                    spaces[index] = " "
                if piece.after == " " and after and not before:
                    spaces[index + 1] = " "
        visible_atoms = [
            index for index, piece in enumerate(pieces) if piece.kind == "atom" and piece.is_visible
        ]
        if visible_atoms:
            first = visible_atoms[0]
            last = visible_atoms[-1]
            if before[-1:].isalnum() and not pieces[first].before.isalnum():
                spaces[first] = " "
            if after[:1].isalnum() and not pieces[last].after.isalnum():
                space = space or " "
        if space:
            spaces[space_index] = self._escape(space)
        parts = [spaces[0]]
        for piece, following in zip(pieces, spaces[1:]):
            parts.append(self._line.source[piece.start : piece.end])
            parts.append(following)
        return "".join(parts)
