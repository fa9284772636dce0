"""HTTP/1.1 connections: uvicorn's, with JSON errors and an end for clients that stall."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from http import HTTPStatus

from uvicorn.protocols.http.h11_impl import H11Protocol

from transformer_jax.serving.limits import HEADER_TIMEOUT

logger = logging.getLogger(__name__)

_PIECE = 4096
# Open files that are left when a warning is logged.
_FEW_FILES = 16
# Asks a client that has closed its side whether it still reads: if not, its system resets the
# connection, and the next write fails.
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Protocol(H11Protocol):
    """One client's connection.

    Attributes:
      patience: seconds between checks for progress after shutdown has begun.
      header_timeout: maximum number of seconds for the headers of a request.
      probe_interval: seconds between checks whether a client that has closed its side is there.
    """

    patience = 5.0
    header_timeout = HEADER_TIMEOUT
    probe_interval = 0.2
    _num_received = 0
    _half_closed = False
    _header_timer: asyncio.TimerHandle | None = None

    @property
    def _expects_request(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        _warn_of_open_files(transport)
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """End everything that belongs to the connection."""
        self._stop_header_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data in small pieces, because h11 limits the size of incomplete headers only."""
        self._num_received += len(data)
        for start in range(0, len(data), _PIECE):
            if not self.transport.is_closing():
                super().data_received(data[start : start + _PIECE])
        if not self._expects_request:
            self._stop_header_timer()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a client that has closed its side after its request. Returns whether the
        connection stays open.
        """
        cycle = self.cycle
        if self._expects_request or cycle.more_body or cycle.response_started:
            return False
        if cycle.scope["http_version"] != "1.1":  # older clients know no interim responses
            return False
        self._half_closed = True
        self._probe()
        return True

    def on_response_complete(self) -> None:
        """Close the connection or wait for the next request."""
        super().on_response_complete()
        if self._half_closed:
            self.transport.close()
        elif self._expects_request:
            self._start_header_timer()

    def send_400_response(self, msg: str) -> None:
        """Reject an invalid request, with status 431 if its headers are too large."""
        status = HTTPStatus(getattr(sys.exception(), "error_status_hint", 400))
        self._reject(status, f"{msg} {status.phrase}.")

    def shutdown(self) -> None:
        """Close the connection once its request is answered, or if the client stalls."""
        super().shutdown()
        self._end_if_stalled(None)

    def _reject(self, status: HTTPStatus, message: str) -> None:
        head = f"HTTP/1.1 {status} {status.phrase}\r\nContent-Type: application/json\r\n"
        body = f'Connection: close\r\n\r\n{{"error": "{message}"}}'
        self.transport.write((head + body).encode())
        self.transport.close()

    def _start_header_timer(self) -> None:
        self._stop_header_timer()
        self._header_timer = self.loop.call_later(self.header_timeout, self._end_late_request)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()

    def _end_late_request(self) -> None:
        if self._expects_request and not self.transport.is_closing():
            message = f"The headers took more than {self.header_timeout:g} s; send them faster."
            self._reject(HTTPStatus.REQUEST_TIMEOUT, message)

    def _probe(self) -> None:
        if not (self.transport.is_closing() or self.cycle.response_started):
            self.transport.write(_PROBE)
            self.loop.call_later(self.probe_interval, self._probe)

    def _end_if_stalled(self, before: tuple[int, int] | None) -> None:
        """Close the connection if the client has made no progress since ``before``."""
        now = (self._num_received, self.transport.get_write_buffer_size())
        is_waiting = (self.cycle and self.cycle.more_body) or self.flow.write_paused
        if is_waiting and now == before:
            self.transport.abort()
        elif self in self.connections:
            self.loop.call_later(self.patience, self._end_if_stalled, now)


def _warn_of_open_files(transport: asyncio.Transport) -> None:
    """Log a warning if few files can still be opened. At the limit, new clients are reset."""
    connection = transport.get_extra_info("socket")
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if connection is not None and connection.fileno() >= limit - _FEW_FILES:
        message = "Nearly all of %d files are open; new clients will be refused. Raise ulimit -n."
        logger.warning(message, limit)
