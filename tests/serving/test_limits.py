"""Every limit of the service: its unit, its scope, and what happens beyond it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from servers import LINES, Reply, Server, answering
from starlette.responses import Response

from transformer_jax.serving import service as service_module
from transformer_jax.serving.app import App
from transformer_jax.serving.flags import Arguments, Pair
from transformer_jax.serving.hosts import allowed_hosts
from transformer_jax.serving.schema import Query
from transformer_jax.translation import plan as plan_module
from transformer_jax.translation.requests import Request
from transformer_jax.translation.translator import Translator

JSON, FORM = "application/json", "application/x-www-form-urlencoded"
PATHS = "/translate", "/translate/stream"
LIGATURE = "\ufdfa"  # one character, 18 after NFKC
MAX_CHARACTERS, MAX_QUEUE = 2000, 100  # of the server in conftest.py


def series(server: Server) -> set[str]:
    figures = server.request("GET", "/metrics").body.decode().splitlines()
    return {line.rpartition(" ")[0] for line in figures if not line.startswith("#")}


MADE_UP: dict[str, Callable[[Server, str], Reply]] = {
    "method": lambda server, x: server.request(x, "/translate"),
    "method of a page": lambda server, x: server.request(x, "/"),
    "path": lambda server, x: server.request("GET", f"/{x}"),
    "path below a route": lambda server, x: server.request("GET", f"/translate/{x}"),
    "path below a folder": lambda server, x: server.request("GET", f"/static-offline-docs/{x}"),
    "parameter": lambda server, x: server.request("GET", f"/languages?{x}={x}"),
    "host": lambda server, x: server.request("GET", "/health", host=f"{x}.example"),
    "header": lambda server, x: server.request("GET", "/health", **{x: x}),
    "content type": lambda server, x: server.request("POST", "/translate", x, content_type=x),
    "field": lambda server, x: server.ask(**{x: x}),
    "language": lambda server, x: server.ask(q="one", source=x, target=x),
    "case of a language": lambda server, x: server.ask(q="one", target=f"{'dD'[x < 'B']}e"),
    "text": lambda server, x: server.ask(q=x),
}


@pytest.mark.parametrize("kind", MADE_UP)
def test_metrics_do_not_grow_with_what_clients_invent(server: Server, kind: str) -> None:
    series(server)  # /metrics itself is counted
    MADE_UP[kind](server, "A1")
    before = series(server)
    for invented in "B2", "C3", "D4":
        MADE_UP[kind](server, invented)
    assert series(server) == before


def padded(fields: dict[str, Any], size: int) -> bytes:
    return json.dumps({"source": "en", "target": "de"} | fields).encode().ljust(size)


def in_pieces(body: bytes) -> Iterator[bytes]:
    """A chunked body, in pieces that the server receives one at a time."""
    for start in range(0, len(body), 12_000):
        time.sleep(0.03)
        yield body[start : start + 12_000]


def post_body(server: Server, path: str, body: Any, kind: str = JSON, **headers: str) -> Reply:
    return server.request("POST", path, body, content_type=kind, **headers)


FIELDS = "target=de&q=one"
MAX_BODY = MAX_CHARACTERS * 12 + 10_000
# Each sends a request of a size, at most this size, and the status above it.
LIMITS: dict[str, tuple[Callable[[Server, str, int], Reply], int, int]] = {
    "characters of a text": (lambda s, p, n: s.ask(p, q=" " * n), MAX_CHARACTERS, 413),
    "characters beyond 16 bits": (lambda s, p, n: s.ask(p, q="😀" * n), MAX_CHARACTERS, 413),
    "characters of a text and the prefix": (
        lambda s, p, n: s.ask(p, q=" " * (n - 3), prefix="SIX"),
        MAX_CHARACTERS,
        413,
    ),
    "characters of all texts and the prefix": (
        lambda s, p, n: s.ask(p, q=[" " * (n - 1003), " " * 1000], prefix="SIX"),
        MAX_CHARACTERS,
        413,
    ),
    "texts": (lambda s, p, n: s.ask(p, q=[""] * n), MAX_QUEUE, 413),
    "sentences": (lambda s, p, n: s.ask(p, q="\n".join(["one"] * n)), MAX_QUEUE, 413),
    "sentences of all texts": (
        lambda s, p, n: s.ask(p, q=["one"] * (n - 2) + ["two\nsix"]),
        MAX_QUEUE,
        413,
    ),
    "alternatives": (lambda s, p, n: s.ask(p, q="one", alternatives=n), 2, 400),
    "alternatives of all texts": (
        lambda s, p, n: s.ask(p, q=["one", "two"], alternatives=n),
        2,
        400,
    ),
    "tokens of the prefix": (lambda s, p, n: s.ask(p, q="one", prefix=prefix(s, n)), 10, 400),
    "tokens of all texts' prefix": (
        lambda s, p, n: s.ask(p, q=["", "one"], prefix=prefix(s, n)),
        10,
        400,
    ),
    "bytes of a body": (
        lambda s, p, n: post_body(s, p, padded({"q": "one"}, n)),
        MAX_BODY,
        413,
    ),
    "bytes of a form": (lambda s, p, n: post_body(s, p, FIELDS.ljust(n, "&"), FORM), MAX_BODY, 413),
    "bytes of a body in an unknown encoding": (
        lambda s, p, n: post_body(s, p, b"\xff" * n, "x"),
        MAX_BODY,
        413,
    ),
    "bytes of a body in chunks": (
        lambda s, p, n: post_body(s, p, in_pieces(padded({"q": "one"}, n))),
        MAX_BODY,
        413,
    ),
    "bytes of a body in pieces": (
        lambda s, p, n: post_body(s, p, in_pieces(padded({"q": "one"}, n)), content_length=str(n)),
        MAX_BODY,
        413,
    ),
}


def prefix(server: Server, num_tokens: int) -> str:
    """A prefix of this many target tokens."""
    encode = server.translator.tokenizer.target.encode
    words = " ".join(LINES).upper()
    return next(
        words[:end] for end in range(len(words)) if len(encode([words[:end]])[0]) == num_tokens
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"q": "x"},
        {"q": ["x", "x"]},
        {"q": "x", "prefix": "x"},
        {"q": "x", "glossary": {"x": "x"}},
        {"q": ["x", ""], "prefix": "x", "glossary": {"x": ["x", "x"], "xx": "xxx"}},
    ],
)
def test_all_text_of_a_query_counts(fields: dict[str, Any]) -> None:
    """Tokenizing any of it takes time."""
    query = Query(target="de", **fields)
    assert query.num_characters == json.dumps(fields).count("x") - ("prefix" in fields)


@pytest.mark.parametrize(
    ("limit", "path"),
    # A stream takes one text.
    [
        (limit, path)
        for limit in LIMITS
        for path in PATHS
        if path == PATHS[0] or "texts" not in limit
    ],
)
def test_limits_are_exact(server: Server, limit: str, path: str) -> None:
    ask, most, status = LIMITS[limit]
    assert ask(server, path, most).status == (415 if "unknown" in limit else 200)
    reply = ask(server, path, most + 1)
    assert reply.status == status and str(most) in reply.json["error"]
    if status == 413:
        assert reply.json["limit"] == most


@pytest.mark.parametrize("where", ["one header", "many headers", "the path"])
def test_headers_have_64_kb(server: Server, where: str) -> None:
    """In one piece or many, with an end or without."""

    def status(size: int) -> bytes:
        path, headers = b"/health", b"X: " + b"x" * size
        if where == "many headers":
            headers = b"\r\n".join([b"X: x"] * (size // 6))
        elif where == "the path":
            path, headers = b"/health?" + b"x" * size, b"X: x"
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            client.sendall(b"GET %b HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n" % (path, headers))
            reply = client.recv(1000)
        if b" 431 " in reply:
            assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
        return reply.split()[1]

    assert status(60_000) == b"200"
    assert [status(size) for size in (75_000, 100_000, 1_000_000)] == [b"431"] * 3


def test_segments_count_in_the_queue(server: Server) -> None:
    """A request costs as much as its segments, however few characters and sentences it has."""
    translator = server.translator
    text = LIGATURE * 20
    count = len(translator.plan(Request(text)).sentences)
    assert 4 < count < MAX_QUEUE

    async def accepted() -> tuple[int, int]:
        answering = await server.service.begin(Query(q=[text, "one"], target="de", split=False))
        during = server.service.num_accepted
        await answering.full_response()
        await asyncio.sleep(0)
        return during, server.service.num_accepted

    assert asyncio.run(accepted()) == (count + 1, 0)
    reply = server.ask(q=LIGATURE * MAX_CHARACTERS, split=False)
    assert reply.status == 413 and "sentences; expected at most 100" in reply.json["error"]


@pytest.mark.parametrize("path", PATHS)
def test_texts_are_tokenized_outside_the_event_loop(
    server: Server, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_loop = []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **settings: Any) -> Any:
            in_loop.append(asyncio._get_running_loop() is not None)
            return original(*args, **settings)

        monkeypatch.setattr(owner, name, watched)

    model = server.service.models[Pair("en", "de")]
    watch(model.translator.tokenizer.source, "encode")
    watch(model.translator.tokenizer.target, "encode")
    watch(plan_module, "divide")
    reply = server.ask(path, q=LINES[3], prefix="SIX", attention=True)
    assert reply.status == 200 and len(in_loop) > 3
    in_loop.clear()
    asyncio.run(model.translate(LINES[3]))
    assert in_loop and not any(in_loop)


@pytest.mark.parametrize(
    ("limit", "above"),
    [
        ("MAX_ALIGNED_REQUEST_TOKENS", [False, False]),
        ("MAX_ALIGNED_SENTENCE_TOKENS", [True, False]),
    ],
    ids=["tokens of a request", "tokens of a sentence"],
)
def test_attention_is_limited(
    server: Server, limit: str, above: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second sentence has several segments, whose tokens count together."""
    lines = [LINES[3], " ".join(LINES[3:8])]
    counts = [
        sum(len(segment.tokens) for segment in server.translator.plan(Request(line)).sentences)
        for line in lines
    ]
    most = sum(counts) if limit == "MAX_ALIGNED_REQUEST_TOKENS" else counts[1]

    def with_attention() -> list[bool]:
        reply = server.ask(q=lines, attention=True, split=False)
        found = ["alignment" in sentence for [sentence] in reply.json["sentences"]]
        reply = server.ask("/translate/stream", q="\n".join(lines), attention=True)
        assert ['"alignment":' in data for data in reply.body.decode().split("\n\n")[:2]] == found
        return found

    monkeypatch.setattr(service_module, limit, most)
    assert with_attention() == [True, True]
    monkeypatch.setattr(service_module, limit, most - 1)
    assert with_attention() == above


