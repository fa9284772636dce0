"""A query in progress and its response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from transformer_jax import Translation
from transformer_jax.serving.flags import Pair
from transformer_jax.serving.schema import Answer, Detected, Query, SentenceEvent, SentenceResponse
from transformer_jax.translation.plan import Plan
from transformer_jax.translation.sentences import SentenceJoiner

Task = asyncio.Task[list[Translation]]

_EVENT_ADAPTER = TypeAdapter(SentenceEvent)


@dataclass(frozen=True)
class PlannedText:
    """A text of a query."""

    plan: Plan
    tasks: Sequence[Task]
    """One for each part of the plan."""

    @property
    def translations(self) -> list[list[Translation]]:
        """The translations of each part, once all tasks are done."""
        return [task.result() for task in self.tasks]


@dataclass(frozen=True)
class PendingAnswer:
    """A query in progress."""

    query: Query
    pair: Pair
    texts: Sequence[PlannedText]

    async def full_response(self) -> bytes:
        """Wait for the complete response. Returns it as JSON."""
        tasks = [task for text in self.texts for task in text.tasks]
        await asyncio.gather(*tasks)
        if self.query.is_short:
            return self._response()
        return await asyncio.to_thread(self._response)

    def cancel(self) -> None:
        """Cancel all work. Whoever waits for a response gets an ``asyncio.CancelledError``."""
        for text in self.texts:
            for task in text.tasks:
                task.cancel()

    async def stream_sentences(self) -> AsyncGenerator[tuple[str, bytes]]:
        """Yield the sentences of a single text in order, then the complete response: a kind,
        ``sentence`` or ``done``, with JSON.
        """
        [text] = self.texts
        joiner = SentenceJoiner()
        try:
            for index, task in enumerate(text.tasks):
                await task
                yield "sentence", await asyncio.to_thread(self._event, text, index, joiner)
            yield "done", await asyncio.to_thread(self._response)
        finally:
            self.cancel()

    def _event(self, text: PlannedText, index: int, joiner: SentenceJoiner) -> bytes:
        """Return the event of a sentence. Takes time if it has attention weights."""
        part = text.plan.parts[index]
        translations = text.tasks[index].result()
        separator = joiner.add(part.before, part.source, translations[0].text)
        event = SentenceEvent.from_translations(
            translations,
            self.query.alternatives > 0,
            source=part.source,
            index=index,
            before="" if text.plan.document is not None else separator,
        )
        return _EVENT_ADAPTER.dump_json(event, exclude_none=True)

    def _response(self) -> bytes:
        return self._answer().model_dump_json(exclude_none=True).encode()

    def _answer(self) -> Answer:
        query = self.query
        ranked = [self._ranked(text) for text in self.texts]
        answer = Answer(translatedText=self._one_or_all([texts[0] for texts in ranked]))
        answer.unmet = self._unmet_terms() or None
        if query.alternatives:
            answer.alternatives = self._one_or_all(
                [list(dict.fromkeys(texts))[1:] for texts in ranked]
            )
        if query.source.lower() == "auto":
            detected = Detected(language=self.pair.source, confidence=100)
            answer.detectedLanguage = self._one_or_all([detected] * len(self.texts))
        if query.details or query.attention:
            answer.sentences = [self._sentences(text) for text in self.texts]
        return answer

    def _ranked(self, text: PlannedText) -> list[str]:
        """Return the translations of a text, best first."""
        translations = text.plan.join_parts(text.translations)
        return [translation.text for translation in translations[: 1 + self.query.alternatives]]

    def _one_or_all(self, values: list[Any]) -> Any:
        """Return the value of a single text, or the values of a list of texts."""
        return values[0] if isinstance(self.query.q, str) else values

    def _unmet_terms(self) -> list[str]:
        terms = set[str]()
        for text in self.texts:
            for translations in text.translations:
                terms.update(translations[0].unmet)
        return sorted(terms)

    def _sentences(self, text: PlannedText) -> list[SentenceResponse]:
        return [
            SentenceResponse.from_translations(
                translations, self.query.alternatives > 0, source=part.source
            )
            for part, translations in zip(text.plan.parts, text.translations)
        ]
