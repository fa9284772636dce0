"""transformer-serve as a program: flags, startup errors, shutdown."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from servers import (
    CONFIG,
    LINES,
    answering,
    free_port,
    make_model_to_serve,
    running,
    serving,
    write_served_run,
)

from transformer_jax.errors import UserError
from transformer_jax.serving import __main__ as program
from transformer_jax.serving.app import App
from transformer_jax.serving.flags import Arguments, Pair, checked_flags
from transformer_jax.serving.hosts import allowed_hosts
from transformer_jax.serving.limits import Limits
from transformer_jax.serving.service import Service
from transformer_jax.translation.translator import Translator

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory, translator: Translator) -> Path:
    """A run with one checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    write_served_run(folder, translator)
    return folder


def only_config(workdir: Path, folder: Path) -> Path:
    """Make a folder with only the run's config."""
    folder.mkdir()
    shutil.copy(workdir / "config.json", folder)
    return folder


def test_languages_have_neutral_codes_by_default(workdir) -> None:
    _, [served] = checked_flags(["--workdir", str(workdir)])
    assert served.pairs == [Pair("source", "target")]
    _, [served] = checked_flags(["--workdir", str(workdir), "--languages", "en-pt_BR"])
    assert served.pairs == [Pair("en", "pt_BR")]


@pytest.mark.parametrize(
    ("flag", "pair"),
    [
        ("en-de", Pair("en", "de")),
        ("en-pt-BR", Pair("en", "pt-BR")),
        ("zh-Hans-en", Pair("zh-Hans", "en")),
        ("zh-Hans-TW-es-419", Pair("zh-Hans-TW", "es-419")),
        ("pt_br-zh_Hant", Pair("pt_br", "zh_Hant")),
        *((wrong, None) for wrong in ("en", "en-", "en-pt-br", "en-de-fr", "EN-de", "en--de")),
    ],
)
def test_languages_have_codes_with_hyphens(workdir, flag, pair) -> None:
    flags = ["--workdir", str(workdir), "--languages", flag]
    if pair:
        _, [served] = checked_flags(flags)
        assert served.pairs == [pair] and str(served.pairs[0]) == flag
    else:
        with pytest.raises(UserError, match="expected pairs of codes, such as en-de or en-pt-BR"):
            checked_flags(flags)


def test_allowed_hosts_are_a_list(workdir) -> None:
    flags = ["--workdir", str(workdir), "--allowed-hosts", "a.example", "*.b.example"]
    arguments, _ = checked_flags(flags)
    hosts = allowed_hosts(arguments.allowed_hosts, arguments.host, "127.0.0.1")
    assert hosts == ("a.example", "*.b.example")


def test_search_flags_apply_to_all_models(workdir, tmp_path) -> None:
    other = only_config(workdir, tmp_path / "other")
    text = json.loads((other / "config.json").read_text())
    text["decoding"] |= {"beam_size": 7, "length_penalty": 1.5, "method": "sample"}
    (other / "config.json").write_text(json.dumps(text))
    flags = ["--workdir", str(workdir), str(other), "--languages", "en-de", "fr-de"]
    flags += ["--length-penalty", "0.8", "--temperature", "0.5"]
    _, [first, second] = checked_flags(flags)
    assert first.pairs == [Pair("en", "de")] and second.pairs == [Pair("fr", "de")]
    changed = replace(CONFIG, length_penalty=0.8, temperature=0.5)
    assert first.search == changed
    assert second.search == replace(changed, beam_size=7, method="sample")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--workdir is missing"),
        (
            ["--workdir", "W", "W", "--languages", "en-de", "en-de"],
            "both translate en-de; expected one model per language pair",
        ),
        (["--workdir", "W", "W", "--languages", "en-pt-BR", "en-pt_br"], "both translate en-pt_br"),
        (["--workdir", "W", "--workdir", "W"], "--languages has 1 pair(s) for 2 work directories"),
        (["--workdir", "W", "--languages", "en-de", "fr-de"], "2 pair(s) for 1 work directories"),
        (["--workdir", "W", "--languages", "English-German"], "has 'English-German'; expected"),
        (["--workdir", "W", "--port", "70000"], "--port is 70000; expected 1 to 65535"),
        (["--workdir", "W", "--protect", "a("], "--protect is ('a(',); expected regular express"),
        (["--workdir", "W", "--max-queue", "0"], "--max-queue is 0; expected a positive number"),
        (
            ["--workdir", "W", "--trusted-proxies", "10.0.0.0/8", "proxy"],
            "--trusted-proxies has 'proxy'",
        ),
        (["--workdir", "W", "--timeout", "nan"], "--timeout is nan; expected a finite number"),
        (["--workdir", "nowhere"], "'nowhere' is not a folder; expected a work directory"),
    ],
)
def test_invalid_flags(workdir, flags, message) -> None:
    with pytest.raises(UserError) as raised:
        checked_flags([str(workdir) if flag == "W" else flag for flag in flags])
    assert message in str(raised.value)


