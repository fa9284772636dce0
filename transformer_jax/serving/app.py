"""The service over HTTP: LibreTranslate's API, some fields more, and the page."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from babel import Locale, UnknownLocaleError
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from fastapi_offline import FastAPIOffline
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from transformer_jax import UserError, shown
from transformer_jax.serving.limits import BodyLimit, SecurityHeaders
from transformer_jax.serving.metrics import Measured, Metrics
from transformer_jax.serving.schema import (
    CONTENT_TYPES,
    Answer,
    Error,
    Language,
    Query,
    Status,
    request_body,
)
from transformer_jax.serving.service import Answering, Refused, Service

T = TypeVar("T")

logger = logging.getLogger(__name__)

_BROKEN = "Something failed in the server; its log says what."
_PAGE = Path(__file__).parent / "page"
_STATUSES: dict[int | str, dict[str, Any]] = {
    status: {"model": Error} for status in (400, 403, 413, 415, 503)
}
_BYTES_A_CHARACTER = 12  # \ud83d\ude00 is the longest that JSON may write, %F0%9F%98%80 a form's
_BYTES_BESIDES = 10_000


class App:
    """The requests that a service answers."""

    def __init__(self, service: Service, *, timeout: float):
        """``timeout``: the most seconds that an answer may take."""
        self.service, self.timeout = service, timeout
        self._metrics = Metrics(service)

    def asgi(self) -> FastAPI:
        """The application that a server such as uvicorn runs."""

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            asyncio.get_running_loop().run_in_executor(None, self.service.start)
            yield  # it may still compile when this goes on
            await asyncio.to_thread(self.service.close)

        app = FastAPIOffline(
            title="transformer_jax",
            redoc_url=None,
            redirect_slashes=False,  # redirects go to the Host that the client names
            lifespan=lifespan,
            description=__doc__ or "",
        )
        translate = partial(
            app.add_api_route,
            methods=["POST"],
            responses=_STATUSES,
            openapi_extra=request_body(),
        )
        translate("/translate", self.translate, response_model=Answer)
        translate("/translate/stream", self.stream, response_class=StreamingResponse)
        app.add_api_route("/languages", self.languages, response_model=list[Language])
        app.add_api_route(
            "/health", self.health, response_model=Status, responses={503: {"model": Status}}
        )
        app.add_api_route("/metrics", self.metrics, response_class=Response)
        for name in ("", "page.js", "words.js", "page.css"):
            file = _page(name or "index.html")
            app.add_api_route(f"/{name}", file, methods=["GET", "HEAD"], include_in_schema=False)
        for failure in _FAILURES:
            app.add_exception_handler(failure, self._refuse)
        app.add_exception_handler(HTTPException, _not_found)
        app.add_exception_handler(Exception, _broken)
        most_bytes = self.service.max_characters * _BYTES_A_CHARACTER + _BYTES_BESIDES
        app.add_middleware(BodyLimit, limit=most_bytes)
        app.add_middleware(SecurityHeaders)
        app.add_middleware(Measured, metrics=self._metrics)
        return app

    async def translate(self, request: Request) -> Response:
        """Translate a text, or several, as LibreTranslate does, with some more fields."""
        query = await _query(request)
        answering = self.service.begin(query)
        async with asyncio.timeout(self.timeout):
            answer = await _unless_gone(request, answering.whole())
        if answer is None:  # nobody is there to read this
            return Response(status_code=499)
        return JSONResponse(answer.model_dump(exclude_none=True))

    async def stream(self, request: Request) -> Response:
        """Translate a text, answering with an event `sentence` for each of its sentences as soon as
        it is done, then `done` with what /translate answers, or `error`.
        """
        query = await _query(request)
        if not isinstance(query.q, str):
            raise UserError("q is a list; expected one text where sentences are streamed.")
        query.details = True
        return StreamingResponse(
            self._events(self.service.begin(query)),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    async def languages(self) -> list[Language]:
        """The languages to translate from, each with those to translate into."""
        targets: dict[str, list[str]] = {}
        for pair in self.service.models:
            targets.setdefault(pair.source, []).append(pair.target)
        return [
            Language(code=code, name=_language_name(code), targets=into)
            for code, into in targets.items()
        ]

    async def health(self) -> Response:
        """Whether the server translates: 200 only after compiling."""
        status = self.service.status
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def metrics(self) -> Response:
        """The server's figures, for Prometheus."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _events(self, answering: Answering) -> AsyncIterator[str]:
        end = asyncio.get_running_loop().time() + self.timeout
        try:
            async with aclosing(answering.by_sentence()) as coming:
                for index in itertools.count():
                    async with asyncio.timeout_at(end):
                        each = await anext(coming)
                    if isinstance(each, Answer):
                        yield _event("done", each.model_dump(exclude_none=True))
                        return
                    before, sentence = each
                    fields = sentence.model_dump(exclude_none=True)
                    yield _event("sentence", {"index": index, "before": before} | fields)
        except _FAILURES as error:
            yield _event("error", _told(self._refusal(error)))
        except Exception:
            logger.exception("A stream ends early.")
            yield _event("error", {"error": _BROKEN})

    def _refusal(self, error: Exception) -> Refused:
        if isinstance(error, TimeoutError):
            said = f"The translation took more than {self.timeout:g} s; send less, or later."
            return Refused(503, said, retry_after=1)
        return error if isinstance(error, Refused) else Refused(400, str(error))

    async def _refuse(self, _: Request, error: Exception) -> Response:
        refused = self._refusal(error)
        wait = refused.retry_after
        headers = {} if wait is None else {"Retry-After": str(wait)}
        return JSONResponse(_told(refused), refused.status, headers)


