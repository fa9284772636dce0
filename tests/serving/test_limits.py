"""What clients may send, and how long they may take to send it and to read the answer."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import answering
from starlette.requests import Request

from transformer_jax.serving.limits import LimitedProtocol, read_body
from transformer_jax.serving.service import Refused


def read(
    limit: int, chunks: list[bytes], *headers: tuple[bytes, bytes], ends: bool = True
) -> tuple[bytes | Refused, int]:
    """The body or the refusal, and how many chunks are read."""
    given: list[Any] = [
        {"type": "http.request", "body": chunk, "more_body": not ends or i + 1 < len(chunks)}
        for i, chunk in enumerate(chunks)
    ] + [{"type": "http.disconnect"}]
    count = 0

    async def receive() -> Any:
        nonlocal count
        count += 1
        return given[count - 1]

    request = Request({"type": "http", "headers": list(headers)}, receive)
    try:
        return asyncio.run(read_body(request, limit=limit, seconds=9)), count
    except Refused as refused:
        return refused, count


@given(st.lists(st.binary(max_size=4), min_size=1, max_size=6), st.integers(0, 12))
def test_a_body_arrives_whole_or_is_refused(chunks: list[bytes], limit: int) -> None:
    body = b"".join(chunks)
    for headers in ([], [(b"content-length", b"%d" % len(body))]):
        got, count = read(limit, chunks, *headers)
        if isinstance(got, bytes):
            assert got == body and len(body) <= limit
            continue
        assert len(body) > limit and got.status_code == 413
        assert len(b"".join(chunks[:count])) - len(chunks[count - 1]) <= limit  # none too many
        assert count == 0 or not headers  # none at all if the length is given
        assert got.headers == {"Connection": "close"}
        assert got.told.limit == limit and f"at most {limit} bytes" in got.told.error


@pytest.mark.parametrize("length", [b"9" * 5000, b"11"])
def test_a_length_above_the_limit_is_refused_unread(length: bytes) -> None:
    got, count = read(10, [b"x"], (b"content-length", length))
    assert isinstance(got, Refused) and got.status_code == 413 and count == 0


@pytest.mark.parametrize("length", [b"", b"-1", b"x", b"3", "٣".encode()])
def test_bytes_count_whatever_the_length_says(length: bytes) -> None:
    got, _ = read(10, [b"x" * 11], (b"content-length", length))
    assert isinstance(got, Refused) and got.status_code == 413


def test_a_client_that_left_asks_for_nothing() -> None:
    got, _ = read(10, [b"x"], ends=False)
    assert isinstance(got, Refused) and got.status_code == 499


GONE = threading.Event()


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with a megabyte for ever at /endless, elsewhere with the length of the body."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/endless":
        leaves = asyncio.ensure_future(_leaves(receive))
        while not leaves.done():
            await send({"type": "http.response.body", "body": b"x" * 2**20, "more_body": True})
        GONE.set()
        return
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.body", "body": b"%d" % size})


async def _leaves(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where ``app`` answers; clients have 0.3 seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LimitedProtocol, "seconds", 0.3)
        with answering(app, lifespan="off") as found:
            yield found


@contextmanager
def connected(port: int, sent: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(sent)
        yield client


def answer(client: socket.socket) -> bytes:
    """All that comes until the connection ends."""
    found = b""
    while more := client.recv(10_000):
        found += more
    return found


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNK = b"%x\r\n%b\r\n" % (90_000, b"x" * 90_000)


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"X: " + b"x" * 70_000,
        HEAD + b"X: x\r\n" * 20_000,
        b"GET /" + b"x" * 70_000,
        b"GET / HTTP/1.1\r\n\r\nGET /" + b"x" * 200_000,
    ],
    ids=["one header", "many headers", "path", "second request"],
)
def test_heads_above_64_kilobytes_are_refused(port: int, sent: bytes) -> None:
    with connected(port, sent) as client:
        found = answer(client)
    assert b"HTTP/1.1 431 " in found and b"expected less than 65536 bytes" in found


def test_trailers_have_the_same_limit(port: int) -> None:
    with connected(port, CHUNKED + CHUNK) as client, pytest.raises(ConnectionError):
        for _ in range(1000):
            client.sendall(b"0\r\nX: " + b"x" * 70_000)


def test_bodies_may_be_larger(port: int) -> None:
    head = b"X: " + b"x" * 60_000 + b"\r\nContent-Length: 200000\r\n\r\n"
    with connected(port, HEAD + head + b"x" * 200_000) as client:
        assert client.recv(10_000).startswith(b"HTTP/1.1 200 ")
    closes = CHUNKED.replace(b"Host: x", b"Connection: close")
    with connected(port, closes + CHUNK * 2 + b"0\r\n\r\n") as client:
        found = answer(client)
    assert b"200 OK" in found and b"180000" in found


@pytest.mark.parametrize(
    ("before", "sent"),
    [(b"", b""), (b"", HEAD), (b"GET / HTTP/1.1\r\n\r\n", HEAD)],
    ids=["nothing", "half a head", "second request"],
)
def test_a_head_that_takes_too_long_is_refused(port, before, sent) -> None:
    with connected(port, before + sent) as client:
        found = answer(client)
    assert found.count(b"HTTP/1.1 200") == bool(before)
    head, said = found.split(b"\r\n\r\n")[-2:]
    assert b"HTTP/1.1 408 " in head
    assert json.loads(said)["error"] == "The head took more than 0.3 s to arrive."


def test_a_client_that_never_reads_is_dropped(port: int) -> None:
    GONE.clear()
    with connected(port, b"GET /endless HTTP/1.1\r\n\r\nGET /"):  # the second changes nothing
        assert GONE.wait(20)


def test_a_shutdown_does_not_wait_for_requests_that_have_not_arrived() -> None:
    half = HEAD + b"Content-Length: 9\r\n\r\nx"
    with ExitStack() as clients:
        with answering(app, lifespan="off", timeout_graceful_shutdown=20) as port:
            for sent in b"", HEAD, half, half:
                clients.enter_context(connected(port, sent))
            with connected(port, b"GET / HTTP/1.1\r\n\r\n") as client:
                assert client.recv(1000)  # so what the others sent has arrived
            start = time.monotonic()
        assert time.monotonic() - start < 10
