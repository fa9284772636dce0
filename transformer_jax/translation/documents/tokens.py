"""Tokens of a document: tags, text and everything else, with their exact places."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    """Whether its text or the content of its element is translated; None: as its parent's, or as
    the format says."""
    preserve: bool | None = None
    """Whether white space counts (xml:space); None: as in its parent."""
    parent: MarkupToken = field(init=False, repr=False)
    """Start tag of the element around it."""
    partner: MarkupToken | None = field(default=None, repr=False)
    """The other tag of its element; None: it has none."""
    has_text: bool = False
    """Its element has text of its own."""
    has_translated: bool = False
    """Its element is not translated, but has a translated one in it."""
