"""Throughput, latency and correctness of the HTTP service, and of CTranslate2 behind FastAPI.

    python -m benchmarks.serving --workdir W --input F -- --length-offset 0

Each client sends lines of the file as single sentences over a persistent connection, one as soon as
the previous response arrives. ``mixed`` uses all lines in order, and ``alike`` uses lines of medium
length. Latency is the time from sending a request to receiving its response. Clients run on the
same cores as the service. Flags after ``--`` set the search of all engines; CTranslate2 needs
``--length-offset 0``.

``ours`` computes in the data type that ``model.dtype`` auto chooses. ``ours_ctranslate2`` is our
service with CTranslate2 as its engine, so it compares the HTTP layers. ``ours_float32 / this`` is
the ratio of throughputs (median, lowest and highest of the rounds): above 1, ``ours_float32`` is
faster. ``differ`` counts responses that are not the same text as the engine's own translation of
the file: decode.py's for ours, ``translate_file``'s for CTranslate2 (batches of other sizes round
differently). ``CPU ms`` is the server's CPU time per sentence, which depends less on other programs
than throughput does. ``--against`` also starts the service of another checkout. The first load
begins when the services have compiled all their searches.

CTranslate2's server is ``benchmarks.ctranslate2_server``. Before each load, the benchmark measures
each division of the cores into workers and threads, with several limits to the sentences per call,
and keeps the fastest (``setting``).
"""

from __future__ import annotations

import argparse
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
from dataclasses import replace
from functools import cache, partial
from http.client import HTTPConnection
from itertools import cycle, product
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple
from urllib.request import urlopen

from benchmarks.in_turn import ROOT, Answer, Table, absolute, finish, measure, parser

Pairs = list[tuple[str, str]]  # a line and its expected translation
OURS: dict[str, tuple[Any, Any, str]] = {  # model.dtype, decoding.weights and --engine
    "ours": ("auto", "auto", "jax"),
    "ours_float32": ("float32", "auto", "jax"),
    "ours_bfloat16": ("bfloat16", "auto", "jax"),
    "ours_int8": ("auto", "int8", "jax"),
    "ours_ctranslate2": ("float32", "auto", "ctranslate2"),
    "ours_ctranslate2_int8": ("auto", "int8", "ctranslate2"),
}
PEERS = {"ctranslate2": "float32", "ctranslate2_int8": "int8"}
_BATCHES = 1, 4, 16, 64  # sentences per call of CTranslate2


class Server(NamedTuple):
    """A running service."""

    port: int
    pid: int

    def cpu_seconds(self) -> float:
        """Return the CPU time so far, of all threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start(command: list[str], place: Path, log: Path, stack: ExitStack) -> Server:
    """Start a service and wait until it is ready. The stack stops it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    output = stack.enter_context(log.open("wb"))
    command = [*command, "--port", str(port)]
    process = subprocess.Popen(command, cwd=place, stdout=output, stderr=output)
    stack.callback(process.wait)
    stack.callback(process.kill)
    while process.poll() is None:
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health"):
            return Server(port, process.pid)
        time.sleep(0.1)
    raise SystemExit(f"error: the service exited.\n{log.read_text(errors='replace')[-2000:]}")


def wait_until_idle(server: Server) -> None:
    """Wait until the server uses no CPU time: a ready service of ours goes on compiling."""
    while True:
        before = server.cpu_seconds()
        time.sleep(2)
        if server.cpu_seconds() - before < 0.2:
            return


def load(server: Server, lines: Pairs, clients: int, seconds: float) -> Answer:
    """Measure throughput, latencies and errors with concurrent clients."""
    shared = cycle(lines)
    times = []
    faults = Counter[str]()
    begin = time.perf_counter()
    before = server.cpu_seconds()

    def client(_: int) -> None:
        with closing(HTTPConnection("127.0.0.1", server.port)) as connection:
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
    cuts = quantiles(times, n=20)
    spent = time.perf_counter() - begin
    figures = {"p50 ms": cuts[9], "p95 ms": cuts[18]}
    figures["CPU ms"] = 1e3 * (server.cpu_seconds() - before) / len(times)
    return {"lines": len(times), "seconds": spent, **figures, **faults}


def speed(answer: Answer) -> float:
    """Return sentences per second."""
    return answer["lines"] / answer["seconds"]


def export(workdir: str, folder: Path, engines: list[str], flags: list[str]) -> dict[str, str]:
    """Write the model to a folder per engine of ours, and to one for CTranslate2, with the search
    settings in ``flags``. Returns the data type of each engine of ours.
    """
    from flax import nnx

    from transformer_jax import load_model, save_model
    from transformer_jax.model.matmul import compute_dtype
    from transformer_jax.model.transformer import abstract_model
    from transformer_jax.pretrained.ctranslate2 import export_ctranslate2
    from transformer_jax.translation.flags import checked_flags

    config, model, tokenizer = load_model(workdir)
    config = replace(config, decoding=checked_flags(["--workdir", workdir, *flags])[0].search)
    dtypes = {}
    for name in [each for each in engines if each in OURS]:
        dtype, weights, _ = OURS[name]
        shape = replace(config.model, dtype=dtype)
        model = nnx.merge(abstract_model(shape).graph, nnx.to_pure_dict(nnx.state(model)))
        own = replace(config, decoding=replace(config.decoding, weights=weights))
        save_model(folder / name, own, model, tokenizer)
        dtypes[name] = str(compute_dtype(shape)) if weights == "auto" else weights
    if set(engines) & set(PEERS):
        (folder / "exported").mkdir()
        export_ctranslate2(config, model, tokenizer, folder / "exported")
    return dtypes


