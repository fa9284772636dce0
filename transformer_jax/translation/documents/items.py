"""A document as items: text, inline tags, atoms, and borders between the lines to translate."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import unescape
from itertools import pairwise
from typing import Literal

from transformer_jax.translation.documents.formats import DocumentFormat
from transformer_jax.translation.documents.placeholders import template_tags
from transformer_jax.translation.documents.tokens import MarkupToken, name_set

FORMATTING = name_set(
    "a b bdi bdo big bold del em emphasis font hi i ins italic mark nobr s small strike strong tt "
    "u wbr"
)
"""Elements that can begin or end inside a word."""
# Depth of the elements that a start tag may end.
_MAX_DEPTH = 256
# Tags and atoms of a line; more take long to place.
_MAX_ITEMS_PER_LINE = 1000
_CHARACTER_REFERENCE = re.compile(r"&(?:#[0-9]+;?|#[xX][0-9a-fA-F]+;?|[a-zA-Z][a-zA-Z0-9]{0,31};?)")
# Where xml:space keeps all spaces: between lines and columns.
_COLUMN_GAPS = re.compile(r"[ \t\r\n]{2,}|[\t\r\n]")


@dataclass(eq=False, slots=True)
class Item:
    """A part of a document."""

    kind: Literal["text", "open", "close", "atom", "border"]
    """open, close: tags of an inline element. atom: an element, comment or placeholder that has a
    place in a text. border: what divides the document into lines."""
    start: int
    end: int
    name: str = ""
    is_visible: bool = True
    """A reader sees the atom."""
    is_placeholder: bool = False
    """The atom stands for text."""
    text: str = ""
    """The text, without character references."""
    offsets: Sequence[int] = field(default=(), repr=False)
    """Place in the document of each character of the text, and the end."""


def document_items(text: str, format: DocumentFormat, name: str) -> list[Item]:
    """Read a document. Tags that are not between two borders, as their partner is, are borders.

    Raises ``UserError`` for a document that its format does not allow. ``name`` is for messages.
    """
    tree = _Tree(text, format.read_tokens(text, name), format)
    return _divide_elements_at_borders(_items(text, tree))


class _Tree:
    """Which tags belong together, and which text is translated.

    Attributes:
      matching_tags: index of the matching tag of each token; -1: it has none.
      parents: index of the start tag around each token; -1: it has none.
      is_translated: whether the token (for a tag, the content of its element) is translated.
      preserves_space: whether white space counts.
    """

    def __init__(self, text: str, tokens: Sequence[MarkupToken], format: DocumentFormat):
        self.tokens = tokens
        self._format = format
        self.matching_tags = [-1] * len(tokens)
        self.parents = list[int]()
        self.is_translated = list[bool]()
        self.preserves_space = list[bool]()
        self._stack = list[int]()
        self._open_names = Counter[str]()
        self._partly_translated = set[int]()
        """Untranslated elements with translated ones in them."""
        for index, token in enumerate(tokens):
            if token.kind == "close":
                self._close(index)
            elif token.name in format.ended_by_start_tag:
                self._end_implied(token.name)
            self._add_token(index)
        self._with_own_text = {
            parent
            for token, parent in zip(tokens, self.parents)
            if token.kind == "text" and text[token.start : token.end].strip()
        }

    def is_inline(self, index: int) -> bool:
        """Whether a tag or other token does not divide a text."""
        token = self.tokens[index]
        if token.kind in ("open", "close") and self.matching_tags[index] < 0:
            return False
        if self._format.inline_names is not None:
            return bool(self._format.inline_names.fullmatch(token.name))
        first = min(index, self.matching_tags[index]) if token.kind == "close" else index
        return self.parents[first] in self._with_own_text

    def is_atom(self, index: int) -> bool:
        """Whether a start tag begins an inline element without translated text."""
        is_outermost = self.parents[index] < 0 or self.is_translated[self.parents[index]]
        is_kept = not self.is_translated[index] and index not in self._partly_translated
        return is_outermost and is_kept and self.is_inline(index)

    def _add_token(self, index: int) -> None:
        """Note where a token is and, if it is a start tag, open its element."""
        token = self.tokens[index]
        parent = self._stack[-1] if self._stack else -1
        is_translated = self.is_translated[parent] if parent >= 0 else True
        preserves_space = self.preserves_space[parent] if parent >= 0 else False
        if token.kind == "open":
            self._stack.append(index)
            self._open_names[token.name] += 1
            if token.name in self._format.untranslated:
                is_translated = False
            if token.translate is not None:
                is_translated = token.translate
            if token.preserve is not None:
                preserves_space = token.preserve
            if is_translated:
                self._mark_partly_translated(parent)
        self.parents.append(parent)
        self.is_translated.append(is_translated)
        self.preserves_space.append(preserves_space)

    def _mark_partly_translated(self, parent: int) -> None:
        while (
            parent >= 0 and not self.is_translated[parent] and parent not in self._partly_translated
        ):
            self._partly_translated.add(parent)
            parent = self.parents[parent]

    def _close(self, index: int) -> None:
        name = self.tokens[index].name
        while self._open_names[name] and self.matching_tags[index] < 0:
            start_index = self._pop_open_tag()
            if self.tokens[start_index].name == name:
                self.matching_tags[index] = start_index
                self.matching_tags[start_index] = index

    def _pop_open_tag(self) -> int:
        start_index = self._stack.pop()
        self._open_names[self.tokens[start_index].name] -= 1
        return start_index

    def _end_implied(self, name: str) -> None:
        """Close the elements that the start tag of another ends."""
        ended, barriers = self._format.ended_by_start_tag[name]
        if not any(self._open_names[each] for each in ended):
            return
        depth_kept = len(self._stack)
        for depth in range(depth_kept - 1, max(-1, depth_kept - _MAX_DEPTH), -1):
            open_name = self.tokens[self._stack[depth]].name
            if open_name in barriers:
                break
            if open_name in ended:
                depth_kept = depth
        while len(self._stack) > depth_kept:
            self._pop_open_tag()


def _items(text: str, tree: _Tree) -> Iterator[Item]:
    """Yield the items of a document; all tags with a partner are inline."""
    tokens = tree.tokens
    next_index = 0
    for index, token in enumerate(tokens):
        if index < next_index:
            continue
        inline = tree.is_inline(index)
        if token.kind == "text":
            if tree.is_translated[index]:
                yield from _text_items(text, token, tree.preserves_space[index])
            else:
                yield Item("border", token.start, token.end)
        elif token.kind == "open" and tree.is_atom(index):
            next_index = tree.matching_tags[index] + 1
            yield Item("atom", token.start, tokens[next_index - 1].end, token.name)
        elif token.kind in ("open", "close") and inline:
            kind: Literal["open", "close"] = "open" if token.kind == "open" else "close"
            yield Item(kind, token.start, token.end, token.name)
        elif token.kind == "comment":
            yield Item("atom", token.start, token.end, is_visible=False)
        elif token.kind == "void" and inline:
            yield Item("atom", token.start, token.end, token.name, token.name != "wbr")
        else:
            yield Item("border", token.start, token.end)


def _text_items(text: str, token: MarkupToken, preserves_space: bool) -> Iterator[Item]:
    """Divide text at the tags of templates and, if it is preserved, at its columns."""
    raw = text[token.start : token.end]
    position = 0
    for tag in template_tags(raw):
        yield from _plain_items(raw[position : tag.start], token.start + position, preserves_space)
        position = tag.end
        span = (token.start + tag.start, token.start + tag.end)
        if tag.kind == "statement":
            yield Item("border", *span)
        else:
            item = Item("atom", *span, is_visible=tag.kind != "comment")
            item.is_placeholder = tag.kind == "expression"
            item.text = raw[tag.start : tag.end]
            yield item
    yield from _plain_items(raw[position:], token.start + position, preserves_space)


def _plain_items(raw: str, start: int, preserves_space: bool) -> Iterator[Item]:
    if not preserves_space:
        yield from _decode_text(raw, start)
        return
    position = 0
    for column in _COLUMN_GAPS.finditer(raw):
        yield from _decode_text(raw[position : column.start()], start + position)
        yield Item("border", start + column.start(), start + column.end())
        position = column.end()
    yield from _decode_text(raw[position:], start + position)


def _decode_text(raw: str, start: int) -> Iterator[Item]:
    if raw:
        item = Item("text", start, start + len(raw))
        item.text, item.offsets = decode_references(raw, start)
        yield item


def decode_references(raw: str, start: int) -> tuple[str, Sequence[int]]:
    """Replace character references. Returns the text, and the place of each of its characters in
    the document, where ``raw`` begins at ``start``; the last place is the end.
    """
    references = list(_CHARACTER_REFERENCE.finditer(raw)) if "&" in raw else []
    if not references:
        return raw, range(start, start + len(raw) + 1)
    parts = list[str]()
    offsets = list[int]()
    end = 0
    for reference in references:
        character = unescape(reference[0]) or "\ufffd"
        if character == reference[0]:
            continue
        # Without a semicolon, only the beginning may be a reference: &notit is ¬it.
        size = len(reference[0])
        while len(character) > 1 and character[-1] == reference[0][size - 1]:
            character = character[:-1]
            size -= 1
        parts += [raw[end : reference.start()], character]
        offsets += range(start + end, start + reference.start())
        offsets += [start + reference.start()] * len(character)
        end = reference.start() + size
    offsets += range(start + end, start + len(raw) + 1)
    return "".join([*parts, raw[end:]]), offsets


def _divide_elements_at_borders(items: Iterable[Item]) -> list[Item]:
    """Turn inline elements that contain borders, and too many items, into borders."""
    result = list[Item]()
    open_tags = list[Item]()
    num_borders = 0  # the first of the opened elements, which are borders
    num_items = 0
    for item in items:
        if item.kind == "open":
            open_tags.append(item)
        elif item.kind == "close":
            item.kind = "close" if open_tags.pop().kind == "open" else "border"
            num_borders = min(num_borders, len(open_tags))
        result.append(item)
        num_items += item.kind != "text"
        if num_items > _MAX_ITEMS_PER_LINE:
            result.append(Item("border", item.end, item.end))
        if result[-1].kind == "border":
            for element in open_tags[num_borders:]:
                element.kind = "border"
            num_borders = len(open_tags)
            num_items = 0
    return result


def lines_of_items(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Yield the items between borders."""
    borders = [index for index, item in enumerate(items) if item.kind == "border"]
    for before, after in pairwise([-1, *borders, len(items)]):
        if after - before > 1:
            yield list(items[before + 1 : after])
