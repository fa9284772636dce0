"""Engines to compare: one process each, one at work at a time, A B C A B C ..., quiet rounds only.

Engines in one process disturb each other (their thread pools spin while they wait), and their peak
memory could not be told apart. So each has a process that reads commands from its input and
answers with one line of JSON each; all but one wait for their next command.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol, TextIO

import psutil

_PAUSE = 0.3  # seconds between turns: a thread pool may spin for a while after its work is done
_MOST_ROUNDS = 2  # times the rounds asked for, where other programs disturb them
_QUIET = 0.2  # CPU cores that other programs may use in a round that counts


class Engine:
    """The process of one engine, as the benchmark sees it."""

    def __init__(self, module: str, name: str, folder: Path, threads: int):
        """Start ``python -m module name folder``, on as many cores as all engines get."""
        command = [sys.executable, "-m", module, name, str(folder)]
        memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # a GPU's is shared by all engines
        threads_everywhere = {"OMP_NUM_THREADS": str(threads)}
        pipe = subprocess.PIPE
        root = Path(__file__).resolve().parents[1]
        self.name = name
        self.process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            text=True,
            cwd=root,
            env=os.environ | memory | threads_everywhere,
        )
        os.sched_setaffinity(self.process.pid, sorted(os.sched_getaffinity(0))[:threads])

    def read(self) -> dict[str, Any]:
        """Its next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"error: {self.name} ended without an answer (status {self.process.wait()}); "
                "see above."
            )
        return json.loads(line)

    def ask(self, command: str) -> dict[str, Any]:
        """Have it do something; adds what others did meanwhile."""
        assert self.process.stdin is not None
        begin, busy = time.perf_counter(), busy_seconds()
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        answer = self.read()
        if "cpu_seconds" in answer:
            others = busy_seconds() - busy - answer["cpu_seconds"]
            answer["others"] = max(0.0, others / (time.perf_counter() - begin))
        return answer

    def end(self) -> None:
        """Let it go."""
        self.process.kill()
        self.process.communicate()


class Rounds(NamedTuple):
    """What the engines answered, by name, in each round that counts."""

    warm_up: dict[str, Any]
    timed: list[dict[str, Any]]
    num_all: int
    num_quiet: int

    def seconds(self, name: str) -> list[float]:
        """How long this engine took in each timed round."""
        return [each[name]["seconds"] for each in self.timed]

    def load_of_others(self, name: str) -> float:
        """CPU cores that other programs used in its turns: the median."""
        return round(median(each[name]["others"] for each in self.timed), 2)


class Started(NamedTuple):
    """Engines that are ready, what each said of itself, and why others are left out; all by
    name.
    """

    engines: dict[str, Engine]
    said: dict[str, Any]
    skipped: dict[str, str]


@contextmanager
def running(module: str, names: list[str], folder: Path, threads: int) -> Iterator[Started]:
    """Start the engines of these names; end them where the block ends."""
    engines: dict[str, Engine] = {}
    try:
        for name in names:
            engines[name] = Engine(module, name, folder, threads)
        said = {name: engine.read() for name, engine in engines.items()}
        skipped = {name: answer["skipped"] for name, answer in said.items() if "skipped" in answer}
        for name in skipped:
            engines.pop(name).end()
        yield Started(engines, said, skipped)
    finally:
        for engine in engines.values():
            engine.end()


def prepare(module: str, folder: Path, threads: int) -> dict[str, Any]:
    """What ``python -m module prepare folder`` answers before any engine is started."""
    engine = Engine(module, "prepare", folder, threads)
    answer = engine.read()
    engine.end()
    return answer


def take_turns(engines: dict[str, Engine], *, repeats: int, patience: float) -> Rounds:
    """A round to warm up, then rounds until enough were quiet or there were too many; if none was
    quiet, all count.

    ``patience``: most seconds to wait, before a turn, while other programs use the machine.
    """
    rounds: list[dict[str, Any]] = []
    while _quiet_rounds(rounds[1:]) < repeats and len(rounds) < 1 + _MOST_ROUNDS * repeats:
        rounds.append({})
        for name, engine in engines.items():
            wait_for_others(patience)
            rounds[-1][name] = answer = engine.ask("run")
            seen = (
                f"{answer['seconds']:.2f} s, {answer['cpu_seconds']:.2f} CPU s, "
                f"others {answer['others']:.2f}"
            )
            print(f"round {len(rounds) - 1}  {name:<18}{seen}", file=sys.stderr, flush=True)
    warm_up, *all_timed = rounds
    timed = [each for each in all_timed if _quiet_rounds([each])] or all_timed
    return Rounds(warm_up, timed, len(all_timed), _quiet_rounds(all_timed))


def wait_for_others(patience: float) -> None:
    """A pause; and while other programs use the machine, up to ``patience`` seconds more."""
    latest = time.perf_counter() + patience
    while True:
        busy = busy_seconds()
        time.sleep(_PAUSE)
        if (busy_seconds() - busy) / _PAUSE <= _QUIET or time.perf_counter() >= latest:
            return


def ours_over(speeds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """For each other engine: ours / its speed, as the ratio of medians and as the median over
    rounds of the ratio.
    """
    return {
        name: {
            "of_medians": round(median(speeds["ours"]) / median(theirs), 3),
            "median_of_pairs": round(median(a / b for a, b in zip(speeds["ours"], theirs)), 3),
        }
        for name, theirs in speeds.items()
        if name != "ours" and "ours" in speeds
    }


class Skipped(Exception):
    """This engine cannot run here; the message says why."""


class Runner(Protocol):
    """An engine, loaded, in its own process."""

    about: dict[str, Any]  # its precision, and what else it can tell before it works

    def __call__(self) -> Any:
        """One turn's work; returns its outputs, as JSON has them."""

    def extras(self) -> dict[str, Any]:
        """What only this engine can tell."""


def answer_once(work: Callable[[], dict[str, Any]]) -> None:
    """What the process ``prepare`` does."""
    print(json.dumps(work()), file=_answers())


def serve(load: Callable[[], Runner]) -> None:
    """What an engine's process does: load it, then answer ``run`` and ``extras``."""
    answers = _answers()
    begin = time.perf_counter()
    try:
        runner = load()
    except Skipped as reason:
        print(json.dumps({"skipped": str(reason)}), file=answers)
        return
    print(
        json.dumps({**runner.about, "load_seconds": round(time.perf_counter() - begin, 2)}),
        file=answers,
    )
    for command in sys.stdin:
        if command.strip() == "extras":
            answer = {"peak_memory_gb": peak_memory_gb(), **runner.extras()}
        else:
            begin, cpu = time.perf_counter(), time.process_time()
            outputs = runner()
            seconds = time.perf_counter() - begin
            answer = {
                "seconds": seconds,
                "cpu_seconds": time.process_time() - cpu,
                "outputs": outputs,
            }
        print(json.dumps(answer), file=answers)


def _answers() -> TextIO:
    """Where answers go; what libraries print is none, and goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def peak_memory_gb() -> float:
    """Of this process alone: getrusage would count what its parent held when it was started."""
    [peak] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return round(int(peak) * 1024 / 1e9, 3)


def _quiet_rounds(rounds: list[dict[str, Any]]) -> int:
    """How many had the machine to themselves."""
    return sum(all(answer["others"] <= _QUIET for answer in each.values()) for each in rounds)


def busy_seconds() -> float:
    """What all cores have worked so far."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest
