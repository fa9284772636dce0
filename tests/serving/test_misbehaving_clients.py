"""Clients that do not behave: what they send costs others little time, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import pytest
from requests_by_size import MAX_CHARACTERS, MAX_SENTENCES, REPEATED, query, request_bytes
from servers import LINES, Server, answering, make_model_to_serve, serving

from transformer_jax.serving import protocol
from transformer_jax.serving.app import App
from transformer_jax.serving.flags import Pair
from transformer_jax.serving.limits import Limits
from transformer_jax.serving.log_limit import LogLimit
from transformer_jax.serving.protocol import Protocol
from transformer_jax.serving.schema import Query
from transformer_jax.serving.service import Service
from transformer_jax.translation.translator import Translator

FORM = "application/x-www-form-urlencoded"


@pytest.fixture(scope="module")
def default(translator: Translator) -> Iterator[Server]:
    """A server with the default limits of text. Few lengths and terms compile quickly."""
    model = make_model_to_serve(translator, max_terms=1)
    service = Service({Pair("en", "de"): model}, Limits(MAX_SENTENCES, MAX_CHARACTERS))
    with serving(service, translator) as found:
        yield found


# One of each kind of work: search, validation, glossary, reading of documents.
HEAVIEST = (
    "letters",
    "sentences",
    "texts",
    "numbers as texts",
    "terms with one beginning",
    "numbers as terms",
    "unfinished tags",
    "a long paragraph",
)


@pytest.mark.parametrize(
    ("path", "kinds"),
    [
        pytest.param("/translate", HEAVIEST, id="heaviest"),
        pytest.param("/translate", tuple(REPEATED), id="all", marks=pytest.mark.exhaustive),
        pytest.param(
            "/translate/stream", tuple(REPEATED), id="stream", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_no_request_delays_a_polite_client(
    default: Server, path: str, kinds: tuple[str, ...]
) -> None:
    """However it uses the limits. The polite client asks for its health during each. What counts
    is this process's CPU time, as other work on the machine delays both.
    """
    slowest = {}
    for kind in kinds:
        repeated = REPEATED[kind]
        done = threading.Event()

        def send(body: bytes, done: threading.Event = done) -> None:
            try:
                with socket.create_connection(("127.0.0.1", default.port), timeout=20) as client:
                    sent = request_bytes(path, body)
                    client.sendall(sent.replace(b"Host", b"Connection: close\r\nHost", 1))
                    client.settimeout(4)
                    while client.recv(2**16):
                        pass
            except OSError:
                pass
            done.set()

        thread = threading.Thread(target=send, args=[repeated.body(repeated.most)])
        thread.start()
        delays = [0.0]
        while not done.is_set() or len(delays) < 3:
            start = time.process_time()
            assert default.request("GET", "/health").status == 200
            delays.append(time.process_time() - start)
            time.sleep(0.01)
        thread.join()
        slowest[kind] = round(max(delays), 2)
    assert max(slowest.values()) < 2, slowest
    assert default.is_idle()


def test_a_form_of_many_fields_is_read_quickly(default: Server) -> None:
    for fields in ([("q", "")] * 60_000, [(f"k{i}", "1") for i in range(20_000)]):
        start = time.process_time()
        default.request("POST", "/translate", urlencode(fields), content_type=FORM)
        assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("fields", "location", "value"),
    [
        ({"q": ["a", 1, 2]}, ("q", "list[str]", 0), 1),
        ({"q": "a", "glossary": {"a": "b", "c": 5, "d": 6}}, ("glossary", "c", "str"), 5),
        ({"q": "a", "glossary": {"a": ["b", 5, 6]}}, ("glossary", "a", "str"), [5]),
        ({"q": "a", "x": 1, "y": 2}, ("x",), 1),
    ],
)
def test_only_the_first_error_is_built(fields, location, value) -> None:
    with pytest.raises(ValueError) as error:
        Query.model_validate({"target": "de"} | fields)
    errors = error.value.errors()
    assert len(errors) <= 2 and any(
        (each["loc"], each["input"]) == (location, value) for each in errors
    )


def exchange(port: int, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        return client.makefile("rb").read()


@pytest.mark.parametrize("line", [LINES[3], " ".join(LINES[:30])], ids=["short", "long"])
def test_a_half_closed_client_gets_its_answer(
    server: Server, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Protocol, "probe_interval", 1e-3)
    reply = exchange(server.port, request_bytes("/translate", query(q=line, split=False)))
    *_, head, body = reply.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and reply.startswith(b"HTTP/1.1 100 ")
    assert [json.loads(body)["translatedText"]] == server.translator.translate([line])
    assert server.is_idle()


def test_slow_headers_end_the_connection(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a first request. Headers that arrive in time do not."""
    monkeypatch.setattr(Protocol, "header_timeout", 0.5)
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    for before in b"", whole:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
            client.sendall(before)
            if before:
                assert b"200" in client.recv(1000)
            start = time.monotonic()
            received = b""
            for byte in range(20):
                try:
                    client.sendall(whole[byte : byte + 1])
                except OSError:
                    break
                time.sleep(0.1)
            received = client.recv(1000)
            assert received.startswith(b"HTTP/1.1 408 ") and b"took more than 0.5 s" in received
            assert time.monotonic() - start < 5
    body = request_bytes("/translate", query(q=" ".join(LINES[:9])))
    assert b" 200 " in exchange(server.port, body)


def test_the_limit_of_open_files_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    for number, is_logged in ((5, False), (limit - 3, True)):
        caplog.clear()
        connection = SimpleNamespace(fileno=lambda number=number: number)
        transport: Any = SimpleNamespace(get_extra_info=lambda _, c=connection: c)
        protocol._warn_of_open_files(transport)
        assert ("files are open; new clients will be refused" in caplog.text) == is_logged


def test_warnings_are_limited() -> None:
    now = 0.0
    limit = LogLimit(lambda: now)

    def passes(text: str, level: int = logging.WARNING) -> str:
        record = logging.LogRecord("x", level, "", 0, text, (), None)
        return record.getMessage() if limit.filter(record) else ""

    assert [bool(passes("Invalid request.")) for _ in range(25)] == [True] * 10 + [False] * 15
    assert passes("another") == "another"
    assert all(passes("progress", logging.INFO) for _ in range(25))
    now = 61.0
    assert passes("Invalid request.") == "Invalid request. (15 more like it were not logged.)"
    assert passes("Invalid request.") == "Invalid request."
    for i in range(5000):
        passes(f"text {i}")
    assert len(limit._windows) <= 1001


def test_invalid_requests_are_answered_while_one_is_logged(server: Server) -> None:
    with answering(App(server.service, timeout=60).asgi(), lifespan="off") as port:
        for _ in range(30):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
                client.sendall(b"nonsense\r\n\r\n")
                assert client.recv(100).startswith(b"HTTP/1.1 400 ")


def test_documents_are_joined_outside_the_event_loop(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformer_jax.translation.plan import Plan

    in_loop = []
    join = Plan.join_parts

    def watched(*args: Any) -> Any:
        in_loop.append(asyncio._get_running_loop() is not None)
        return join(*args)

    monkeypatch.setattr(Plan, "join_parts", watched)
    for path in "/translate", "/translate/stream":
        assert server.ask(path, q="<p>one <b>two</b></p>", format="html").status == 200
    assert in_loop == [False, False]
