"""What ``serving.py`` measures: services, each in a process of its own, and the library itself."""

from __future__ import annotations

import json
import math
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks import http_load, in_turn
from benchmarks.http_load import Address, Answer

_START_SECONDS = 600.0  # until a service must be ready: it may compile for long
_END_SECONDS = 60.0
_SHOWN = 3  # lines that are wrong, and errors


@dataclass(frozen=True)
class Turn:
    """What one engine did in one turn: figures for the table, by column; and the ms of each line
    that was translated alone.
    """

    figures: dict[str, Any]
    ms_of_lines: dict[int, float] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()
    """Errors and differing answers, the first few, as text."""


class Server:
    """A service, and its process if that is known."""

    def __init__(self, address: Address, pid: int | None = None):
        """One that runs."""
        self.address = address
        self.process: subprocess.Popen[bytes] | None = None
        self.ready_seconds = 0.0
        self._family = [] if pid is None else [psutil.Process(pid)]

    @classmethod
    def start(cls, command: Sequence[str], log: Path) -> Server:
        """Start this program, with a host and a port, and wait until it is ready; what it prints
        goes to ``log``.
        """
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = Address(*free.getsockname())
        where = ["--host", address.host, "--port", str(address.port)]
        with log.open("wb") as output:
            process = subprocess.Popen([*command, *where], stdout=output, stderr=output)
        server = cls(address, process.pid)
        server.process = process
        begin = time.perf_counter()
        while not server.is_ready():
            if process.poll() is not None or time.perf_counter() - begin > _START_SECONDS:
                server.end()
                said = log.read_text(errors="replace")[-2000:]
                raise SystemExit(f"error: {' '.join(command)} does not answer /health:\n{said}")
            time.sleep(0.1)
        server.ready_seconds = round(time.perf_counter() - begin, 1)
        return server

    def is_ready(self) -> bool:
        """Whether /health says so."""
        with suppress(OSError):
            return http_load.get(self.address, "/health")[0] == 200
        return False

    def memory_mb(self) -> float:
        """Resident; NaN if its process is not known."""
        with suppress(psutil.Error):  # it may have ended
            return sum(each.memory_info().rss for each in self._processes()) / 1e6 or math.nan
        return math.nan

    def cpu_seconds(self) -> float:
        """Of all its threads so far; NaN likewise."""
        with suppress(psutil.Error):
            return sum(sum(each.cpu_times()[:2]) for each in self._processes()) or math.nan
        return math.nan

    def _processes(self) -> list[psutil.Process]:
        return [*self._family, *(x for each in self._family for x in each.children(recursive=True))]

    def terminate(self) -> None:
        """Send it SIGTERM."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int | None:
        """Its exit status; None if it does not end."""
        assert self.process is not None
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(_END_SECONDS)
        return None

    def end(self) -> None:
        """Let it go, if it is ours."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True)
class Job:
    """What to translate, and what is expected."""

    lines: list[str]
    reference: list[str]
    languages: str

    def requests(self, address: Address) -> list[bytes]:
        """One for each line."""
        return http_load.translation_requests(address, self.lines, self.languages)

    def check(self, answers: Sequence[Answer]) -> tuple[int, int, list[str]]:
        """How many requests had no translation, how many another than expected, and what they
        were, the first few of both.
        """
        errors, different = [], []
        for answer in answers:
            if answer.status != 200:
                why = answer.fault or f"status {answer.status}: {answer.body[:200].decode()}"
                errors.append(f"line {answer.line + 1}: {why}")
            elif (text := translated(answer.body)) != self.reference[answer.line]:
                different.append(
                    f"line {answer.line + 1}: {self.lines[answer.line]!r}\n"
                    f"  expected {self.reference[answer.line]!r}\n  got      {text!r}"
                )
        return len(errors), len(different), errors[:_SHOWN] + different[:_SHOWN]


def translated(body: bytes) -> Any:
    """The translation in an answer; whatever else is there instead."""
    with suppress(ValueError, KeyError, TypeError):
        return json.loads(body)["translatedText"]
    return body


