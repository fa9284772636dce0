"""Hosts that requests may name.

A web page could make its own name resolve to this server, and then read its responses (DNS
rebinding), so names are checked. An IP address cannot be made to resolve to another one, so
addresses are always accepted. Health checks and scrapes can use any name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import Receive, Scope, Send

# Their responses contain no text, only counts.
_PATHS_OF_PROBES = "/health", "/metrics"

_LOCAL_HOST = re.compile(
    r"(localhost|\d+(\.\d+){3}|\[[\da-f.]*:[\da-f:.]*\])(:\d+)?", re.ASCII | re.IGNORECASE
)
"""localhost or an IP address, with or without a port. No other name has these forms."""


def allowed_hosts(flag: Sequence[str], host: str, address: str) -> Sequence[str]:
    """Return ``--allowed-hosts`` or its default for a server at this IP address."""
    if flag:
        return flag
    return ["localhost", host] if ip_address(address).is_loopback else ["*"]


class HostCheck:
    """Middleware that rejects requests whose Host header has another name, with status 400."""

    def __init__(self, app: Any, allowed: Sequence[str]):
        self._app = app
        self._checked = TrustedHostMiddleware(app, allowed_hosts=allowed, www_redirect=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it."""
        app = self._checked
        if scope["type"] == "http":
            is_probe = scope["path"] in _PATHS_OF_PROBES
            if is_probe or _LOCAL_HOST.fullmatch(Headers(scope=scope).get("host", "")):
                app = self._app
        await app(scope, receive, send)
