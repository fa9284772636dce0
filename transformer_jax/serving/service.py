"""Translation of queries with the served models."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.exceptions import HTTPException

from transformer_jax import AsyncTranslator, Request, Sentence, Translation, UserError
from transformer_jax.errors import short_repr
from transformer_jax.serving.flags import Pair, folded
from transformer_jax.serving.schema import (
    Answer,
    Detected,
    Error,
    Query,
    SentenceEvent,
    SentenceResponse,
    State,
)
from transformer_jax.serving.text import Cut, cut, sentences
from transformer_jax.translation.markup import PLACEHOLDERS, Document

logger = logging.getLogger(__name__)

FAILED = "The search has failed. Restart the server."
_COMPILING = "The server is still compiling. Retry in a few seconds."
_HEADERS = {
    413: {"Connection": "close"},  # the rest of the body is never read
    503: {"Retry-After": "1"},
}
# Language pairs in an error message.
_MOST_SHOWN = 12
# Source tokens of a sentence, whose attention weights grow quadratically, and of a request.
_LONGEST_ALIGNED, _MOST_ALIGNED = 256, 4096

_Line = tuple[Request, list[Sentence]]
_Task = asyncio.Task[list[Translation]]


class Refused(HTTPException):
    """Raised to reject a request that is too large or not allowed, or because the server is busy.

    Attributes:
      told: the response body.
    """

    def __init__(self, status: int, said: str, *, limit: int | None = None):
        """``limit`` is the limit that the request exceeds, if any."""
        super().__init__(status, said, _HEADERS.get(status))
        self.told = Error(error=said, limit=limit)


class Service:
    """All served models and the request limits.

    Attributes:
      num_accepted: number of accepted sentences that are not yet translated; a long sentence
        counts once per segment.
      registry: Prometheus metrics of the searches.
    """

    def __init__(
        self,
        models: Mapping[Pair, AsyncTranslator],
        *,
        max_queue: int,
        max_characters: int,
        protect: Sequence[str] = (),
    ):
        self.models = dict(models)
        self._pairs_to = defaultdict[str, list[Pair]](list)
        for pair in models:
            self._pairs_to[folded(pair.target)].append(pair)
        self._searches = list(dict.fromkeys(models.values()))
        self.max_queue, self.max_characters, self.protect = max_queue, max_characters, protect
        self.num_accepted = 0
        self._status: State = "compiling"
        self.registry = CollectorRegistry()
        searches = [model.workers for model in self._searches]
        for name, said, value in (
            ("sentences_accepted", "Sentences in progress.", lambda: self.num_accepted),
            (
                "sentences_waiting",
                "Waiting sentences.",
                lambda: sum(x.num_waiting for x in searches),
            ),
            ("rows_busy", "Rows in use.", lambda: sum(x.num_busy for x in searches)),
            ("rows", "Total rows across all searches.", lambda: sum(x.num_rows for x in searches)),
        ):
            Gauge(f"transformer_{name}", said, registry=self.registry).set_function(value)
        counter = partial(Counter, labelnames=["pair"], registry=self.registry)
        self._num_sentences = counter("transformer_sentences", "Sentences translated.")
        said = "Target tokens in the best translations."
        self._num_tokens = counter("transformer_target_tokens", said)

    def start(self) -> None:
        """Compile all models and start their searches. Failures are logged and set ``status``."""
        start = time.perf_counter()
        try:
            for model in self._searches:
                model.start()
        except Exception:
            logger.exception("Compilation failed.")
            self._status = "failed"
            return
        self._status = "ok"
        logger.info("Ready after %.0f s of compilation.", time.perf_counter() - start)

    def close(self) -> None:
        """Stop all searches."""
        for model in self._searches:
            model.close()

    @property
    def status(self) -> State:
        """Current status; "failed" if any search has failed."""
        if any(model.workers.failure for model in self._searches):
            return "failed"
        return self._status

    def find(self, query: Query) -> Pair:
        """Find the language pair of a query. Raises ``UserError`` if none or several match."""
        source = folded(query.source)
        pairs = self._pairs_to.get(folded(query.target), [])
        if source != "auto":
            pairs = [pair for pair in pairs if folded(pair.source) == source]
        if len(pairs) == 1:
            return pairs[0]
        expected = "a source language because several match:" if pairs else "one of"
        shown = [str(pair) for pair in (pairs or self.models)][:_MOST_SHOWN]
        more = ", ... (GET /languages lists all)" if len(pairs or self.models) > _MOST_SHOWN else ""
        raise UserError(
            f"source is {short_repr(query.source)} and target is {short_repr(query.target)}; "
            f"expected {expected} {', '.join(shown)}{more}."
        )

    async def begin(self, query: Query) -> Answering:
        """Check a query, split its texts into sentences and start translating them.

        Raises:
          UserError: a field is invalid or unsupported.
          Refused: there are too many characters or sentences, or the server is busy.
        """
        if self.status != "ok":
            raise Refused(503, FAILED if self.status == "failed" else _COMPILING)
        pair = self.find(query)
        model = self.models[pair]
        most = model.config.beam_size - 1
        if query.alternatives > most:
            raise UserError(
                f"alternatives is {query.alternatives}; expected at most {most}, "
                "one less than this server's beam size."
            )
        sent = [*query.texts, query.prefix]
        for source, targets in query.glossary.items():
            sent += [source, *([targets] if isinstance(targets, str) else targets)]
        _refuse_above(self.max_characters, sum(map(len, sent)), "characters")
        _refuse_above(self.max_queue, len(query.texts), "texts")
        # In a thread: tokenizing takes a second if each character is a ligature of many letters.
        texts = await asyncio.to_thread(self._prepare, query, pair)
        segments = [segment for _, lines in texts for _, its in lines for segment in its]
        _refuse_above(self.max_queue, len(segments), "sentences")
        if self.num_accepted + len(segments) > self.max_queue:
            raise Refused(
                503,
                f"{self.num_accepted} sentences are in progress and this request has "
                f"{len(segments)}; expected at most {self.max_queue} in total. Retry later.",
                limit=self.max_queue,
            )
        turns = model.new_turns()  # keeps one request from taking all rows
        attention = query.attention and _num_tokens(segments) <= _MOST_ALIGNED
        tasks = []
        for its_cut, lines in texts:
            tasks.append((its_cut, list[_Task]()))
            for line, its in lines:
                aligned = attention and _num_tokens(its) <= _LONGEST_ALIGNED
                aligned = aligned or isinstance(its_cut, Document)
                work = model.translate(line, alignments=aligned, turns=turns, segments=its)
                task = asyncio.create_task(work)
                task.add_done_callback(partial(self._release, pair, len(its)))
                self.num_accepted += len(its)
                tasks[-1][1].append(task)
        return Answering(query, pair, tasks)

    def _prepare(self, query: Query, pair: Pair) -> list[tuple[Cut | Document, list[_Line]]]:
        """Split the texts of a query into sentences, and those into segments of tokens."""
        model = self.models[pair]
        translator, texts = model.translator, []
        many = bool(translator.tokenizer.languages.tokens)
        names = ("source_language", "target_language") if many else ()
        languages: dict[str, Any] = dict(zip(names, pair))
        translator.check(Request("", query.prefix, **languages))
        languages["glossary"] = translator.tokenized(query.glossary, "The glossary")
        for text in query.texts:
            translator.check(Request(text, **languages))
            tag, rest = _split_tag(text, model)
            its_cut: Cut | Document
            if query.format == "text":
                its_cut = cut(rest, language=pair.source, split=query.split)
            else:
                divide = partial(sentences, language=pair.source, split=query.split)
                tokenizer, protect = translator.tokenizer, (*PLACEHOLDERS, *self.protect)
                its_cut = Document(rest, query.format, tokenizer, protect=protect, split=divide)
            requests = [
                Request(tag + sentence, "" if i else query.prefix, number=1, **languages)
                for i, sentence in enumerate(its_cut.sentences)
            ]
            most = 1 + query.alternatives
            lines = [(request, translator.sentences(request, most)) for request in requests]
            for segment in chain.from_iterable(its for _, its in lines):
                model.workers.bucket_of(segment)  # raises an error for too many terms
            texts.append((its_cut, lines))
        return texts

    def _release(self, pair: Pair, count: int, task: _Task) -> None:
        """End the work on a sentence, whose segments count as accepted until then."""
        self.num_accepted -= count
        if not task.cancelled() and not task.exception():
            self._num_sentences.labels(pair).inc()
            self._num_tokens.labels(pair).inc(task.result()[0].length)


def _split_tag(text: str, model: AsyncTranslator) -> tuple[str, str]:
    """Split off a leading tag such as <2de>, with the space after it, because every sentence needs
    the tag.
    """
    _, rest = model.translator.tokenizer.source.split_tag(text)
    if rest == text:
        return "", text
    rest = rest.lstrip()
    return text.removesuffix(rest), rest


def _num_tokens(segments: list[Sentence]) -> int:
    return sum(len(segment.tokens) for segment in segments)


def _refuse_above(most: int, count: int, what: str) -> None:
    if count > most:
        raise Refused(
            413,
            f"The request has {count} {what}; expected at most {most}. Split the request.",
            limit=most,
        )


@dataclass(frozen=True)
class Answering:
    """A query in progress."""

    query: Query
    pair: Pair
    texts: Sequence[tuple[Cut | Document, Sequence[_Task]]]
    """Each split text with one task per sentence."""

    async def whole(self) -> Answer:
        """Wait for the complete response."""
        await asyncio.gather(*(task for _, tasks in self.texts for task in tasks))
        if self.query.format == "text":
            return self._answer()
        return await asyncio.to_thread(self._answer)

    async def by_sentence(self) -> AsyncGenerator[SentenceEvent | Answer]:
        """Yield the sentences of a single text in order, then the complete response."""
        [(its_cut, tasks)] = self.texts
        previous, ranked = "", self.query.alternatives > 0
        try:
            for index, (source, task) in enumerate(zip(its_cut.sentences, tasks)):
                found = await task
                before = its_cut.gap(index, previous) if isinstance(its_cut, Cut) else ""
                yield SentenceEvent.of_ranked(
                    found, ranked, source=source, index=index, before=before
                )
                previous = found[0].text
            yield self._answer()
        finally:
            for task in tasks:
                task.cancel()

    def _answer(self) -> Answer:
        query, count = self.query, self.query.alternatives
        texts = [(its_cut, [task.result() for task in tasks]) for its_cut, tasks in self.texts]
        ranked = [
            [
                its_cut.joined([each[min(rank, len(each) - 1)] for each in found])
                for rank in range(1 + count)
            ]
            for its_cut, found in texts
        ]
        others = [list(dict.fromkeys(texts))[1:] for texts in ranked]

        def one_or_all(values: list[Any]) -> Any:
            return values[0] if isinstance(query.q, str) else values

        sentences = chain.from_iterable(found for _, found in texts)
        missing = {source for [best, *_] in sentences for source in best.unmet}
        translated = one_or_all([texts[0] for texts in ranked])
        answer = Answer(translatedText=translated, unmet=sorted(missing) or None)
        if count:
            answer.alternatives = one_or_all(others)
        if query.source.lower() == "auto":
            detected = Detected(language=self.pair.source, confidence=100)
            answer.detectedLanguage = one_or_all([detected] * len(texts))
        if query.details or query.attention:
            answer.sentences = [
                [
                    SentenceResponse.of_ranked(each, count > 0, source=source)
                    for source, each in zip(its_cut.sentences, found)
                ]
                for its_cut, found in texts
            ]
        return answer
