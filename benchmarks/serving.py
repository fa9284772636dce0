"""Throughput, latency and correctness of the HTTP service.

    python -m benchmarks.serving --workdir W --input F -- --batch-size 32

Each client sends lines of the file as single sentences over a persistent connection, one as soon as
the previous response arrives. ``mixed`` uses all lines in order, and ``alike`` uses lines of medium
length. Responses are compared with decode.py's output for the same file. Throughput is compared
with decode.py's throughput, without its startup time, which is measured once. Latency is the time
from sending a request to receiving its response. Clients run on the same cores as the service.
Flags after ``--`` are passed to the service and to decode.py. ``--against`` also starts the service
of another checkout.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from http.client import HTTPConnection
from itertools import cycle
from pathlib import Path
from statistics import quantiles
from urllib.request import urlopen

from benchmarks.in_turn import ROOT, Answer, absolute, finish, measure, parser


def start(command: list[str], place: Path, log: Path, stack: ExitStack) -> int:
    """Start a service and wait until it is ready. Returns its port; the stack stops it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    output = stack.enter_context(log.open("wb"))
    command = [*command, "--port", str(port)]
    process = subprocess.Popen(command, cwd=place, stdout=output, stderr=output)
    stack.callback(process.wait)
    stack.callback(process.kill)
    while process.poll() is None:
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health"):
            return port
        time.sleep(0.1)
    raise SystemExit(f"error: the service exited.\n{log.read_text(errors='replace')[-2000:]}")


def load(port: int, lines: list[tuple[str, str]], clients: int, seconds: float) -> Answer:
    """Measure throughput, latencies and errors with concurrent clients."""
    shared, times, faults = cycle(lines), [], Counter[str]()
    begin = time.perf_counter()

    def client(_: int) -> None:
        with closing(HTTPConnection("127.0.0.1", port)) as connection:
            for line, expected in shared:
                start = time.perf_counter()
                if start > begin + seconds:
                    break
                body = json.dumps({"q": line, "source": "en", "target": "de", "split": False})
                connection.request("POST", "/translate", body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                text = json.loads(response.read()).get("translatedText")
                times.append(1e3 * (time.perf_counter() - start))
                faults["differ" if response.status == 200 else "errors"] += text != expected

    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(client, range(clients)))
    cuts, spent = quantiles(times, n=20), time.perf_counter() - begin
    latencies = {"p50 ms": cuts[9], "p95 ms": cuts[18]}
    return {"lines": len(times), "seconds": spent, **latencies, **faults}


def decode(
    workdir: str, source: Path, target: Path, flags: list[str], *, start_up: float = 0.0
) -> Answer:
    """Time decode.py on a file, minus ``start_up`` seconds."""
    begin = time.perf_counter()
    command = [sys.executable, "decode.py", "--workdir", workdir, "--input", str(source)]
    subprocess.run([*command, "--output", str(target), *flags], cwd=ROOT, check=True)
    seconds = time.perf_counter() - begin - start_up
    return {"lines": len(source.read_text().splitlines()), "seconds": seconds}


def main() -> None:
    """Measure all loads in turn, and report."""
    flags = parser(__doc__)
    add = flags.add_argument
    add("--workdir", type=absolute, required=True, help="work directory of a trained model")
    add("--input", type=absolute, required=True, help="lines to translate")
    add("--clients", type=int, nargs="+", default=[1, 8, 64])
    add("--seconds", type=float, default=20.0)
    add("flags", nargs="*", metavar="-- FLAGS", help="search flags")
    arguments = flags.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    workdir, places = str(arguments.workdir), {"ours": ROOT}
    if arguments.against:
        places["against"] = arguments.against
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        reference, empty = Path(name, "reference"), Path(name, "empty")
        empty.write_text("\n")
        translate = partial(decode, workdir, arguments.input, reference, arguments.flags)
        translate()
        start_up = decode(workdir, empty, Path(name, "nothing"), arguments.flags)["seconds"]
        source, target = (x.read_text().splitlines() for x in (arguments.input, reference))
        pairs = list(zip(source, target, strict=True))
        alike = sorted(pairs, key=lambda pair: len(pair[0]))[len(pairs) // 3 : 1 + len(pairs) // 2]
        runs = {"decode.py": partial(translate, start_up=start_up)}
        for engine, place in places.items():
            command = [sys.executable, "-m", "transformer_jax.serving", "--workdir", workdir]
            command += ["--languages=en-de", *arguments.flags]
            port = start(command, place, Path(name, engine), stack)
            for clients in arguments.clients:
                for kind, lines in {"mixed": pairs, "alike": alike}.items():
                    run = partial(load, port, lines, clients, arguments.seconds)
                    runs[f"{engine}, {clients} clients, {kind}"] = run
        found = measure(runs, arguments.rounds, lambda x: x["lines"] / x["seconds"], "sentences/s")
    finish(*found, arguments)


if __name__ == "__main__":
    main()
