"""Asynchronous translation: many asyncio tasks share one search across all devices."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from transformer_jax.decoding.devices import devices_for_rows
from transformer_jax.decoding.engine import EngineBatch
from transformer_jax.decoding.length_buckets import padded_length
from transformer_jax.decoding.scheduler import Scheduler
from transformer_jax.decoding.search import Hypothesis, Sentence
from transformer_jax.decoding.workers import Workers
from transformer_jax.pretrained.loading import local_workdir
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
        engines = translator.engines
        buckets = engines[0].buckets_with_terms(max_terms)
        schedulers = [
            Scheduler([EngineBatch(engine, bucket, is_resizable=True) for bucket in buckets])
            for engine in engines
        ]
        self.workers = Workers(schedulers, engines[0].bucket_of)
        scorer_config = replace(self.config, batch_size=_ALIGN_BATCH_SIZE)
        self._scorer = Scorer(translator.model, translator.tokenizer, scorer_config)
        self._align_executor = ThreadPoolExecutor(1, thread_name_prefix="align")

    @classmethod
    def from_workdir(cls, workdir: str | Path, *, max_terms: int = 0, **settings: Any) -> Self:
        """Load the model of a training run on all devices.

        ``workdir`` is the path or URL of a work directory or of one of its checkpoints.
        ``settings`` override fields of the run's ``decoding`` config.

        Raises:
          UserError: see ``load_model`` and ``Translator``.
        """
        folder = local_workdir(workdir)
        rows = replace(load_config_file(folder).decoding, **settings).batch_size
        devices = devices_for_rows(rows)  # before JAX is initialized
        translator = Translator.from_workdir(folder, devices=devices, **settings)
        return cls(translator, max_terms=max_terms)

    def start(self) -> None:
        """Compile everything, then start the search threads."""
        self.workers.start()
        pairs = [([0] * (length - 1), [0]) for length in self._compiled_align_lengths]
        self._scorer.align_tokens(pairs)

    def close(self) -> None:
        """Stop the search; lines in progress fail."""
        self._align_executor.shutdown(cancel_futures=True)
        self.workers.close()

    async def translate(
        self, line: str | Request, *, num_hypotheses: int = 1, alignments: bool = False
    ) -> list[Translation]:
        """Translate a line or a document. Returns its translations, best first (see
        ``Translator.stream``). ``alignments`` adds alignments to those of a line (see
        ``Scorer.align``). Canceling the task frees its rows.

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

        hypotheses = await asyncio.gather(*map(search_one, part.sentences))
        if len(part.sentences) > 1:  # a long text takes time
            translations = await asyncio.to_thread(part.join, hypotheses)
        else:
            translations = part.join(hypotheses)
        if not alignments:  # a document's part is aligned only if that compiles nothing
            alignments = part.needs_alignment and self._can_align(part, translations)
        if not alignments:
            return translations
        pairs = [(part.request, translation) for translation in translations]
        return await asyncio.wrap_future(self._align_executor.submit(self._scorer.align, pairs))

    @cached_property
    def _compiled_align_lengths(self) -> list[int]:
        """The lengths for which alignment is compiled: those of a sentence that is searched at once
        and of its translation.
        """
        longest_source = self.translator.engines[0].longest_source
        positions = self.translator.model.config.position_limit
        longest = max(longest_source, self.config.longest_target(longest_source, positions))
        lengths = [padded_length(1, MIN_PADDED_LENGTH)]
        while lengths[-1] < longest:
            lengths.append(padded_length(lengths[-1] + 1, MIN_PADDED_LENGTH))
        return [min(length, self._scorer.longest) for length in lengths]

    def _can_align(self, part: Part, translations: Sequence[Translation]) -> bool:
        """Whether alignment is compiled for a part and its translations."""
        num_tokens = sum(len(sentence.tokens) for sentence in part.sentences)
        lengths = [num_tokens + 1, *(translation.length for translation in translations)]
        return max(lengths) <= self._compiled_align_lengths[-1]

    def new_semaphore(self) -> asyncio.Semaphore:
        """Create a semaphore. Parts that share it use at most half of the rows."""
        return asyncio.Semaphore(max(1, self.config.batch_size // 2))
