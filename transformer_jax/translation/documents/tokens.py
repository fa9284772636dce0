"""Tokens of a document: tags, text and everything else, with their exact places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["open", "close", "void", "text", "comment", "opaque"]


def name_set(text: str) -> frozenset[str]:
    """Return the names in a text, which are separated by spaces."""
    return frozenset(text.split())


@dataclass(eq=False, slots=True)
class MarkupToken:
    """A part of a document. Tokens follow each other without gaps or overlaps."""

    kind: Kind
    """void: an element without content, or an XML entity or CDATA section. comment: what a reader
    never sees. opaque: anything else that is not text, such as a declaration or a script."""
    start: int
    """Place in the document, in characters."""
    end: int
    name: str = ""
    """Name of a tag; in HTML in lower case."""
    translate: bool | None = None
    """What the tag says about its element: translate="yes" or "no", or the class notranslate."""
    preserve: bool | None = None
    """xml:space: "preserve" or "default"."""
