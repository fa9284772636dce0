"""An emulated Google Cloud Storage with one bucket, ``ckpt``, in memory.

    python tests/training/gcs_emulator.py PORT

Adds to gcp-storage-emulator what tensorstore's driver needs: a generation at each download,
ifGenerationMatch (412) and ifGenerationNotMatch (304). SIGUSR1 makes every request fail (503) until
SIGUSR2.
"""

import signal
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from typing import Any

from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

_lock = threading.RLock()


def conditional(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Make a handler for one object check the request's conditions first."""

    def handle(request: Any, response: Any, storage: Any, *others: Any, **named: Any) -> Any:
        with _lock:
            name = request.params.get("object_id") or request.query.get("name", [None])[0]
            if name is not None:
                try:
                    found = storage.get_file_obj(request.params["bucket_name"], name)
                    now = int(found["generation"])
                except NotFound:
                    now = 0
                query = {key: values[0] for key, values in request.query.items()}
                writes = handler in (objects.insert, objects.delete)
                if int(query.get("ifGenerationMatch", now)) != now:
                    if writes:
                        _ = request.data  # read the body, because the connection stays open
                    response.status = HTTPStatus.PRECONDITION_FAILED
                    return None
                if now and int(query.get("ifGenerationNotMatch", -1)) == now:
                    response.status = HTTPStatus.NOT_MODIFIED
                    return None
                if now and not writes:
                    response["x-goog-generation"] = str(now)
            return handler(request, response, storage, *others, **named)

    return handle


class Router(server.Router):  # type: ignore[misc]
    """The emulator's router, with simulated outages."""

    failing = False

    def handle(self, method: str) -> None:
        if not Router.failing:
            super().handle(method)
            return
        response = server.Response(self._request_handler)
        response.status = HTTPStatus.SERVICE_UNAVAILABLE
        response["Connection"] = "close"  # the body is not read
        self._request_handler.close_connection = True
        response.close()


def fail(number: int, frame: Any) -> None:
    """Start an outage at SIGUSR1, and end it at SIGUSR2."""
    Router.failing = number == signal.SIGUSR1


def main() -> None:
    """Serve until killed."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, fail)
    server.Router = Router
    names = ("get", "download", "insert", "delete")
    wrapped = {getattr(objects, name): conditional(getattr(objects, name)) for name in names}
    server.HANDLERS = tuple(
        (route, {method: wrapped.get(handler, handler) for method, handler in methods.items()})
        for route, methods in server.HANDLERS
    )
    ThreadingHTTPServer.daemon_threads = True
    server.server.HTTPServer = ThreadingHTTPServer
    server.create_server("127.0.0.1", int(sys.argv[1]), True, default_bucket="ckpt").run()


if __name__ == "__main__":
    main()
