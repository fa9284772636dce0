"""Documented requests work, and the tables in docs/serving.md are complete."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families
from servers import Server

from transformer_jax.decoding import scheduler
from transformer_jax.serving import limits
from transformer_jax.serving.__main__ import UVICORN
from transformer_jax.serving.log_limit import LogLimit
from transformer_jax.serving.protocol import Protocol
from transformer_jax.serving.schema import Query

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text()
FORM = "application/x-www-form-urlencoded"


class Curl(NamedTuple):
    """A request of a curl command."""

    path: str
    body: str
    kind: str


def parse(command: str) -> Curl:
    """Parse a curl command that has only flags used in the page."""
    # bash's $'...' has newlines, a file any content
    words = shlex.split(re.sub(r"\$('.*?')", lambda m: m[1].replace("\\n", "%0A"), command))
    assert words.pop(0) == "curl"
    fields, kind, path = [], FORM, ""
    while words:
        match words.pop(0):
            case "-d":
                fields.append(words.pop(0))
            case "--data-urlencode":
                fields.append(re.sub("@.*", "=one", words.pop(0)))
            case "-H":
                name, kind = words.pop(0).split(": ")
                assert name == "Content-Type"
            case "-N":
                pass
            case url:
                assert not path
                path = urlsplit(f"http://{url}").path
    return Curl(path, "&".join(fields), kind)


COMMANDS = [
    re.sub(r"  #.*", "", line) for line in re.findall(r"^    (curl .*)$", PAGE, re.MULTILINE)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_requests_work(server: Server, command: str) -> None:
    asked = parse(command)
    # The test model has another vocabulary.
    body = asked.body.replace("prefix=sieb", "prefix=SIX").encode()
    reply = server.request("POST", asked.path, body, content_type=asked.kind)
    assert reply.status == 200, reply
    answer = b"event: done" in reply.body if "stream" in asked.path else reply.json
    assert answer


def test_tables_explain_every_field() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"\w+", row)}
    assert Query.model_fields.keys() <= named
    assert len(COMMANDS) >= 8


def test_documented_limits_are_the_flags_defaults() -> None:
    rows = re.findall(r"^\| `--([a-z-]+)` \| (\w+)", PAGE, re.MULTILINE)
    defaults = {field.name: field.default for field in dataclasses.fields(limits.Limits)}
    assert len(rows) == len(defaults) == 3
    for flag, documented in rows:
        default = defaults[flag.replace("-", "_")]
        assert documented == ("none" if default is None else f"{default:g}"), flag


# What the page says, and the figures in the code.
FIGURES: dict[str, tuple[float, ...]] = {
    r"of up to (\d+) tokens, in requests of up to ([\d,]+)": (
        limits.MAX_ALIGNED_SENTENCE_TOKENS,
        limits.MAX_ALIGNED_REQUEST_TOKENS,
    ),
    r"except for sentences of more than (\d+) tokens": (limits.MAX_ALIGNED_SENTENCE_TOKENS,),
    r"\| (\d+) × `--max-characters` \+ ([\d,]+) bytes": (
        limits._BYTES_PER_CHARACTER,
        limits._OTHER_BYTES,
    ),
    r"\| headers \| (\d+) KB": (UVICORN["h11_max_incomplete_event_size"] / 1024,),
    r"up to (eight) decoding\s+steps at a time \(up to (\d+) with one row\)": (
        scheduler.STEPS_PER_READ,
        scheduler.STEPS_PER_READ_OF_ONE_ROW,
    ),
    r"sends no complete headers for (\d+) seconds": (Protocol.header_timeout,),
    r"(\d+) warnings of a kind in (\d+) seconds": (LogLimit.burst, LogLimit.seconds),
    r"are disconnected after (\d+) to (\d+) seconds": (Protocol.patience, 2 * Protocol.patience),
}


@pytest.mark.parametrize("said", FIGURES)
def test_documented_figures_are_the_codes(said: str) -> None:
    found = re.findall(said, re.sub(r"\s+", " ", PAGE))
    assert len(found) == 1, found
    words = [found[0]] if isinstance(found[0], str) else found[0]
    numbers = [float(word.replace("eight", "8").replace(",", "")) for word in words]
    assert numbers == list(FIGURES[said])


def test_every_metric_is_explained(server: Server) -> None:
    figures = server.request("GET", "/metrics").body.decode()
    names = {family.name for family in text_string_to_metric_families(figures)}
    documented = set(re.findall(r"`((?:transformer|http)_\w+?)(?:_total)?`", PAGE))
    assert documented == {name for name in names if not name.endswith("_created")}