class Peer:
    """CTranslate2's servers for one compute type, one per setting."""

    def __init__(self, compute_type: str, threads: int, folder: Path, stack: ExitStack):
        """Use the exported model in ``folder`` on ``threads`` cores."""
        self.threads = threads
        self._folder = folder
        self._stack = stack
        self._command = [sys.executable, "-m", "benchmarks.ctranslate2_server"]
        self._command += ["--model", str(folder / "exported"), "--compute-type", compute_type]
        self.server = cache(self._server)

    def translate(self, source: Path, target: Path) -> None:
        """Translate a file with all cores."""
        flags = [*self._command, "--threads", str(self.threads)]
        subprocess.run([*flags, "--input", source, "--output", target], cwd=ROOT, check=True)

    def _server(self, workers: int, batch: int) -> Server:
        threads = self.threads // workers
        flags = [f"--workers={workers}", f"--threads={threads}", f"--batch={batch}"]
        log = self._folder / "-".join([*self._command[-1:], *flags])
        return start([*self._command, *flags], ROOT, log, self._stack)

    def fastest(self, lines: Pairs, clients: int, seconds: float) -> tuple[Server, str]:
        """Find the fastest setting for this load. Returns its server and its description."""
        divisions = [n for n in range(1, self.threads + 1) if self.threads % n == 0]
        batches = [n for n in _BATCHES if n < 4 * clients]
        servers = {
            f"{n} x {self.threads // n} threads, {batch} per call": self.server(n, batch)
            for n, batch in product(divisions, batches)
        }
        runs = {
            name: partial(load, server, lines, clients, seconds) for name, server in servers.items()
        }
        table, _ = measure(runs, 2, speed, "sentences/s")
        best = max(table, key=lambda name: table[name]["sentences/s"])
        return servers[best], best


def compared(table: Table, rounds: list[dict[str, Answer]]) -> Table:
    """Replace the ratios of a table: each engine of ours divided by each row's engine."""
    for name, row in table.items():
        for key in ("ratio", "lowest", "highest"):
            del row[key]
        for own in [each for each in table if each in OURS]:
            ratios = [speed(each[own]) / speed(each[name]) for each in rounds[1:]]
            shown = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            row[f"{own} / this"] = shown
    return table


def main() -> None:
    """Measure each load with all engines in turn, and report."""
    flags = parser(__doc__)
    add = flags.add_argument
    add("--workdir", type=absolute, required=True, help="work directory of a trained model")
    add("--input", type=absolute, required=True, help="lines to translate")
    add("--clients", type=int, nargs="+", default=[1, 8, 64])
    add("--seconds", type=float, default=10.0, help="duration of each run; default: 10")
    engines = [*OURS, *PEERS]
    add("--engines", nargs="+", choices=engines, default=["ours", "ours_float32", *PEERS])
    add("flags", nargs="*", metavar="-- FLAGS", help="search flags")
    arguments = flags.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        table = measured(arguments, Path(name), stack)
    finish(table, None, arguments)


def measured(arguments: argparse.Namespace, folder: Path, stack: ExitStack) -> Table:
    """Start all servers, and measure each load."""
    from transformer_jax.data.text_files import read_lines

    settings = export(str(arguments.workdir), folder, arguments.engines, arguments.flags)
    servers = dict[str, Server]()
    peers = dict[str, Peer]()
    pairs = dict[str, Pairs]()
    table = Table()
    for name in arguments.engines:
        target = folder / f"{name}.out"
        if name in PEERS:
            peers[name] = Peer(PEERS[name], arguments.threads, folder, stack)
            peers[name].translate(arguments.input, target)
        else:
            engine = OURS[name][2]
            decode = [sys.executable, "decode.py", "--workdir", str(folder / name)]
            decode += ["--engine", engine]
            files = ["--input", str(arguments.input), "--output", str(target)]
            subprocess.run([*decode, *files], cwd=ROOT, check=True)
            checkouts = {name: (ROOT, folder / name)}
            if arguments.against and "against" not in servers:
                # Another version may not read a folder that this one wrote.
                checkouts["against"] = (arguments.against, arguments.workdir)
            for server, (checkout, workdir) in checkouts.items():
                command = [sys.executable, "-m", "transformer_jax.serving", "--languages=en-de"]
                command += ["--workdir", str(workdir), "--engine", engine]
                servers[server] = start(command, checkout, folder / f"{server}.log", stack)
        expected = zip(read_lines(str(arguments.input)), read_lines(str(target)), strict=True)
        pairs[name] = list(expected)
        pairs.setdefault("against", pairs[name])
    for server in servers.values():
        wait_until_idle(server)
    for clients in arguments.clients:
        for name, peer in peers.items():
            fastest = peer.fastest(pairs[name], clients, arguments.seconds / 4)
            servers[name], settings[name] = fastest
        for kind in ("mixed", "alike"):
            runs = {}
            for name, server in servers.items():
                lines = pairs[name]
                if kind == "alike":
                    by_length = sorted(lines, key=lambda pair: len(pair[0]))
                    lines = by_length[len(lines) // 3 : 1 + len(lines) // 2]
                runs[name] = partial(load, server, lines, clients, arguments.seconds)
            for name, row in compared(
                *measure(runs, arguments.rounds, speed, "sentences/s")
            ).items():
                table[f"{clients} clients, {kind}, {name}"] = row | {
                    "setting": settings.get(name, "")
                }
    return table


if __name__ == "__main__":
    main()
