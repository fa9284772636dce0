"""CTranslate2 behind FastAPI and uvicorn: the peer of our HTTP service.

    python -m benchmarks.ctranslate2_server --model M --port 8000

``M`` is a folder from ``python -m transformer_jax.export --format ctranslate2``. POST
/translate takes and returns JSON as ours does, for a single sentence. One thread per CTranslate2
worker takes the oldest waiting requests, at most ``--batch``, and translates them in one call
(dynamic batching). With ``--batch 1``, each request is one call.

``--input`` and ``--output`` translate a file with ``Translator.translate_file`` instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import ctranslate2
import sentencepiece
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel


class Query(BaseModel):
    """A request. Other fields are ignored."""

    q: str


class Answer(BaseModel):
    """A response."""

    translatedText: str


def make_app(translate: Callable[[list[str]], list[str]], workers: int, max_batch: int) -> FastAPI:
    """Make an app whose ``workers`` translate up to ``max_batch`` waiting sentences per call."""
    app = FastAPI()
    waiting = SimpleQueue[tuple[str, Future[str]]]()

    def work() -> None:
        while True:
            batch = [waiting.get()]
            with suppress(Empty):
                while len(batch) < max_batch:
                    batch.append(waiting.get_nowait())
            try:
                texts = translate([line for line, _ in batch])
            except Exception as error:
                for _, future in batch:
                    future.set_exception(error)
            else:
                for text, (_, future) in zip(texts, batch, strict=True):
                    future.set_result(text)

    for _ in range(workers):
        Thread(target=work, daemon=True).start()

    @app.get("/health")
    async def health() -> None:
        pass

    @app.post("/translate")
    async def answer(query: Query) -> Answer:
        waiting.put((query.q, future := Future[str]()))
        return Answer(translatedText=await asyncio.wrap_future(future))

    return app


def main() -> None:
    """Serve, or translate a file."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = flags.add_argument
    add("--model", type=Path, required=True)
    add("--compute-type", default="auto", help="float32, int8, ...; default: the fastest")
    add("--workers", type=int, default=1, help="CTranslate2's inter_threads")
    add("--threads", type=int, default=1, help="CTranslate2's intra_threads")
    add("--batch", type=int, default=32, help="sentences per call, at most")
    add("--port", type=int, default=8000)
    add("--input", help="file to translate")
    add("--output", help="file to write")
    arguments = flags.parse_args()
    translator = ctranslate2.Translator(
        str(arguments.model),
        compute_type=arguments.compute_type,
        inter_threads=arguments.workers,
        intra_threads=arguments.threads,
    )
    source, target = (
        sentencepiece.SentencePieceProcessor(model_file=str(arguments.model / f"{side}.spm"))
        for side in ("source", "target")
    )
    settings: dict[str, Any] = json.loads((arguments.model / "generation_config.json").read_text())
    settings["max_batch_size"] = arguments.batch
    if arguments.input:
        translator.translate_file(
            arguments.input,
            arguments.output,
            source_tokenize_fn=lambda line: source.encode(line, out_type=str),
            target_detokenize_fn=target.decode,
            **settings,
        )
        return

    def translate(lines: list[str]) -> list[str]:
        results = translator.translate_batch(source.encode(lines, out_type=str), **settings)
        return target.decode([x.hypotheses[0] for x in results])

    app = make_app(translate, arguments.workers, arguments.batch)
    uvicorn.run(app, port=arguments.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
