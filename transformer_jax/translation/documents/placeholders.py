"""Text that passes unchanged: placeholders, and the tags of template languages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Literal, NamedTuple, TypeAlias

_WIDTH = r"[-+#0]*\d*(?:\.\d+)?"
_SIZE = r"(?:hh|h|ll|l|q|j|z|t|L)?"
_CONVERSION = rf"{_SIZE}[diouxXeEfFgGcspn@]"

PLACEHOLDERS = (
    r"\{\{\{[^{}\n]*\}\}\}|\{\{[^{}\n]*\}\}",
    r"[$%#@]\{[^{}\n]*\}|\{[^{}\s]*\}|\{ ?[\w.]+ ?\}",
    # printf: with a name or a number; with a precision, a leading zero or *, which no text has; any
    # letter at the end of a word; before letters (not 5 %ig)
    rf"%%|%(?:\(\w+\)|\d+\$){_WIDTH}{_CONVERSION}|%<\w+>(?:{_WIDTH}{_CONVERSION})?",
    rf"%[-+#]*(?:0\d+|(?:\d+|\*)?\.(?:\d+|\*)|\*){_CONVERSION}|%(?:ll|l|hh)d|%@",
    rf"%(?:{_WIDTH}[a-zA-Z@](?!\w)|(?<!\d%)(?<!\d\s%)[-+#0]*{_CONVERSION})",
    r"(?:https?|ftp)://[^\s<>\"\u3000-\u9fff\uff00-\uffef]*[^\s<>\".,;:!?)\u3000-\u9fff\uff00-\uffef]",
    r"(?<![A-Za-z0-9_.+-])[A-Za-z0-9_.+-]++@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+",
)
"""Regular expressions of text that passes unchanged: {name}, {{x}}, %s, URLs, e-mail addresses."""

TemplateKind: TypeAlias = Literal["statement", "expression", "comment", "message"]


class TemplateTag(NamedTuple):
    """A place of a document that a program replaces."""

    kind: TemplateKind
    """statement: its order matters. expression: stands for text. comment: stands for nothing.
    message: stands for one of the texts in it."""
    start: int
    end: int


_ICU_MESSAGE_START = (
    r"\{\s*+[\w.]++\s*+,\s*+(?:plural|select|selectordinal|number|date|time|choice|list)\b"
)
_BRACES = r"[^{}]"
for _ in range(6):  # branches in branches
    _BRACES = rf"(?:[^{{}}]++|\{{{_BRACES}*+\}})"
_ICU_MESSAGE = re.compile(rf"{_ICU_MESSAGE_START}{_BRACES}*+\}}")
_TAG_START = re.compile(rf"\{{%|\{{#|\{{\{{\{{?|<%|<\?(?:php\b|=)|(?={_ICU_MESSAGE_START})\{{")
_TAG_ENDS = {"{%": "%}", "{#": "#}", "{{": "}}", "{{{": "}}}", "<%": "%>"}
_COMMENTS = ("{#", "{{!", "<%#", "<%--")
_EXPRESSIONS = ("<%=", "<%-", "<?=")
# Tags of Mustache and Handlebars that begin, divide or end a block.
_BLOCK = re.compile(r"\{\{\{?~?\s*(?:[#/^>]|else\b)")


def template_tags(text: str) -> Iterator[TemplateTag]:
    """Yield the tags of Jinja, Django, Handlebars, ERB and PHP, and the messages of ICU, in order.
    A tag without end is text; only PHP's last one needs none.
    """
    position = 0
    unfinished = set[str]()
    while tag_start := _TAG_START.search(text, position):
        start = tag_start.start()
        position = tag_start.end()
        opening = tag_start[0]
        if opening == "{":
            message = _ICU_MESSAGE.match(text, start)
            if message:
                position = message.end()
                yield TemplateTag("message", start, position)
            continue
        closing = _TAG_ENDS.get(opening, "?>")
        if closing in unfinished:
            continue
        closing_start = text.find(closing, position)
        if opening.startswith("{{") and text.find("\n", position, closing_start) >= 0:
            continue
        if closing_start < 0:
            unfinished.add(closing)
            if opening != "<?php":
                continue
        position = closing_start + len(closing) if closing_start >= 0 else len(text)
        yield TemplateTag(_template_kind(text, start), start, position)


def _template_kind(text: str, start: int) -> TemplateKind:
    if text.startswith(_COMMENTS, start):
        return "comment"
    if text.startswith("{{", start):
        return "statement" if _BLOCK.match(text, start) else "expression"
    return "expression" if text.startswith(_EXPRESSIONS, start) else "statement"


def without_template_tags(text: str) -> str:
    """Return a text of the same length in which letters replace template tags, so that a ">" in
    them ends no tag of the document.
    """
    parts = list[str]()
    end = 0
    for tag in template_tags(text):
        parts.append(text[end : tag.start])
        parts.append("\ue000" * (tag.end - tag.start))
        end = tag.end
    return "".join([*parts, text[end:]])


def find_spans(text: str, patterns: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the places that match a pattern, from left to right, without empty ones. The first
    pattern has priority. Patterns are not joined, because each has groups of its own.
    """
    no_span = (len(text), 0)
    end = 0
    next_spans = dict.fromkeys(patterns, (-1, 0))
    while True:
        for pattern, (start, _) in next_spans.items():
            if start < end:
                matches = re.compile(pattern).finditer(text, end)
                next_spans[pattern] = next((match.span() for match in matches if match[0]), no_span)
        span = min(next_spans.values(), key=itemgetter(0), default=no_span)
        if span == no_span:
            return
        yield span
        end = span[1]


def copies_pattern(placeholders: Sequence[str], source: str) -> re.Pattern[str]:
    """Return a pattern that finds exact copies of placeholders in a translation: the longest first,
    and words only as whole words, unless the ``source`` has letters beside them, too.
    """
    alternatives = list[str]()
    for placeholder in sorted(set(placeholders), key=len, reverse=True):
        escaped = re.escape(placeholder)
        is_word = placeholder[0].isalnum()
        if is_word and not re.search(rf"\w{escaped}", source):
            escaped = rf"(?<!\w){escaped}"
        if is_word and placeholder[-1].isalnum() and not re.search(rf"{escaped}\w", source):
            escaped = rf"{escaped}(?!\w)"
        alternatives.append(escaped)
    return re.compile("|".join(alternatives) or r"(?!)")
