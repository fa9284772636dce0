"""Reads the query of an HTTP request: JSON, or form data and query parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from fastapi import Request
from pydantic import ValidationError

from transformer_jax import UserError
from transformer_jax.errors import short_repr
from transformer_jax.serving.rejected import RequestRejected
from transformer_jax.serving.schema import CONTENT_TYPES, Query


async def read_query(request: Request, max_bytes: int) -> Query:
    """Read the query of a request, whose body has at most ``max_bytes``.

    Raises:
      UserError: a field is invalid, or the text is not UTF-8.
      RequestRejected: the request is cross-site (any web page could otherwise use a local server),
        its body is too large, or its content type is unsupported.
    """
    _check_site(request.headers)
    body = await _read_body(request, max_bytes)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and kind not in CONTENT_TYPES:
        expected = " or ".join(CONTENT_TYPES)
        raise RequestRejected(415, f"The content type is {short_repr(kind)}; expected {expected}.")
    try:
        if body and kind == "application/json":
            return Query.model_validate_json(body)
        return Query.model_validate(_form_fields(request.scope["query_string"], body))
    except ValidationError as error:
        raise UserError(_first_error(error)) from None
    except UnicodeError:
        raise UserError("The form or a query parameter is not valid UTF-8.") from None


def _check_site(headers: Mapping[str, str]) -> None:
    """Raise ``RequestRejected`` if a page of another site sent the request."""
    fetch_site = headers.get("sec-fetch-site")  # sent over HTTPS and to localhost only
    if fetch_site:
        is_own = fetch_site in ("same-origin", "none")
    else:
        origin = headers.get("origin")
        is_own = origin is None or origin.partition("://")[2] == headers.get("host")
    if not is_own:
        raise RequestRejected(
            403, "The request comes from another site; expected the web UI or an API client."
        )


async def _read_body(request: Request, limit: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            message = f"The body is too large; expected at most {limit} bytes. Send less text."
            raise RequestRejected(413, message, limit=limit)
    return bytes(body)


def _form_fields(query_string: bytes, body: bytes) -> dict[str, Any]:
    """Return the fields of a form and of query parameters; a repeated field is a list."""
    form = f"{query_string.decode()}&{body.decode()}"
    fields = parse_qs(form, keep_blank_values=True, errors="strict")
    return {name: values if len(values) > 1 else values[0] for name, values in fields.items()}


def _first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    field = [*first["loc"], "The request"][0]
    return f"{short_text(field)}: {first['msg']}; got {short_repr(first['input'])}."


def short_text(name: object) -> str:
    """Return the name of a field, shortened if it is long."""
    return str(name) if len(str(name)) <= 60 else short_repr(name)
