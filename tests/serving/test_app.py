"""The HTTP API from a client's view: responses, errors, disconnects."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from servers import LINES, Server, make_model_to_serve, serving

from transformer_jax.config import TokenizerConfig
from transformer_jax.decoding.async_translator import LiveRows
from transformer_jax.decoding.engine import Sentence
from transformer_jax.decoding.records import Request
from transformer_jax.serving.flags import Pair
from transformer_jax.serving.schema import Query
from transformer_jax.serving.service import Service, _split_tag
from transformer_jax.tokenizer import Tokenizer

FORM = "application/x-www-form-urlencoded"


def events(body: bytes) -> list[tuple[str, dict]]:
    blocks = body.decode().strip().split("\n\n")
    lines = [block.split("\n") for block in blocks]
    return [
        (kind.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for kind, data in lines
    ]


def test_many_clients_get_what_the_translator_gives_each_line(server: Server) -> None:
    expected = server.translator.translate(LINES)
    with ThreadPoolExecutor(16) as clients:
        replies = list(clients.map(lambda line: server.ask(q=line, split=False), LINES * 3))
    assert [reply.status for reply in replies] == [200] * len(replies)
    assert [reply.json["translatedText"] for reply in replies] == expected * 3
    assert server.ask(q=LINES).json == {"translatedText": expected}
    assert server.is_idle()


def test_one_long_line_leaves_rows_to_others(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = server.service.models[Pair("en", "de")].workers
    submit, searched, at_once = workers.submit, set(), []

    def counted(sentence: Sentence) -> Any:
        future = submit(sentence)
        searched.add(future)
        future.add_done_callback(searched.discard)
        at_once.append(len(searched))
        return future

    monkeypatch.setattr(workers, "submit", counted)
    line = " ".join(LINES)[:1500]  # many segments
    reply = server.ask(q=line, split=False)
    assert reply.json == {"translatedText": server.translator.translate([line])[0]}
    assert max(at_once) == server.translator.config.batch_size // 2


def test_forms_and_parameters_do_as_well(server: Server) -> None:
    [expected] = server.translator.translate([LINES[7]])
    answer = {"translatedText": expected}
    assert server.ask_form(q=LINES[7], format="text", api_key="any").json == answer
    several = server.ask_form(q=[LINES[7], LINES[7]])
    assert several.json == {"translatedText": [expected, expected]}
    words = LINES[7].replace(" ", "+")
    assert server.request("POST", f"/translate?q={words}&source=en&target=de").json == answer
    for form in ("", "target=de"):  # clients call the type of an empty body a form's
        path = f"/translate?q={words}&source=en{'' if form else '&target=de'}"
        kind = "application/x-www-form-urlencoded"
        assert server.request("POST", path, form, content_type=kind).json == answer


def test_texts_keep_their_white_space(server: Server) -> None:
    lines = ["one two three", "four five", "six"]
    one, two, three = server.translator.translate(lines)
    text = "  {}\n\n\t{}\r\n{} \n"
    assert server.ask(q=text.format(*lines)).json["translatedText"] == text.format(one, two, three)
    assert server.ask(q=["", " \n "]).json["translatedText"] == ["", " \n "]


def test_alternatives_and_details_are_those_of_the_translator(server: Server) -> None:
    line = LINES[8]
    [translations] = server.translator.stream([line], num_hypotheses=3)
    answer = server.ask(q=line, source="auto", alternatives=2, details=True).json
    assert answer["translatedText"] == translations[0].text
    assert answer["alternatives"] == [each.text for each in translations[1:]]
    assert answer["detectedLanguage"] == {"language": "en", "confidence": 100}
    [[sentence]] = answer["sentences"]
    assert sentence["source"] == line
    for got, its in zip(sentence["hypotheses"], translations, strict=True):
        assert got["score"] == pytest.approx(its.score, abs=1e-4)
        assert got["tokens"] == [*its.tokens, "</s>"]
        assert got["token_scores"] == pytest.approx(its.token_log_probs, abs=1e-4)
    assert server.ask(q=[line, "one"], alternatives=1).json["alternatives"] == [
        [translations[1].text],
        [each.text for each in next(server.translator.stream(["one"], num_hypotheses=2))[1:]],
    ]


def test_attention_has_a_row_for_each_token(server: Server) -> None:
    [[sentence]] = server.ask(q=LINES[8], attention=True).json["sentences"]
    assert len(sentence["alignment"]) == len(sentence["tokens"])
    for row in sentence["alignment"]:
        assert len(row) == len(sentence["source_tokens"]) and sum(row) == pytest.approx(1, abs=1e-2)


def test_long_texts_have_no_attention(server: Server) -> None:
    line = " ".join(LINES)[:1500]
    [tokens] = server.translator.tokenizer.source.encode([line])
    assert len(tokens) > 256
    answer = server.ask(q=[line, "one"], split=False, attention=True).json
    [long], [short] = answer["sentences"]
    assert len(long["tokens"]) == len(long["token_scores"]) and "alignment" not in long
    assert len(short["alignment"]) == len(short["tokens"])
    assert answer["translatedText"] == server.translator.translate([line, "one"])


def test_a_prefix_begins_the_translation(server: Server) -> None:
    [expected] = server.translator.translate([Request("one two", "SIX")])
    assert server.ask(q="one two", prefix="SIX").json["translatedText"] == expected
    assert expected.startswith("SIX")
    reply = server.ask(q="one two", prefix="日本")
    assert reply.status == 400 and "outside the vocabulary" in reply.json["error"]


def test_sentences_are_streamed_in_order(server: Server) -> None:
    text = "\n".join(LINES[:20])
    reply = server.ask("/translate/stream", q=text)
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    *sentences, (last, answer) = events(reply.body)
    whole = "".join(each["before"] + each["translation"] for _, each in sentences)
    assert [each["index"] for _, each in sentences] == list(range(20))
    assert {kind for kind, _ in sentences} == {"sentence"} and last == "done"
    assert whole == answer["translatedText"] == "\n".join(server.translator.translate(LINES[:20]))
    assert server.ask("/translate/stream", q=["a", "b"]).status == 400


def test_languages_health_metrics_and_docs(server: Server) -> None:
    languages = [{"code": "en", "name": "English", "targets": ["de"]}]
    assert server.request("GET", "/languages").json == languages
    assert server.request("GET", "/health").json == {"status": "ok"}
    server.ask(q="one")
    figures = server.request("GET", "/metrics").body.decode()
    assert 'http_requests_total{handler="/translate",method="POST",status="200"}' in figures
    assert "transformer_rows 8.0" in figures
    docs = server.request("GET", "/docs").body.decode()
    assert "swagger" in docs and "://" not in docs.replace(server.url, "")
    paths = server.request("GET", "/openapi.json").json["paths"]
    assert {"/translate", "/translate/stream", "/languages", "/health", "/metrics"} <= paths.keys()


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"q": 5}, 400, "q: Input should be a valid string; got 5."),
        ({}, 400, "q: Field required"),
        ({"q": "one", "colour": "red"}, 400, "colour: Extra inputs are not permitted; got 'red'"),
        ({"q": "one", "sample": True}, 400, "sample: Extra inputs are not permitted; got True"),
        (
            {"q": "one", "target": "fr"},
            400,
            "source is 'en' and target is 'fr'; expected one of en-de",
        ),
        (
            {"q": "<p>", "format": "html"},
            400,
            "format: Input should be 'text'; got 'html'.",
        ),
        ({"q": "one", "alternatives": 3}, 400, "alternatives is 3; expected at most 2"),
        ({"q": "one " * 600}, 413, "2400 characters; expected at most 2000"),
    ],
)
def test_what_a_query_may_not_hold(server: Server, fields, status, message) -> None:
    reply = server.ask(**fields)
    assert reply.status == status and message in reply.json["error"], reply
    if status == 413:
        assert reply.json["limit"] == 2000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 30_000,
        '{"q": "é", "target": "de"}'.encode("latin-1"),
        '{"q": "one", "target": "de"}'.encode("utf-16"),
        b'{"q": "\\ud800", "target": "de"}',
        b'{"q": "one", "target": "de", "alternatives": 1' + b"0" * 5000 + b"}",
    ],
    ids=["nothing", "cut short", "deep", "latin-1", "utf-16", "half a pair", "large number"],
)
def test_what_is_no_json_is_refused(server: Server, body) -> None:
    reply = server.request("POST", "/translate", body, content_type="application/json")
    assert reply.status == 400 and reply.json["error"], reply


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/translate", b"target=de&q=f%FCnf", FORM),
        ("/translate", "target=de&q=fünf".encode("latin-1"), FORM),
        ("/translate?target=de&q=f%FCnf", b"", FORM),
        ("/translate?target=de&q=f%FCnf", b"", ""),
    ],
    ids=["escaped", "raw", "parameter and form", "parameter"],
)
def test_forms_that_are_not_utf_8_are_refused(server: Server, path, body, kind) -> None:
    reply = server.request("POST", path, body, content_type=kind)
    assert reply.status == 400 and "not valid UTF-8" in reply.json["error"], reply
    utf_8 = body.replace(b"%FC", b"%C3%BC").replace(b"\xfc", b"\xc3\xbc")
    path = path.replace("%FC", "%C3%BC")
    reply = server.request("POST", path, utf_8, content_type=kind)
    assert [reply.json["translatedText"]] == server.translator.translate(["fünf"])


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://localhost:8000", "host": "localhost:8000"}, 200),
        ({"origin": "https://a.example", "sec_fetch_site": "same-origin"}, 200),  # behind a proxy
        ({"sec_fetch_site": "none"}, 200),
        ({"origin": "http://a.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": "https://a.example", "host": "a.example"}, 200),  # the same, an older browser
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
    ],
)
def test_pages_of_other_sites_are_refused(server: Server, headers, status) -> None:
    for path in "/translate", "/translate/stream":
        reply = server.request("POST", path, b"target=de&q=one", content_type=FORM, **headers)
        assert reply.status == status, reply


def test_bodies_of_other_types_are_refused(server: Server) -> None:
    body = b'{"q": "one", "target": "de"}'
    for kind in "text/plain", "text/plain; application/json", "multipart/form-data", "":
        reply = server.request("POST", "/translate", body, content_type=kind)
        assert reply.status == 415 and "expected application/json or" in reply.json["error"]


def test_answers_are_of_the_type_that_they_say_and_the_page_loads_nothing_from_elsewhere(
    server: Server,
) -> None:
    for path in "/", "/page.js", "/docs", "/openapi.json", "/health", "/metrics", "/nothing":
        headers = server.request("GET", path).headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
    page = server.request("GET", "/").body.decode()
    [policy] = re.findall(r'Content-Security-Policy" content="(.*?)"', page)
    assert policy.startswith("default-src 'none'") and "http" not in policy
    assert "unsafe" not in policy and page.index(policy) < page.index("<script")


def test_requests_for_pages_and_folders(server: Server) -> None:
    reply = server.request("HEAD", "/")
    assert reply.status == 200 and not reply.body
    assert server.request("GET", "/health/", host="elsewhere.example").status == 404


def test_what_the_sentence_splitter_cannot_read_is_translated(server: Server) -> None:
    for text in ('B\xa0. ."', " B\xa0.BB", "a\u3000. b\u3000."):
        assert server.ask(q=text).status == 200


def test_each_sentence_gets_the_tag_of_its_text() -> None:
    pairs = [(line, line.upper()) for line in LINES]
    settings = TokenizerConfig(vocab_size=50, algorithm="unigram", user_defined_symbols=("<2de>",))
    tokenizer = Tokenizer.train(pairs, settings)
    model: Any = SimpleNamespace(translator=SimpleNamespace(tokenizer=tokenizer))
    assert _split_tag("<2de> one. two", model) == ("<2de> ", "one. two")
    assert _split_tag("<2de>one", model) == ("<2de>", "one")
    assert _split_tag(" one <2de>", model) == ("", " one <2de>")


def test_control_characters_do_no_harm(server: Server) -> None:
    text = "".join(map(chr, range(32))) + "one\x7f\x80\ufeff\u2028two\u202e"
    assert server.ask(q=text).status == 200
    assert server.ask(q="\x00").status == 200


HEAD = b"POST /translate HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"Content-Length: 1000000000\r\n\r\n" + b"x" * 40_000,
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (40_000, b"x" * 40_000),
    ],
    ids=["length", "chunks"],
)
def test_large_bodies_are_not_read_to_their_end(server: Server, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(HEAD + sent)
        assert client.recv(1000).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("sent", [b"X: " + b"x" * 70_000, b"X: x\r\n" * 20_000])
def test_heads_above_64_kilobytes_are_refused(server: Server, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(HEAD + sent)
        assert client.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_slow_bodies_are_refused(strict: Server) -> None:
    with socket.create_connection(("127.0.0.1", strict.port), timeout=20) as client:
        client.sendall(HEAD + b"Content-Length: 10\r\n\r\n{")
        answer = client.recv(1000)
    assert answer.startswith(b"HTTP/1.1 503 ") and b"timed out after 0.3 s" in answer


def test_clients_that_leave_within_a_body_do_no_harm(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(HEAD + b"Content-Length: 10\r\n\r\n{")
    assert server.ask(q="one").status == 200 and not caplog.records


def test_a_client_that_reads_nothing_holds_up_nobody(server: Server) -> None:
    body = json.dumps({"q": "\n".join(LINES), "target": "de", "attention": True}).encode()
    sent = HEAD.replace(b"translate", b"translate/stream") + b"Content-Type: application/json\r\n"
    clients = []
    for _ in range(5):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(sent + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        clients.append(client)
        assert server.ask(q="one").status == 200
        assert server.is_idle()
    for client in clients:
        client.close()


def test_a_stream_that_is_never_read_leaves_the_queue(server: Server) -> None:
    async def accepted() -> int:
        query = Query(q="\n".join(LINES[:20]), target="de")
        coming = server.service.begin(query).by_sentence()
        await anext(coming)
        for _ in range(2000):
            if not server.service.num_accepted:
                break
            await asyncio.sleep(0.01)
        count = server.service.num_accepted
        await coming.aclose()
        return count

    assert asyncio.run(accepted()) == 0


def test_paths_and_methods_that_are_not_there(server: Server) -> None:
    assert server.request("GET", "/nothing").status == 404
    reply = server.request("GET", "/translate")
    assert reply.status == 405 and "/docs" in reply.json["error"]


def test_rows_of_clients_that_go_away_are_free(server: Server) -> None:
    body = json.dumps({"q": "\n".join(LINES), "target": "de"}).encode()
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for path in [b"/translate", b"/translate/stream"] * 20:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            client.sendall(head % path + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            time.sleep(0.005)
    assert server.is_idle()
    assert server.ask(q="one").status == 200


@pytest.fixture(scope="module")
def strict(translator):
    """A server with narrow limits, and with two languages to translate from."""
    models = {
        Pair("en", "de"): make_model_to_serve(translator),
        Pair("fr", "de"): make_model_to_serve(translator, beam_size=1, max_source_length=8),
    }
    service = Service(models, max_queue=4, max_characters=2000)
    with serving(service, translator, timeout=0.3) as found:
        yield found


def test_limits_say_what_is_allowed(strict: Server) -> None:
    reply = strict.ask(q=["one"] * 5)
    assert reply.status == 413 and "5 sentences; expected at most 4" in reply.json["error"]
    assert reply.json["limit"] == 4

    reply = strict.ask(q="one", source="auto")
    assert reply.status == 400 and "expected a source language" in reply.json["error"]


def test_too_much_to_do_and_too_long_answers_are_refused(
    strict: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows in strict.service.models[Pair("en", "de")].workers._searches[0]:
        turn = partial(LiveRows.turn, rows, most=1)
        slowly = partial(lambda its, entries, most: time.sleep(0.2) or its(entries), turn)
        monkeypatch.setattr(rows, "turn", slowly)
    with ThreadPoolExecutor(3) as clients:
        replies = list(clients.map(lambda _: strict.ask(q=LINES[6:9]), range(3)))
    assert [reply.status for reply in replies] == [503] * 3
    assert all(int(reply.headers["Retry-After"]) for reply in replies)
    said = [reply.json["error"] for reply in replies]
    full = [each for each in said if "expected at most 4 in total" in each]
    assert len(full) == 2 and "timed out after 0.3 s" in (set(said) - set(full)).pop()
    assert strict.is_idle()


def test_before_compiling_and_after_a_failure_nothing_is_translated(translator) -> None:
    model = make_model_to_serve(translator, beam_size=1, max_source_length=8)
    service = Service({Pair("en", "de"): model}, max_queue=4, max_characters=2000)
    go_on = threading.Event()
    start = model.start

    def start_later() -> None:
        go_on.wait()
        start()

    model.start = start_later  # type: ignore[method-assign]
    status = Service.status
    seen = []
    try:
        Service.status = property(lambda self: seen.append(1) or "ok")  # serving() waits for it
        with serving(service, translator) as server:
            Service.status = status
            assert server.request("GET", "/health").json == {"status": "compiling"}
            reply = server.ask(q="one")
            assert reply.status == 503 and "compiling" in reply.json["error"]
            go_on.set()
            while service.status == "compiling":
                time.sleep(0.01)
            assert server.ask(q="one").status == 200

            def fail(*_):
                raise RuntimeError("out of memory")

            for rows in model.workers._searches[0]:
                rows.turn = fail
            reply = server.ask(q="one")
            assert reply.status == 503 and "Restart the server" in reply.json["error"]
            assert server.request("GET", "/health").status == 503
    finally:
        Service.status = status
