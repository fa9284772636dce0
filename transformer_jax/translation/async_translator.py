"""Asynchronous translation: many asyncio tasks share one search across all devices."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from transformer_jax.decoding.devices import devices_for_rows
from transformer_jax.decoding.length_buckets import padded_length
from transformer_jax.decoding.search import Hypothesis, Sentence
from transformer_jax.decoding.workers import Workers
from transformer_jax.pretrained.loading import local_workdir
from transformer_jax.settings.config import EngineName
from transformer_jax.settings.config_files import load_config_file
from transformer_jax.translation.plan import Part
from transformer_jax.translation.requests import Request, Translation
from transformer_jax.translation.scoring import MIN_PADDED_LENGTH, Scorer
from transformer_jax.translation.translator import Translator

logger = logging.getLogger(__name__)

_ALIGN_BATCH_SIZE = 4


class AsyncTranslator:
    """Translator for many concurrent tasks, with continuous batching.

    For each line, produces the same tokens as ``Translator``, no matter when the line arrives or
    which other lines are in progress.

    Attributes:
      translator: the ``Translator``.
      config: its settings; ``batch_size`` is the number of rows across all devices.
      workers: the search threads; they also count rows and waiting sentences.
    """

    def __init__(self, translator: Translator, *, max_terms: int = 0):
        """Search with the translator's model, settings and devices. ``max_terms`` is the number of
        glossary terms in a sentence for which searches are compiled: 0, 1, 4, 16 or 64.
        """
        self.translator = translator
        self.config = translator.config
        engines = translator.search_engines
        buckets = engines[0].buckets_with_terms(max_terms)
        batches = [
            [engine.new_batch(bucket, is_resizable=True) for bucket in buckets]
            for engine in engines
        ]
        self.workers = Workers(batches, engines[0].bucket_of)
        scorer_config = replace(self.config, batch_size=_ALIGN_BATCH_SIZE)
        self._scorer = Scorer(translator.model, translator.tokenizer, scorer_config)
        self._align_executor = ThreadPoolExecutor(1, thread_name_prefix="align")

    @classmethod
    def from_workdir(
        cls,
        workdir: str | Path,
        *,
        max_terms: int = 0,
        engine: EngineName = "jax",
        **settings: Any,
    ) -> Self:
        """Load the model of a training run on all devices.

        ``workdir`` is the path or URL of a work directory or of one of its checkpoints.
        ``settings`` override fields of the run's ``decoding`` config.

        Raises:
          UserError: see ``load_model``, ``Translator`` and ``choose_engine``.
        """
        folder = local_workdir(workdir)
        batch_size = replace(load_config_file(folder).decoding, **settings).batch_size
        devices = devices_for_rows(batch_size)  # before JAX is initialized
        jax_only = "Glossary terms (--max-terms) work" if max_terms else ""
        translator = Translator.from_workdir(
            folder, devices=devices, engine=engine, jax_only=jax_only, **settings
        )
        return cls(translator, max_terms=max_terms)

    def start(self) -> None:
        """Compile the search of a few short sentences, and start the search threads. Other searches
        are compiled in the background (see ``Workers``), and alignments when they are requested.
        """
        self.workers.start()

    def close(self) -> None:
        """Stop the search; lines in progress fail."""
        self._align_executor.shutdown(wait=False, cancel_futures=True)
        self.workers.close()

    async def translate(
        self, line: str | Request, *, num_hypotheses: int = 1, alignments: bool = False
    ) -> list[Translation]:
        """Translate a line or a document. Returns its translations, best first (see
        ``Translator.stream``). ``alignments`` adds alignments to those of a line (see
        ``Scorer.align_and_score``). Canceling the task frees its rows.

        Raises:
          UserError: see ``Translator.stream``; ``start`` has not been called.
          SearchFailed: the search has stopped permanently.
        """
        request = Request.of(line, 1)
        # In a thread, because tokenizing a long line takes time.
        plan = await asyncio.to_thread(self.translator.plan, request, num_hypotheses)
        semaphore = self.new_semaphore()
        parts = [self.translate_part(part, semaphore, alignments=alignments) for part in plan.parts]
        translations = await asyncio.gather(*parts)
        return await asyncio.to_thread(plan.join_parts, translations)

    async def translate_part(
        self, part: Part, semaphore: asyncio.Semaphore, *, alignments: bool = False
    ) -> list[Translation]:
        """Translate a part of a plan. Returns its translations, best first.

        ``semaphore`` limits how many segments are searched at once. Parts that share one thus leave
        rows for others.
        """

        async def search_one(sentence: Sentence) -> list[Hypothesis]:
            async with semaphore:
                future = self.workers.submit(sentence)
                try:
                    return await asyncio.wrap_future(future)
                finally:
                    future.cancel()

        if len(part.sentences) == 1:
            translations = part.join([await search_one(part.sentences[0])])
        else:  # a long text takes time
            hypotheses = await asyncio.gather(*map(search_one, part.sentences))
            translations = await asyncio.to_thread(part.join, hypotheses)
        if alignments:
            return await self._call_scorer(self._scorer.align_and_score, part, translations)
        # A document's part is aligned unless it is too long.
        if part.needs_alignment and self._can_align(part, translations):
            return await self._call_scorer(self._scorer.align, part, translations)
        return translations

    async def _call_scorer(
        self,
        method: Callable[[Sequence[tuple[Request, Translation]]], list[Translation]],
        part: Part,
        translations: Sequence[Translation],
    ) -> list[Translation]:
        """Add alignments or scores to translations, in a thread."""
        pairs = [(part.request, translation) for translation in translations]
        return await asyncio.wrap_future(self._align_executor.submit(method, pairs))

    def _can_align(self, part: Part, translations: Sequence[Translation]) -> bool:
        """Whether a part and its translations are at most as long as a sentence that is searched at
        once, and its translation. This limits the number of alignment functions to compile.
        """
        max_source_length = self.translator.engines[0].max_source_length
        positions = self.translator.model.config.position_limit
        max_target_length = self.config.max_target_length(max_source_length, positions)
        padded = padded_length(max(max_source_length, max_target_length), MIN_PADDED_LENGTH)
        num_tokens = sum(len(sentence.tokens) for sentence in part.sentences)
        lengths = [num_tokens + 1, *(translation.length for translation in translations)]
        return max(lengths) <= min(padded, self._scorer.max_length)

    def new_semaphore(self) -> asyncio.Semaphore:
        """Create a semaphore. Parts that share it use at most half of the rows."""
        return asyncio.Semaphore(max(1, self.config.batch_size // 2))
