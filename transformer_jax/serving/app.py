"""HTTP API, compatible with LibreTranslate, and web UI."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from fastapi_offline import FastAPIOffline
from prometheus_fastapi_instrumentator import Instrumentator
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from transformer_jax import SearchFailed, UserError
from transformer_jax.serving.answering import PendingAnswer
from transformer_jax.serving.hosts import HostCheck
from transformer_jax.serving.query_reader import read_query
from transformer_jax.serving.rejected import RequestRejected
from transformer_jax.serving.schema import Answer, Error, Language, Status, request_body
from transformer_jax.serving.service import FAILED, Service

logger = logging.getLogger(__name__)

_PAGE = Path(__file__).parent / "page"
_STATUSES: dict[int | str, dict[str, Any]] = {
    status: {"model": Error} for status in (400, 403, 413, 415, 431, 503)
}
# uvicorn drops the body of a response to HEAD.
_METHODS = {"GET": "GET", "HEAD": "GET", "POST": "POST"}


class App:
    """The HTTP endpoints of a service."""

    def __init__(self, service: Service, *, timeout: float, allowed_hosts: Sequence[str] = ("*",)):
        """``timeout`` is the maximum number of seconds from a request's start to its response.
        ``allowed_hosts`` are names for ``HostCheck``.
        """
        self.service = service
        self.timeout = timeout
        self.allowed_hosts = allowed_hosts

    def asgi(self) -> FastAPI:
        """Build the ASGI application, for a server such as uvicorn."""

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            asyncio.get_running_loop().run_in_executor(None, self.service.start)
            yield  # compilation may still be running
            await asyncio.to_thread(self.service.close)

        failures = UserError, SearchFailed, TimeoutError, ClientDisconnect, HTTPException, Exception
        app = FastAPIOffline(
            title="transformer_jax",
            docs_url=None,  # page/docs.html, which has a content security policy
            redoc_url=None,
            redirect_slashes=False,  # redirects would trust the client's Host header
            lifespan=lifespan,
            description=__doc__ or "",
            exception_handlers=dict.fromkeys(failures, self._reject),
        )
        for path, name in ("/", "index.html"), ("/docs", "docs.html"):
            page: Any = FileResponse(_PAGE / name)
            app.add_route(path, page, ["GET"])
        get = partial(app.add_api_route, response_model_exclude_none=True)
        post = partial(get, methods=["POST"], responses=_STATUSES, openapi_extra=request_body())
        post("/translate", self.translate, response_model=Answer)
        post("/translate/stream", self.stream, response_class=StreamingResponse)
        get("/languages", self.languages)
        get("/health", self.health, responses={503: {"model": Status}})
        # A mount at / would answer GET /translate with 404 instead of 405.
        app.router.default = StaticFiles(directory=_PAGE)
        registry = self.service.metrics.registry
        instrumentator = Instrumentator(should_group_status_codes=False, registry=registry)
        instrumentator.instrument(app).expose(app, endpoint="/metrics")
        app.add_middleware(partial(partial, _with_known_method))
        # Added last, runs first.
        app.add_middleware(HostCheck, allowed=self.allowed_hosts)
        return app

    async def translate(self, request: Request) -> Response:
        """Translate one or more texts. Extends LibreTranslate's API."""
        async with asyncio.timeout(self.timeout):
            query = await read_query(request, self.service.limits.max_body_bytes)
            pending_answer = await self.service.begin(query)
            content = await _response_unless_disconnected(request, pending_answer)
        if content is None:
            return Response(status_code=499)  # the client disconnected
        return Response(content, media_type="application/json")

    async def stream(self, request: Request) -> Response:
        """Translate one text and stream the result: a `sentence` event as each sentence finishes,
        then `done` with the response of /translate. A failure sends an `error` event.
        """
        end = asyncio.get_running_loop().time() + self.timeout
        async with asyncio.timeout_at(end):
            query = await read_query(request, self.service.limits.max_body_bytes)
            if not isinstance(query.q, str):
                raise UserError(
                    "q is a list; expected a single string. Use /translate to translate a list."
                )
            pending_answer = await self.service.begin(query)
        return StreamingResponse(
            self._events(pending_answer, end),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    async def languages(self) -> list[Language]:
        """List all languages, each with its target languages."""
        return self.service.pairs.languages()

    async def health(self, response: Response) -> Status:
        """Readiness check: 200 once compilation is done, otherwise 503."""
        status = self.service.status
        response.status_code = 200 if status == "ok" else 503
        return Status(status=status, engine=self.service.engine)

    async def _events(self, pending_answer: PendingAnswer, end: float) -> AsyncIterator[bytes]:
        kind = "sentence"
        try:
            async with aclosing(pending_answer.stream_sentences()) as events:
                while kind == "sentence":
                    async with asyncio.timeout_at(end):
                        kind, content = await anext(events)
                    yield _event(kind, content)
        except Exception as error:
            error_response = self._rejection(error)
            if error_response.status_code == 500:
                logger.exception("Streaming a translation failed.")
            yield _event("error", error_response.content)

    def _rejection(self, error: Exception) -> RequestRejected:
        match error:
            case RequestRejected():
                return error
            case UserError():
                return RequestRejected(400, str(error))
            case SearchFailed():
                return RequestRejected(503, FAILED)
            case TimeoutError():
                message = f"The request timed out after {self.timeout:g} s."
                return RequestRejected(503, f"{message} Send less text or retry.")
            case ClientDisconnect():
                return RequestRejected(499, "The client disconnected.")
            case HTTPException(status_code=status):
                return RequestRejected(status, f"{error.detail}. See /docs for the API.")
        return RequestRejected(500, "Internal error; see the server's log.")

    async def _reject(self, _: Request, error: Exception) -> Response:
        error_response = self._rejection(error)
        headers = getattr(error, "headers", error_response.headers)  # 405 lists allowed methods
        return Response(
            error_response.content, error_response.status_code, headers, "application/json"
        )


async def _with_known_method(app: Any, scope: Scope, receive: Receive, send: Send) -> None:
    """Run ``app`` with a method in ``_METHODS``, so that clients cannot add labels to metrics."""
    if scope["type"] == "http":
        scope = {**scope, "method": _METHODS.get(scope["method"], "OTHER")}
    await app(scope, receive, send)


async def _response_unless_disconnected(
    request: Request, pending_answer: PendingAnswer
) -> bytes | None:
    """Return the full response. If the client disconnects first, cancel the work; return None."""

    async def cancel_when_disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        pending_answer.cancel()

    disconnect_watcher = asyncio.create_task(cancel_when_disconnected())
    try:
        return await pending_answer.full_response()
    except asyncio.CancelledError:
        if not disconnect_watcher.done():
            raise
        return None
    finally:
        disconnect_watcher.cancel()


def _event(kind: str, content: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), content)
