"""Translation for many asyncio tasks, which share one search on all devices."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import jax

from transformer_jax.checkpoint import load_model
from transformer_jax.config import DecodingConfig
from transformer_jax.config_io import load_config_file
from transformer_jax.decoding.buckets import Sentence
from transformer_jax.decoding.devices import devices_for_rows
from transformer_jax.decoding.engine import Hypothesis
from transformer_jax.decoding.ensemble import Ensemble
from transformer_jax.decoding.records import Request, Translation
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.translator import Translator, numbered_request
from transformer_jax.decoding.workers import Workers
from transformer_jax.model.transformer import Transformer
from transformer_jax.remote_workdir import local_workdir
from transformer_jax.tokenizer import Tokenizer

_ALIGNED_TOGETHER = 4


class AsyncTranslator:
    """Translates lines for many tasks at a time, by continuous batching.

    A line gets the tokens that ``Translator`` gives it, at any time and with any neighbours.

    Attributes:
      config: settings of the search; ``batch_size`` counts the rows of all devices.
      translator: a ``Translator`` with the same settings and devices.
      workers: the search, with the numbers of rows and of sentences that wait.
      num_lines: lines translated so far.
      num_tokens: tokens of their best translations.
    """

    def __init__(
        self,
        models: Transformer | Ensemble | Sequence[Transformer],
        tokenizer: Tokenizer,
        config: DecodingConfig,
        *,
        devices: Sequence[jax.Device] = (),
    ):
        """``devices`` share the rows of ``config.batch_size``; default: all.

        Raises:
          UserError: as ``Translator``.
        """
        devices = devices or devices_for_rows(config.batch_size)
        self.config = config
        self.translator = Translator(models, tokenizer, config, devices=devices)
        self.workers = Workers(self.translator.engines)
        self.num_lines = self.num_tokens = 0
        together = replace(config, batch_size=_ALIGNED_TOGETHER)
        self._scorer = Scorer(models, tokenizer, together)
        self._aligning = ThreadPoolExecutor(1, thread_name_prefix="align")

    @classmethod
    def from_workdir(
        cls,
        workdir: str | Path,
        *,
        average: int | None = None,
        **settings: Any,
    ) -> Self:
        """The model of a training run, on all devices.

        ``workdir`` is a work directory or one of its checkpoints, a folder or a URL; ``settings``
        replace fields of the run's ``decoding`` config; ``average`` is that of ``load_model``.

        Raises:
          UserError: as ``load_model`` and ``Translator``.
        """
        folder = local_workdir(workdir)
        search = replace(load_config_file(folder).decoding, **settings)
        devices = devices_for_rows(search.batch_size)  # before JAX starts
        _, model, tokenizer = load_model(folder, average=average)
        return cls(model, tokenizer, search, devices=devices)

    def start(self) -> None:
        """Compile everything, then begin to work."""
        self.workers.start()
        lengths = chain(*(bucket.lengths for bucket in self.translator.engines[0].buckets))
        self._scorer.align_tokens([([0] * (length - 1), [0]) for length in lengths])

    def close(self) -> None:
        """Stop working; lines in progress are cancelled."""
        self._aligning.shutdown(cancel_futures=True)
        self.workers.close()

    async def translate(
        self,
        line: str | Request,
        *,
        num_hypotheses: int = 1,
        alignments: bool = False,
        turns: asyncio.Semaphore | None = None,
    ) -> list[Translation]:
        """A line's translations, best first, as ``Translator.stream`` gives them; with
        ``alignments`` as ``Scorer.align`` adds them.

        Each segment that is searched takes one of ``turns``, so that lines which share them leave
        rows to others (default: half of the rows). A task that is cancelled frees its rows.

        Raises:
          UserError: as ``Translator.stream``.
          SearchFailed: the search has stopped for good.
        """
        request = numbered_request(line, 1)
        turns = turns or self.new_turns()

        async def search(segment: Sentence) -> list[Hypothesis]:
            async with turns:
                return await self.workers.search(segment)

        async with turns:  # no line is encoded sooner: that holds up all tasks
            segments = self.translator.sentences(request, num_hypotheses)
            found = [await self.workers.search(segment) for segment in segments[:1]]
        found += await asyncio.gather(*map(search, segments[1:]))
        translations = self.translator.translations(request, found)
        self.num_lines += 1
        self.num_tokens += translations[0].length
        if not alignments:
            return translations
        pairs = [(request.text, translation) for translation in translations]
        return await asyncio.wrap_future(self._aligning.submit(self._scorer.align, pairs))

    def new_turns(self) -> asyncio.Semaphore:
        """Turns for lines that together may have half of the rows."""
        return asyncio.Semaphore(max(1, self.config.batch_size // 2))
