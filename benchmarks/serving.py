"""The service under load: sentences/s, latency, memory, and whether every answer is right.

    python -m benchmarks.serving --workdir W --input F --clients 1 64 --seconds 60
    python -m benchmarks.serving --workdir W --input F --clients 1 64 --rounds 3 \\
        --engines translator one_by_one ours ct2 decode -- --beam-size 4 --length-offset 0
    python -m benchmarks.serving --workdir W --input F --vanish 200 --sigterm

Each client sends the next line of the file, as one sentence, as soon as its last answer has come,
over a connection that it keeps. Lines begin anew at the end of the file. Answers are compared with
what decode.py writes for the same file (``--reference``; made if it is missing). Latency is from
sending a request to having its answer, errors left out; sentences/s counts the answers that come
within ``--seconds``. Clients run on the same cores as the service: their CPU seconds are shown too.

*Engines*: ``ours`` is the service; ``ct2`` CTranslate2 behind FastAPI (ct2_server.py), whose
answers need not be decode.py's; ``translator`` the library, all lines in one stream and one line at
a time; ``one_by_one`` one line at a time with ``--batch-size 1``, as decode.py at a terminal;
``decode`` decode.py, its time for one empty line (start-up) subtracted. Flags after ``--`` are
decode.py's for the search and go to all of them; CTranslate2 takes ``--beam-size`` and
``--length-penalty``. It divides by length^alpha: ``--length-offset 0`` makes ours do so.

Engines work one at a time, A B C A B C ..., after a load that is not counted. The table has medians
over rounds. ``others`` is how many CPU cores other programs used during a turn.

*Faults*, in place of that: with ``--vanish`` so many clients close their connections 5 to 50 ms
after they have sent a request, and then /metrics must say that nothing is searched and nothing
waits; with ``--sigterm`` the service gets SIGTERM under load, must answer what it has accepted, and
end with status 0.

The exit status is 1 if a request to ``ours`` had no answer or another than expected.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import in_turn, serving_faults
from benchmarks.http_load import Address
from benchmarks.serving_engines import (
    Job,
    Server,
    Turn,
    decode,
    measure,
    measure_decode,
    measure_library,
    medians,
)
from benchmarks.serving_report import (
    Turns,
    compared,
    load_of,
    print_report,
    row,
    without_nan,
)

_LIBRARY = ("translator", "one_by_one")
_SERVERS = ("ours", "ct2")
_NAMES = (*_LIBRARY, *_SERVERS, "decode")


def main() -> int:
    """Measure, or check faults, and report; returns the exit status."""
    arguments = _arguments()
    # what is started from here on inherits it
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        job = _make_job(arguments, folder)
        check = _check_faults if arguments.vanish or arguments.sigterm else _compare
        report, failed = check(arguments, job, folder, stack)
    if arguments.json:
        arguments.json.write_text(json.dumps(without_nan(report), indent=2, default=str) + "\n")
    return int(failed)


def _make_job(arguments: argparse.Namespace, folder: Path) -> Job:
    """The lines, as ``folder/lines.txt`` too, and what is expected for them."""
    lines = _read_lines(arguments.input)[: arguments.lines]
    (folder / "lines.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    path = arguments.reference or folder / "reference.txt"
    if not path.exists():
        print("translating the reference with decode.py", file=sys.stderr)
        decode(arguments.workdir, folder / "lines.txt", path, arguments.flags)
    reference = _read_lines(path)
    if len(reference) < len(lines):
        raise SystemExit(
            f"error: {path} has {len(reference)} lines; expected {len(lines)}, as many as are "
            "translated. Remove it, and it is made anew."
        )
    return Job(lines, reference[: len(lines)], arguments.languages)


def _read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def _start(name: str, arguments: argparse.Namespace, folder: Path, stack: ExitStack) -> Server:
    """A service that is ready; it ends with the stack."""
    if name == "ours" and arguments.url:
        return Server(Address.of(arguments.url), arguments.pid)
    if name == "ours":
        command = shlex.split(arguments.command)
        command += ["--workdir", arguments.workdir, "--languages", arguments.languages]
    else:
        model = str(folder / "ctranslate2")
        export = ["-m", "transformer_jax.interop", "export", "--workdir", arguments.workdir]
        export += ["--format", "ctranslate2", "--output", model]
        subprocess.run([sys.executable, *export], check=True, stdout=subprocess.DEVNULL)
        command = [sys.executable, "-m", "benchmarks.ct2_server", "--model", model]
        command += ["--threads", str(arguments.threads), *shlex.split(arguments.ct2_flags)]
    server = Server.start([*command, *arguments.flags], folder / f"{name}.log")
    stack.callback(server.end)
    print(f"{name} is ready after {server.ready_seconds} s", file=sys.stderr)
    return server


def _check_faults(
    arguments: argparse.Namespace, job: Job, folder: Path, stack: ExitStack
) -> tuple[dict[str, Any], bool]:
    """The report, and whether anything is wrong."""
    server = _start("ours", arguments, folder, stack)
    load = {"clients": max(arguments.clients), "seconds": arguments.seconds}
    found = {}
    if arguments.vanish:
        vanishing = {"count": arguments.vanish, "idle_within": arguments.idle_within}
        found["vanish"] = serving_faults.vanish(server, job, **vanishing, **load)
    if arguments.sigterm:
        found["sigterm"] = serving_faults.sigterm(server, job, **load)
    for name, outcome in found.items():
        print(f"{name}: {'FAILED' if outcome.wrong else 'passed'}")
        for key, value in outcome.figures.items():
            print(f"  {key:<34}{value:.3g}" if isinstance(value, float) else f"  {key:<34}{value}")
        for each in outcome.wrong:
            print(f"  wrong: {each}")
    report = {name: {**each.figures, "wrong": each.wrong} for name, each in found.items()}
    return report, any(outcome.wrong for outcome in found.values())


def _compare(
    arguments: argparse.Namespace, job: Job, folder: Path, stack: ExitStack
) -> tuple[dict[str, Any], bool]:
    """The report, and whether the service was wrong."""
    names = [name for name in _NAMES if name in arguments.engines]
    servers = {name: _start(name, arguments, folder, stack) for name in names if name in _SERVERS}
    library_job = {"flags": arguments.flags, "seconds": arguments.seconds}
    library_job |= {"workdir": arguments.workdir, "input": str(folder / "lines.txt")}
    (folder / "job.json").write_text(json.dumps(library_job))
    library = stack.enter_context(
        in_turn.running(
            "benchmarks.serving_ours",
            [name for name in names if name in _LIBRARY],
            folder,
            arguments.threads,
        )
    )
    for server in servers.values():
        measure(server, job, clients=max(arguments.clients), seconds=arguments.warm_up)
    if "decode" in names:  # finds what is compiled here
        decode(arguments.workdir, folder / "lines.txt", folder / "warm_up.out", arguments.flags)
    turns: Turns = {}
    for number in range(arguments.rounds):
        for name in names:
            for load, turn in _take_turn(name, arguments, job, folder, servers, library.engines):
                turns.setdefault((name, load), []).append(turn)
                print(f"round {number + 1}  {row(name, load, turn.figures)}", file=sys.stderr)
    ratios = compared(turns)
    print_report(turns, ratios)
    ready = {name: server.ready_seconds for name, server in servers.items()}
    report = {
        "setting": vars(arguments),
        "library": library.said,
        "ready_seconds": ready,
        "results": [
            {"engine": name, "load": load, **medians(each), "rounds": [x.figures for x in each]}
            for (name, load), each in turns.items()
        ],
        "compared": ratios,
    }
    ours = [turn for (name, _), each in turns.items() if name == "ours" for turn in each]
    return report, any(turn.wrong for turn in ours)


def _take_turn(
    name: str,
    arguments: argparse.Namespace,
    job: Job,
    folder: Path,
    servers: dict[str, Server],
    library: dict[str, in_turn.Engine],
) -> list[tuple[str, Turn]]:
    """What this engine does in one round: loads and how it bears them."""
    if name in servers:
        found = []
        for clients in arguments.clients:
            in_turn.wait_for_others(arguments.patience)
            turn = measure(servers[name], job, clients=clients, seconds=arguments.seconds)
            found.append((load_of(clients), turn))
        return found
    in_turn.wait_for_others(arguments.patience)
    if name == "decode":
        turn = measure_decode(job, arguments.workdir, folder, arguments.flags)
        return [("all lines", turn)]
    return list(measure_library(library[name]).items())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workdir", help="of a training run")
    add("--input", type=Path, required=True, help="lines to translate, UTF-8")
    add("--lines", type=int, help="take so many of them; default: all")
    add("--reference", type=Path, help="decode.py's translations of them; made if missing")
    add("--languages", default="en-de", help="source and target; default: en-de")
    add("--clients", type=int, nargs="+", default=[64], help="so many at a time; one load each")
    add("--seconds", type=float, default=60.0, help="of each load")
    add("--warm-up", type=float, default=3.0, help="seconds of load that are not counted")
    add("--engines", nargs="+", choices=_NAMES, default=["ours"])
    add("--rounds", type=int, default=1)
    add("--command", default=f"{sys.executable} -m transformer_jax.serving", help="the service")
    add("--ct2-flags", default="", help="of ct2_server.py, in one word")
    add("--url", help="of a service that runs already, in place of --command")
    add("--pid", type=int, help="of that service, for its memory and CPU time")
    add("--threads", type=int, default=2, help="CPU cores, for everything together")
    add("--patience", type=float, default=20.0, help="most seconds to wait for a quiet machine")
    add("--vanish", type=int, default=0, metavar="N", help="clients that vanish")
    add("--idle-within", type=float, default=10.0, help="seconds, after they have vanished")
    add("--sigterm", action="store_true", help="end the service under load")
    add("--json", type=Path, help="file for all figures")
    add("flags", nargs="*", metavar="-- FLAGS", help="decode.py's, for the search")
    arguments = parser.parse_args()
    if arguments.workdir and Path(arguments.workdir).is_dir():  # no URL
        arguments.workdir = str(Path(arguments.workdir).absolute())
    if not arguments.workdir and not (arguments.url and arguments.reference):
        parser.error("--workdir is missing; without it --url and --reference are needed")
    if not arguments.workdir and arguments.engines != ["ours"]:
        parser.error("--engines other than ours need --workdir")
    if arguments.sigterm and arguments.url:
        parser.error("--sigterm ends the service: leave --url out, and one is started")
    if not arguments.workdir and not arguments.reference.exists():
        parser.error(f"{arguments.reference} does not exist; without --workdir it is needed")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
