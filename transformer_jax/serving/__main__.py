"""Entry point of transformer-serve: an HTTP API and a web UI for translation.

python -m transformer_jax.serving --workdir runs/demo
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformer_jax import UserError, run_program
from transformer_jax.errors import needs_extra
from transformer_jax.serving.flags import Arguments, ServedModel, checked_flags

if TYPE_CHECKING:
    from transformer_jax.serving.service import Service

UVICORN: dict[str, Any] = {
    "http": "transformer_jax.serving.protocol:Protocol",
    "h11_max_incomplete_event_size": 2**16,  # bytes of headers
    "headers": [
        ("X-Content-Type-Options", "nosniff"),
        ("X-Frame-Options", "DENY"),
        ("Referrer-Policy", "no-referrer"),
    ],
    "log_level": "warning",
    "access_log": False,
    "server_header": False,
    "proxy_headers": False,
}
"""uvicorn settings."""

logger = logging.getLogger("transformer_jax.serving")


def main(argv: list[str] | None = None) -> int:
    """Run the program. Returns the exit status: 0 after SIGTERM, otherwise see ``run_program``."""
    return run_program(lambda: _serve(argv))


def _serve(argv: list[str] | None) -> None:
    arguments, served = checked_flags(argv)
    # Import late, so that --help and flag errors do not load JAX.
    with needs_extra("serve"):
        import uvicorn

        from transformer_jax.serving.app import App
        from transformer_jax.serving.hosts import allowed_hosts
        from transformer_jax.serving.log_limit import LogLimit
    # On a signal, uvicorn finishes open requests, stops and raises the signal again. Then exit
    # immediately: nothing needs to be saved, a running compilation cannot be canceled, and an
    # exception could be caught anywhere.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    _raise_open_files()
    logging.getLogger("transformer_jax").setLevel(arguments.log_level.upper())
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogLimit())
    with _listen(arguments) as listening:
        address = listening.getsockname()[0]
        hosts = allowed_hosts(arguments.allowed_hosts, arguments.host, address)
        service = _load(arguments, served)
        app = App(service, timeout=arguments.limits.timeout, allowed_hosts=hosts)
        config = uvicorn.Config(
            app.asgi(),
            timeout_graceful_shutdown=round(arguments.limits.timeout) + 5,
            **UVICORN | _access_log(arguments),
        )
        if arguments.access_log:
            _log_requests()
        # Garbage collections skip what is loaded. Otherwise, a full one would take 0.2 s, during
        # which all requests wait.
        gc.collect()
        gc.freeze()
        # With the default of 5 ms, search threads would wait too long for the server thread.
        sys.setswitchinterval(0.0005)
        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        logger.info("Listening on http://%s:%d; compiling ...", host, arguments.port)
        uvicorn.Server(config).run(sockets=[listening])


def _access_log(arguments: Arguments) -> dict[str, Any]:
    """Return uvicorn's settings of the access log. Without trusted proxies, a client cannot choose
    the address under which it is logged.
    """
    return {
        "access_log": arguments.access_log,
        "proxy_headers": bool(arguments.trusted_proxies),
        "forwarded_allow_ips": list(arguments.trusted_proxies),
    }


def _log_requests() -> None:
    """Write uvicorn's access log with the time, to stderr like all messages, and without query
    parameters, which can have text.
    """

    def without_query(record: logging.LogRecord) -> bool:
        client, method, path, *other_values = record.args or ()
        record.args = (client, method, str(path).partition("?")[0], *other_values)
        return True

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    access = logging.getLogger("uvicorn.access")
    handler.addFilter(without_query)
    access.handlers = [handler]
    access.propagate = False
    access.setLevel(logging.INFO)


def _raise_open_files() -> None:
    """Allow as many open files as the system does; each client needs one."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def _load(arguments: Arguments, served: Sequence[ServedModel]) -> Service:
    from transformer_jax import AsyncTranslator
    from transformer_jax.devices.compilation_cache import enable_compilation_cache
    from transformer_jax.serving.service import Service

    enable_compilation_cache()
    models: dict[Any, AsyncTranslator] = {}
    for workdir, pairs, search in served:
        model = AsyncTranslator.from_workdir(
            workdir, max_terms=arguments.max_terms, engine=arguments.engine, **vars(search)
        )
        if (tokenizer := model.translator.tokenizer).languages.tokens:
            for languages in pairs:
                tokenizer.affixes(*languages, "--languages: ")  # raises an error for unknown ones
        models |= dict.fromkeys(pairs, model)
        pair = pairs[0] if len(pairs) == 1 else f"{len(pairs)} language pairs"
        logger.info("%s from %s", pair, workdir)
    return Service(models, arguments.limits, protect=arguments.protect)


def _listen(arguments: Arguments) -> socket.socket:
    """Bind the port before models are loaded, so that a port in use is reported immediately."""
    try:
        family, *_, address = socket.getaddrinfo(
            os.fsencode(arguments.host), arguments.port, type=socket.SOCK_STREAM
        )[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else error.strerror
        raise UserError(
            f"Cannot listen on {arguments.host} port {arguments.port}: {reason}. "
            "Expected a free port (--port) and an address of this machine (--host)."
        ) from None


if __name__ == "__main__":
    sys.exit(main())
