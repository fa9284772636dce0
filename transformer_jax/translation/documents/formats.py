"""Formats of documents: how each is read, divided into lines, and written."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from transformer_jax.translation.documents.html_tokens import html_tokens
from transformer_jax.translation.documents.placeholders import without_template_tags
from transformer_jax.translation.documents.tokens import MarkupToken, name_set
from transformer_jax.translation.documents.xml_tokens import xml_tokens

_INLINE_HTML = re.compile(
    "a|abbr|acronym|b|bd[io]|big|cite|code|data|del|dfn|em|embed|font|i|img|input|ins|kbd|label|"
    "mark|math|nobr|q|r[bpt]|rtc|ruby|s|samp|small|span|strike|strong|su[bp]|svg|time|tt|u|var|wbr|"
    ".*-.*"
)
_UNTRANSLATED_HTML = name_set("code math pre script style svg textarea")
_UNTRANSLATED_XML = name_set(
    "code cmdsynopsis funcsynopsis math pre programlisting screen script style synopsis"
)
_TAGS_ENDING_P = (
    "address article aside blockquote center details dialog dir div dl fieldset figcaption figure "
    "footer form h1 h2 h3 h4 h5 h6 header hgroup hr main menu nav ol p pre search section summary "
    "table ul"
)
_TABLE_SECTIONS = "thead tbody tfoot"
_IMPLIED_ENDS = {
    "li": ("li", "ul ol menu"),
    "dt dd": ("dt dd", "dl"),
    "option": ("option", "select datalist optgroup"),
    "optgroup": ("option optgroup", "select"),
    "rt rp": ("rt rp", "ruby"),
    "td th": ("td th", "table"),
    "tr": ("tr td th", "table"),
    _TABLE_SECTIONS: (f"{_TABLE_SECTIONS} tr td th caption colgroup", "table"),
    _TAGS_ENDING_P: ("p", "button caption object td template th"),
}
_ENDED_BY_START_TAG = {
    name: (name_set(ended), name_set(barriers))
    for starts, (ended, barriers) in _IMPLIED_ENDS.items()
    for name in name_set(starts)
}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class DocumentFormat:
    """A format of documents."""

    read_tokens: Callable[[str, str], list[MarkupToken]]
    """Divides a document into tokens. Raises ``UserError``, with this name, for an invalid one."""
    escape: Callable[[str], str]
    """Spells text as the document has it."""
    untranslated: frozenset[str]
    """Elements whose text is not translated."""
    inline_names: re.Pattern[str] | None = None
    """Elements that do not divide a text into lines. None: those whose parent has text of its own.
    """
    ended_by_start_tag: Mapping[str, tuple[frozenset[str], frozenset[str]]] = field(
        default_factory=dict
    )
    """Start tags, with the open elements that they end, unless an element of the second set is in
    between."""


def _read_html(text: str, name: str) -> list[MarkupToken]:
    return list(html_tokens(without_template_tags(text)))


def _escape_html(text: str) -> str:
    return html.escape(text, quote=False)


def _escape_xml(text: str) -> str:
    return _NOT_XML.sub("", _escape_html(text))


FormatName: TypeAlias = Literal["html", "xml"]
FORMATS: dict[FormatName, DocumentFormat] = {
    "html": DocumentFormat(
        _read_html,
        _escape_html,
        untranslated=_UNTRANSLATED_HTML,
        inline_names=_INLINE_HTML,
        ended_by_start_tag=_ENDED_BY_START_TAG,
    ),
    "xml": DocumentFormat(xml_tokens, _escape_xml, untranslated=_UNTRANSLATED_XML),
}
"""All formats of documents, by the names that flags and requests give them."""
