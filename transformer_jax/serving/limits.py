"""ASGI middleware: the size of request bodies, and what browsers may do with answers."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_DOCS_POLICY = _POLICY.replace("-src 'self';", "-src 'self' 'unsafe-inline';", 2)  # Swagger UI


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


class BodyLimit:
    """Middleware: a body of more than ``limit`` bytes gets 413 and is read no further.

    It reads a body, whether its length is given or it comes in chunks, before the application runs.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        length = dict(scope["headers"]).get(b"content-length", b"")
        # int() raises at thousands of digits; a false length is the server's business
        declared = int(length[:20]) if length.isdigit() else 0
        body, more = bytearray(), True
        while more and declared <= self.limit and len(body) <= self.limit:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if max(declared, len(body)) > self.limit:
            said = f"The body is too large; expected at most {self.limit} bytes; send less at once."
            answer = {"error": said, "limit": self.limit}
            headers = {"connection": "close"}  # what is left of the body is never read
            return await JSONResponse(answer, 413, headers)(scope, receive, send)
        messages: list[Message] = [{"type": "http.request", "body": bytes(body)}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replay, send)
