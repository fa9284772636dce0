"""The program transformer-serve: translates for other programs, and on a page for people.

python -m transformer_jax.serving --workdir runs/demo
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from pathlib import Path

from transformer_jax.cli import run_program
from transformer_jax.errors import UserError
from transformer_jax.serving.flags import Arguments, parse_flags

log = logging.getLogger("transformer_jax.serving")


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status: 0 after SIGTERM, otherwise as ``run_program``."""
    return run_program(lambda: _serve(sys.argv[1:] if argv is None else argv))


def _serve(argv: list[str]) -> None:
    arguments, served = parse_flags(argv)
    # Imports stand where they are needed: --help and wrong flags are answered before JAX is loaded.
    try:
        import uvicorn

        from transformer_jax.serving.app import App
        from transformer_jax.serving.limits import ApiKeys
    except ModuleNotFoundError as error:
        raise UserError(
            f"{error.name} is not installed; expected what the service needs besides: "
            "pip install 'transformer-jax[serve]'."
        ) from None
    from transformer_jax.compilation_cache import keep_compiled
    from transformer_jax.model.layers import use_matmul_precision
    from transformer_jax.serving.service import Model, Service

    keys = ApiKeys.load(Path(arguments.api_keys)) if arguments.api_keys else None
    listening = _listen(arguments)
    keep_compiled(arguments.compilation_cache)
    models = {}
    for workdir, pair, config, search in served:
        use_matmul_precision(config.model)
        models[pair] = Model.load(
            workdir,
            search,
            sampling=arguments.sampling,
            checkpoint=arguments.checkpoint,
            average=arguments.average,
        )
        log.info("%s: %s from %s", pair, models[pair].translator, workdir)
    service = Service(
        models, max_queue=arguments.max_queue, max_characters=arguments.max_characters
    )
    app = App(
        service,
        timeout=arguments.timeout,
        requests_per_minute=arguments.requests_per_minute,
        api_keys=keys,
    )
    server = uvicorn.Config(
        app.asgi(),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=round(arguments.timeout) + 5,
    )
    log.info("http://%s:%d is the page; compiling ...", arguments.host, arguments.port)
    # uvicorn stops at these signals when every request is answered, then raises them once more.
    signal.signal(signal.SIGTERM, lambda *_: None)
    uvicorn.Server(server).run(sockets=[listening])


def _listen(arguments: Arguments) -> socket.socket:
    """Before anything is loaded: a port that is in use is known at once."""
    try:
        family, *_, address = socket.getaddrinfo(
            arguments.host, arguments.port, type=socket.SOCK_STREAM
        )[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise UserError(
            f"{arguments.host} port {arguments.port} cannot be listened at: {error.strerror}; "
            "expected a free port (--port) and an address of this machine (--host)."
        ) from None


if __name__ == "__main__":
    sys.exit(main())
