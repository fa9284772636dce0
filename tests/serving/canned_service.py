"""A fake server with the HTTP API of transformer-serve and canned translations."""

from __future__ import annotations

import json
import math
import re
import select
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import transformer_jax

PAGE = Path(transformer_jax.__file__).parent / "serving" / "page"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:"
)
LANGUAGES = [{"code": "en", "name": "en", "targets": ["de"]}]
GERMAN = {
    "A man sleeps on a bench.": "Ein Mann schläft auf einer Bank.",
    "Two dogs are running through the snow.": "Zwei Hunde rennen durch den Schnee.",
    "A woman in a blue shirt is reading.": "Eine Frau in einem blauen Hemd liest.",
}


class CannedService:
    """Translates sentences to upper case, a few to German. Attributes control its behavior."""

    def __init__(self, port: int = 0) -> None:
        self.languages: Any = LANGUAGES
        self.status = "ok"
        self.beam_size = 4
        self.max_characters = 20_000
        self.busy = 0
        """Number of requests to reject with 503, queue full."""
        self.breaks = False
        """True: the connection ends after one sentence."""
        self.fails = False
        """True: streams end with an error event."""
        self.steps: threading.Semaphore | None = None
        """If set, each sentence waits for a release."""
        self.requests: list[dict[str, Any]] = []
        self.vanished = 0
        """Number of clients that disconnected before their response was complete."""
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def refusal(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        """The status and body of an error response, or None."""
        asked, most, limit = request["alternatives"], self.beam_size - 1, self.max_characters
        if self.status != "ok":
            return 503, {"error": f"The server is {self.status}; try again later."}
        if self.busy:
            self.busy -= 1
            return 503, {"error": "The queue is full (1,024 sentences)."}
        if asked > most:
            return 400, {"error": f"alternatives is {asked}; expected at most {most}."}
        if len(request["q"]) > limit:
            said = f"q has {len(request['q']):,} characters; expected at most {limit:,}."
            return 413, {"error": said, "limit": limit}
        return None

    def sentences(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the translated sentences of a request."""
        found = re.finditer(r"(\s*)(\S.*?(?:[.!?](?=\s)|$))", request["q"], re.MULTILINE)
        for index, (before, source) in enumerate(match.groups() for match in found):
            best = GERMAN.get(source, source.upper())
            ranks = range(request["alternatives"] + 1)
            hypotheses = [
                _hypothesis(source, best.replace(" ", f" {'so ' * rank}", 1), rank)
                for rank in ranks
            ]
            more = {"hypotheses": hypotheses} if request["alternatives"] else {}
            yield {"index": index, "before": before, **hypotheses[0], **more}


def _tokens(text: str) -> list[str]:
    """Split into subwords of up to four characters; "▁" begins a word."""
    words = [re.findall(r"\w{1,4}|\W", word) for word in text.split()]
    return [token for first, *rest in words for token in (f"▁{first}", *rest)] + ["</s>"]


def _hypothesis(source: str, text: str, rank: int) -> dict[str, Any]:
    tokens, source_tokens = _tokens(text), _tokens(source)
    scores = [-((zlib.crc32(token.encode()) % 100 / 70) ** 3) for token in tokens]
    alignment = []
    for i in range(len(tokens)):
        centre = i * (len(source_tokens) - 1) / max(len(tokens) - 1, 1)
        weights = [math.exp(-((j - centre) ** 2)) for j in range(len(source_tokens))]
        alignment.append([round(weight / sum(weights), 4) for weight in weights])
    return {
        "source": source,
        "translation": text,
        "score": round(sum(scores) / len(scores) - rank / 10, 4),
        "log_prob": round(sum(scores) - rank / 2, 4),
        "tokens": tokens,
        "token_scores": [round(score, 4) for score in scores],
        "source_tokens": source_tokens,
        "alignment": alignment,
    }


def _handler(service: CannedService) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/health":
                self.answer(200 if service.status == "ok" else 503, {"status": service.status})
            elif self.path == "/languages":
                self.answer(200, service.languages)
            else:
                file = PAGE / (self.path.strip("/") or "index.html")
                if file.parent != PAGE or not file.is_file():
                    return self.answer(404, {"error": f"There is no {self.path}."})
                self.head(200, TYPES[file.suffix])
                self.wfile.write(file.read_bytes())

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            service.requests.append(request)
            if refusal := service.refusal(request):
                return self.answer(*refusal)
            self.head(200, "text/event-stream")
            try:
                self.stream(request)
            except ConnectionError:
                service.vanished += 1

        def stream(self, request: dict[str, Any]) -> None:
            text = request["q"]
            done = 0
            for sentence in service.sentences(request):
                while service.steps and not service.steps.acquire(timeout=0.02):
                    if select.select([self.connection], [], [], 0)[0]:  # it was closed
                        raise ConnectionError
                self.send("sentence", sentence)
                if service.breaks:
                    return
                if service.fails:
                    return self.send("error", {"error": "The search ran out of time."})
                where = text.index(sentence["source"], done)
                text = text[:where] + text[where:].replace(
                    sentence["source"], sentence["translation"], 1
                )
                done = where + len(sentence["translation"])
            self.send("done", {"translatedText": text})

        def send(self, event: str, data: dict[str, Any]) -> None:
            self.wfile.write(f"event: {event}\ndata: {json.dumps(data)}\n\n".encode())

        def answer(self, status: int, body: Any) -> None:
            self.head(status, "application/json")
            self.wfile.write(json.dumps(body).encode())

        def head(self, status: int, content_type: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", f"{content_type}; charset=utf-8")
            self.send_header("Content-Security-Policy", POLICY)
            if status == 503:
                self.send_header("Retry-After", "1")
            self.end_headers()

    return Handler
