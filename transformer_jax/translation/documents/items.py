"""A document as items: text, inline tags, atoms, and borders between the lines to translate."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import unescape
from itertools import groupby
from operator import attrgetter
from typing import Literal

from transformer_jax.translation.documents.formats import DocumentFormat
from transformer_jax.translation.documents.placeholders import TemplateTag, template_tags
from transformer_jax.translation.documents.tokens import MarkupToken

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
    opening: Item | None = field(default=None, repr=False)
    """The start tag of an end tag."""
    before: str = ""
    """The character before an atom: a space, or the last one of the unit before it."""
    after: str = ""
    """The character after an atom: a space, or the first one of the unit after it."""


def document_items(text: str, format: DocumentFormat, name: str) -> Iterator[Item]:
    """Read a document. All tags with a partner are inline.

    Raises ``UserError`` for a document that its format does not allow. ``name`` is for messages.
    """
    tokens = format.read_tokens(text, name)
    _Tree(text, format).add(tokens)
    return _items(text, tokens, format)


class _Tree:
    """Finds the element around each token, and what is translated."""

    def __init__(self, text: str, format: DocumentFormat):
        self._text = text
        self._format = format
        root = MarkupToken("open", 0, len(text), translate=True, preserve=False)
        self._stack = [root]
        self._open_names = Counter[str]()

    def add(self, tokens: Sequence[MarkupToken]) -> None:
        """Set the fields of all tokens."""
        for token in tokens:
            if token.kind == "close":
                self._close(token)
            elif token.name in self._format.ended_by_start_tag:
                self._end_implied(token.name)
            self._add_token(token)

    def _add_token(self, token: MarkupToken) -> None:
        """Note where a token is and, if it is a start tag, open its element."""
        parent = self._stack[-1]
        token.parent = parent
        if token.translate is None:
            token.translate = parent.translate and token.name not in self._format.untranslated
        if token.preserve is None:
            token.preserve = parent.preserve
        if token.kind == "text" and self._text[token.start : token.end].strip():
            parent.has_text = True
        if token.kind == "open":
            self._stack.append(token)
            self._open_names[token.name] += 1
            if token.translate:
                while not (parent.translate or parent.has_translated):
                    parent.has_translated = True
                    parent = parent.parent

    def _close(self, token: MarkupToken) -> None:
        while self._open_names[token.name] and token.partner is None:
            start_tag = self._pop_start_tag()
            if start_tag.name == token.name:
                token.partner = start_tag
                start_tag.partner = token

    def _pop_start_tag(self) -> MarkupToken:
        start_tag = self._stack.pop()
        self._open_names[start_tag.name] -= 1
        return start_tag

    def _end_implied(self, name: str) -> None:
        """Close the elements that the start tag of another ends."""
        ended, barriers = self._format.ended_by_start_tag[name]
        if not any(self._open_names[ended_name] for ended_name in ended):
            return
        depth_kept = len(self._stack)
        for depth in range(depth_kept - 1, max(0, depth_kept - _MAX_DEPTH), -1):
            open_name = self._stack[depth].name
            if open_name in barriers:
                break
            if open_name in ended:
                depth_kept = depth
        while len(self._stack) > depth_kept:
            self._pop_start_tag()


def _items(text: str, tokens: Sequence[MarkupToken], format: DocumentFormat) -> Iterator[Item]:
    end = 0
    for token in tokens:
        if token.start < end:
            continue  # inside an atom
        is_inline = _is_inline(token, format)
        end = token.end
        if token.kind == "text" and token.translate:
            yield from _text_items(text, token)
        elif token.kind == "comment":
            yield Item("atom", token.start, end, is_visible=False)
        elif token.kind == "void" and is_inline:
            yield Item("atom", token.start, end, token.name, is_visible=token.name != "wbr")
        elif token.kind == "open" and is_inline and _is_atom(token):
            assert token.partner
            end = token.partner.end
            yield Item("atom", token.start, end, token.name)
        elif token.kind == "open" and is_inline:
            yield Item("open", token.start, end, token.name)
        elif token.kind == "close" and is_inline:
            yield Item("close", token.start, end, token.name)
        else:
            yield Item("border", token.start, end)


def _is_inline(token: MarkupToken, format: DocumentFormat) -> bool:
    """Whether a tag or other token does not divide a text."""
    if token.kind in ("open", "close") and token.partner is None:
        return False
    if format.inline_names is not None:
        return bool(format.inline_names.fullmatch(token.name))
    start_tag = token.partner if token.kind == "close" and token.partner else token
    return start_tag.parent.has_text


def _is_atom(token: MarkupToken) -> bool:
    """Whether a start tag begins the outermost element without translated text."""
    return bool(token.parent.translate and not token.translate and not token.has_translated)


def _text_items(text: str, token: MarkupToken) -> Iterator[Item]:
    """Divide text at the tags of templates and, if white space counts, at its columns."""
    raw = text[token.start : token.end]
    tags = list(template_tags(raw))
    if token.preserve:
        tags += [TemplateTag("statement", *gap.span()) for gap in _COLUMN_GAPS.finditer(raw)]
    position = 0
    for tag in sorted(tags, key=attrgetter("start")):
        if tag.start < position:
            continue  # a gap in a tag
        yield from _decode_text(raw[position : tag.start], token.start + position)
        position = tag.end
        item = Item("border", token.start + tag.start, token.start + tag.end)
        if tag.kind != "statement":
            item.kind = "atom"
            item.is_visible = tag.kind != "comment"
            item.is_placeholder = tag.kind == "expression"
            item.text = raw[tag.start : tag.end]
        yield item
    yield from _decode_text(raw[position:], token.start + position)


def _decode_text(raw: str, start: int) -> Iterator[Item]:
    if raw:
        text, offsets = _decode_references(raw, start)
        yield Item("text", start, start + len(raw), text=text, offsets=offsets)


def _decode_references(raw: str, start: int) -> tuple[str, Sequence[int]]:
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


def lines_of_items(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield the items between borders. The tags of an element with a border in it are borders, too,
    and so is the end of too many items.
    """
    line = list[Item]()
    open_tags = list[Item]()
    num_marks = 0
    for item in items:
        line.append(item)
        if item.kind == "open":
            open_tags.append(item)
        elif item.kind == "close" and open_tags:
            item.opening = open_tags.pop()
        elif item.kind == "close":
            item.kind = "border"  # as its start tag
        num_marks += item.kind != "text"
        if item.kind == "border" or num_marks > _MAX_ITEMS_PER_LINE:
            for start_tag in open_tags:
                start_tag.kind = "border"
            yield from _between_borders(line)
            line = []
            open_tags = []
            num_marks = 0
    yield from _between_borders(line)


def _between_borders(items: Iterable[Item]) -> Iterator[list[Item]]:
    for is_border, group in groupby(items, lambda item: item.kind == "border"):
        if not is_border:
            yield list(group)
