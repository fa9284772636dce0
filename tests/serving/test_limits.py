"""The size of bodies: which are read, and what a refused client is told."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from transformer_jax.serving.limits import BodyLimit


def ask(
    limit: int, chunks: list[bytes], *headers: tuple[bytes, bytes], ends: bool = True
) -> tuple[list[Any], bytes | None, int]:
    """What is sent, the body that the application gets, and how many chunks are read."""
    given: list[Any] = [
        {"type": "http.request", "body": chunk, "more_body": not ends or i + 1 < len(chunks)}
        for i, chunk in enumerate(chunks)
    ] + [{"type": "http.disconnect"}]
    sent, got, count = list[Any](), list[bytes](), 0

    async def receive() -> Any:
        nonlocal count
        count += 1
        return given[count - 1]

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert message["type"] == "http.request" and not message.get("more_body")
        got.append(message["body"])
        assert (await receive())["type"] == "http.disconnect"

    scope = {"type": "http", "headers": list(headers)}
    asyncio.run(BodyLimit(app, limit)(scope, receive, send))
    return sent, got[0] if got else None, count


@given(st.lists(st.binary(max_size=4), min_size=1, max_size=6), st.integers(0, 12))
def test_a_body_arrives_whole_or_is_refused(chunks: list[bytes], limit: int) -> None:
    body = b"".join(chunks)
    for headers in ([], [(b"content-length", b"%d" % len(body))]):
        sent, got, count = ask(limit, chunks, *headers)
        if len(body) <= limit:
            assert got == body and not sent
            continue
        assert got is None
        assert len(b"".join(chunks[:count])) - len(chunks[count - 1]) <= limit  # none too many
        assert count == 0 or not headers  # none at all if the length is given
        start, end = sent
        assert start["status"] == 413 and (b"connection", b"close") in start["headers"]
        assert (b"content-length", b"%d" % len(end["body"])) in start["headers"]
        answer = json.loads(end["body"])
        assert answer["limit"] == limit and f"at most {limit} bytes" in answer["error"]


@pytest.mark.parametrize("length", [b"9" * 5000, b"11"])
def test_a_length_above_the_limit_is_refused_unread(length: bytes) -> None:
    sent, got, count = ask(10, [b"x"], (b"content-length", length))
    assert sent[0]["status"] == 413 and got is None and count == 0


@pytest.mark.parametrize("length", [b"", b"-1", b"x", b"3", "٣".encode()])
def test_bytes_count_whatever_the_length_says(length: bytes) -> None:
    sent, got, _ = ask(10, [b"x" * 11], (b"content-length", length))
    assert sent[0]["status"] == 413 and got is None


def test_nothing_is_answered_to_a_client_that_left() -> None:
    sent, got, _ = ask(10, [b"x"], ends=False)
    assert not sent and got is None


@pytest.fixture(params=["h11", "httptools"])
def address(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """Where uvicorn answers with the length of the body, up to 1,000 bytes."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        size = b"%d" % len((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": size})

    config = uvicorn.Config(
        BodyLimit(app, 1000), port=0, http=request.param, lifespan="off", log_level="warning"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()
    server.should_exit = True
    thread.join()


def test_a_server_refuses_and_closes_the_connection(address: tuple[str, int]) -> None:
    chunk = b"%x\r\n%b\r\n" % (600, b"x" * 600)
    for head, body, status in [
        (b"Transfer-Encoding: chunked", chunk + b"0\r\n\r\n", b"200"),
        (b"Transfer-Encoding: chunked", chunk * 2, b"413"),  # and the client would go on
        (b"Content-Length: 1000000000", b"", b"413"),
        (b"Content-Length: 1000000000\r\nExpect: 100-continue", b"", b"413"),
    ]:
        with socket.create_connection(address, timeout=5) as connection:
            connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n" + body)
            answer = connection.recv(10_000)
            assert answer.split()[1] == status
            if status == b"413":
                while more := connection.recv(10_000):
                    answer += more
                assert json.loads(answer.split(b"\r\n\r\n")[1])["limit"] == 1000
