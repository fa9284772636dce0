"""Third-party and malicious clients."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import LINES, Server, make_model_to_serve

from transformer_jax.errors import UserError
from transformer_jax.serving.flags import Pair
from transformer_jax.serving.limits import Limits
from transformer_jax.serving.schema import Query
from transformer_jax.serving.service import Service
from transformer_jax.translation.requests import Request
from transformer_jax.translation.translator import Translator

# FUZZ=600 runs more examples.
FUZZ = settings(
    max_examples=int(os.environ.get("FUZZ", "75")),
    deadline=20_000,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

TEXTS = st.text(max_size=40) | st.sampled_from(LINES) | st.sampled_from(["<b>", "&#99999999;", ""])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
RIGHT: dict[str, st.SearchStrategy[Any]] = {
    "q": TEXTS | st.lists(TEXTS, max_size=4),
    "source": st.sampled_from(["en", "auto", "fr"]),
    "target": st.sampled_from(["de", "de", "en"]),
    "format": st.sampled_from(["text", "html", "xml"]),
    "alternatives": st.integers(0, 3),
    "prefix": st.sampled_from(["", "ONE", "é"]),
    "details": st.booleans(),
    "attention": st.booleans(),
    "split": st.booleans(),
}
OPTIONAL = {name: each for name, each in RIGHT.items() if name not in ("q", "target")}
QUERIES = st.fixed_dictionaries({"q": RIGHT["q"], "target": RIGHT["target"]}, optional=OPTIONAL)
WRONG = st.fixed_dictionaries({}, optional=dict.fromkeys([*RIGHT, "api_key", "x"], ANYTHING))
KINDS = st.sampled_from(
    [
        "application/json",
        "application/json; charset=utf-16",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain",
        "",
    ]
)


PAGE = (
    "<p class='x'>one <a href=q>two</a>\n three</p><ul><li>four {x}<li><code>a &lt; b</code></ul>"
)


def translated_page(server: Server) -> str:
    [page] = server.translator.documents([Request(PAGE, format="html")])
    assert page.text.startswith("<p class='x'>") and "{x}<li><code>a &lt; b</code>" in page.text
    return page.text


def check(server: Server, path: str, body: bytes, kind: str) -> None:
    headers = {"content_type": kind} if kind else {}
    reply = server.request("POST", path, body, **headers)
    assert reply.status in (200, 400, 413, 415), (body, kind, reply)
    if reply.status != 200:
        assert reply.json["error"]
    elif path == "/translate":
        assert reply.json["translatedText"] is not None
    else:
        assert b"event: done" in reply.body and b"event: error" not in reply.body


@FUZZ
@given(st.sampled_from(["/translate", "/translate/stream"]), QUERIES | WRONG)
def test_any_query_gets_a_translation_or_an_error(server: Server, path, query) -> None:
    check(server, path, json.dumps(query).encode(), "application/json")


@FUZZ
@given(st.binary(max_size=200) | TEXTS.map(str.encode), KINDS)
def test_any_body_gets_a_translation_or_an_error(server: Server, body, kind) -> None:
    check(server, "/translate", body, kind)
    check(server, "/translate", b"target=de&q=" + body, kind)


def test_libretranslatepy_works_unchanged(server: Server) -> None:
    libretranslatepy = pytest.importorskip("libretranslatepy", reason="needs libretranslatepy")
    client = libretranslatepy.LibreTranslateAPI(server.url)
    assert [client.translate(line, "en", "de") for line in LINES[:5]] == (
        server.translator.translate(LINES[:5])
    )
    # It has no argument for the format. What follows # is not sent.
    client_of_html = libretranslatepy.LibreTranslateAPI(f"{server.url}/translate?format=html#")
    assert client_of_html.translate(PAGE, "en", "de") == translated_page(server)
    assert client.languages()[0] == {"code": "en", "name": "en", "targets": ["de"]}
    with pytest.raises(HTTPError, match="400"):
        client.translate("one", "en", "fr")


NPM_CLIENTS = """
import libre from "libretranslate";  // its languages must include source and target
import translate from "translate";

