"""What a request may not do: lack a key, come too often, be too large."""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from pathlib import Path

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transformer_jax.errors import UserError

_SHORTEST_KEY = 16
_KEYS = (
    f"one API key per line, of at least {_SHORTEST_KEY} characters without white space; "
    "make one with `openssl rand -hex 16`"
)
_WINDOW = 60.0  # seconds


class ApiKeys:
    """The keys of which each request must bring one. Only their hashes are held."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def load(cls, path: Path) -> ApiKeys:
        """The keys in a file, one per line; empty lines and those that begin with # are skipped.

        Raises ``UserError`` if the file cannot be read, holds no keys, or holds one that is short
        or has white space in it. Messages, which go to logs, never show a key.
        """
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            said = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise UserError(f"{path} cannot be read ({said}); expected {_KEYS}.") from None
        keys = []
        for number, key in enumerate(map(str.strip, lines), 1):
            if not key or key.startswith("#"):
                continue
            if len(key) < _SHORTEST_KEY or len(key.split()) > 1:
                raise UserError(
                    f"Line {number} of {path} has {len(key)} characters in {len(key.split())} "
                    f"word(s); expected {_KEYS}."
                )
            keys.append(key)
        if not keys:
            raise UserError(f"{path} has no keys; expected {_KEYS}; or leave out --api-keys.")
        return cls(keys)

    def allows(self, key: str) -> bool:
        """Whether it is one of the keys. The time this takes says nothing about them."""
        digest = _digest(key)
        return any([hmac.compare_digest(digest, each) for each in self._digests])  # noqa: C419  all


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


class RateLimit:
    """At most ``per_minute`` requests of each client in any 60 seconds; 0: any number.

    Remembers only clients of the last 60 seconds. (The ``limits`` package keeps all of them, and
    walks through them in a new thread every 10 ms.) For use in one thread.
    """

    def __init__(self, per_minute: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        # when each client's last requests came, the client that was quiet for longest first
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def retry_after(self, client: str) -> int | None:
        """None, and the request counts; or, where it is one too many, the seconds to wait."""
        if not self.per_minute:
            return None
        now = self._clock()
        while self._times and next(iter(self._times.values()))[-1] <= now - _WINDOW:
            self._times.popitem(last=False)
        times = self._times.setdefault(client, deque(maxlen=self.per_minute))
        if len(times) == self.per_minute and times[0] > now - _WINDOW:
            return math.ceil(times[0] + _WINDOW - now)
        times.append(now)  # the oldest goes
        self._times.move_to_end(client)
        return None


class BodyLimit:
    """ASGI middleware: a body of more than ``limit`` bytes gets 413 and is read no further.

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
