"""The benchmark of the service, mostly of one that does not translate."""

import asyncio
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flax import nnx
from random_models import write_run

from benchmarks.http_load import IGNORED, UNREAD, Address, Answer, Connection
from benchmarks.serving_engines import Job, latencies
from transformer_jax.config import (
    Config,
    DataConfig,
    DecodingConfig,
    ModelConfig,
    TokenizerConfig,
)
from transformer_jax.model.transformer import Transformer
from transformer_jax.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
SHOUTING = ROOT / "tests" / "shouting_service.py"
LINES = ["one", "two & two", "three", "vier, fünf"]


@pytest.fixture
def serving(tmp_path: Path) -> Callable[..., tuple[int, str, Any]]:
    """``serving(fault, *flags)``: exit status, what is printed, JSON; without a fault of the real
    service.
    """
    source, reference, report = (tmp_path / name for name in ("in.en", "out.de", "report.json"))
    source.write_text("".join(f"{line}\n" for line in LINES))
    reference.write_text("".join(f"{line.upper()}\n" for line in LINES))

    def run(fault: str, *flags: str) -> tuple[int, str, Any]:
        command = [sys.executable, "-m", "benchmarks.serving", "--json", str(report)]
        command += ["--workdir", "none", "--input", str(source), "--reference", str(reference)]
        if fault:
            command += ["--command", shlex.join([sys.executable, str(SHOUTING), "--fault", fault])]
        command += ["--seconds", "0.3", "--warm-up", "0.1", "--patience", "0", *flags]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        return done.returncode, done.stdout, json.loads(report.read_text())

    return run


def test_load_in_one_report(serving: Callable[..., tuple[int, str, Any]]) -> None:
    status, printed, report = serving("none", "--clients", "1", "8", "--rounds", "2")
    assert status == 0
    one, eight = report["results"]
    assert (one["load"], eight["load"]) == ("1 client", "8 clients")
    for figures in (one, eight):
        assert figures["engine"] == "ours" and len(figures["rounds"]) == 2
        assert figures["requests"] > 2 and figures["errors"] == figures["differ"] == 0
        assert 20 <= figures["p50_ms"] <= figures["p95_ms"] <= figures["p99_ms"]
        assert figures["p99_ms"] <= figures["max_ms"] and figures["cpu_seconds"] >= 0
        assert figures["memory_mb_start"] > 1 and figures["memory_mb_end"] > 1
    assert eight["sentences_per_second"] > one["sentences_per_second"] > 0
    assert "8 clients" in printed and "sent/s" in printed


def test_wrong_answers_are_shown(serving: Callable[..., tuple[int, str, Any]]) -> None:
    status, printed, report = serving("wrong", "--clients", "2")
    assert status == 1
    [figures] = report["results"]
    assert 0 < figures["differ"] < figures["requests"] and figures["errors"] == 0
    assert "line 2: 'two & two'\n  expected 'TWO & TWO'\n  got      'two & two'" in printed


def test_clients_that_vanish_and_an_end_under_load(
    serving: Callable[..., tuple[int, str, Any]],
) -> None:
    status, printed, report = serving("none", "--clients", "8", "--vanish", "20", "--sigterm")
    assert status == 0 and "vanish: passed" in printed and "sigterm: passed" in printed
    vanished, ended = report["vanish"], report["sigterm"]
    assert 0 < vanished["vanished"] == 20 - vanished["answered_before"]
    assert vanished["transformer_rows_busy"] == 0 and vanished["requests_afterwards"] > 8
    assert ended["answered_after_signal"] > 0 == ended["errors"] == ended["exit_status"]


@pytest.mark.parametrize(
    ("fault", "flags", "wrong"),
    [
        ("busy", ["--vanish", "2", "--idle-within", "0.1"], "transformer_rows_busy is 1"),
        ("hasty", ["--sigterm"], IGNORED),
        ("status", ["--sigterm"], "the exit status is 3; expected 0"),
    ],
)
def test_faults_are_found(
    serving: Callable[..., tuple[int, str, Any]], fault: str, flags: list[str], wrong: str
) -> None:
    status, printed, report = serving(fault, "--clients", "4", *flags)
    assert status == 1 and wrong in printed and "FAILED" in printed
    assert any(wrong in each for outcome in report.values() for each in outcome["wrong"])


def test_a_service_may_be_busy_at_first(serving: Callable[..., tuple[int, str, Any]]) -> None:
    _, printed, report = serving("late", "--clients", "1", "--vanish", "1")
    assert "vanish: passed" in printed and report["vanish"]["seconds_until_idle"] > 0.5