@pytest.mark.parametrize("path", PATHS)
def test_time_is_limited_from_request_to_response(
    server: Server, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for the body counts."""
    workers = server.service.models[Pair("en", "de")].workers
    monkeypatch.setattr(workers, "submit", lambda _: Future())
    body = padded({"q": "one"}, 0)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\nConnection: close\r\n"
    with (
        answering(App(server.service, timeout=2).asgi(), lifespan="off") as port,
        socket.create_connection(("127.0.0.1", port), timeout=60) as client,
    ):
        start = time.monotonic()
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:1])
        time.sleep(1.6)
        client.sendall(body[1:])
        reply = client.makefile("rb").read()
        assert 1.9 < time.monotonic() - start < 3.5 and b"timed out after 2 s" in reply
    assert server.is_idle()


MANY = [" ".join(LINES[:8]), *LINES[8:14]]  # a long line and others


@pytest.mark.parametrize("how", ["disconnects", "disconnects during tokenization", "times out"])
@pytest.mark.parametrize(
    ("path", "q"),
    [
        ("/translate", MANY),
        ("/translate", "\n".join(MANY)),
        ("/translate/stream", "\n".join(MANY)),
    ],
    ids=["texts", "sentences", "stream"],
)
def test_a_request_that_ends_early_releases_everything(
    server: Server, path: str, q: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sentences leave the queue and their rows, also those that nobody awaits yet."""
    submitted: list[Future[Any]] = []

    def submit(_: Any) -> Future[Any]:
        submitted.append(Future())
        return submitted[-1]

    def slowly(*args: Any, **settings: Any) -> Any:
        begun.set()
        time.sleep(0.05)
        return divide(*args, **settings)

    def figure(name: str, **labels: str) -> float:
        return server.service.metrics.registry.get_sample_value(name, labels) or 0

    def gone() -> float:
        labels = {"handler": path, "method": "POST", "status": "499"}
        return figure("http_requests_total", **labels)

    begun, divide, gone_before = threading.Event(), plan_module.divide, gone()
    monkeypatch.setattr(plan_module, "divide", slowly)
    monkeypatch.setattr(server.service.models[Pair("en", "de")].workers, "submit", submit)
    with ExitStack() as until:
        port = server.port
        if how == "times out":
            app = App(server.service, timeout=0.8).asgi()
            port = until.enter_context(answering(app, lifespan="off", timeout_graceful_shutdown=5))
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(post(path, q=q))
            assert begun.wait(60)
            if how != "disconnects during tokenization":
                while len(submitted) < 2:
                    time.sleep(0.01)
                accepted = figure("transformer_sentences_accepted")
                assert accepted == server.service.num_accepted > len(MANY)
            reply = b""
            while how == "times out" and b"timed out" not in reply:
                reply += client.recv(1000)
        if how == "disconnects during tokenization":
            time.sleep(0.05 * len(MANY) + 0.2)
        assert server.is_idle()
        assert all(future.cancelled() for future in submitted)
    if how != "times out" and path == "/translate":
        assert gone() == gone_before + 1


def test_the_queue_is_shared_by_all_requests(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full queue rejects a request of any size, and one that fits exactly is accepted."""
    for taken in range(MAX_QUEUE - 3, MAX_QUEUE + 1):
        monkeypatch.setattr(server.service, "num_accepted", taken)
        fits = taken + 3 <= MAX_QUEUE
        for path, q in (
            (PATHS[0], "one\ntwo\nsix"),
            (PATHS[1], "one\ntwo\nsix"),
            (PATHS[0], MANY[1:4]),
        ):
            reply = server.ask(path, q=q)
            assert reply.status == (200 if fits else 503)
            if not fits:
                assert reply.json["limit"] == MAX_QUEUE and int(reply.headers["Retry-After"])
                assert f"{taken} sentences are in progress" in reply.json["error"]
            assert server.service.num_accepted == taken


GOOD_HOSTS = ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "10.1.2.3:8000", "[::1]"]
BAD_HOSTS = ["evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example", "", "[::1"]
BAD_HOSTS += ["::1", "10.1.2.3.evil.example:80", "1", "[10.1.2.3]", "localhost:x"]


def test_hosts_are_checked(server: Server) -> None:
    hosts = allowed_hosts((), "127.0.0.1", "127.0.0.1")
    app = App(server.service, timeout=60, allowed_hosts=hosts).asgi()
    with answering(app, lifespan="off") as port:
        local = server._replace(port=port)
        for path in "/", "/health", "/metrics", "/languages", "/docs", "/page.js":
            assert {local.request("GET", path, host=host).status for host in GOOD_HOSTS} == {200}
            bad = {local.request("GET", path, host=host).status for host in BAD_HOSTS}
            assert bad == ({200} if path in ("/health", "/metrics") else {400})
        for host in BAD_HOSTS:
            assert local.request("POST", "/translate", "q=one&target=de", host=host).status == 400


@pytest.mark.parametrize(
    ("flags", "address", "allowed"),
    [
        ({}, "127.0.0.1", ["localhost", "127.0.0.1"]),
        ({"host": "my-pc"}, "127.0.1.1", ["localhost", "my-pc"]),
        ({"host": "localhost"}, "::1", ["localhost", "localhost"]),
        ({"host": "0.0.0.0"}, "0.0.0.0", ["*"]),
        ({"host": "::"}, "::", ["*"]),
        ({"allowed_hosts": ("a.example",)}, "127.0.0.1", ("a.example",)),
        ({"allowed_hosts": ("a.example",), "host": "::"}, "::", ("a.example",)),
    ],
)
def test_default_hosts(flags, address, allowed) -> None:
    arguments = Arguments(**flags)
    assert allowed_hosts(arguments.allowed_hosts, arguments.host, address) == allowed


def test_probes_and_scrapes_can_use_any_name(server: Server) -> None:
    """A pod's health check names its address or service, whatever --allowed-hosts has."""
    app = App(server.service, timeout=60, allowed_hosts=["a.example"]).asgi()
    with answering(app, lifespan="off") as port:
        local = server._replace(port=port)
        for host in "10.8.0.7:8000", "127.0.0.1", "localhost:1", "a.example", "translate.svc":
            for path in "/health", "/metrics":
                assert local.request("GET", path, host=host).status == 200
        assert local.request("GET", "/languages", host="translate.svc").status == 400


@pytest.mark.parametrize(
    "path",
    ["/.", "//", "/./", "/%2e", "/docs/", "//evil.example/..", "/static-offline-docs", "/.."],
)
def test_nothing_redirects_to_the_clients_host(server: Server, path: str) -> None:
    reply = server.request("GET", path, host="evil.example")
    assert reply.status == 404 and "evil.example" not in str(reply.headers)


@pytest.mark.parametrize(
    "path",
    ["/", "/docs", "/health", "/languages", "/metrics", "/openapi.json", "/page.js", "/nothing"],
)
def test_head_answers_like_get(server: Server, path: str) -> None:
    get, head = server.request("GET", path), server.request("HEAD", path)
    assert head.status == get.status and not head.body
    assert head.headers["Content-Type"] == get.headers["Content-Type"]


def exchange(port: int, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(sent)
        return client.makefile("rb").read()


def post(path: str, **fields: Any) -> bytes:
    body = padded(fields, 0)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_jax.serving.protocol import Protocol

    monkeypatch.setattr(Protocol, "patience", 0.3)


def test_shutdown_answers_what_has_arrived(
    server: Server, translator: Translator, impatient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running, waiting and streamed sentences finish; idle connections and new ones are closed."""
    for batch in server.service.models[Pair("en", "de")].workers.schedulers[0].batches:

        def decode_slowly(*args, decode=batch.decode, **limits):
            time.sleep(0.1)
            decode(*args, **limits)

        monkeypatch.setattr(batch, "decode", decode_slowly)
    lines = LINES[:6]  # more than rows
    replies: dict[int, bytes] = {}
    with answering(App(server.service, timeout=60).asgi(), lifespan="off") as port:
        requests = [post("/translate", q=line, split=False) for line in lines]
        requests.append(post("/translate/stream", q="\n".join(lines)))
        threads = [
            threading.Thread(target=lambda i=i: replies.update({i: exchange(port, requests[i])}))
            for i in range(len(requests))
        ]
        idle = socket.create_connection(("127.0.0.1", port), timeout=60)
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        while b'"ok"' not in idle.recv(1000):
            pass
        for thread in threads:
            thread.start()
        while server.service.num_accepted < 2 * len(lines):
            time.sleep(0.01)
        assert not replies
    assert idle.recv(1000) == b""
    idle.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    for thread in threads:
        thread.join()
    *plain, stream = (replies[i] for i in range(len(requests)))
    for reply, expected in zip(plain, translator.translate(lines), strict=True):
        assert reply.startswith(b"HTTP/1.1 200 ") and expected.encode() in reply
    assert stream.count(b"event: sentence") == len(lines) and b"event: done" in stream


BIG = b"x" * 2**25  # more than the kernel buffers


@contextmanager
def shutting_down(server: Server, *, delay: float = 0) -> Iterator[socket.socket]:
    """A client with a small buffer. The server, which shuts down at the end, handles a request
    after ``delay`` seconds.
    """
    app = App(server.service, timeout=60).asgi()

    async def delayed(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(delay)
        await (Response(BIG) if scope["path"] == "/big" else app)(scope, receive, send)

    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        with answering(delayed, lifespan="off", timeout_graceful_shutdown=20) as port:
            client.connect(("127.0.0.1", port))
            client.settimeout(6)
            yield client
            time.sleep(0.3)
            start = time.monotonic()
            too_late = threading.Timer(6, client.close)  # else a failure would hang
            too_late.start()
        too_late.cancel()
        assert time.monotonic() - start < 5
    assert server.is_idle()


@pytest.mark.parametrize("stalls", ["in its headers", "in its body", "while it reads"])
def test_a_client_that_stalls_does_not_delay_shutdown(
    server: Server, impatient, stalls: str
) -> None:
    with shutting_down(server) as client:
        sent = post("/translate/stream", q="\n".join(LINES), attention=True)
        if stalls == "while it reads":
            sent = b"GET /static-offline-docs/swagger-ui-bundle.js HTTP/1.1\r\nHost: x\r\n\r\n" * 9
        client.sendall({"in its headers": sent[:40], "in its body": sent[:-5]}.get(stalls, sent))


@pytest.mark.parametrize("stalls", [False, True], ids=["ends", "stalls"])
@pytest.mark.parametrize("slow", ["its body", "the server", "the client"])
def test_a_client_is_checked_again_during_shutdown(
    server: Server, impatient, slow: str, stalls: bool
) -> None:
    """A client that is slow but does not stall gets its response. One that stalls only after the
    first checks is disconnected, too.
    """
    received = bytearray()

    def talk(client: socket.socket) -> None:
        with client, suppress(OSError):
            if slow == "its body":
                for start in range(len(head), len(sent) - 5 * stalls, size):
                    time.sleep(0.1)
                    client.sendall(sent[start : start + size][: len(sent) - 5 * stalls - start])
            if slow == "the server" and stalls:
                return
            while piece := client.recv(50_000):
                received.extend(piece)
                if slow == "the client":
                    if stalls and len(received) > len(BIG) / 2:
                        return
                    time.sleep(len(piece) / 2e7)  # 20 MB/s

    sent = post("/translate", q=LINES[3], split=False)
    head = sent.partition(b"\r\n\r\n")[0]
    size = (len(sent) - len(head)) // 12
    if slow != "its body":
        sent = head = b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n"
    with shutting_down(server, delay=1.2 * (slow == "the server")) as client:
        client.sendall(head)
        talking = threading.Thread(target=talk, args=[client.dup()])
        talking.start()
    talking.join()
    whole = BIG if slow != "its body" else b"translatedText"
    assert (whole in received) is not stalls
