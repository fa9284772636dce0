"""Tokens of XML, from expat, which gives the place of each event in bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html.entities import html5
from typing import Any
from xml.parsers import expat

import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.translation.documents.tokens import Kind, MarkupToken

_FILES_OF_STRINGS = {
    "xliff": ("XLIFF", ""),
    "tmx": ("TMX", ""),
    "martif": ("TBX", ""),
    "tbx": ("TBX", ""),
    "ts": ("a Qt translation file", "<source"),
    "resources": ("an Android resource file", "<(string|plurals)"),
    "root": ("a .NET resource file", "<resheader"),
    "plist": ("an Apple property list", ""),
}
"""Formats of strings with keys, translations or escapes of their own: the name of the root element
in lower case, what the file is, and a regular expression of what it contains.
"""
_FRAGMENT = "<fragment>"
_PREDEFINED_ENTITIES = frozenset(["amp", "lt", "gt", "quot", "apos"])


def xml_tokens(text: str, name: str) -> list[MarkupToken]:
    """Return the tokens of an XML document, or of a fragment of one: text with elements in it.

    Raises:
      UserError: the text is not well-formed, or a file of strings, such as XLIFF. The message
        begins with ``name``.
    """
    is_fragment = False
    try:
        reader = _Reader(text)
    except expat.ExpatError as error:
        start = text.lstrip("\ufeff \t\r\n")
        is_fragment = not start.startswith(("<?xml", "<!DOCTYPE"))
        failure = error
        if is_fragment:
            try:
                reader = _Reader(f"{_FRAGMENT}{text}</{_FRAGMENT[1:]}")
            except expat.ExpatError as fragment_error:
                failure = fragment_error
            else:
                return _without_root(reader.tokens)
        column = failure.offset - len(_FRAGMENT) * (is_fragment and failure.lineno == 1)
        raise UserError(
            f"{name} is not well-formed XML ({expat.ErrorString(failure.code)}: line "
            f"{failure.lineno}, column {max(0, column) + 1}); correct it, or read it as HTML."
        ) from None
    root = reader.root.rpartition(":")[2].lower()  # without the prefix of a namespace
    file_format, content = _FILES_OF_STRINGS.get(root, ("", ""))
    if file_format and re.search(content, text):
        raise UserError(
            f"{name} is {file_format}; expected a document. "
            "Extract the source strings, for example to JSONL, translate those, and write the "
            "translations into the file."
        )
    return reader.tokens


def _without_root(tokens: list[MarkupToken]) -> list[MarkupToken]:
    """Return the tokens of a fragment, without the element around it."""
    inner = tokens[1:-1]
    for token in inner:
        token.start -= len(_FRAGMENT)
        token.end -= len(_FRAGMENT)
    return inner


class _Reader:
    """Reads a document.

    Attributes:
      root: name of the root element.
      tokens: from the first tag to the last.
    """

    def __init__(self, text: str):
        """Raises ``ExpatError`` if the text is not well-formed."""
        self.root = ""
        self.tokens = list[MarkupToken]()
        self._text = text
        self._bytes = text.encode(errors="replace")
        self._declared_entities = set[str]()
        self._in_cdata = False
        self._depth = 0
        self._end_offset = 0
        self._parser = expat.ParserCreate("utf-8")
        # Entities that only an external DTD defines are not errors.
        self._parser.UseForeignDTD(True)
        self._parser.StartElementHandler = self._start_element
        self._parser.EndElementHandler = self._close
        self._parser.CharacterDataHandler = self._characters
        self._parser.CommentHandler = lambda data: self._add("comment")
        self._parser.ProcessingInstructionHandler = self._instruction
        self._parser.StartCdataSectionHandler = self._start_cdata
        self._parser.EndCdataSectionHandler = self._end_cdata
        self._parser.EntityDeclHandler = self._declare_entity
        self._parser.DefaultHandler = self._default  # also leaves internal entities unexpanded
        self._parser.Parse(self._bytes, True)
        self._convert_offsets()

    def _add(self, kind: Kind, name: str = "") -> MarkupToken:
        """Add a token, or more text to the last one. Its places are in bytes, and its end follows
        from the next token.
        """
        token = MarkupToken(kind, self._parser.CurrentByteIndex, -1, name)
        is_more_text = kind == "text" and self.tokens and self.tokens[-1].kind == "text"
        if (self._depth or kind == "close") and not is_more_text:
            self.tokens.append(token)
        return token

    def _start_element(self, name: str, attributes: Mapping[str, str]) -> None:
        if not self._depth and not self.tokens:
            self.root = name
        self._depth += 1
        token = self._add("open", name)
        for key, value in attributes.items():
            if key.rpartition(":")[2] == "translate":
                token.translate = {"no": False, "yes": True}.get(value.strip().lower())
            elif key == "class" and "notranslate" in value.lower().split():
                token.translate = False
            elif key == "xml:space":
                token.preserve = value == "preserve"

    def _close(self, name: str) -> None:
        self._depth -= 1
        offset = self._parser.CurrentByteIndex
        self._end_offset = self._bytes.find(b">", offset) + 1
        tag = self.tokens[-1]
        if tag.kind == "open" and self._bytes.endswith(b"/>", tag.start, offset):
            tag.kind = "void"
            self._end_offset = offset
        else:
            self._add("close", name)

    def _characters(self, data: str) -> None:
        if not self._in_cdata:
            self._add("text")

    def _instruction(self, target: str, data: str) -> None:
        self._add("opaque" if target == "php" else "comment")

    def _start_cdata(self) -> None:
        self._in_cdata = True
        self._add("void")

    def _end_cdata(self) -> None:
        self._in_cdata = False

    def _declare_entity(self, name: str, *details: Any) -> None:
        self._declared_entities.add(name)

    def _default(self, data: str) -> None:
        name = data[1:-1]
        if not data.startswith("&"):
            return
        is_known = name not in self._declared_entities and f"{name};" in html5
        self._add("text" if is_known or name in _PREDEFINED_ENTITIES else "void")

    def _convert_offsets(self) -> None:
        """Set the end of each token, and convert places from bytes to characters."""
        data = np.frombuffer(self._bytes, np.uint8)
        is_first = (data & 0xC0) != 0x80
        characters = np.concatenate([[0], np.cumsum(is_first)]).tolist()
        end = self._end_offset
        for token in reversed(self.tokens):
            token.end = characters[end]
            end = token.start
            token.start = characters[end]
