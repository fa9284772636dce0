"""The models that are served: texts in, answers out. Nothing here knows HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self

from transformer_jax.checkpoint import load_model
from transformer_jax.config import DecodingConfig
from transformer_jax.decoding import buckets
from transformer_jax.decoding.devices import devices_for_rows
from transformer_jax.decoding.engine import Hypothesis
from transformer_jax.decoding.records import OutputFormat
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.trained_models import check_text
from transformer_jax.decoding.translator import Request, Translation, Translator
from transformer_jax.errors import UserError, shown
from transformer_jax.remote_workdir import local_workdir
from transformer_jax.serving.flags import Pair
from transformer_jax.serving.schema import Answer, Detected, Query, Sentence
from transformer_jax.serving.text import Cut, cut
from transformer_jax.serving.workers import SearchFailed, Workers

logger = logging.getLogger(__name__)

_ALIGNED_TOGETHER = 4
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


class Model:
    """One model on all of its devices."""

    def __init__(self, translators: Sequence[Translator]):
        """A translator for each device, all alike."""
        self.translator, self.config = translators[0], translators[0].config
        self.batch_size = self.config.batch_size * len(translators)  # of all devices
        self.workers = Workers([each.engine for each in translators])
        together = replace(self.config, batch_size=_ALIGNED_TOGETHER)
        self.num_sentences = self.num_tokens = 0  # so far, tokens of the best translations
        self._scorer = Scorer(self.translator.models, self.translator.tokenizer, together)
        self._aligning = ThreadPoolExecutor(1, thread_name_prefix="align")

    @classmethod
    def load(
        cls,
        workdir: str,
        search: DecodingConfig,
        *,
        checkpoint: Literal["last", "best"] | int | None = None,
        average: int | None = None,
    ) -> Self:
        """The model of a training run, on all devices; ``search.batch_size`` is for all together.

        Raises:
          UserError: as ``load_model`` and ``Translator``.
        """
        devices = devices_for_rows(search.batch_size)
        search = replace(search, batch_size=search.batch_size // len(devices))
        _, model, tokenizer = load_model(
            local_workdir(workdir), checkpoint=checkpoint, average=average
        )
        return cls([Translator(model, tokenizer, search, devices=[each]) for each in devices])

    def start(self) -> None:
        """Compile everything, and begin to work."""
        self.workers.start()
        lengths = [length for bucket in self.translator.engine.buckets for length in bucket.lengths]
        self._scorer.align_tokens([([0] * (length - 1), [0]) for length in lengths])

    def close(self) -> None:
        """Stop working."""
        self._aligning.shutdown(cancel_futures=True)
        self.workers.close()

    def tagged(self, text: str) -> tuple[str, str]:
        """The tag that a text begins with, such as <2de>, which all of its sentences need, with the
        space after it; and the rest of the text.
        """
        _, rest = self.translator.tokenizer.source_tag(text)
        if rest == text:
            return "", text
        rest = rest.lstrip()
        return text.removesuffix(rest), rest

    async def translate(
        self, request: Request, *, num_hypotheses: int, turns: asyncio.Semaphore
    ) -> list[Translation]:
        """As ``Translator.stream`` translates one line; ``turns`` bounds how many segments of lines
        are searched at a time.
        """
        search = partial(self.workers.search, wanted=num_hypotheses)

        async def search_in_turn(segment: buckets.Sentence) -> list[Hypothesis]:
            async with turns:
                return await search(segment)

        try:
            async with turns:  # no line is encoded sooner: that holds up all clients
                [segments] = self.translator.sentences([request])
                found = [await search(segment) for segment in segments[:1]]
            found += await asyncio.gather(*map(search_in_turn, segments[1:]))
        except SearchFailed:
            raise Refused(503, _SAID["failed"], retry_after=_SECONDS) from None
        translations = self.translator.translations(request, found)
        self.num_sentences += 1
        self.num_tokens += translations[0].length
        return translations

    async def align(
        self, request: Request, translations: Sequence[Translation]
    ) -> list[Translation]:
        """The translations with alignments, as ``decode.py --alignments`` has them."""
        pairs = [(request.text, translation) for translation in translations]
        return await asyncio.wrap_future(self._aligning.submit(self._scorer.align, pairs))


class Service:
    """All models, and what a request may ask of them.

    Attributes:
      num_accepted: sentences of the queries that are being answered.
    """

    def __init__(
        self,
        models: Mapping[Pair, Model],
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

    def count(self, of: Callable[[Workers], int]) -> int:
        """The sum of a figure over all workers."""
        return sum(of(model.workers) for model in self.models.values())

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
        for text in [*query.texts, query.prefix]:
            check_text(text, "A text")
        most = model.config.beam_size - 1
        if query.alternatives > most:
            raise UserError(
                f"alternatives is {query.alternatives}; expected at most {most}, "
                "one less than this server's beam size."
            )
        _refuse_above(
            self.max_characters, sum(map(len, [*query.texts, query.prefix])), "characters"
        )
        try:
            model.translator.prefix_tokens(Request("", query.prefix, number=1))
        except UserError as error:
            raise UserError(str(error).removeprefix("Line 1: ")) from None
        tagged = [model.tagged(text) for text in query.texts]
        cuts = [cut(rest, language=pair.source, split=query.split) for _, rest in tagged]
        coming = sum(len(each.sentences) for each in cuts)
        _refuse_above(self.max_queue, coming, "sentences")
        if self.num_accepted + coming > self.max_queue:
            raise Refused(
                503,
                f"{self.num_accepted} sentences are being translated, and this request has "
                f"{coming}; expected at most {self.max_queue} together. Try again soon.",
                limit=self.max_queue,
                retry_after=1,
            )
        return Answering(self, query, pair, cuts, [tag for tag, _ in tagged])


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
        cuts: Sequence[Cut],
        tags: Sequence[str],
    ):
        """``tags`` stand before each sentence of their texts. The sentences count as accepted until
        this is answered, or gone.
        """
        self.query, self.pair, self.cuts, self._tags = query, pair, cuts, tags
        self._model = service.models[pair]
        coming = sum(len(each.sentences) for each in cuts)
        service.num_accepted += coming
        self._release = weakref.finalize(self, service.release, coming)
        # One request leaves rows to others.
        self._turns = asyncio.Semaphore(max(1, self._model.batch_size // 2))
        self._form = OutputFormat(
            "jsonl",
            nbest=1 + query.alternatives,
            token_scores=query.details or query.attention,
            alignments="soft" if query.attention else None,
        )

    async def whole(self) -> Answer:
        """The answer of /translate."""
        async with self._translating() as tasks:
            return self.answer([[await task for task in of_text] for of_text in tasks])

    async def by_sentence(self) -> AsyncGenerator[tuple[str, Sentence] | Answer]:
        """Each sentence of the one text, and what stands before its translation, in order; last
        the answer.
        """
        [its_cut] = self.cuts
        async with self._translating() as [tasks]:
            done: list[dict[str, Any]] = []
            for index, task in enumerate(tasks):
                fields = await task
                previous = done[-1]["translation"] if done else ""
                done.append(fields)
                sentence = Sentence(source=its_cut.sentences[index], **fields)
                yield its_cut.gap(index, previous), sentence
        yield self.answer([done])

    def answer(self, fields: Sequence[Sequence[dict[str, Any]]]) -> Answer:
        """The answer, given the fields of each text's sentences."""
        query, count = self.query, self.query.alternatives
        ranked = [
            [its_cut.joined([_ranked(each, rank) for each in of_text]) for rank in range(1 + count)]
            for its_cut, of_text in zip(self.cuts, fields, strict=True)
        ]
        others = [[text for text in dict.fromkeys(texts) if text != texts[0]] for texts in ranked]
        alternatives = others if count else None
        one = isinstance(query.q, str)
        details = None
        if query.details or query.attention:
            details = [
                [
                    Sentence(source=source, **each)
                    for source, each in zip(its_cut.sentences, of_text)
                ]
                for its_cut, of_text in zip(self.cuts, fields, strict=True)
            ]
        return Answer(
            translatedText=ranked[0][0] if one else [texts[0] for texts in ranked],
            alternatives=alternatives[0] if one and alternatives else alternatives,
            detectedLanguage=Detected(language=self.pair.source, confidence=100)
            if query.source == "auto"
            else None,
            sentences=details,
        )

    @asynccontextmanager
    async def _translating(self) -> AsyncIterator[list[list[asyncio.Task[dict[str, Any]]]]]:
        """The translations of all sentences under way; cancelled at the end."""
        tasks = [
            [
                asyncio.create_task(self._translate(tag + sentence, "" if i else self.query.prefix))
                for i, sentence in enumerate(its_cut.sentences)
            ]
            for tag, its_cut in zip(self._tags, self.cuts, strict=True)
        ]
        try:
            yield tasks
        finally:
            self._release()
            every = [task for of_text in tasks for task in of_text]
            for task in every:
                task.cancel()
            await asyncio.gather(*every, return_exceptions=True)

    async def _translate(self, sentence: str, prefix: str) -> dict[str, Any]:
        """What decode.py's JSONL would say of a sentence."""
        query = self.query
        request = Request(sentence, prefix, number=1)
        translations = await self._model.translate(
            request, num_hypotheses=1 + query.alternatives, turns=self._turns
        )
        if query.attention:
            translations = await self._model.align(request, translations)
        return self._form.fields(translations)


def _ranked(fields: dict[str, Any], rank: int) -> str:
    """The translation of this rank, or the last there is."""
    hypotheses = fields.get("hypotheses", [fields])
    return str(hypotheses[min(rank, len(hypotheses) - 1)]["translation"])
