"""Third-party and malicious clients."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import LINES, Server

# FUZZ=600 runs more examples.
FUZZ = settings(
    max_examples=int(os.environ.get("FUZZ", "75")),
    deadline=20_000,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

TEXTS = st.text(max_size=40) | st.sampled_from(LINES) | st.sampled_from(["<b>", "&#99999999;", ""])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
RIGHT: dict[str, st.SearchStrategy[Any]] = {
    "q": TEXTS | st.lists(TEXTS, max_size=4),
    "source": st.sampled_from(["en", "auto", "fr"]),
    "target": st.sampled_from(["de", "de", "en"]),
    "format": st.just("text"),
    "alternatives": st.integers(0, 3),
    "prefix": st.sampled_from(["", "ONE", "é"]),
    "details": st.booleans(),
    "attention": st.booleans(),
    "split": st.booleans(),
}
OPTIONAL = {name: each for name, each in RIGHT.items() if name not in ("q", "target")}
QUERIES = st.fixed_dictionaries({"q": RIGHT["q"], "target": RIGHT["target"]}, optional=OPTIONAL)
WRONG = st.fixed_dictionaries({}, optional=dict.fromkeys([*RIGHT, "api_key", "x"], ANYTHING))
KINDS = st.sampled_from(
    [
        "application/json",
        "application/json; charset=utf-16",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain",
        "",
    ]
)


def check(server: Server, path: str, body: bytes, kind: str) -> None:
    headers = {"content_type": kind} if kind else {}
    reply = server.request("POST", path, body, **headers)
    assert reply.status in (200, 400, 413, 415), (body, kind, reply)
    if reply.status != 200:
        assert reply.json["error"]
    elif path == "/translate":
        assert reply.json["translatedText"] is not None
    else:
        assert b"event: done" in reply.body and b"event: error" not in reply.body


@FUZZ
@given(st.sampled_from(["/translate", "/translate/stream"]), QUERIES | WRONG)
def test_any_query_gets_a_translation_or_an_error(server: Server, path, query) -> None:
    check(server, path, json.dumps(query).encode(), "application/json")


@FUZZ
@given(st.binary(max_size=200) | TEXTS.map(str.encode), KINDS)
def test_any_body_gets_a_translation_or_an_error(server: Server, body, kind) -> None:
    check(server, "/translate", body, kind)
    check(server, "/translate", b"target=de&q=" + body, kind)


def test_libretranslatepy_works_unchanged(server: Server) -> None:
    libretranslatepy = pytest.importorskip("libretranslatepy", reason="needs libretranslatepy")
    client = libretranslatepy.LibreTranslateAPI(server.url)
    assert [client.translate(line, "en", "de") for line in LINES[:5]] == (
        server.translator.translate(LINES[:5])
    )
    assert client.languages()[0] == {"code": "en", "name": "en", "targets": ["de"]}
