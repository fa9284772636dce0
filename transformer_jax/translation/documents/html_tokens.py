"""Tokens of HTML, as the HTML standard divides it (13.2.5, Tokenization).

Regular expressions find each tag with its exact place, whatever is wrong with the page. Python's
``html.parser`` reads scripts, CDATA and broken tags differently in each version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from transformer_jax.translation.documents.tokens import MarkupToken, name_set

VOID_ELEMENTS = name_set("area base br col embed hr img input link meta param source track wbr")
"""Elements without content and end tag."""
_RAW_TEXT_ELEMENTS = name_set("script style xmp iframe noembed noframes title textarea plaintext")
"""Elements without tags in them."""
_VISIBLE_RAW_TEXT_ELEMENTS = name_set("title textarea")
"""Elements of raw text that a reader sees, with character references."""
_FOREIGN_ELEMENTS = name_set("svg math")
"""Elements whose descendants follow other rules."""

_SPACE = r" \t\n\r\f"
_ATTRIBUTE_VALUE = rf""""[^"]*+(?:"|\Z)|'[^']*+(?:'|\Z)|(?!["'])[^{_SPACE}>]*+"""
_ATTRIBUTE = (
    rf"[{_SPACE}/]*+(?P<key>[^{_SPACE}/>][^{_SPACE}/>=]*+)"
    rf"(?:[{_SPACE}]*+=[{_SPACE}]*+(?P<value>{_ATTRIBUTE_VALUE}))?+"
)
_ATTRIBUTES = re.compile(_ATTRIBUTE)
_TAG = re.compile(
    rf"<(?P<slash>/?)(?P<name>[a-zA-Z][^{_SPACE}/>]*+)"
    rf"(?P<attributes>(?:{re.sub('[?]P<[a-z]+>', '?:', _ATTRIBUTE)})*+)(?P<end>[{_SPACE}/]*+)>"
)
_TAG_START = re.compile("</?[a-zA-Z]")
_MARKUP = re.compile(r"<(?:[a-zA-Z!?]|/(?!\Z))")
_COMMENT_END = re.compile(r"--!?>")


def html_tokens(text: str) -> Iterator[MarkupToken]:
    """Yield the tokens of an HTML document. What is unfinished at its end is opaque."""
    position = 0
    if text.startswith("\ufeff"):  # the byte-order mark
        position = 1
        yield MarkupToken("opaque", 0, 1)
    foreign_depth = 0
    while markup := _MARKUP.search(text, position):
        start = markup.start()
        if start > position:
            yield MarkupToken("text", position, start)
        token = _markup_token(text, start)
        position = token.end
        if token.name in _FOREIGN_ELEMENTS:
            foreign_depth += 1 if token.kind == "open" else -1
            foreign_depth = max(0, foreign_depth)
        if foreign_depth and token.kind == "open" and text.endswith("/>", start, position):
            token.kind = "void"
            foreign_depth -= token.name in _FOREIGN_ELEMENTS
        yield token
        if token.kind == "open" and token.name in _RAW_TEXT_ELEMENTS and not foreign_depth:
            end = _end_of_raw_text(text, token)
            if end > position:
                is_visible = token.name in _VISIBLE_RAW_TEXT_ELEMENTS and end < len(text)
                yield MarkupToken("text" if is_visible else "opaque", position, end)
            position = end
    if position < len(text):
        yield MarkupToken("text", position, len(text))


def _markup_token(text: str, start: int) -> MarkupToken:
    """Return the token that begins with "<" at ``start``."""
    tag = _TAG.match(text, start)
    if tag:
        return _tag_token(tag)
    if _TAG_START.match(text, start):
        return MarkupToken("opaque", start, len(text))  # an unfinished tag
    if text.startswith("<!--", start):
        return MarkupToken("comment", start, _end_of_comment(text, start))
    closing = "]]>" if text.startswith("<![CDATA[", start) else ">"
    end = text.find(closing, start + 2)
    is_comment = text[start + 1] != "!"
    return MarkupToken(
        "comment" if is_comment else "opaque",
        start,
        len(text) if end < 0 else end + len(closing),
    )


def _tag_token(tag: re.Match[str]) -> MarkupToken:
    name = tag["name"].lower()
    if tag["slash"]:
        return MarkupToken("close", tag.start(), tag.end(), name)
    token = MarkupToken("void" if name in VOID_ELEMENTS else "open", tag.start(), tag.end(), name)
    if "translate" in tag["attributes"].lower():
        token.translate = _translate(tag["attributes"])
    return token


def _translate(attributes: str) -> bool | None:
    """Return whether a tag asks for translation of its element; None: it does not say."""
    translate = None
    classes = list[str]()
    for attribute in _ATTRIBUTES.finditer(attributes):
        value = (attribute["value"] or "").strip("\"'")
        if attribute["key"].lower() == "translate" and translate is None:
            translate = {"no": False, "yes": True, "": True}.get(value.strip().lower())
        elif attribute["key"].lower() == "class":
            classes += value.lower().split()
    return False if "notranslate" in classes else translate


def _end_of_comment(text: str, start: int) -> int:
    for empty in ("<!-->", "<!--->"):
        if text.startswith(empty, start):
            return start + len(empty)
    end = _COMMENT_END.search(text, start + 4)
    return end.end() if end else len(text)


def _end_of_raw_text(text: str, token: MarkupToken) -> int:
    """Return where the end tag of an element of raw text begins."""
    if token.name == "plaintext":
        return len(text)
    end = re.compile(rf"</{token.name}(?=[{_SPACE}/>])", re.IGNORECASE).search(text, token.end)
    return end.start() if end else len(text)
