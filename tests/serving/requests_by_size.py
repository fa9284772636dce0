"""Requests of every size: one thing many times, for each field of a request."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_CHARACTERS = 20_000  # of a service with default flags
MAX_SENTENCES = 1024
JSON = "application/json"


class Repeated(NamedTuple):
    """A request body that holds one thing ``count`` times."""

    body: Callable[[int], bytes]
    most: int  # as many as fit in a request, or more


def query(**fields: Any) -> bytes:
    """Write a query as JSON, by default from en to de."""
    return json.dumps({"source": "en", "target": "de"} | fields).encode()


def request_bytes(path: str, body: bytes, kind: str = JSON, version: str = "1.1") -> bytes:
    """Write a POST request as it is sent."""
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _text(thing: str, **fields: Any) -> Repeated:
    return Repeated(lambda count: query(q=thing * count, **fields), MAX_CHARACTERS // len(thing))


def _html(thing: str, start: str = "", end: str = "", format: str = "html") -> Repeated:
    size = len(thing) + len(start)
    return Repeated(
        lambda count: query(q=start + thing * count + end, format=format), MAX_CHARACTERS // size
    )


REPEATED: dict[str, Repeated] = {
    "letters": _text("a"),
    "ligatures": _text("\ufdfa"),
    "words": _text("one "),
    "sentences": _text("One. "),
    "lines": Repeated(lambda count: query(q="one\n" * count), MAX_SENTENCES),
    "breaks": _text("\n"),
    "spaces": _text(" "),
    "quotation marks": _text('"「'),
    "undivided": _text("one two. ", split=False),
    "attention": Repeated(
        lambda count: query(q="one two three\n" * count, attention=True, alternatives=2), 120
    ),
    "texts": Repeated(
        lambda count: query(q=["one"] * count, details=True, alternatives=2), MAX_SENTENCES
    ),
    "empty texts": Repeated(lambda count: query(q=[""] * count), 70_000),
    "numbers as texts": Repeated(
        lambda count: b'{"target": "de", "q": [%b1]}' % (b"1," * count), 120_000
    ),
    "deep lists": Repeated(lambda count: b'{"target": "de", "q": %b}' % (b"[" * count), 100_000),
    "unknown fields": Repeated(
        lambda count: query(q="a", **{f"k{i}": 1 for i in range(count)}), 20_000
    ),
    "prefix": Repeated(lambda count: query(q="one", prefix="SIX " * count), 4000),
    "prefix of many texts": Repeated(
        lambda count: query(q=["one"] * 1000, prefix="€" * count), 19_000
    ),
    "terms": Repeated(
        lambda count: query(q="one", glossary={f"k{i}": "ONE" for i in range(count)}), 1500
    ),
    "terms with one beginning": Repeated(
        lambda count: query(
            q="one " * 2000,
            glossary={" ".join(["one"] * i) + " x": "ONE" for i in range(1, count + 1)},
        ),
        59,
    ),
    "a long term": Repeated(
        lambda count: query(q="one " * count, glossary={"one " * count: "ONE"}), 2000
    ),
    "alternatives of a term": Repeated(
        lambda count: query(q="one", glossary={"one": ["ONE"] * count}), 4000
    ),
    "numbers as terms": Repeated(
        lambda count: query(q="one", glossary={f"k{i}": 1 for i in range(count)}), 20_000
    ),
    "language": Repeated(lambda count: query(q="one", source="x_" * count), 100_000),
    "format": Repeated(lambda count: query(q="one", format="x" * count), 200_000),
    "API key": Repeated(lambda count: query(q="one", api_key=[[1]] * count), 40_000),
    "number": Repeated(
        lambda count: b'{"target": "de", "q": "one", "alternatives": %b}' % (b"9" * count), 200_000
    ),
    "elements": _html("<b>one</b> "),
    "nested elements": Repeated(
        lambda count: query(q="<b>" * count + "one" + "</b>" * (5 * count // 6), format="html"),
        3000,
    ),
    "unfinished tags": _html("<a "),
    "paragraphs": _html("<p>one</p>"),
    "a long paragraph": _html("One two. ", start="<p><i>"),
    "references": _html("&amp;"),
    "placeholders": _html("{x} "),
    "XML": Repeated(
        lambda count: query(q="<a>" + "<b>one</b> two " * count + "</a>", format="xml"), 1200
    ),
}
