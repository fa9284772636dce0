"""Time commands in turn, A B A B ..., and report the ratios of their speeds.

    python -m benchmarks.in_turn 'python decode.py --workdir W --input F' 'python other.py F'
    python -m benchmarks.in_turn --against ../older 'python decode.py --workdir W --input F'

The speed of a shared machine drifts, so only ratios within a round are reliable. Each round runs
every command once, after one warm-up round. ``ratio`` is the first command's speed divided by this
command's speed (median over rounds); above 1, the first command is faster. ``lowest`` and
``highest`` are the extremes over rounds. ``--against`` also runs the first command in another
checkout.

The other benchmarks compare engines in the same way. Each engine runs in its own process, so that
thread pools do not interfere and peak memory is measured separately.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from transformer_jax.devices.machine import cpu_flags

ROOT = Path(__file__).resolve().parents[1]
Answer = dict[str, Any]
Engine = Callable[[], Answer]  # runs one turn
Table = dict[str, Answer]  # rows by name, values by column
_engine: Engine  # in a worker process
_PAUSE = 0.3  # seconds between turns, because idle thread pools may keep spinning for a while


@contextmanager
def workers(module: str, names: Sequence[str], job: Answer) -> Iterator[dict[str, Engine]]:
    """Start engines by name, each in its own process, with ``benchmarks.MODULE.start(name, job)``.

    Each engine gets ``job["threads"]`` cores. If ``job["against"]`` names a checkout, an engine
    ``against`` uses ``transformer_jax`` from that checkout.
    """
    # limit thread pools; share GPU memory among engines
    os.environ |= {"OMP_NUM_THREADS": str(job["threads"]), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    engines: dict[str, Engine] = {}
    with ExitStack() as stack:
        for name in [*names, "against"] if job["against"] else names:
            pool = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
            try:
                pool.submit(_start, module, name, job).result()
                engines[name] = lambda pool=pool: pool.submit(_work).result()  # type: ignore[misc]
            except ImportError as error:
                print(f"{name} is skipped: {error}", file=sys.stderr)
        yield engines


def _start(module: str, name: str, job: Answer) -> None:
    global _engine
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job["threads"]])
    if name == "against":  # drop modules of this checkout
        for each in [x for x in sys.modules if x.startswith("transformer_jax")]:
            del sys.modules[each]
        sys.path.insert(0, str(job["against"]))
    _engine = import_module(f"benchmarks.{module}").start(name, job)


def _work() -> Answer:
    begin = time.perf_counter()
    answer = _engine()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return answer | {"seconds": time.perf_counter() - begin, "gb": peak}


def measure(
    runs: Mapping[str, Engine], num_rounds: int, speed: Callable[[Answer], float], unit: str
) -> tuple[Table, list[dict[str, Answer]]]:
    """Run engines in turn. Returns a table (median speeds, ratios, the last round's numbers) and
    each round's answers by name, starting with the warm-up round.
    """
    rounds: list[dict[str, Answer]] = [{} for _ in range(num_rounds + 1)]
    for number, answers in enumerate(rounds):
        for name, run in runs.items():
            time.sleep(_PAUSE)
            begin = time.perf_counter()
            answer = run()
            answers[name] = {"seconds": time.perf_counter() - begin} | answer
            shown = f"{answers[name]['seconds']:.3g} s, {speed(answers[name]):.4g} {unit}"
            print(f"round {number}  {name:<16} {shown}", file=sys.stderr, flush=True)
    speeds = {name: [speed(answers[name]) for answers in rounds[1:]] for name in runs}
    first, *_ = speeds.values()
    table: Table = {}
    for name, own in speeds.items():
        ratios = [a / b for a, b in zip(first, own, strict=True)]
        table[name] = {unit: median(own)}
        table[name] |= {"ratio": median(ratios), "lowest": min(ratios), "highest": max(ratios)}
        numbers = {key: x for key, x in rounds[-1][name].items() if isinstance(x, int | float)}
        table[name] |= numbers
    return table, rounds


def markdown(table: Table) -> str:
    """Format a table as Markdown."""
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    lines += [[name, *(_shown(row.get(x, "")) for x in columns)] for name, row in table.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def absolute(path: str) -> Path:
    """Make a path absolute, because other processes may have another working directory."""
    return Path(path).absolute()


def parser(text: str | None) -> argparse.ArgumentParser:
    """Make a parser with the common flags of benchmarks, and ``text`` as help."""
    made = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--rounds", type=int, default=3, help="rounds after the warm-up; default: 3")
    add("--against", type=absolute, help="another checkout of this project")
    add("--threads", type=int, default=2, help="CPU cores per engine; default: 2")
    add("--output", type=Path, help="JSON file for results")
    return made


def processor() -> str:
    """Describe the processor: its name, family and model, and those of its instruction sets that
    matmuls use. A virtual machine may hide the generation from the name.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    split = (line.partition(":") for line in lines)
    fields = {field.strip(): value.strip() for field, _, value in split}
    name = fields.get("model name", "CPU")
    if "cpu family" in fields:
        name += f", family {fields['cpu family']}, model {fields['model']}"
    wide = sorted(x for x in cpu_flags() if x.startswith(("avx2", "avx512", "avx_vnni", "amx")))
    return f"{name} ({', '.join(wide)})"


def finish(table: Table, rounds: Any, arguments: argparse.Namespace) -> None:
    """Print the table and the processor, and write them and all results to ``--output``."""
    if arguments.output:
        report = {"table": table, "settings": vars(arguments), "processor": processor()}
        report["found"] = rounds
        arguments.output.write_text(json.dumps(report, indent=2, default=str) + "\n")
    print(f"{markdown(table)}\n\nProcessor: {processor()}")


def main() -> None:
    """Run the commands and print their table."""
    flags = parser(__doc__)
    flags.add_argument("commands", nargs="+", metavar="COMMAND")
    arguments = flags.parse_args()

    def run(command: str, place: Path | None = None) -> Answer:
        subprocess.run(command, shell=True, cwd=place, check=True, stdout=sys.stderr)
        return {}

    runs = {command: partial(run, command) for command in arguments.commands}
    if arguments.against:
        runs["against"] = partial(run, arguments.commands[0], arguments.against)
    measurements = measure(runs, arguments.rounds, lambda answer: 1 / answer["seconds"], "runs/s")
    finish(*measurements, arguments)


if __name__ == "__main__":
    main()