def measure(server: Server, job: Job, *, clients: int, seconds: float) -> Turn:
    """Have so many clients ask for all lines, again and again."""
    requests = job.requests(server.address)
    busy, cpu, own = in_turn.busy_seconds(), server.cpu_seconds(), time.process_time()
    memory, begin = server.memory_mb(), time.perf_counter()
    work = http_load.load(server.address, requests, clients=clients, seconds=seconds)
    answers: list[Answer] = http_load.run(work)
    took = time.perf_counter() - begin
    cpu, own = server.cpu_seconds() - cpu, time.process_time() - own
    others = max(in_turn.busy_seconds() - busy - cpu - own, 0.0) / took  # NaN stays NaN
    errors, different, wrong = job.check(answers)
    good = [answer for answer in answers if answer.status == 200]
    in_time = sum(answer.end <= begin + seconds for answer in good)
    figures = {
        "requests": len(answers),
        "errors": errors,
        "differ": different,
        "sentences_per_second": in_time / seconds,
        **latencies([1e3 * (answer.end - answer.begin) for answer in good]),
        "memory_mb_start": memory,
        "memory_mb_end": server.memory_mb(),
        "cpu_seconds": cpu,
        "cpu_ms_per_sentence": 1e3 * cpu / len(good) if good else math.nan,
        "load_cpu_seconds": own,
        "others": others,
    }
    first = {answer.line: 1e3 * (answer.end - answer.begin) for answer in reversed(good)}
    return Turn(figures, first if clients == 1 else {}, tuple(wrong))


def latencies(ms: Sequence[float]) -> dict[str, float]:
    """Percentiles: the least number that so many of these do not exceed."""
    ordered = sorted(ms) or [math.nan]
    found = {
        f"p{share}_ms": ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]
        for share in (50, 95, 99)
    }
    return found | {"max_ms": ordered[-1]}


def decode(workdir: str, source: Path, output: Path, flags: Sequence[str]) -> float:
    """Translate a file with decode.py; the program's seconds."""
    command = [sys.executable, "-m", "transformer_jax.decoding", "--workdir", workdir]
    begin = time.perf_counter()
    done = subprocess.run(
        [*command, "--input", str(source), "--output", str(output), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"error: decode.py ended with status {done.returncode}:\n{done.stdout}")
    return time.perf_counter() - begin


def measure_decode(job: Job, workdir: str, folder: Path, flags: Sequence[str]) -> Turn:
    """decode.py with all lines, less what it takes for one empty line: starting, loading."""
    texts = {"empty": "\n", "lines": "".join(f"{line}\n" for line in job.lines)}
    seconds = {}
    for name, text in texts.items():
        source = folder / f"{name}.txt"
        source.write_text(text, encoding="utf-8")
        seconds[name] = decode(workdir, source, folder / f"{name}.out", flags)
    return Turn(
        {
            "sentences_per_second": len(job.lines) / (seconds["lines"] - seconds["empty"]),
            "program_seconds": seconds["lines"],
            "startup_seconds": seconds["empty"],
        }
    )


def measure_library(engine: in_turn.Engine) -> dict[str, Turn]:
    """A turn of ``serving_ours.py``: what it translated in one stream, and line by line."""
    answer = engine.ask("run")
    found, others = answer["outputs"], {"others": answer["others"]}
    ms = found["ms_of_lines"]
    turns = {"one line": Turn(latencies(ms) | others, dict(enumerate(ms)))}
    if "seconds" in found:
        speed = {"sentences_per_second": found["lines"] / found["seconds"]}
        turns["all lines"] = Turn(speed | others)
    return turns


def medians(turns: Sequence[Turn]) -> dict[str, float]:
    """Of each figure over the rounds; errors and differing answers are added up."""
    added = ("requests", "errors", "differ")
    return {
        name: (sum if name in added else median)(turn.figures[name] for turn in turns)
        for name in turns[0].figures
    }
