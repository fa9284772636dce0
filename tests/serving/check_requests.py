"""Send thousands of requests of every kind and size to a service. Too slow for the test suite.

    python tests/serving/check_requests.py --workdir W --input F [--requests 20000] [--clients 8]

F holds lines for W's model, en to de. Of ten requests, eight translate a line; the others hold one
thing many times, up to the limits (see requests_by_size.py), or a made-up path, method or field.
Some clients leave before the response. Every translation must be decode.py's, and no status may be
500. Meanwhile, one polite client asks for the service's health, and another for a line's
translation, again and again. Prints their longest waits, the statuses and the memory.
"""

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from requests_by_size import JSON, REPEATED, query

from benchmarks.in_turn import ROOT
from benchmarks.serving import Server, start, wait_until_idle


def main() -> None:
    """Start the service, send the requests, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=["jax", "ctranslate2"], default="jax")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of the service")
    arguments = parser.parse_args()
    lines = arguments.input.read_text().splitlines()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        target = Path(name) / "out"
        workdir = ["--workdir", arguments.workdir, "--engine", arguments.engine]
        files = ["--input", arguments.input, "--output", target]
        subprocess.run([sys.executable, "decode.py", *workdir, *files], cwd=ROOT, check=True)
        command = [sys.executable, "-m", "transformer_jax.serving", "--languages", "en-de"]
        command += [*workdir, *arguments.flags]
        server = start(command, ROOT, Path(name) / "log", stack)
        translations = list(zip(lines, target.read_text().splitlines(), strict=True))
        print(json.dumps(checked(server, translations, arguments), indent=2))


class Load:
    """Clients that send requests until a number of them is sent.

    Attributes:
      outcomes: number of each status, and of wrong translations.
      memory: resident memory in MB before, and after each fifth of the requests.
    """

    def __init__(self, server: Server, translations: list[tuple[str, str]], requests: int):
        self._server = server
        self._translations = translations
        self._requests = requests
        self._number = 0
        self._lock = threading.Lock()
        self.outcomes = Counter[str]()
        self.memory = [resident_megabytes(server.pid)]

    def run_client(self, seed: int) -> None:
        """Send requests until none is left."""
        rng = random.Random(seed)
        while self._take_number():
            kind = rng.random()
            if kind < 0.8:
                self.translate(rng)
            elif kind < 0.9:
                self._send_repeated(rng)
            else:
                self._send_made_up(rng)

    def translate(self, rng: random.Random) -> float:
        """Translate a line and check its translation. Returns the seconds it takes."""
        line, expected = rng.choice(self._translations)
        begin = time.monotonic()
        status, answer = self._send("POST", "/translate", query(q=line, split=False))
        if status == 200 and json.loads(answer)["translatedText"] != expected:
            self._count("wrong translations")
        return time.monotonic() - begin

    def ask_health(self, rng: random.Random) -> float:
        """Ask for the service's health. Returns the seconds it takes."""
        begin = time.monotonic()
        self._send("GET", "/health")
        return time.monotonic() - begin

    def _send_repeated(self, rng: random.Random) -> None:
        repeated = REPEATED[rng.choice(list(REPEATED))]
        count = round(math.exp(rng.uniform(0, math.log(repeated.most))))
        path = rng.choice(["/translate", "/translate", "/translate/stream"])
        leaves_early = rng.random() < 0.2
        self._send("POST", path, repeated.body(count), timeout=0.2 if leaves_early else 120)

    def _send_made_up(self, rng: random.Random) -> None:
        name = "x" * rng.choice([1, 10, 100, 1000])
        choices: list[tuple[str, str, bytes]] = [
            ("GET", f"/{name}", b""),
            ("GET", f"/translate/{name}", b""),
            (name[:20], "/translate", b""),
            ("POST", "/translate", name.encode()),
            ("POST", "/translate", query(q="one", **{name: name})),
            ("POST", "/translate", query(q="one", source=name, target=name)),
            ("POST", "/translate", query(q=rng.randbytes(20).decode("latin-1"))),
            ("POST", "/translate", query(q={"a": name})),
            ("POST", "/detect", query(q=name)),
        ]
        self._send(*rng.choice(choices))

    def _send(
        self, method: str, path: str, body: bytes = b"", timeout: float = 120
    ) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self._server.port, timeout=timeout)
        try:
            connection.request(method, path, body, {"Content-Type": JSON})
            response = connection.getresponse()
            text = response.read()
        except TimeoutError:
            self._count("left early" if timeout < 1 else "no response")
            return 0, b""
        except (OSError, HTTPException) as error:
            self._count(type(error).__name__)
            return 0, b""
        finally:
            connection.close()
        self._count(f"status {response.status}")
        return response.status, text

    def _count(self, outcome: str) -> None:
        with self._lock:
            self.outcomes[outcome] += 1

    def _take_number(self) -> bool:
        with self._lock:
            self._number += 1
            if self._number % math.ceil(self._requests / 5) == 0:
                self.memory.append(resident_megabytes(self._server.pid))
            return self._number <= self._requests


def checked(
    server: Server, translations: list[tuple[str, str]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Send the requests. Returns the report."""
    while Load(server, translations, 1).translate(random.Random(0)) > 5:
        pass
    wait_until_idle(server)
    load = Load(server, translations, arguments.requests)
    waits: dict[str, list[float]] = {"health": [], "translation": []}
    is_done = threading.Event()

    def polite(ask: Callable[[random.Random], float], seconds: list[float]) -> None:
        rng = random.Random(arguments.seed)
        while not is_done.is_set():
            seconds.append(ask(rng))
            time.sleep(0.02)

    clients = [
        threading.Thread(target=load.run_client, args=[arguments.seed + number])
        for number in range(arguments.clients)
    ]
    politely = [
        threading.Thread(target=polite, args=[load.ask_health, waits["health"]]),
        threading.Thread(target=polite, args=[load.translate, waits["translation"]]),
    ]
    begin = time.monotonic()
    for thread in clients + politely:
        thread.start()
    for thread in clients:
        thread.join()
    is_done.set()
    for thread in politely:
        thread.join()
    report: dict[str, Any] = {"seconds": round(time.monotonic() - begin)}
    for name, seconds in waits.items():
        ordered = sorted(seconds)
        report[f"polite client, {name}"] = {
            "requests": len(ordered),
            "median": round(ordered[len(ordered) // 2], 3),
            "99%": round(ordered[len(ordered) * 99 // 100], 3),
            "longest": round(ordered[-1], 3),
        }
    return report | {"outcomes": dict(load.outcomes.most_common()), "memory, MB": load.memory}


def resident_megabytes(pid: int) -> int:
    """Return the resident memory of a process."""
    [line] = [
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    ]
    return int(line.split()[1]) // 1024


if __name__ == "__main__":
    main()
