"""HTTP/1.1 connections: uvicorn's, with JSON errors and an end for stalled clients at shutdown."""

from __future__ import annotations

import sys
from http import HTTPStatus

from uvicorn.protocols.http.h11_impl import H11Protocol

_PIECE = 4096


class Protocol(H11Protocol):
    """One client's connection.

    Attributes:
      patience: seconds between checks for progress after shutdown has begun.
    """

    patience = 5.0
    _num_received = 0

    def data_received(self, data: bytes) -> None:
        """Parse data in small pieces, because h11 limits the size of incomplete headers only."""
        self._num_received += len(data)
        for start in range(0, len(data), _PIECE):
            if not self.transport.is_closing():
                super().data_received(data[start : start + _PIECE])

    def send_400_response(self, msg: str) -> None:
        """Reject an invalid request, with status 431 if its headers are too large."""
        status = HTTPStatus(getattr(sys.exception(), "error_status_hint", 400))
        head = f"HTTP/1.1 {status} {status.phrase}\r\nContent-Type: application/json\r\n"
        body = f'Connection: close\r\n\r\n{{"error": "{msg} {status.phrase}."}}'
        self.transport.write((head + body).encode())
        self.transport.close()

    def shutdown(self) -> None:
        """Close the connection once its request is answered, or if the client stalls."""
        super().shutdown()
        self._end_if_stalled(None)

    def _end_if_stalled(self, before: tuple[int, int] | None) -> None:
        """Close the connection if the client has made no progress since ``before``."""
        now = self._num_received, self.transport.get_write_buffer_size()
        waits = (self.cycle and self.cycle.more_body) or self.flow.write_paused
        if waits and now == before:
            self.transport.abort()
        elif self in self.connections:
            self.loop.call_later(self.patience, self._end_if_stalled, now)
