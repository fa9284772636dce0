"""What the service is compared with: CTranslate2 behind FastAPI, as its users write it.

    python -m transformer_jax.interop export --workdir W --format ctranslate2 --output DIR
    python -m benchmarks.ct2_server --model DIR --port 8001

``POST /translate`` takes ``q``, a line or several, and answers with ``translatedText``; ``GET
/health``. Search settings are those of the export; ``--beam-size`` and ``--length-penalty`` replace
them.

CTranslate2 translates what one call gives it, and starts nothing before the call's last sentence is
done. So ``--batching window`` puts into one call what has come while the last one was busy, at most
``--call-size`` sentences, and may wait ``--wait`` ms for more. ``--batching queue`` gives each
request to CTranslate2's own queue (``asynchronous=True``), whose ``--workers`` take one call each.
The defaults were the fastest for 64 clients and a small model on two cores: a worker a core, as
two threads of one worker wait for each other; and calls that all workers get a share of.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

Search = Callable[..., list[Any]]


class Batching(Protocol):
    """Who decides which sentences are searched together."""

    async def __call__(self, tokens: list[str]) -> list[str]:
        """The best translation of these tokens."""

    async def work(self) -> None:
        """Runs beside the server, if there is something to do."""


class Window:
    """Calls of all that waits, at most ``size`` sentences."""

    def __init__(self, search: Search, *, workers: int, size: int, wait: float):
        self._search, self._workers, self._size, self._wait = search, workers, size, wait
        self._waiting: deque[tuple[list[str], asyncio.Future[list[str]]]] = deque()
        self._came = asyncio.Event()
        self._threads = ThreadPoolExecutor(workers)

    async def __call__(self, tokens: list[str]) -> list[str]:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((tokens, future))
        self._came.set()
        return await future

    async def work(self) -> None:
        await asyncio.gather(*(self._worker() for _ in range(self._workers)))

    async def _worker(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._came.wait()
            if self._wait:
                await asyncio.sleep(self._wait)
            batch = [self._waiting.popleft() for _ in range(min(self._size, len(self._waiting)))]
            if not self._waiting:
                self._came.clear()
            if not batch:
                continue
            lines = [tokens for tokens, _ in batch]
            try:
                results = await loop.run_in_executor(self._threads, self._search, lines)
            except Exception as error:  # belongs to these requests; the next may do
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():  # its client may have gone
                    future.set_result(result.hypotheses[0])


class Queue:
    """A call for each request; CTranslate2 queues them."""

    def __init__(self, search: Search, *, most: int = 1024):
        self._search, self._threads = search, ThreadPoolExecutor(most)

    async def __call__(self, tokens: list[str]) -> list[str]:
        [later] = self._search([tokens], asynchronous=True)
        loop = asyncio.get_running_loop()
        return (await loop.run_in_executor(self._threads, later.result)).hypotheses[0]

    async def work(self) -> None:
        pass


class Asked(BaseModel):
    """A request; other fields are ignored."""

    q: str | list[str]


def make_app(batching: Batching, source: Any, target: Any) -> FastAPI:
    """The service; ``source`` and ``target`` are SentencePiece processors."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batching.work())
        yield
        task.cancel()

    app = FastAPI(lifespan=lifespan)

    async def one(line: str) -> str:
        tokens = source.encode(line, out_type=str)
        return target.decode(await batching(tokens)) if tokens else ""

    @app.post("/translate")
    async def translate(asked: Asked) -> dict[str, str | list[str]]:
        if isinstance(asked.q, str):
            return {"translatedText": await one(asked.q)}
        return {"translatedText": list(await asyncio.gather(*map(one, asked.q)))}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def load(arguments: argparse.Namespace) -> FastAPI:
    """The service of an exported model, ready to answer."""
    import ctranslate2
    import sentencepiece

    settings = json.loads((arguments.model / "generation_config.json").read_text())
    for name in ("beam_size", "length_penalty"):
        if (value := getattr(arguments, name)) is not None:
            settings[name] = value
    workers = arguments.workers or arguments.threads
    translator = ctranslate2.Translator(
        str(arguments.model),
        compute_type=arguments.compute_type,
        inter_threads=workers,
        intra_threads=max(1, arguments.threads // workers),
    )
    search = partial(translator.translate_batch, **settings)
    source, target = (
        sentencepiece.SentencePieceProcessor(model_file=str(arguments.model / f"{side}.spm"))
        for side in ("source", "target")
    )
    batching: Batching = Queue(search)
    if arguments.batching == "window":
        batching = Window(
            search, workers=workers, size=arguments.call_size, wait=arguments.wait / 1e3
        )
    return make_app(batching, source, target)


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the export")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--batching", choices=["window", "queue"], default="window")
    parser.add_argument("--wait", type=float, default=0.0, help="ms to wait for more sentences")
    parser.add_argument("--call-size", type=int, default=32, help="sentences in a call, at most")
    parser.add_argument("--workers", type=int, help="calls at a time; default: one a core")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores, of all workers")
    parser.add_argument("--compute-type", default="float32")
    parser.add_argument("--beam-size", type=int)
    parser.add_argument("--length-penalty", type=float)
    arguments, others = parser.parse_known_args()
    if others:  # search flags that only our engines know
        print(f"ignored: {' '.join(others)}", file=sys.stderr)
    uvicorn.run(
        load(arguments),
        host=arguments.host,
        port=arguments.port,
        log_level="warning",
        access_log=False,
    )


if __name__ == "__main__":
    main()