const [url, page, ...lines] = process.argv.slice(1);
Object.assign(translate, { engine: "libre", url: `${url}/translate`, from: "en", to: "de" });
const found = { translate: [], libretranslate: [], error: "" };
for (const line of lines) {
  found.translate.push(await translate(line));
  const query = { query: line, source: "en", target: "de", apiurl: url, apiKey: "any" };
  found.libretranslate.push(await libre.translate(query));
  found.html = await libre.translate({ ...query, query: page, format: "html" });
}
await translate("one", "fr").catch((error) => (found.error = error.message));
console.log(JSON.stringify(found));
"""


def test_npm_clients_work_unchanged(server: Server) -> None:
    node, folder = shutil.which("node"), Path(sys.prefix)
    if node is None or not (folder / "node_modules" / "libretranslate").is_dir():
        pytest.skip("needs node, and clients that `make test` installs with npm")
    arguments = ["--", server.url, PAGE, *LINES[:5]]
    command = [node, "--input-type=module", "--eval", NPM_CLIENTS, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected = server.translator.translate(LINES[:5])
    assert found["translate"] == found["libretranslate"] == expected
    assert found["html"] == translated_page(server)
    assert "target is 'fr'; expected one of en-de" in found["error"]


@pytest.mark.parametrize(
    "fields",
    [
        *({name: None} for name in Query.model_fields if name not in ("q", "target")),
        {"format": ""},
        {"source": ""},
        {"format": "html"},
        *({"api_key": key} for key in (7, 0.5, True, ["x"], {"x": "y"}, "")),
        {"apiKey": "any"},
        {"target": "DE", "source": "EN"},
    ],
    ids=str,
)
def test_what_libretranslate_accepts_is_accepted(server: Server, fields: dict[str, Any]) -> None:
    expected = server.ask(q=LINES[7]).json["translatedText"]
    assert server.ask(q=LINES[7], **fields).json["translatedText"] == expected
    if all(isinstance(value, str) for value in fields.values()):
        assert server.ask_form(q=LINES[7], **fields).json["translatedText"] == expected


def test_each_text_has_a_detected_language(server: Server) -> None:
    detected = {"language": "en", "confidence": 100}
    for q, expected in (("one", detected), (["one"], [detected]), (["", "b"], [detected] * 2)):
        for source in ("auto", "AUTO"):  # codes match in any case
            assert server.ask(q=q, source=source).json["detectedLanguage"] == expected
    assert "detectedLanguage" not in server.ask(q="one").json


@pytest.mark.parametrize("path", ["/", "/translate/", "/detect", "/suggest", "/translate_file"])
def test_unsupported_requests_get_a_json_error(server: Server, path: str) -> None:
    reply = server.request("POST", path, b"q=one", content_type="application/x-www-form-urlencoded")
    assert reply.status in (404, 405) and reply.json["error"]


def test_language_codes_match_in_any_case(translator: Translator) -> None:
    pairs = [Pair("zh-Hans", "pt-BR"), Pair("en", "pt_PT"), Pair("en", "de")]
    model = make_model_to_serve(translator)
    service = Service(dict.fromkeys(pairs, model), Limits(4, 2000))

    def found(source: str, target: str) -> Pair:
        return service.pairs.find(source, target)

    for source, target in (("zh-Hans", "pt-BR"), ("ZH-hans", "pt_br"), ("Auto", "PT-BR")):
        assert found(source, target) == pairs[0]
    assert found("EN", "pt-pt") == pairs[1] and found("auto", "DE") == pairs[2]
    with pytest.raises(UserError, match="expected one of zh-Hans-pt-BR, en-pt_PT, en-de"):
        found("zh", "pt")


def test_an_error_lists_some_of_many_pairs(translator: Translator) -> None:
    codes = [f"x{first}{second}" for first in "abcdef" for second in "abcdef"]
    pairs = [Pair(*pair) for pair in itertools.permutations(codes, 2)]
    model = make_model_to_serve(translator)
    service = Service(dict.fromkeys(pairs, model), Limits(4, 2000))
    assert service.pairs.find("xff", "xab") == Pair("xff", "xab")
    for source, target in (("en", "de"), ("auto", "xaa")):
        with pytest.raises(
            UserError, match=r"expected .*\.\.\. \(GET /languages lists all\)"
        ) as found:
            service.pairs.find(source, target)
        assert len(str(found.value)) < 300


def test_punctuation_is_copied_unless_the_text_is_not_split(server: Server) -> None:
    """``decode.py`` translates it."""
    for text in "...", "***\n\n---", "?!", "____", "_ - _\n€", "😀", "“ …”":
        assert server.ask(q=text).json["translatedText"] == text
        [expected] = server.translator.translate([text])
        alone = server.ask(q=text.partition("\n")[0], split=False).json["translatedText"]
        assert alone == server.translator.translate([text.partition("\n")[0]])[0]
        assert expected != text
