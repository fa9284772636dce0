"""The exception for requests that the service rejects."""

from __future__ import annotations

from starlette.exceptions import HTTPException

from transformer_jax.serving.schema import Error

_HEADERS = {
    413: {"Connection": "close"},  # the rest of the body is never read
    503: {"Retry-After": "1"},
}


class RequestRejected(HTTPException):
    """Raised to reject a request that is too large or not allowed, or because the server is busy.

    Attributes:
      content: the response body, JSON.
    """

    def __init__(self, status: int, message: str, *, limit: int | None = None):
        """``limit`` is the limit that the request exceeds, if any."""
        super().__init__(status, message, _HEADERS.get(status))
        error = Error(error=message, limit=limit)
        self.content = error.model_dump_json(exclude_none=True).encode()