@pytest.mark.parametrize("read", [True, False])
def test_whether_a_request_was_read_before_its_connection_closed(read: bool) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if read:
            await reader.readexactly(5)
        writer.close()

    async def ask() -> tuple[int, bytes, str]:
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            connection = await Connection.open(Address(*server.sockets[0].getsockname()))
            if not read:
                await asyncio.sleep(0.1)  # it is closed by now
            try:
                return await connection.ask(b"hello")
            finally:
                connection.close()

    assert asyncio.run(ask()) == (0, b"", IGNORED if read else UNREAD)


def test_percentiles_are_latencies_that_occurred() -> None:
    found = latencies([float(n) for n in range(200, 0, -1)])
    assert found == {"p50_ms": 100, "p95_ms": 190, "p99_ms": 198, "max_ms": 200}


def test_what_is_no_translation_is_an_error() -> None:
    job = Job(["a", "b"], ["A", "B"], "en-de")
    answers = [
        Answer(0, 0, 1, 200, b'{"translatedText": "A"}', ""),
        Answer(1, 0, 1, 200, b'{"text": "B"}', ""),
        Answer(1, 0, 1, 503, b'{"error": "full"}', ""),
        Answer(0, 0, 1, 0, b"", UNREAD),
    ]
    errors, different, shown = job.check(answers)
    assert (errors, different) == (2, 1)
    assert shown[0] == 'line 2: status 503: {"error": "full"}' and UNREAD in shown[1]


def test_the_peer_searches_together_what_waits() -> None:
    pytest.importorskip("fastapi")
    from benchmarks.ct2_server import Window

    calls: list[int] = []

    def search(lines: list[list[str]]) -> list[Any]:
        calls.append(len(lines))
        time.sleep(0.05)
        if ["bad"] in lines:
            raise ValueError("bad")
        return [SimpleNamespace(hypotheses=[tokens[::-1]]) for tokens in lines]

    async def ask() -> None:
        window = Window(search, workers=1, size=3, wait=0.0)
        work = asyncio.create_task(window.work())
        first = asyncio.create_task(window(["a", "b"]))
        await asyncio.sleep(0.02)
        others: list[Awaitable[list[str]]] = [window([str(i), "x"]) for i in range(4)]
        assert await asyncio.gather(first, *others) == [
            ["b", "a"],
            *(["x", str(i)] for i in range(4)),
        ]
        with pytest.raises(ValueError, match="bad"):
            await window(["bad"])
        assert await window(["c", "d"]) == ["d", "c"]
        work.cancel()

    asyncio.run(ask())
    assert calls == [1, 3, 1, 1, 1]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work directory with one checkpoint, of random parameters."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = Tokenizer.train(
        [(line, line.upper()) for line in LINES],
        TokenizerConfig(vocab_size=30, algorithm="unigram"),
    )
    config = Config(
        model=ModelConfig(vocab_size=30, d_model=16, d_ff=16, num_heads=2, num_layers=1),
        data=DataConfig(max_source_length=16, max_target_length=16),
        decoding=DecodingConfig(
            beam_size=2, max_extra_length=4, max_source_length=16, batch_size=4
        ),
    )
    model = Transformer(config.model, rngs=nnx.Rngs(0))
    write_run(folder, config, tokenizer, {1: model}, best_step=1)
    return folder


def test_every_engine_in_one_report(
    serving: Callable[..., tuple[int, str, Any]], workdir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("ctranslate2")
    pytest.importorskip("fastapi")
    made = tmp_path / "made.de"
    command = ["--workdir", str(workdir), "--reference", str(made), "--clients", "1", "4"]
    command += ["--engines", "ours", "ct2", "translator", "decode", "--lines", "3"]
    status, printed, report = serving("", *command, "--", "--length-penalty", "0.5")
    assert len(made.read_text().splitlines()) == 3
    assert status == 0, printed
    found = {(each["engine"], each["load"]): each for each in report["results"]}
    served = [(name, load) for name in ("ours", "ct2") for load in ("1 client", "4 clients")]
    library = [("translator", "all lines"), ("translator", "one line"), ("decode", "all lines")]
    assert set(found) == {*served, *library}
    assert all(found[each]["requests"] > 0 == found[each]["errors"] for each in served)
    assert found["translator", "one line"]["p50_ms"] > 0
    assert found["decode", "all lines"]["program_seconds"] > 0
    assert set(report["compared"]) == {
        "sentences/s: ours, 1 client / ct2, 1 client",
        "sentences/s: ours, 4 clients / ct2, 4 clients",
        "sentences/s: ours, 4 clients / translator, all lines",
        "sentences/s: ours, 4 clients / decode, all lines",
        "ms added to a line: ours, 1 client - translator",
    }
    assert all(name in printed for name in report["compared"])
