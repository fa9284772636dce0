"""Limits for clients: the size of a request, the time to send it and to read its answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from transformer_jax.serving.service import Refused

_HEAD_BYTES = 2**16
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_DOCS_POLICY = _POLICY.replace("-src 'self';", "-src 'self' 'unsafe-inline';", 2)  # Swagger UI


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits, for ``uvicorn.Config(http=LimitedProtocol)``.

    A request's head may have 64 KB (then 431). A client has ``seconds`` to send the head (then
    408) and to read what is buffered for it (then the connection ends). A shutdown closes
    connections whose request has not arrived whole.
    """

    seconds = 30.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._unparsed = 0
        """Bytes that the parser holds back: part of a head or of a trailer."""
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop("head", "reader")

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _HEAD_BYTES):
            if self.transport.is_closing():
                return
            piece = data[start : start + _HEAD_BYTES]
            self._unparsed += len(piece)
            super().data_received(piece)
            if self._unparsed >= _HEAD_BYTES:
                self._refuse(431, f"The head is too large; expected less than {_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._stop("head")
        self._unparsed = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start("reader", self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("reader")

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def shutdown(self) -> None:
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            self._close()
        else:
            super().shutdown()  # closes after the response

    def _expect_head(self) -> None:
        said = f"The head took more than {self.seconds:g} s to arrive."
        self._start("head", self._refuse, 408, said)

    def _start(self, timer: str, late: Callable[..., None], *arguments: Any) -> None:
        self._stop(timer)
        self._timers[timer] = self.loop.call_later(self.seconds, late, *arguments)

    def _stop(self, *timers: str) -> None:
        for timer in timers:
            if timer in self._timers:
                self._timers.pop(timer).cancel()

    def _refuse(self, status: int, said: str) -> None:
        if self.cycle is None or self.cycle.response_complete:
            body = json.dumps({"error": said}).encode()
            fields = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close"
            self.transport.write(STATUS_LINE[status] + fields % len(body) + b"\r\n\r\n" + body)
        self._close()

    def _close(self) -> None:
        self.transport.close()  # sends what is buffered, if the client reads it
        self._start("reader", self.transport.abort)


async def read_body(request: Request, *, limit: int, seconds: float) -> bytes:
    """The body of a request; ``Refused`` if it has more than ``limit`` bytes, which are read no
    further, or takes more than ``seconds``.
    """
    too_large = Refused(
        413, f"The body is too large; expected at most {limit} bytes; send less.", limit=limit
    )
    length = request.headers.get("content-length", "")
    # int() raises at thousands of digits; a false length is the server's business
    if length.isascii() and length.isdigit() and int(length[:20]) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        raise Refused(408, f"The body took more than {seconds:g} s to arrive.") from None
    except ClientDisconnect:
        raise Refused(499, "The client has gone.") from None
    return bytes(body)


class SecurityHeaders:
    """Middleware: answers load nothing from elsewhere and are of the type that they say."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        docs = scope.get("path", "").startswith("/docs")
        fixed = {
            "Content-Security-Policy": _DOCS_POLICY if docs else _POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(fixed)
            await send(message)

        await self.app(scope, receive, with_headers)
