"""Translation for many asyncio tasks, which share one search on all devices.

A thread for each device seats the sentences that have arrived, takes a few steps, and answers those
that are done.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from transformer_jax.config import DecodingConfig
from transformer_jax.config_io import load_config_file
from transformer_jax.decoding.buckets import Bucket, Sentence, bucket_of
from transformer_jax.decoding.continuous_batching import Found
from transformer_jax.decoding.devices import devices_for_rows
from transformer_jax.decoding.engine import Engine, Hypothesis, hypotheses
from transformer_jax.decoding.ensemble import Ensemble
from transformer_jax.decoding.records import Request, Translation
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.trained_models import load_models
from transformer_jax.decoding.translator import Translator, numbered_request
from transformer_jax.model.transformer import Transformer
from transformer_jax.remote_workdir import local_workdir
from transformer_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# New sentences wait until so many steps are done.
_STEPS = 8
# A step takes the longer the more rows it has. So there are sets of so many rows, of which the
# smallest suffices for what is there: 1, and these shares 1 / n of all.
_SHARES = (4, 1)
_ALIGNED_TOGETHER = 4


class SearchFailed(Exception):
    """The search has stopped for good."""


@dataclass(eq=False)
class Entry:
    """A sentence, and the future of its hypotheses."""

    sentence: Sentence
    future: Future[list[Hypothesis]] = field(default_factory=Future)


class LiveRows:
    """Rows of an engine. Hypotheses are those of ``Engine.search``, their scores up to rounding:
    XLA adds up in another order where there are fewer rows. Not for several threads.

    Attributes:
      busy: the sentences in the rows, by number.
    """

    def __init__(self, engine: Engine, bucket: Bucket):
        self._engine, self.bucket = engine, bucket
        self.busy: dict[int, Entry] = {}
        self._numbers = itertools.count()
        self._rows = engine.new_rows(bucket)

    @property
    def num_idle(self) -> int:
        """Rows without a sentence."""
        return self.bucket.rows - len(self.busy)

    def compile(self) -> None:
        """Compile all that sentences need."""
        self._nobody = self._engine.encode(self.bucket, {})
        for length in self.bucket.lengths:
            entry = Entry(Sentence([0] * (length - 1)))
            self.turn([entry], 0)
            entry.future.cancel()
            self.turn([], 0)

    def turn(self, entries: Sequence[Entry], most: int) -> None:
        """Give rows to at most ``bucket.block_size`` sentences of one encoded length, taking steps
        until enough are idle. Then write up to ``most`` tokens of every sentence, fewer once a
        block of them is done.

        Sets the results of futures: no hypotheses where the model's logits were NaN. Rows of
        cancelled futures become idle.
        """
        entered = dict(zip(self._numbers, entries, strict=False))
        self.busy |= entered
        block = self._nobody
        if entered:
            sentences = {number: entry.sentence for number, entry in entered.items()}
            block = self._engine.encode(self.bucket, sentences)
        limits = {"most": most, "enough": self.bucket.block_size}
        rows, left = self._engine.seat(self.bucket, self._rows, block, **limits)
        self._answer(left)
        self._answer(self._engine.results(rows))
        gone = [number for number, entry in self.busy.items() if entry.future.cancelled()]
        if gone:
            done_B = np.asarray(rows.state.done_B) | np.isin(rows.number_B, gone)
            done_B = jax.device_put(done_B, rows.state.done_B.sharding)
            rows = rows._replace(state=rows.state._replace(done_B=done_B))
        for number in gone:
            del self.busy[number]
        self._rows = rows

    def _answer(self, found: Found) -> None:
        numbers = np.asarray(found.number_R).tolist()
        if self.busy.keys().isdisjoint(numbers):
            return
        results = jax.device_get(found.results)
        for row, number in enumerate(numbers):
            if entry := self.busy.pop(number, None):
                with suppress(InvalidStateError):  # it was cancelled
                    entry.future.set_result(hypotheses(results, row)[: entry.sentence.wanted])


class Workers:
    """The search of one model for all who submit sentences, at any time and from any thread.

    A sentence gets the next free row of any device. To give up on a sentence, cancel its future:
    that frees its row.

    Attributes:
      failure: why they stopped working, if they did; all futures fail with it from then on.
    """

    def __init__(self, engines: Sequence[Engine]):
        """One engine for each device, all alike."""
        self.failure: SearchFailed | None = None
        self._searches = [
            [_sets_of_rows(engine, bucket) for bucket in engine.buckets] for engine in engines
        ]
        self._waiting: dict[Bucket, list[Entry]] = {bucket: [] for bucket in engines[0].buckets}
        self._unfinished: set[Future[list[Hypothesis]]] = set()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Compile everything, then begin to work."""
        with ThreadPoolExecutor() as together:
            for searches in self._searches:  # a GPU finds what another one has compiled
                list(together.map(LiveRows.compile, chain(*searches)))
        for searches in self._searches:
            self._threads.append(threading.Thread(target=self._work, args=[searches], daemon=True))
            self._threads[-1].start()

    def stop(self, reason: str) -> None:
        """All futures that are not done fail, and so do those of later sentences."""
        with self._changed:
            self.failure = self.failure or SearchFailed(reason)
            self._changed.notify_all()
            for future in list(self._unfinished):
                with suppress(InvalidStateError):  # it has just been answered
                    future.set_exception(self.failure)

    def close(self) -> None:
        """Stop working."""
        self.stop("It was closed.")
        for thread in self._threads:
            thread.join()

    def submit(self, sentence: Sentence) -> Future[list[Hypothesis]]:
        """The sentence's hypotheses, best first, as ``Engine.search`` gives them."""
        entry = Entry(sentence)
        with self._changed:
            if self.failure:
                entry.future.set_exception(self.failure)
            else:
                self._waiting[bucket_of(list(self._waiting), sentence)].append(entry)
                self._unfinished.add(entry.future)
                entry.future.add_done_callback(self._unfinished.discard)
            self._changed.notify_all()
        return entry.future

    @property
    def num_waiting(self) -> int:
        """Sentences without a row."""
        return sum(map(len, self._waiting.values()))

    @property
    def num_busy(self) -> int:
        """Rows with a sentence."""
        return sum(len(rows.busy) for searches in self._searches for rows in chain(*searches))

    @property
    def num_rows(self) -> int:
        """Sentences that can be in progress, on all devices and in all buckets."""
        return len(self._searches) * sum(bucket.rows for bucket in self._waiting)

    def _work(self, searches: list[list[LiveRows]]) -> None:
        every = list(chain(*searches))
        try:
            while self.failure is None:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self.failure or self.num_waiting or any(x.busy for x in every)
                    )
                work = [
                    (sets, waiting)
                    for sets, waiting in zip(searches, self._waiting.values(), strict=True)
                    if waiting or any(rows.busy for rows in sets)
                ]
                for sets, waiting in work:
                    self._take_turns(sets, waiting, may_step=len(work) == 1)
        except Exception as error:
            logger.exception("The search failed; it must be started again.")
            self.stop(str(error))

    def _take_turns(self, sets: list[LiveRows], waiting: list[Entry], *, may_step: bool) -> None:
        """Seat sentences in the set of rows that suffices for all, or the largest; then take steps
        in every set.
        """
        num_sentences = len(waiting) + sum(len(rows.busy) for rows in sets)
        chosen = next((rows for rows in sets if rows.bucket.rows >= num_sentences), sets[-1])
        block = self._next_block(chosen, waiting, may_step=may_step)
        for rows in sets:
            entries = block if rows is chosen else []
            if entries or rows.busy:
                rows.turn(entries, 0 if entries and waiting else _STEPS)

    def _next_block(self, rows: LiveRows, waiting: list[Entry], *, may_step: bool) -> list[Entry]:
        """Sentences of the length of the one that has waited for longest, as many as rows are idle.
        Or a whole block, for whose rows ``turn`` takes steps, if no other bucket waits meanwhile.
        """
        with self._changed:
            waiting[:] = [entry for entry in waiting if not entry.future.cancelled()]
            if not waiting:
                return []
            size, length_of = rows.bucket.block_size, rows.bucket.length_of
            length = length_of(waiting[0].sentence)
            block = [entry for entry in waiting if length_of(entry.sentence) == length][:size]
            if len(block) < size or not may_step:
                del block[rows.num_idle :]
            for entry in block:
                waiting.remove(entry)
            return block


