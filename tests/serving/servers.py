"""Servers with small random models, each on its own port, and requests to them."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode
from urllib.request import urlopen

import uvicorn
from random_models import lines_of_words, write_run

from transformer_jax.decoding.devices import devices_for_rows
from transformer_jax.serving.__main__ import UVICORN
from transformer_jax.serving.app import App
from transformer_jax.serving.service import Service
from transformer_jax.settings.config import Config, DecodingConfig
from transformer_jax.translation.async_translator import AsyncTranslator
from transformer_jax.translation.translator import Translator

LINES = lines_of_words(60)
CONFIG = DecodingConfig(beam_size=3, max_extra_length=10, max_source_length=24, batch_size=4)


class Reply(NamedTuple):
    """An HTTP response."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class Server(NamedTuple):
    """A running server, its service, and a translator with the same model."""

    port: int
    service: Service
    translator: Translator

    @property
    def url(self) -> str:
        """The base URL without a trailing slash."""
        return f"http://127.0.0.1:{self.port}"

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """Send one request on a new connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            reply = connection.getresponse()
            return Reply(reply.status, reply.headers, reply.read())
        finally:
            connection.close()

    def ask(self, path: str = "/translate", **fields: Any) -> Reply:
        """Send a JSON query, by default from en to de."""
        query = {"source": "en", "target": "de"} | fields
        return self.request("POST", path, json.dumps(query), content_type="application/json")

    def ask_form(self, **fields: Any) -> Reply:
        """Send a form, by default from en to de."""
        body = urlencode({"source": "en", "target": "de"} | fields, doseq=True)
        kind = "application/x-www-form-urlencoded"
        return self.request("POST", "/translate", body, content_type=kind)

    def is_idle(self) -> bool:
        """Wait until no sentence has a row or waits for one; False after 60 s."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            searches = [model.workers for model in self.service.models.values()]
            rows = sum(each.num_running + each.queue.num_waiting for each in searches)
            if not rows and not self.service.num_accepted:
                return True
            time.sleep(0.01)
        return False


@contextmanager
def serving(service: Service, translator: Translator, **settings: Any) -> Iterator[Server]:
    """Run a server for this service until the end of the block."""
    app = App(service, **{"timeout": 60, **settings}).asgi()
    with answering(app, lifespan="on") as port:
        found = Server(port, service, translator)
        while service.status == "compiling":
            time.sleep(0.01)
        for model in service.models.values():
            model.workers.wait_until_compiled()
        yield found


@contextmanager
def answering(app: Any, **settings: Any) -> Iterator[int]:
    """Run an ASGI application with uvicorn until the end of the block. Yields its port. The end is
    a shutdown as after SIGTERM.
    """
    config = uvicorn.Config(app, port=0, **UVICORN | settings)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def make_model_to_serve(
    translator: Translator, *, max_terms: int = 0, **settings: Any
) -> AsyncTranslator:
    """Make a model with the parameters of ``translator``; ``settings`` override CONFIG."""
    config = dataclasses.replace(CONFIG, **settings)
    options = {"devices": devices_for_rows(config.batch_size)}
    served = Translator(translator.model, translator.tokenizer, config, **options)
    return AsyncTranslator(served, max_terms=max_terms)


def write_served_run(folder: Path, translator: Translator) -> None:
    """Write a run with one checkpoint, the model of ``translator``."""
    model = translator.model
    config = Config(model=model.config, decoding=CONFIG)
    write_run(folder, config, translator.tokenizer, {1: model}, best_step=1)


@contextmanager
def running(
    command: Sequence[str | Path], folder: Path, **environment: str
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start transformer-serve with ``command``. Yields it and its port when it is ready."""
    port = free_port()
    flags = ["--port", str(port)]
    with subprocess.Popen(
        [*command, *flags], cwd=folder, env=os.environ | environment, stderr=subprocess.PIPE
    ) as started:
        try:
            while not _is_ready(port):
                assert started.poll() is None
                time.sleep(0.1)
            yield started, port
        finally:
            started.kill()


def free_port() -> int:
    """Find a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def _is_ready(port: int) -> bool:
    try:
        return urlopen(f"http://127.0.0.1:{port}/health").status == 200
    except OSError:
        return False