def test_ports_in_use_and_missing_checkpoints_are_errors(workdir, tmp_path, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert program.main(["--workdir", str(workdir), "--port", str(port)]) == 2
    assert "Address already in use. Expected a free port (--port)" in capsys.readouterr().err
    assert program.main(["--workdir", str(workdir), "--host", "my..host"]) == 2
    assert "Cannot listen on my..host port 8000: " in capsys.readouterr().err
    empty = only_config(workdir, tmp_path / "empty")
    port = free_port()
    assert program.main(["--workdir", str(empty), "--port", str(port)]) == 2
    assert "checkpoint" in capsys.readouterr().err


def test_flags_reach_the_server(workdir, monkeypatch) -> None:
    """It ends at most 5 s after the last request has timed out."""
    made: dict[str, Any] = {}
    original = App.asgi
    monkeypatch.setattr(App, "asgi", lambda self: made.update(app=self) or original(self))
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: made.update(server=self))
    # It closes all handlers, and absl's closes the stderr of before the program: pytest's.
    monkeypatch.setattr(uvicorn.Config, "configure_logging", lambda self: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    port = str(free_port())
    flags = ["--max-queue", "7", "--max-characters", "8", "--timeout", "9", "--beam-size", "2"]
    assert program.main(["--workdir", str(workdir), "--port", port, *flags]) == 0
    assert made["app"].service.engine == "ctranslate2"
    app, config = made["app"], made["server"].config
    assert (app.service.limits, app.timeout) == (Limits(7, 8, 9), 9)
    assert config.timeout_graceful_shutdown == 14
    assert [model.config.beam_size for model in app.service.models.values()] == [2]
    assert app.allowed_hosts == ["localhost", "127.0.0.1"]  # and any IP address
    assert not config.access_log and not config.proxy_headers


@pytest.mark.parametrize(
    ("proxies", "client"),
    [((), "127.0.0.1"), (("127.0.0.0/8",), "203.0.113.9"), (("10.0.0.1",), "127.0.0.1")],
)
def test_the_access_log_names_clients_of_trusted_proxies_only(
    proxies, client, capsys, monkeypatch
) -> None:
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    arguments = Arguments(access_log=True, trusted_proxies=proxies)
    access = logging.getLogger("uvicorn.access")
    for name in ("handlers", "level", "propagate"):  # uvicorn changes them
        monkeypatch.setattr(access, name, getattr(access, name))
    # It closes all handlers, and absl's closes pytest's stderr.
    monkeypatch.setattr(uvicorn.Config, "configure_logging", lambda self: None)
    settings = program._access_log(arguments)
    with answering(app, lifespan="off", **settings) as port:
        program._log_requests()
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/health?q=x", headers={"X-Forwarded-For": "203.0.113.9"})
        assert connection.getresponse().status == 204
        connection.close()
    line = capsys.readouterr().err
    assert re.fullmatch(rf"\d{{4}}-.* {client}:\d+ - \"GET /health HTTP/1.1\" 204\n", line)


@pytest.fixture(scope="module")
def command(workdir) -> list[str]:
    flags = ["--workdir", str(workdir), "--languages", "en-de", "--engine", "jax"]
    return [sys.executable, "-m", "transformer_jax.serving", *flags]


@pytest.fixture
def process(command) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The program when it is ready, and its port. A batch of one row compiles fastest."""
    with running([*command, "--batch-size", "1"], ROOT) as found:
        yield found


def test_sigterm_under_load_finishes_accepted_requests(process, translator) -> None:
    started, port = process
    expected = translator.translate(LINES)
    wrong, answered, stopping = [], [0] * 8, threading.Event()

    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for i in range(number, 100_000):
            query = {"q": LINES[i % 60], "source": "en", "target": "de", "split": False}
            headers = {"Content-Type": "application/json"}
            try:
                if connection.sock is None:
                    connection.connect()
            except OSError:
                break  # no new connections
            try:
                connection.request("POST", "/translate", json.dumps(query), headers)
                reply = connection.getresponse()
                body = json.loads(reply.read())
            except (OSError, http.client.HTTPException) as error:
                if not stopping.is_set():
                    wrong.append(repr(error))
                break  # a connection without a request in progress was closed
            if body != {"translatedText": expected[i % 60]}:
                wrong.append((reply.status, body))
            answered[number] += 1
        connection.close()

    threads = [threading.Thread(target=client, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    half = socket.create_connection(("127.0.0.1", port))
    half.sendall(b"POST /translate HTTP/1.1\r\nHost: x\r\n")  # never completed
    while sum(answered) < 200:
        time.sleep(0.01)
    stopping.set()
    started.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert started.wait(60) == 0 and not wrong
    assert started.stderr is not None
    said = started.stderr.read().decode()
    assert "Traceback" not in said, said
    half.close()


def test_an_upgrade_on_one_host_loses_no_request(translator) -> None:
    """Clients of a proxy see no error while it switches from one server to the next."""
    models = [{Pair("en", "de"): make_model_to_serve(translator, batch_size=2)} for _ in range(2)]
    services = [Service(each, Limits(100, 2000)) for each in models]
    upstream = [0]
    proxy = socket.create_server(("127.0.0.1", 0))
    faults, answered, stopping = [], [0] * 4, threading.Event()
    body = json.dumps({"q": "one two three", "source": "en", "target": "de"}).encode()
    expected = translator.translate(["one two three"])[0]

    def send_back(server: socket.socket, connection: socket.socket) -> None:
        with server, connection:
            while data := server.recv(2**16):
                connection.sendall(data)

    def forward() -> None:
        """Forward each request on a connection of its own, as nginx does by default. Once a request
        has reached the new server, all earlier ones have reached the old one.
        """
        while True:
            try:
                connection = proxy.accept()[0]
            except OSError:  # the proxy is shut down, after all clients have ended
                return
            request = b""
            while not request.endswith(body):
                request += connection.recv(2**16)
            server = socket.create_connection(("127.0.0.1", upstream[0]))
            server.sendall(request)
            threading.Thread(target=send_back, args=[server, connection]).start()

    def client(number: int) -> None:
        while not stopping.is_set():
            connection = http.client.HTTPConnection(*proxy.getsockname(), timeout=60)
            try:
                headers = {"Content-Type": "application/json", "Connection": "close"}
                connection.request("POST", "/translate", body, headers)
                reply = connection.getresponse()
                content = json.loads(reply.read())
                if content != {"translatedText": expected}:
                    faults.append((reply.status, content))
            except (OSError, http.client.HTTPException) as error:
                faults.append(repr(error))
            connection.close()
            answered[number] += 1

    def wait_for(count: int) -> None:
        end = sum(answered) + count
        while sum(answered) < end and not faults:
            time.sleep(0.01)

    with ExitStack() as newer:
        with serving(services[0], translator) as old:
            upstream[0] = old.port
            threads = [threading.Thread(target=forward, daemon=True)]
            threads += [threading.Thread(target=client, args=[number]) for number in range(4)]
            for thread in threads:
                thread.start()
            wait_for(20)
            new = newer.enter_context(serving(services[1], translator))  # when it is ready
            wait_for(20)
            upstream[0] = new.port
            wait_for(20)  # the last one of them from the new server
        wait_for(20)  # the old server has ended
        stopping.set()
        for thread in threads[1:]:
            thread.join()
    proxy.shutdown(socket.SHUT_RDWR)
    threads[0].join()
    proxy.close()
    for service in services:
        service.close()
    assert not faults and sum(answered) >= 80


def test_sigterm_ends_the_program_while_it_loads(command) -> None:
    port = free_port()
    with subprocess.Popen([*command, "--port", str(port)], cwd=ROOT) as started:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert started.poll() is None
                time.sleep(0.05)
        started.terminate()
        assert started.wait(60) == 0


def test_ctrl_c_does_not_wait_for_compilation(command, tmp_path) -> None:
    command = [*command, "--port", str(free_port())]
    empty = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "empty")}
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=empty
    ) as started:
        assert started.stderr is not None
        said = ""
        while "Compiling" not in said:
            said = started.stderr.readline()
            assert said
        started.send_signal(signal.SIGINT)
        _, said = started.communicate(timeout=60)
        assert started.returncode == 130 and "Ready" not in said