def _sets_of_rows(engine: Engine, bucket: Bucket) -> list[LiveRows]:
    """Smallest first."""
    counts = sorted({1, *(max(1, bucket.rows // n) for n in _SHARES)})
    return [LiveRows(engine, bucket._replace(rows=count)) for count in counts]


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
        rows = replace(load_config_file(folder).decoding, **settings).batch_size
        devices = devices_for_rows(rows)  # before JAX starts
        return cls(*load_models(folder, average=average, **settings), devices=devices)

    def start(self) -> None:
        """Compile everything, then begin to work."""
        self.workers.start()
        lengths = chain(*(bucket.lengths for bucket in self.translator.engines[0].buckets))
        self._scorer.align_tokens([([0] * (length - 1), [0]) for length in lengths])

    def close(self) -> None:
        """Stop working; lines in progress fail."""
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
            future = self.workers.submit(segment)
            try:
                return await asyncio.wrap_future(future)
            finally:
                future.cancel()

        async def search_in_turn(segment: Sentence) -> list[Hypothesis]:
            async with turns:
                return await search(segment)

        async with turns:  # no line is encoded sooner: that holds up all tasks
            segments = self.translator.sentences(request, num_hypotheses)
            found = [await search(segment) for segment in segments[:1]]
        found += await asyncio.gather(*map(search_in_turn, segments[1:]))
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