_FAILURES = (UserError, Refused, TimeoutError)


async def _query(request: Request) -> Query:
    """What a request asks: JSON, or a form and the URL's parameters.

    Raises:
      UserError: fields that are wrong or no UTF-8.
      Refused: a page of another site that a browser shows; a body of another type.
    """
    if _is_foreign(request):
        raise Refused(403, "A page of another site asks; expected the web UI or a program.")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await request.body()
    if body and kind not in CONTENT_TYPES:
        said = f"The content type is {shown(kind)}; expected one of {', '.join(CONTENT_TYPES)}."
        raise Refused(415, said)
    try:
        if body and kind == "application/json":
            return Query.model_validate_json(body)
        form = body.decode()
        fields: list[tuple[str, Any]] = _url_fields(request.scope["query_string"].decode())
        if kind == "multipart/form-data":
            async with request.form() as parts:
                fields += parts.multi_items()
        else:
            fields += _url_fields(form)
        return Query.model_validate(_by_name(fields))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = [*first["loc"], "The request"][0]
        raise UserError(f"{field}: {first['msg']}; it is {shown(first['input'])}.") from None
    except UnicodeError:
        raise UserError("The form or a URL parameter is not UTF-8; expected UTF-8.") from None


def _is_foreign(request: Request) -> bool:
    """Whether a browser sends this for a page of another site, which would spend a local server's
    time. (Browsers send ``Sec-Fetch-Site`` to HTTPS and localhost only.)
    """
    if site := request.headers.get("sec-fetch-site"):
        return site not in ("same-origin", "none")
    origin = request.headers.get("origin")
    return origin is not None and origin.partition("://")[2] != request.headers.get("host")


_url_fields = partial(parse_qsl, keep_blank_values=True, errors="strict")


def _by_name(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """A form's fields; one that comes several times is a list."""
    values: dict[str, list[Any]] = {}
    for name, value in items:
        values.setdefault(name, []).append(value)
    return {name: each if len(each) > 1 else each[0] for name, each in values.items()}


async def _unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """The result of ``work``; None if the client goes away before, which cancels it."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for each in (working, watching):
            each.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def _told(refused: Refused) -> dict[str, Any]:
    return Error(error=str(refused), limit=refused.limit).model_dump(exclude_none=True)


def _event(kind: str, data: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"


def _page(name: str) -> Callable[[], Awaitable[FileResponse]]:
    async def page() -> FileResponse:
        return FileResponse(_PAGE / name)

    return page


def _language_name(code: str) -> str:
    try:
        return Locale.parse(code, sep="-" if "-" in code else "_").english_name or code
    except (UnknownLocaleError, ValueError):
        return code


async def _not_found(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = f"{error.detail}; /docs lists what there is."
    return JSONResponse({"error": said}, error.status_code, error.headers)


async def _broken(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": _BROKEN}, 500)
