"""The models that are served: texts in, answers out. Nothing here knows HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Literal

from transformer_jax import AsyncTranslator, Request, SearchFailed, UserError, shown
from transformer_jax.serving.flags import Pair
from transformer_jax.serving.schema import Answer, Detected, Query, Sentence
from transformer_jax.serving.text import Cut, cut

logger = logging.getLogger(__name__)

_SECONDS = 5  # to wait for a server that does not translate
_SAID = {
    "compiling": "The server is still compiling; try again soon.",
    "failed": "The search has failed; the server must be started again.",
}


class Refused(Exception):
    """A request that cannot be answered now, or is too large.

    Attributes:
      status: HTTP's.
      limit: what is allowed, if that is a number.
      retry_after: seconds.
    """

    def __init__(
        self, status: int, said: str, *, limit: int | None = None, retry_after: int | None = None
    ):
        super().__init__(said)
        self.status, self.limit, self.retry_after = status, limit, retry_after


class Service:
    """All models, and what a request may ask of them.

    Attributes:
      num_accepted: sentences of the queries that are being answered.
    """

    def __init__(
        self,
        models: Mapping[Pair, AsyncTranslator],
        *,
        max_queue: int,
        max_characters: int,
    ):
        self.models = dict(models)
        self.max_queue, self.max_characters = max_queue, max_characters
        self.num_accepted = 0
        self._status: Literal["ok", "compiling", "failed"] = "compiling"

    def start(self) -> None:
        """Compile everything, and begin to work. Failures are logged, and in ``status``."""
        start = time.perf_counter()
        try:
            for model in self.models.values():
                model.start()
        except Exception:
            logger.exception("The search cannot be compiled.")
            self._status = "failed"
            return
        self._status = "ok"
        logger.info("Ready, after %.0f s of compiling.", time.perf_counter() - start)

    def close(self) -> None:
        """Stop working."""
        for model in self.models.values():
            model.close()

    @property
    def status(self) -> Literal["ok", "compiling", "failed"]:
        """Whether requests are answered."""
        if any(model.workers.failure for model in self.models.values()):
            return "failed"
        return self._status

    def release(self, count: int) -> None:
        """So many accepted sentences are done with."""
        self.num_accepted -= count

    def find(self, query: Query) -> Pair:
        """The pair that a query asks for; ``UserError`` if there is none."""
        pairs = [pair for pair in self.models if pair.target == query.target]
        if query.source != "auto":
            pairs = [pair for pair in pairs if pair.source == query.source]
        if len(pairs) == 1:
            return pairs[0]
        given = f"source is {shown(query.source)}, target {shown(query.target)}"
        known = ", ".join(map(str, self.models))
        if pairs:
            raise UserError(f"{given}; expected the language of the texts, as one of {known}.")
        raise UserError(f"{given}; expected one of {known}.")

    def begin(self, query: Query) -> Answering:
        """Check a query and cut its texts.

        Raises:
          UserError: fields that make no sense, or not here.
          Refused: too many characters, or too much to do already.
        """
        if self.status != "ok":
            raise Refused(503, _SAID[self.status], retry_after=_SECONDS)
        pair = self.find(query)
        model = self.models[pair]
        most = model.config.beam_size - 1
        if query.alternatives > most:
            raise UserError(
                f"alternatives is {query.alternatives}; expected at most {most}, "
                "one less than this server's beam size."
            )
        _refuse_above(
            self.max_characters, sum(map(len, [*query.texts, query.prefix])), "characters"
        )
        texts = []
        for text in query.texts:
            model.translator.check(Request(text, query.prefix))
            tag, rest = _split_tag(text, model)
            texts.append((tag, cut(rest, language=pair.source, split=query.split)))
        coming = sum(len(its_cut.sentences) for _, its_cut in texts)
        _refuse_above(self.max_queue, coming, "sentences")
        if self.num_accepted + coming > self.max_queue:
            raise Refused(
                503,
                f"{self.num_accepted} sentences are being translated, and this request has "
                f"{coming}; expected at most {self.max_queue} together. Try again soon.",
                limit=self.max_queue,
                retry_after=1,
            )
        return Answering(self, query, pair, texts, coming)


def _split_tag(text: str, model: AsyncTranslator) -> tuple[str, str]:
    """The tag that a text begins with, such as <2de>, which all of its sentences need, with the
    space after it; and the rest of the text.
    """
    _, rest = model.translator.tokenizer.source_tag(text)
    if rest == text:
        return "", text
    rest = rest.lstrip()
    return text.removesuffix(rest), rest


def _refuse_above(most: int, count: int, what: str) -> None:
    if count > most:
        raise Refused(
            413,
            f"The request has {count} {what}; expected at most {most}. Send the texts in several.",
            limit=most,
        )


class Answering:
    """One query and its answer."""

    def __init__(
        self,
        service: Service,
        query: Query,
        pair: Pair,
        texts: Sequence[tuple[str, Cut]],
        coming: int,
    ):
        """``texts``: each one's tag, which stands before all of its sentences, and the rest of it.

        The sentences, ``coming``, count as accepted until this is answered, or gone.
        """
        self.query, self.pair, self._texts = query, pair, texts
        self._model = service.models[pair]
        service.num_accepted += coming
        self._release = weakref.finalize(self, service.release, coming)
        self._turns = self._model.new_turns()  # one request leaves rows to others

    async def whole(self) -> Answer:
        """The answer of /translate."""
        async with self._translating() as tasks:
            return self.answer([[await task for task in of_text] for of_text in tasks])

    async def by_sentence(self) -> AsyncGenerator[tuple[str, Sentence] | Answer]:
        """Each sentence of the one text, and what stands before its translation, in order; last
        the answer.
        """
        [(_, its_cut)] = self._texts
        async with self._translating() as [tasks]:
            done: list[Sentence] = []
            for index, task in enumerate(tasks):
                previous = done[-1].translation if done else ""
                done.append(await task)
                yield its_cut.gap(index, previous), done[-1]
        yield self.answer([done])

    def answer(self, sentences: list[list[Sentence]]) -> Answer:
        """The answer, given each text's sentences."""
        query, count = self.query, self.query.alternatives
        ranked = [
            [its_cut.joined([each.ranked(rank) for each in of_text]) for rank in range(1 + count)]
            for (_, its_cut), of_text in zip(self._texts, sentences, strict=True)
        ]
        others = [[text for text in dict.fromkeys(texts) if text != texts[0]] for texts in ranked]
        alternatives = others if count else None
        one = isinstance(query.q, str)
        return Answer(
            translatedText=ranked[0][0] if one else [texts[0] for texts in ranked],
            alternatives=alternatives[0] if one and alternatives else alternatives,
            detectedLanguage=Detected(language=self.pair.source, confidence=100)
            if query.source == "auto"
            else None,
            sentences=sentences if query.details or query.attention else None,
        )

    @asynccontextmanager
    async def _translating(self) -> AsyncIterator[list[list[asyncio.Task[Sentence]]]]:
        """The translations of all sentences under way; cancelled at the end."""
        tasks = [
            [
                asyncio.create_task(self._translate(sentence, tag, "" if i else self.query.prefix))
                for i, sentence in enumerate(its_cut.sentences)
            ]
            for tag, its_cut in self._texts
        ]
        try:
            yield tasks
        finally:
            self._release()
            every = [task for of_text in tasks for task in of_text]
            for task in every:
                task.cancel()
            await asyncio.gather(*every, return_exceptions=True)

    async def _translate(self, sentence: str, tag: str, prefix: str) -> Sentence:
        request, alternatives = Request(tag + sentence, prefix), self.query.alternatives
        try:
            translations = await self._model.translate(
                request,
                num_hypotheses=1 + alternatives,
                alignments=self.query.attention,
                turns=self._turns,
            )
        except SearchFailed:
            raise Refused(503, _SAID["failed"], retry_after=_SECONDS) from None
        return Sentence.of(
            sentence, translations, ranked=alternatives > 0, attention=self.query.attention
        )
