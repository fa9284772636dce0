"""Translation of queries with the served models."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from transformer_jax import AsyncTranslator
from transformer_jax.serving.answering import PendingAnswer, PlannedText, Task
from transformer_jax.serving.flags import Pair
from transformer_jax.serving.languages import LanguagePairs
from transformer_jax.serving.limits import (
    MAX_ALIGNED_REQUEST_TOKENS,
    MAX_ALIGNED_SENTENCE_TOKENS,
    Limits,
)
from transformer_jax.serving.metrics import Metrics
from transformer_jax.serving.rejected import RequestRejected
from transformer_jax.serving.schema import Query, ServerState
from transformer_jax.translation.markup import PLACEHOLDERS
from transformer_jax.translation.plan import Part, Plan

logger = logging.getLogger(__name__)

FAILED = "The search has failed. Restart the server."
_COMPILING = "The server is still compiling. Retry in a few seconds."


class Service:
    """All served models and the request limits.

    Attributes:
      limits: the limits of requests.
      num_accepted: number of accepted sentences that are not yet translated; a long sentence
        counts once per segment.
    """

    def __init__(
        self,
        models: Mapping[Pair, AsyncTranslator],
        limits: Limits,
        *,
        protect: Sequence[str] = (),
    ):
        self.models = dict(models)
        self.pairs = LanguagePairs(models)
        self.limits = limits
        self.num_accepted = 0
        self._protect = (*PLACEHOLDERS, *protect)
        self._distinct_models = list(dict.fromkeys(models.values()))
        self._status: ServerState = "compiling"
        self.metrics = Metrics(self._distinct_models, lambda: self.num_accepted)

    def start(self) -> None:
        """Compile all models and start their searches. Failures are logged and set ``status``."""
        start = time.perf_counter()
        try:
            for model in self._distinct_models:
                model.start()
        except Exception:
            logger.exception("Compilation failed.")
            self._status = "failed"
            return
        self._status = "ok"
        logger.info("Ready after %.0f s of compilation.", time.perf_counter() - start)

    def close(self) -> None:
        """Stop all searches."""
        for model in self._distinct_models:
            model.close()

    @property
    def status(self) -> ServerState:
        """Current status; "failed" if any search has failed."""
        if any(model.workers.queue.failure for model in self._distinct_models):
            return "failed"
        return self._status

    @property
    def engine(self) -> str:
        """Names of the engines of all models, separated by commas."""
        engines = {
            "ctranslate2" if model.translator.ctranslate2 else "jax"
            for model in self._distinct_models
        }
        return ", ".join(sorted(engines))

    async def begin(self, query: Query) -> PendingAnswer:
        """Check a query, divide its texts into sentences and start translating them.

        Raises:
          UserError: a field is invalid or unsupported.
          RequestRejected: there are too many characters or sentences, or the server is busy.
        """
        if self.status != "ok":
            raise RequestRejected(503, FAILED if self.status == "failed" else _COMPILING)
        pair = self.pairs.find(query.source, query.target)
        self.limits.check_query(query, self.models[pair].config.beam_size)
        if query.is_short:
            plans = self._plan(query, pair)
        else:  # tokenizing takes a second if each character is a ligature of many letters
            plans = await asyncio.to_thread(self._plan, query, pair)
        num_sentences = sum(len(plan.sentences) for plan in plans)
        self.limits.check_queue(self.num_accepted, num_sentences)
        return PendingAnswer(query, pair, self._translate(plans, query, pair))

    def _plan(self, query: Query, pair: Pair) -> list[Plan]:
        """Divide the texts of a query into sentences, and those into segments of tokens."""
        model = self.models[pair]
        translator = model.translator
        options: dict[str, Any] = {}
        if translator.tokenizer.languages.tokens:
            options = {"source_language": pair.source, "target_language": pair.target}
        glossary = translator.tokenize_glossary(query.glossary, "The glossary")
        plans = list[Plan]()
        for request in query.requests(glossary=glossary, **options):
            plan = translator.plan(
                request, language=pair.source, protect=self._protect, **query.plan_options
            )
            for sentence in plan.sentences:
                model.workers.bucket_of(sentence)  # raises an error for too many terms
            plans.append(plan)
        return plans

    def _translate(self, plans: Sequence[Plan], query: Query, pair: Pair) -> list[PlannedText]:
        """Start one task for each part."""
        model = self.models[pair]
        semaphore = model.new_semaphore()  # keeps one request from taking all rows
        num_tokens = sum(_num_tokens(part) for plan in plans for part in plan.parts)
        attention = query.attention and num_tokens <= MAX_ALIGNED_REQUEST_TOKENS
        texts = list[PlannedText]()
        for plan in plans:
            tasks = list[Task]()
            for part in plan.parts:
                aligned = attention and _num_tokens(part) <= MAX_ALIGNED_SENTENCE_TOKENS
                work = model.translate_part(part, semaphore, alignments=aligned)
                task = asyncio.create_task(work)
                task.add_done_callback(partial(self._release, pair, len(part.sentences)))
                self.num_accepted += len(part.sentences)
                tasks.append(task)
            texts.append(PlannedText(plan, tasks))
        return texts

    def _release(self, pair: Pair, num_sentences: int, task: Task) -> None:
        """End the work on a part, whose segments count as accepted until then."""
        self.num_accepted -= num_sentences
        if not task.cancelled() and not task.exception():
            self.metrics.count(pair, task.result()[0])


def _num_tokens(part: Part) -> int:
    return sum(len(sentence.tokens) for sentence in part.sentences)
