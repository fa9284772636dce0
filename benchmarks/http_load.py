"""Many clients of one HTTP server, at little cost: they share the server's cores.

Each client keeps one connection and sends its next request as soon as it has the last answer. What
is sent is made beforehand, and what comes back is looked at afterwards.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from http.client import HTTPConnection
from itertools import cycle
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

# Why a request has no answer.
REFUSED = "no connection"
UNREAD = "connection closed before the request was read"
IGNORED = "connection closed without an answer"
CUT_OFF = "connection closed in the middle of the answer"
LATE = "no answer in time"

_GRACE = 60.0  # seconds to wait for the last answers
_PAUSE = 0.05  # seconds before a client goes on that was turned away
_VANISH = (0.005, 0.050)  # seconds from a request until its client is gone


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Self:
        """Of ``http://host:port``."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise SystemExit(f"error: url is {url!r}; expected http://HOST:PORT.")
        return cls(parts.hostname, parts.port or 80)


class Answer(NamedTuple):
    """What became of one request."""

    line: int
    """Which of the requests it was; -1: none could be sent."""
    begin: float
    end: float
    status: int
    """0: there is none, and ``fault`` says why."""
    body: bytes
    fault: str


def get(address: Address, path: str) -> tuple[int, str]:
    """Status and body; for questions between the loads."""
    connection = HTTPConnection(*address, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def translation_requests(address: Address, lines: Sequence[str], languages: str) -> list[bytes]:
    """For each line the bytes that ask for its translation, as one sentence; ``languages``: as in
    en-de.
    """
    source, _, target = languages.partition("-")
    host = f"{address.host}:{address.port}".encode()
    found = []
    for line in lines:
        fields = {"q": line, "source": source, "target": target, "split": False}
        body = json.dumps(fields).encode()
        head = b"POST /translate HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\n"
        found.append(b"%bContent-Length: %d\r\n\r\n%b" % (head % host, len(body), body))
    return found


class Connection:
    """One that is kept between requests."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self.ends = False  # the server said so

    @classmethod
    async def open(cls, address: Address) -> Self:
        return cls(*await asyncio.open_connection(*address))

    async def ask(self, request: bytes) -> tuple[int, bytes, str]:
        """Status, body and fault, as in ``Answer``."""
        head = b""
        self._writer.write(request)
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            assert length, f"the answer does not say its length: {head!r}"
            body = await self._reader.readexactly(int(length[1]))
        except asyncio.IncompleteReadError as error:
            return 0, b"", CUT_OFF if head or error.partial else self._why_closed()
        except ConnectionError:  # a reset: the request had not been read to its end
            return 0, b"", CUT_OFF if head else UNREAD
        self.ends = b"\r\nconnection: close" in head.lower()
        return int(head[9:12]), body, ""

    def _why_closed(self) -> str:
        """Of a connection that was closed without a byte: if that was before the request came, the
        kernel answered the request with a reset.
        """
        with suppress(OSError, AttributeError):
            there = self._writer.get_extra_info("socket")
            if there.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return UNREAD
        return IGNORED

    async def vanish(self, request: bytes, delay: float, *, reset: bool) -> bool:
        """Send this and be gone after ``delay`` seconds; whether an answer came before."""
        self._writer.write(request)
        try:
            await asyncio.wait_for(self._reader.read(1), delay)
            return True
        except TimeoutError:
            return False
        finally:
            if reset:
                self._writer.transport.abort()
            self.close()

    def close(self) -> None:
        self._writer.close()


async def load(
    address: Address,
    requests: Sequence[bytes],
    *,
    clients: int,
    seconds: float,
    then: Callable[[], None] | None = None,
) -> list[Answer]:
    """Have so many clients send requests, in order, for so many seconds; answers to what was sent
    are waited for.

    With ``then``, which is called after these seconds, clients go on until they get no connection.
    """
    answers: list[Answer] = []
    lines = cycle(range(len(requests)))
    until = float("inf") if then else time.perf_counter() + seconds
    tasks = [
        asyncio.create_task(_client(address, requests, lines, until, answers))
        for _ in range(clients)
    ]
    if then:
        await asyncio.sleep(seconds)
        then()
    _, late = await asyncio.wait(tasks, timeout=_GRACE if then else seconds + _GRACE)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks)
    return answers


async def _client(
    address: Address,
    requests: Sequence[bytes],
    lines: Iterator[int],
    until: float,
    answers: list[Answer],
) -> None:
    connection, clock = None, time.perf_counter
    line, begin = -1, clock()
    try:
        while (begin := clock()) < until:
            line = -1
            connection = connection or await Connection.open(address)
            line, begin = next(lines), clock()
            status, body, fault = await connection.ask(requests[line])
            answers.append(Answer(line, begin, clock(), status, body, fault))
            if fault or connection.ends:
                connection.close()
                connection = None
            if status != 200:
                await asyncio.sleep(_PAUSE)
    except OSError:
        answers.append(Answer(-1, begin, clock(), 0, b"", REFUSED))
    except asyncio.CancelledError:
        answers.append(Answer(line, begin, clock(), 0, b"", LATE))
    finally:
        if connection is not None:
            connection.close()


async def vanish(address: Address, requests: Sequence[bytes], *, clients: int) -> int:
    """So many clients at once that send a request and close the connection 5 to 50 ms later, half
    of them with a reset; how many had an answer before.
    """
    chance = random.Random(0)
    connections = await asyncio.gather(*(Connection.open(address) for _ in range(clients)))
    answered = await asyncio.gather(
        *(
            each.vanish(requests[i % len(requests)], chance.uniform(*_VANISH), reset=bool(i % 2))
            for i, each in enumerate(connections)
        )
    )
    return sum(answered)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """What the coroutine returns; with uvloop, which takes half the time, if it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)
