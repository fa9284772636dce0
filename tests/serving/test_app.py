"""The HTTP API for a client: responses, errors, disconnects."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, product
from typing import Any
from unittest.mock import Mock

import jax
import pytest
from random_models import make_model
from servers import CONFIG, LINES, Server, make_model_to_serve, serving

from transformer_jax.decoding.scheduler import SearchFailed, Task
from transformer_jax.decoding.search import Sentence
from transformer_jax.serving.answering import PendingAnswer, PlannedText
from transformer_jax.serving.flags import Pair
from transformer_jax.serving.limits import Limits
from transformer_jax.serving.schema import Query
from transformer_jax.serving.service import Service
from transformer_jax.settings.config import TokenizerConfig
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.translation.async_translator import AsyncTranslator
from transformer_jax.translation.requests import Request, Translation
from transformer_jax.translation.translator import Translator

JSON, FORM = "application/json", "application/x-www-form-urlencoded"
HEAD = b"POST /translate HTTP/1.1\r\nHost: x\r\n"


def events(body: bytes) -> list[tuple[str, dict]]:
    blocks = body.decode().strip().split("\n\n")
    lines = [block.split("\n") for block in blocks]
    return [
        (kind.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for kind, data in lines
    ]


def test_many_clients_get_the_translators_results(server: Server) -> None:
    expected = server.translator.translate(LINES)
    with ThreadPoolExecutor(16) as clients:
        replies = list(clients.map(lambda line: server.ask(q=line, split=False), LINES * 3))
    assert [reply.status for reply in replies] == [200] * len(replies)
    assert [reply.json["translatedText"] for reply in replies] == expected * 3
    assert server.ask(q=LINES).json == {"translatedText": expected}
    assert server.is_idle()


LONG = " ".join(LINES)[:1500]  # many segments
LONG_LINES = [" ".join(LINES[:9]), LINES[3], " ".join(LINES[9:18])]


@pytest.mark.parametrize(
    ("path", "q", "lines", "split"),
    [
        ("/translate", LONG, [LONG], False),
        ("/translate", LINES[:12], LINES[:12], True),
        ("/translate", LONG_LINES, LONG_LINES, False),
        ("/translate", "\n".join(LINES[:12]), LINES[:12], True),
        ("/translate/stream", "\n".join(LINES[:12]), LINES[:12], True),
        ("/translate/stream", LONG, [LONG], False),
    ],
    ids=["one long line", "texts", "long texts", "sentences", "stream", "stream of a long line"],
)
def test_one_request_leaves_rows_to_others(
    server: Server, path: str, q: Any, lines: list[str], split: bool, monkeypatch
) -> None:
    """A request gets half of the rows for all its texts, sentences and segments together."""
    workers = server.service.models[Pair("en", "de")].workers
    submit, searched, at_once = workers.submit, set(), []

    def counted(sentence: Sentence) -> Any:
        future = submit(sentence)
        searched.add(future)
        future.add_done_callback(searched.discard)
        at_once.append(len(searched))
        return future

    monkeypatch.setattr(workers, "submit", counted)
    reply = server.ask(path, q=q, split=split)
    answer = events(reply.body)[-1][1] if "stream" in path else reply.json
    expected = server.translator.translate(lines)
    assert answer == {"translatedText": expected if isinstance(q, list) else "\n".join(expected)}
    assert max(at_once) == server.translator.config.batch_size // 2


def test_forms_and_query_parameters_work_like_json(server: Server) -> None:
    [expected] = server.translator.translate([LINES[7]])
    answer = {"translatedText": expected}
    assert server.ask_form(q=LINES[7], format="text", api_key="any").json == answer
    several = server.ask_form(q=[LINES[7], LINES[7]])
    assert several.json == {"translatedText": [expected, expected]}
    words = LINES[7].replace(" ", "+")
    assert server.request("POST", f"/translate?q={words}&source=en&target=de").json == answer
    for form in ("", "target=de"):  # clients may send an empty form
        path = f"/translate?q={words}&source=en{'' if form else '&target=de'}"
        assert server.request("POST", path, form, content_type=FORM).json == answer


@pytest.fixture(scope="module")
def sampling(translator: Translator) -> Iterator[Server]:
    """A server whose translations are samples."""
    model = make_model_to_serve(translator, method="sample", temperature=3.0)
    service = Service({Pair("en", "de"): model}, Limits(100, 2000))
    with serving(service, translator) as found:
        yield found


def test_samples_are_served(sampling: Server) -> None:
    model = sampling.service.models[Pair("en", "de")]
    found = [sampling.ask(q=line).json["translatedText"] for line in LINES[:5]]
    assert found == [model.translator.translate([line])[0] for line in LINES[:5]]
    assert found != sampling.translator.translate(LINES[:5])


LONG_LINE = " ".join(LINES[4:9])  # several segments


@pytest.mark.parametrize("line", [LINES[4], LONG_LINE], ids=["short", "segments"])
@pytest.mark.parametrize(
    "place", ["a text", "texts", "a stream", "a form", "a line", "other requests"]
)
def test_a_sentence_always_gets_the_same_samples(sampling: Server, line: str, place: str) -> None:
    """Wherever it stands and whatever is translated with it."""

    def samples(answer: dict) -> list[list[str]]:
        return [
            [each["translation"] for each in sentence["hypotheses"]]
            for sentence in chain(*answer["sentences"])
            if sentence["source"] == line
        ]

    fields = {"alternatives": 2, "details": True}
    [alone] = samples(sampling.ask(q=line, **fields).json)
    assert len(set(alone)) > 1
    lines = [LINES[3], line, LINES[5], line]
    text = "\n".join(lines)
    match place:
        case "a text":
            found = samples(sampling.ask(q=text, **fields).json)
        case "texts":
            found = samples(sampling.ask(q=[text, line], **fields).json)
        case "a stream":
            body = sampling.ask("/translate/stream", q=text, **fields).body
            found = samples(events(body)[-1][1])
        case "a form":
            found = samples(sampling.ask_form(q=lines, **fields).json)
        case "lines":
            found = samples(sampling.ask(q=lines, split=False, **fields).json)
        case _:
            with ThreadPoolExecutor(6) as clients:
                replies = clients.map(
                    lambda _: sampling.ask(q=[LINES[8], line], **fields), range(6)
                )
                found = [its for reply in replies for its in samples(reply.json)]
    assert len(found) >= 2 and set(map(tuple, found)) == {tuple(alone)}


def test_white_space_is_kept(server: Server) -> None:
    lines = ["one two three", "four five", "six"]
    one, two, three = server.translator.translate(lines)
    text = "  {}\n\n\t{}\r\n{} \n"
    assert server.ask(q=text.format(*lines)).json["translatedText"] == text.format(one, two, three)
    assert server.ask(q=["", " \n "]).json["translatedText"] == ["", " \n "]


def test_alternatives_and_details_equal_the_translators(server: Server) -> None:
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


@pytest.mark.parametrize("count", [1, 2, 3])
def test_alternatives_are_other_texts_without_repeats(translator, count: int) -> None:
    """A sentence with fewer hypotheses keeps its last one; other tokens can spell the same text."""
    found = [["A", "A", "B", "C"], ["a"], ["x", "y", "x", "y"]]
    plan = translator.plan(Request("one\ntwo\nsix"), split_sentences=True)

    async def answer(sentences: list[list[str]]) -> dict[str, Any]:
        hypotheses = [[Translation(text, 0, 0, 1) for text in its] for its in sentences]
        tasks = [asyncio.create_task(asyncio.sleep(0, its)) for its in hypotheses]
        query = Query(q="one\ntwo\nsix", target="de", alternatives=count)
        content = await PendingAnswer(
            query, Pair("en", "de"), [PlannedText(plan, tasks)]
        ).full_response()
        return json.loads(content)

    for sentences in product(found, repeat=3):
        ranks = range(1, count + 1)
        texts = ["\n".join(its[min(rank, len(its) - 1)] for its in sentences) for rank in ranks]
        answered = asyncio.run(answer(list(sentences)))
        best = "\n".join(its[0] for its in sentences)
        assert answered["translatedText"] == best
        assert answered["alternatives"] == list(dict.fromkeys(x for x in texts if x != best))


def test_attention_has_a_row_for_each_token_unless_the_text_is_long(server: Server) -> None:
    line = " ".join(LINES)[:1500]
    [tokens] = server.translator.tokenizer.source.encode([line])
    assert len(tokens) > 256
    answer = server.ask(q=[line, LINES[8]], split=False, attention=True).json
    [long], [short] = answer["sentences"]
    assert len(long["tokens"]) == len(long["token_scores"]) and "alignment" not in long
    assert len(short["alignment"]) == len(short["tokens"])
    for row in short["alignment"]:
        assert len(row) == len(short["source_tokens"]) and sum(row) == pytest.approx(1, abs=1e-2)
    assert answer["translatedText"] == server.translator.translate([line, LINES[8]])


def test_a_prefix_begins_the_translation(server: Server) -> None:
    [expected] = server.translator.translate([Request("one two", "SIX")])
    assert server.ask(q="one two", prefix="SIX").json["translatedText"] == expected
    assert expected.startswith("SIX")
    [other] = server.translator.translate(["three"])  # only the first sentence has the prefix
    answer = server.ask(q="one two\nthree", prefix="SIX").json
    assert answer["translatedText"] == f"{expected}\n{other}"
    reply = server.ask(q="one two", prefix="日本")
    assert reply.status == 400 and "outside the vocabulary" in reply.json["error"]


def test_a_glossary_applies_to_its_request(translator: Translator) -> None:
    """Up to ``max_terms`` source terms of a sentence; terms that are not in it do not count."""
    model = make_model_to_serve(translator, max_terms=1, batch_size=1, max_source_length=12)
    service = Service({Pair("en", "de"): model}, Limits(9, 99))
    glossary = {"one": ["TWO"], "nine": "ONE"}
    [expected] = translator.translate([Request("one three", glossary=glossary)])
    assert " TWO" in f" {expected}" and [expected] != translator.translate(["one three"])
    with serving(service, translator) as server:
        assert server.ask(q="one three", glossary=glossary).json == {"translatedText": expected}
        for wrong, message in (
            (glossary, "A sentence's glossary needs"),
            ({"one": 5}, "glossary: "),
            ({"one": " "}, "The glossary: 'one' has the blank term ' '"),
        ):
            reply = server.ask(q="one nine", glossary=wrong)
            assert reply.status == 400 and message in reply.json["error"]


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


def counted(figures: str) -> tuple[float, ...]:
    """Sentences and target tokens so far."""
    names = "transformer_sentences_total", "transformer_target_tokens_total"
    found = [re.findall(name + r'{pair="en-de"} (.*)', figures) for name in names]
    return tuple(float(value) for [value] in found)


def test_languages_health_metrics_and_docs(server: Server) -> None:
    languages = [{"code": "en", "name": "en", "targets": ["de"]}]
    languages += [{"code": "de", "name": "de", "targets": []}]
    assert server.request("GET", "/languages").json == languages
    assert server.request("GET", "/health").json == {"status": "ok", "engine": "jax"}
    server.ask(q="one")
    figures = server.request("GET", "/metrics").body.decode()
    assert 'http_requests_total{handler="/translate",method="POST",status="200"}' in figures
    assert "transformer_rows 4.0" in figures
    before = counted(figures)
    server.ask(q=["one", "two three"])
    after = counted(server.request("GET", "/metrics").body.decode())
    found = server.translator.stream(["one", "two three"])
    assert after == (before[0] + 2, before[1] + sum(best.length for [best] in found))
    docs = server.request("GET", "/docs").body.decode()
    assert "swagger" in docs and "://" not in docs.replace(server.url, "")
    paths = server.request("GET", "/openapi.json").json["paths"]
    assert {"/translate", "/translate/stream", "/languages", "/health", "/metrics"} <= paths.keys()


def test_html_is_translated_sentence_by_sentence(server: Server) -> None:
    text = "<p>one two <b>three</b></p>\n<!-- x -->***<p title='one'>four. Five &amp; six</p>"
    reply = server.ask(q=[text, ""], format="html", alternatives=2, details=True).json
    sentences = ["one two three", "four.", "Five & six"]
    assert [each["source"] for each in reply["sentences"][0]] == sentences
    expected = server.translator.translate(sentences)
    found, empty = reply["translatedText"]
    assert empty == "" and reply["sentences"][1] == []
    assert re.sub("<.*?>", "", found) == f"{expected[0]}\n***{expected[1]} {expected[2]}".rstrip()
    assert re.findall("<.*?>", found) == re.findall("<.*?>", text)
    assert len(set(reply["alternatives"][0])) == len(reply["alternatives"][0]) > 0
    stream = server.ask("/translate/stream", q=text, format="html").body.decode()
    assert stream.count("event: sentence") == 3
    done = json.loads(stream.split("event: done\ndata: ")[1])
    assert done["translatedText"] == found


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"q": 5}, 400, "q: Input should be a valid string; got 5."),
        ({}, 400, "q: Field required"),
        ({"q": "one", "colour": "red"}, 400, "colour: Extra inputs are not permitted; got 'red'"),
        ({"q": "one", "sample": True}, 400, "sample: Extra inputs are not permitted; got True"),
        ({"q": "one", "target": "fr"}, 400, "'en' and target is 'fr'; expected one of en-de"),
        (
            {"q": "<p>", "format": "pdf"},
            400,
            "format: Input should be 'text', 'html' or 'xml'; got",
        ),
        ({"q": "one", "alternatives": 3}, 400, "alternatives is 3; expected at most 2"),
        ({"q": "one " * 600}, 413, "2400 characters; expected at most 2000"),
    ],
)
def test_invalid_queries(server: Server, fields, status, message) -> None:
    reply = server.ask(**fields)
    assert reply.status == status and message in reply.json["error"], reply
    if status == 413:
        assert reply.json["limit"] == 2000


@pytest.mark.parametrize(
    ("body", "kind", "status", "message"),
    [
        (b"", JSON, 400, ""),
        (b"{", JSON, 400, ""),
        (b"[" * 30_000, JSON, 400, ""),
        ('{"q": "é", "target": "de"}'.encode("latin-1"), JSON, 400, ""),
        ('{"q": "one", "target": "de"}'.encode("utf-16"), JSON, 400, ""),
        (b'{"q": "\\ud800", "target": "de"}', JSON, 400, ""),
        (b'{"q": "one", "target": "de", "alternatives": 1' + b"0" * 5000 + b"}", JSON, 400, ""),
        (b'{"q": "one"}', "text/plain", 415, "expected application/json or"),
        (b'{"q": "one"}', "text/plain; application/json", 415, "expected application/json or"),
        (b'{"q": "one"}', "multipart/form-data", 415, "expected application/json or"),
        (b'{"q": "one"}', "", 415, "expected application/json or"),
    ],
    ids=range(11),
)
def test_invalid_bodies(server: Server, body, kind, status, message) -> None:
    reply = server.request("POST", "/translate", body, content_type=kind)
    assert reply.status == status and reply.json["error"] and message in reply.json["error"], reply


@pytest.mark.parametrize(
    ("parameters", "form", "kind"),
    [
        ("", b"target=de&q=f%C3%BCnf", FORM),
        ("", "target=de&q=fünf".encode(), FORM),
        ("?target=de&q=f%C3%BCnf", b"", FORM),
        ("?target=de&q=f%C3%BCnf", b"", ""),
    ],
    ids=["escaped", "raw", "parameter and form", "parameter"],
)
def test_forms_are_utf_8(server: Server, parameters, form, kind) -> None:
    path = f"/translate{parameters}"
    reply = server.request("POST", path, form, content_type=kind)
    assert [reply.json["translatedText"]] == server.translator.translate(["fünf"])
    path = path.replace("%C3%BC", "%FC")
    latin_1 = form.replace(b"%C3%BC", b"%FC").replace("ü".encode(), b"\xfc")
    reply = server.request("POST", path, latin_1, content_type=kind)
    assert reply.status == 400 and "not valid UTF-8" in reply.json["error"], reply


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
        ({"sec_fetch_site": "unknown"}, 403),
        ({"sec_fetch_site": "Same-Origin"}, 403),
        *(
            ({"origin": "http://a.example:8000", "host": "a.example:8000"} | {site: value}, status)
            for site, value, status in [
                ("sec_fetch_site", "cross-site", 403),
                ("sec_fetch_site", "same-site", 403),
                ("sec_fetch_site", "same-origin", 200),
                ("sec_fetch_site", "", 200),  # as if absent
            ]
        ),
        *(
            ({"origin": origin, "host": "a.example:8000"}, 403)
            for origin in [
                "http://evil-a.example:8000",
                "http://evil.a.example:8000",
                "http://a.example:8000.evil.example",
                "http://a.example:8000@evil.example",
                "http://a.example",
                "http://a.example:80001",
                "http://a.example:800",
                "http://example:8000",
                "http://evil.example/a.example:8000",
                "http://evil.example/://a.example:8000",
                "a.example:8000",
                "://",
                "",
            ]
        ),
    ],
)
def test_cross_site_requests_are_rejected(server: Server, headers, status) -> None:
    bodies = (FORM, b"target=de&q=one"), (JSON, b'{"target": "de", "q": "one"}')
    for path in "/translate", "/translate/stream":
        for kind, body in bodies:
            reply = server.request("POST", path, body, content_type=kind, **headers)
            assert reply.status == status, reply
            assert status == 200 or reply.json["error"]
        reply = server.request("POST", f"{path}?target=de&q=one", **headers)
        assert reply.status == status, reply
        assert not [name for name in reply.headers if name.startswith("Access-Control")]


def test_security_headers_and_content_security_policy(server: Server) -> None:
    for path in "/", "/page.js", "/docs", "/openapi.json", "/health", "/metrics", "/nothing":
        headers = server.request("GET", path).headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert "Access-Control-Allow-Origin" not in headers  # other sites cannot read it
    for path in "/", "/docs":
        page = server.request("GET", path).body.decode()
        [policy] = re.findall(r'Content-Security-Policy"\s+content="(.*?)"', page)
        assert policy.startswith("default-src 'none'") and "http" not in policy
        assert "unsafe" not in policy and page.index(policy) < page.index("<script")
        assert "<script>" not in page


def test_paths_and_methods(server: Server) -> None:
    reply = server.request("HEAD", "/")
    assert reply.status == 200 and not reply.body
    assert server.request("GET", "/health/", host="elsewhere.example").status == 404
    assert server.request("GET", "/nothing").status == 404
    reply = server.request("GET", "/translate")
    assert reply.status == 405 and "/docs" in reply.json["error"]


def test_unusual_characters_are_translated(server: Server) -> None:
    """The sentence splitter cannot read some of these texts."""
    controls = "".join(map(chr, range(32))) + "one\x7f\x80\ufeff\u2028two\u202e"
    for text in ('B\xa0. ."', " B\xa0.BB", "a\u3000. b\u3000.", controls, "\x00"):
        assert server.ask(q=text).status == 200


def test_leading_tags_are_split_off() -> None:
    pairs = [(line, line.upper()) for line in LINES]
    settings = TokenizerConfig(vocab_size=50, algorithm="unigram", user_defined_symbols=("<2de>",))
    tokenizer = Tokenizer.train(pairs, settings)
    translator = Translator(make_model(tokenizer), tokenizer, CONFIG)

    def texts(text: str) -> list[str]:
        plan = translator.plan(Request(text), split_sentences=True)
        return [part.request.text for part in plan.parts]

    assert texts("<2de> one. Two") == ["<2de> one.", "<2de> Two"]
    assert texts("<2de>one") == ["<2de>one"]
    assert texts(" one <2de>") == ["one <2de>"]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"Content-Length: 1000000000\r\n\r\n" + b"x" * 40_000, b"413"),
        (b"Transfer-Encoding: chunked\r\n\r\n9C40\r\n%b\r\n" % (b"x" * 40_000), b"413"),
        (b"X: " + b"x" * 70_000, b"431"),  # headers above 64 kB
        (b"X: x\r\n" * 20_000, b"431"),
        (b"X: " + b"x" * 100_000 + b"\r\n\r\n", b"431"),
    ],
    ids=["length", "chunks", "header", "headers", "complete header"],
)
def test_large_requests_are_rejected_early(server: Server, sent: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(HEAD + sent)
        assert client.recv(1000).startswith(b"HTTP/1.1 %b " % status)


def test_slow_bodies_time_out(strict: Server) -> None:
    with socket.create_connection(("127.0.0.1", strict.port), timeout=60) as client:
        client.sendall(HEAD + b"Content-Length: 10\r\n\r\n{")
        answer = client.recv(1000)
    assert answer.startswith(b"HTTP/1.1 503 ") and b"timed out after 0.3 s" in answer


def test_disconnects_within_a_body_are_silent(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(HEAD + b"Content-Length: 10\r\n\r\n{")
    assert server.ask(q="one").status == 200 and not caplog.records


def test_a_client_that_reads_nothing_does_not_block_others(server: Server) -> None:
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


def test_an_unread_stream_leaves_the_queue(server: Server) -> None:
    async def accepted() -> int:
        query = Query(q="\n".join(LINES[:20]), target="de")
        coming = (await server.service.begin(query)).stream_sentences()
        await anext(coming)
        for _ in range(2000):
            if not server.service.num_accepted:
                break
            await asyncio.sleep(0.01)
        count = server.service.num_accepted
        await coming.aclose()
        return count

    assert asyncio.run(accepted()) == 0


def test_the_rest_of_a_closed_stream_is_canceled(server: Server) -> None:
    async def canceled() -> list[bool]:
        answering = await server.service.begin(Query(q="\n".join(LINES[:20]), target="de"))
        coming = answering.stream_sentences()
        await anext(coming)
        await coming.aclose()
        tasks = answering.texts[0].tasks
        await asyncio.wait(tasks)
        return [task.cancelled() for task in tasks]

    first, *_, last = asyncio.run(canceled())
    assert last and not first


def test_disconnected_clients_free_their_rows(server: Server) -> None:
    body = json.dumps({"q": "\n".join(LINES), "target": "de"}).encode()
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for path in [b"/translate", b"/translate/stream"] * 20:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            client.sendall(head % path + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            time.sleep(0.005)
    assert server.is_idle()
    assert server.ask(q="one").status == 200


@pytest.fixture(scope="module")
def strict(translator):
    """A server with strict limits and two source languages."""
    models = {Pair(language, "de"): make_model_to_serve(translator) for language in ("en", "fr")}
    service = Service(models, Limits(4, 2000))
    with serving(service, translator, timeout=0.3) as found:
        yield found


def test_limits_are_reported(strict: Server) -> None:
    for q, what in (("one\n" * 5, "sentences"), ([""] * 5, "texts")):
        reply = strict.ask(q=q)
        assert reply.status == 413 and f"5 {what}; expected at most 4" in reply.json["error"]
        assert reply.json["limit"] == 4

    reply = strict.ask(q="one", source="auto")
    assert reply.status == 400 and "expected a source language" in reply.json["error"]


def test_full_queues_and_timeouts_are_rejected(
    strict: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    [scheduler] = strict.service.models[Pair("en", "de")].workers.schedulers
    for batch in scheduler.batches:

        def decode_slowly(admitted, *, decode=batch.decode, max_steps, **limits):
            time.sleep(0.2)
            decode(admitted, max_steps=min(max_steps, 1), **limits)

        monkeypatch.setattr(batch, "decode", decode_slowly)
    with ThreadPoolExecutor(3) as clients:
        replies = list(clients.map(lambda _: strict.ask(q=LINES[6:9]), range(3)))
    assert [reply.status for reply in replies] == [503] * 3
    assert all(int(reply.headers["Retry-After"]) for reply in replies)
    said = [reply.json["error"] for reply in replies]
    full = [each for each in said if "expected at most 4 in total" in each]
    assert len(full) == 2 and "timed out after 0.3 s" in (set(said) - set(full)).pop()
    assert strict.is_idle()


def test_requests_fail_during_compilation_and_after_a_failure(translator) -> None:
    model = make_model_to_serve(translator)
    service = Service({Pair("en", "de"): model}, Limits(4, 2000))
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
            assert server.request("GET", "/health").json == {"status": "compiling", "engine": "jax"}
            reply = server.ask(q="one")
            assert reply.status == 503 and "compiling" in reply.json["error"]
            go_on.set()
            while service.status == "compiling":
                time.sleep(0.01)
            assert server.ask(q="one").status == 200

            def fail(*_, **__):
                raise RuntimeError("out of memory")

            for batch in model.workers.schedulers[0].batches:
                batch.decode = fail
            reply = server.ask(q="one")
            assert reply.status == 503 and "Restart the server" in reply.json["error"]
            assert server.request("GET", "/health").status == 503
    finally:
        Service.status = status


@pytest.mark.parametrize("failing", [["en"], ["fr"], ["en", "fr"]], ids="+".join)
def test_each_models_failure_shows(
    strict: Server, failing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in failing:
        workers = strict.service.models[Pair(source, "de")].workers
        monkeypatch.setattr(workers.queue, "failure", SearchFailed("out of memory"))
    health = strict.request("GET", "/health")
    assert health.status == 503 and health.json == {"status": "failed", "engine": "jax"}
    for path in "/translate", "/translate/stream":
        for source in "en", "fr":
            reply = strict.ask(path, q="one", source=source)
            assert reply.status == 503 and "Restart the server" in reply.json["error"]
            assert int(reply.headers["Retry-After"])
    monkeypatch.undo()
    assert strict.request("GET", "/health").status == 200


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_each_models_failed_compilation_shows(translator: Translator, failing: int) -> None:
    models = [make_model_to_serve(translator) for _ in range(3)]
    for number, model in enumerate(models):
        start = Mock(side_effect=[RuntimeError("out of memory")] if number == failing else None)
        model.start = start  # type: ignore[method-assign]
    pairs = [Pair("en", target) for target in ("de", "fr", "es")]
    service = Service(dict(zip(pairs, models)), Limits(4, 2000))
    assert service.status == "compiling"
    service.start()
    assert service.status == "failed"


@pytest.mark.parametrize("num_pairs", [1, 2])
@pytest.mark.parametrize("num_devices", [pytest.param(2, marks=pytest.mark.devices(2)), 1])
def test_metrics_count_all_pairs_and_devices(
    translator: Translator, num_pairs: int, num_devices: int
) -> None:
    model, tokenizer, config = translator.model, translator.tokenizer, translator.config
    pairs = [Pair("en", target) for target in ("de", "fr")[:num_pairs]]
    devices = jax.devices()[:num_devices]
    models = {
        pair: AsyncTranslator(Translator(model, tokenizer, config, devices=devices))
        for pair in pairs
    }
    service = Service(models, Limits(100, 2000))

    def figures() -> list[float | None]:
        names = "rows", "rows_busy", "sentences_waiting"
        return [service.metrics.registry.get_sample_value(f"transformer_{name}") for name in names]

    rows = config.batch_size * num_pairs
    assert figures() == [rows, 0, 0]
    busy = 0
    for each in models.values():
        workers = each.workers
        assert len(workers.schedulers) == num_devices
        for scheduler in workers.schedulers:
            [batch] = scheduler.batches
            batch._tasks = []
            for _ in range(config.batch_size // num_devices):  # as many as there is room for
                batch._tasks.append(Task(Sentence([5])))
                busy += 1
                assert figures() == [rows, busy, 0]
    assert busy == rows
    for waiting in range(1, 5):
        workers = models[pairs[waiting % num_pairs]].workers
        workers.queue.submit(Sentence([5]), workers.schedulers[0].batches[0].bucket)
        assert figures() == [rows, busy, waiting]


def test_sentences_and_tokens_are_counted_by_pair(strict: Server) -> None:
    """A long sentence counts once, a translation twice if it is asked for twice."""

    def counts() -> list[float]:
        samples = strict.service.metrics.registry.get_sample_value
        return [
            samples(f"transformer_{name}_total", {"pair": f"{source}-de"}) or 0
            for source in ("en", "fr")
            for name in ("sentences", "target_tokens")
        ]

    def lengths(*lines: str) -> int:
        return sum(best.length for [best] in strict.translator.stream(lines))

    long = " ".join(LINES[4:7])
    before = counts()
    assert strict.ask(q=[LINES[1], "..."], source="fr").status == 200
    assert strict.ask("/translate/stream", q=f"{LINES[1]}\n{LINES[2]}", source="fr").status == 200
    assert strict.ask(q=long, source="en", split=False, alternatives=1).status == 200
    assert strict.ask(q="one\n" * 5, source="en").status == 413
    assert strict.is_idle()
    added = [now - earlier for now, earlier in zip(counts(), before)]
    assert added == [1, lengths(long), 3, lengths(LINES[1], LINES[1], LINES[2])]
