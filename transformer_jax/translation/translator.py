"""Translates text: one translation per line, in input order."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from transformer_jax.decoding.engine import Engine, search_together
from transformer_jax.decoding.ensemble import Ensemble
from transformer_jax.decoding.lexical_constraints import term_table
from transformer_jax.decoding.search import Hypothesis, Sentence
from transformer_jax.errors import UserError, short_repr
from transformer_jax.model.transformer import Transformer
from transformer_jax.pretrained.loading import pretrained_workdir
from transformer_jax.settings.config import DecodingConfig
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.translation.glossary import Found, Glossary, unmet
from transformer_jax.translation.loading import check_vocabulary, load_models
from transformer_jax.translation.markup import PLACEHOLDERS, Document
from transformer_jax.translation.records import (
    GlossaryTerms,
    Request,
    Translation,
    blocks,
    check_patterns,
    check_text,
)
from transformer_jax.translation.scoring import Scorer
from transformer_jax.translation.segments import joint, split

logger = logging.getLogger(__name__)


class Translator:
    """A model or an ensemble, with its tokenizer and search settings.

    A line's translation depends only on the line and the settings, not on its neighbors.

    Attributes:
      engines: one ``Engine`` per device, which searches over token ids.
    """

    def __init__(
        self,
        model: Transformer | Ensemble,
        tokenizer: Tokenizer,
        config: DecodingConfig | None = None,
        *,
        devices: Sequence[jax.Device] = (),
        glossary: GlossaryTerms | None = None,
    ):
        """Divide lines and the ``config.batch_size`` rows evenly among ``devices`` (default: the
        parameters' device). ``glossary`` applies to every line; a line's own glossary adds to it.

        Raises:
          UserError: model and tokenizer have different vocabulary sizes; ``config.suppress`` has
            tokens outside the vocabulary; ``config.weights`` is int8 without AVX-512 VNNI; a term
            of ``glossary`` is invalid.
        """
        check_vocabulary(model, tokenizer)
        self.tokenizer, self.config = tokenizer, config or DecodingConfig()
        suppress = tuple(tokenizer.target.suppressed_ids(self.config.suppress))
        self._forbidden = {tokenizer.target.unk_id, *suppress}
        self._glossary = self.tokenized(glossary or {}, "The glossary")
        self._devices = devices
        self._longest_prefix = self.config.longest_target(1, model.config.position_limit) - 1
        rows = -(-self.config.batch_size // max(1, len(devices)))
        share = dataclasses.replace(self.config, batch_size=rows)
        languages = tokenizer.languages
        free = int(bool(languages.target or languages.tokens) and not languages.tagged)
        device = devices[0] if devices else None
        engine = Engine(model, share, suppress=suppress, free_prefix=free, device=device)
        self.engines = [engine, *map(engine.on, devices[1:])]

    @classmethod
    def from_workdir(
        cls,
        workdir: str | Path | Sequence[str | Path],
        *,
        devices: Sequence[jax.Device] = (),
        glossary: GlossaryTerms | None = None,
        **chosen: Any,
    ) -> Self:
        """Load the model of a training run, or an ensemble. See ``load_models`` for ``chosen``."""
        return cls(*load_models(workdir, **chosen), devices=devices, glossary=glossary)

    @classmethod
    def from_pretrained(cls, name: str | Path, **options: Any) -> Self:
        """Load a pretrained model: NLLB, M2M100, T5, BART, OPUS-MT and others (docs/pretrained.md).

        Args:
          name: a name on the Hugging Face Hub, such as ``google/flan-t5-base``, with ``@REVISION``
            if necessary, or a folder in transformers' format. The import is kept in the cache.
          options: those of ``from_workdir``, such as ``source_language`` and ``target_language``,
            the codes of a many-to-many model.

        Raises:
          UserError: the model cannot be downloaded, or its family is not supported.
        """
        return cls.from_workdir(pretrained_workdir(name), **options)

    @property
    def parameters(self) -> Any:
        """Parameters of the model or ``Ensemble``, as a dict from ``nnx.to_pure_dict``.

        Assign such a dict or an ``nnx.State``, for example in a training loop, to translate with
        new parameters without recompilation. Arrays may be shared: do not donate them meanwhile.
        """
        return self.engines[0].parameters

    @parameters.setter
    def parameters(self, parameters: Any) -> None:
        self.__dict__.pop("scorer", None)
        engine = self.engines[0]
        engine.parameters = parameters
        self.engines = [engine, *map(engine.on, self._devices[1:])]

    @property
    def model(self) -> Transformer | Ensemble:
        """The model with its current parameters."""
        return self.engines[0].model

    @cached_property
    def scorer(self) -> Scorer:
        """A scorer with the current parameters."""
        return Scorer(self.model, self.tokenizer, self.config, devices=self._devices)

    def translate(self, lines: Iterable[str | Request]) -> list[str]:
        """Return the best translation of each line; an empty line gives an empty translation.
        Raises the same errors as ``stream``.
        """
        return [translations[0].text for translations in self.stream(lines)]

    def stream(
        self, lines: Iterable[str | Request], *, num_hypotheses: int = 1, window: int | None = None
    ) -> Iterator[list[Translation]]:
        """Translate lines in order. Yields the ``num_hypotheses`` best translations of each line
        (at most ``config.beam_size``, at least one), best first.

        Reads and translates ``window`` lines at a time (default: 100 batches). An empty line gives
        one empty translation. So does a line for which the search finds no translation, with a
        warning and NaN scores. A line of more than ``config.max_source_length`` tokens, EOS
        included, is translated in segments, with a warning.

        Raises:
          UserError: at the call, ``lines`` is a single line; during iteration, a line is not text,
            or a prefix has unknown tokens or is too long.
        """
        if isinstance(lines, str | bytes | Request):
            raise UserError(
                f"lines is {short_repr(lines)}; expected an iterable of lines, such as a list."
            )
        requests = map(Request.of, lines, count(1))
        prepared = ((request, self.sentences(request, num_hypotheses)) for request in requests)
        size = window or 100 * self.config.batch_size
        return chain.from_iterable(map(self._translate, blocks(prepared, size)))

    def documents(
        self,
        documents: Iterable[Request],
        *,
        layer: int | None = None,
        protect: Sequence[str] = PLACEHOLDERS,
    ) -> Iterator[Translation]:
        """Translate HTML and XML documents (``Request.format``): the best translation of each.

        Each block of a document, such as a paragraph, is a line. Inline tags go around the words
        that align with theirs (``Scorer.align``, with this ``layer``). ``protect`` are regular
        expressions of placeholders, such as ``{name}``, which do not change; see ``Document``.
        Scores are sums over the lines.

        Raises the same errors as ``stream``.
        """
        check_patterns(protect, "protect")
        requests = list(map(Request.of, documents, count(1)))
        read = [
            Document(request.text, request.format, self.tokenizer, protect=protect)
            for request in requests
        ]
        lines = [
            (line, dataclasses.replace(request, text=line.text, prefix="" if i else request.prefix))
            for request, document in zip(requests, read)
            for i, line in enumerate(document.lines)
        ]
        best = [translations[0] for translations in self.stream(each for _, each in lines)]
        marked = [(each, found) for (line, each), found in zip(lines, best) if line.marks]
        aligned = iter(self.scorer.align(marked, layer=layer))
        found = (next(aligned) if line.marks else found for (line, _), found in zip(lines, best))
        for document in read:
            its = list(islice(found, len(document.lines)))
            score, log_prob = sum(line.score for line in its), sum(line.log_prob for line in its)
            missing = tuple(dict.fromkeys(chain.from_iterable(line.unmet for line in its)))
            yield Translation(document.joined(its), score, log_prob, 0, unmet=missing)

    def _translate(
        self, block: list[tuple[Request, list[Sentence]]]
    ) -> Iterator[list[Translation]]:
        sentences = [sentence for _, its in block for sentence in its]
        found = iter(search_together(self.engines, sentences))
        for request, its in block:
            yield self.translations(request, list(islice(found, len(its))))

    def sentences(self, request: Request, num_hypotheses: int = 1) -> list[Sentence]:
        """Return the sentences to translate: the line, its segments, or none if the line is empty.

        Raises the same errors as ``check``.
        """
        prefix = self.check(request)
        if not request.text.strip():
            return []
        limit = self.engines[0].longest_source - 1  # EOS takes one position
        first, _ = request.first_ids(self.tokenizer)
        [tokens] = self.tokenizer.source.encode([request.text], first=first)
        segments = [(request.text, tokens)]
        if len(tokens) > limit:
            segments = split(request.text, limit, self.tokenizer, first)
            said = "Line %d has %d tokens; the maximum is %d, so it is translated in %d segments."
            logger.warning(said, request.number, len(tokens), limit, len(segments))
        segments = [(text, tokens) for text, tokens in segments if tokens]
        return [
            Sentence(
                tokens,
                # Only the language begins every segment.
                prefix[: self.engines[0].method.free_prefix] if i else prefix,
                seed=(request.number + 1_000_003 * i) % 2**32,
                wanted=max(1, num_hypotheses),
                terms=self._table(request, text),
            )
            for i, (text, tokens) in enumerate(segments)
        ]

    def translations(
        self, request: Request, found: Sequence[Sequence[Hypothesis]]
    ) -> list[Translation]:
        """Return the translations of a request, best first, from the hypotheses for its
        ``sentences``. Joins the best hypotheses of all sentences, then the second-best hypotheses,
        and so on while every sentence has one.
        """
        if not all(found):
            said = "Line %d: the search found no translation; its output is empty."
            logger.warning(said, request.number)
        unknown = math.nan if found else 0.0  # no translation found; nothing to translate
        best_first = list(map(self._joined, zip(*found))) or [Translation("", unknown, unknown, 0)]
        if terms := self._terms(request, request.text):
            best_first = [
                dataclasses.replace(each, unmet=unmet(terms, each.text)) for each in best_first
            ]
            if missing := ", ".join(best_first[0].unmet):
                said = "Line %d: the translation lacks the glossary's terms for: %s."
                logger.warning(said, request.number, missing)
        return best_first

    def tokenized(self, terms: GlossaryTerms, name: str) -> Glossary:
        """Tokenize a glossary once for many requests. ``name`` is for messages. Raises
        ``UserError`` if a term is invalid.
        """
        if isinstance(terms, Glossary):
            return terms
        return Glossary(terms, self.tokenizer.target, name, self._forbidden)

    def _terms(self, request: Request, text: str) -> Found:
        """Find the terms of both glossaries in (a segment of) a request's text."""
        return self._glossary.found_in(text, self._own_glossary(request))

    def _own_glossary(self, request: Request) -> Glossary:
        return self.tokenized(request.glossary, f"{request.name}: glossary")

    def _table(self, request: Request, text: str) -> np.ndarray | None:
        terms = [[ids for _, ids in its] for its in self._terms(request, text).values()]
        if terms and self.config.method != "beam":
            raise UserError(
                "decoding.method is 'sample'; expected 'beam', because only beam search can use a "
                "glossary."
            )
        return term_table(terms, f"{request.name}: glossary") if terms else None

    def _joined(self, hypotheses: tuple[Hypothesis, ...]) -> Translation:
        """Join hypotheses, one for each segment of a line, into one translation."""
        text, tokens = "", list[str]()
        for hypothesis in hypotheses:
            segment = self.tokenizer.target.decode(hypothesis.tokens)
            text += (joint(text) if segment else "") + segment
            tokens += [*self.tokenizer.target.tokens(hypothesis.tokens), "</s>"]
        return Translation(
            text,
            # the mean keeps the best translation first
            sum(hypothesis.score for hypothesis in hypotheses) / len(hypotheses),
            sum(hypothesis.log_prob for hypothesis in hypotheses),
            len(tokens),
            tuple(tokens[:-1]),
            tuple(x for hypothesis in hypotheses for x in hypothesis.token_log_probs),
        )

    def check(self, request: Request) -> list[int]:
        """Check a request. Returns the token ids of its prefix, which is ignored if the text is
        blank. Raises ``UserError`` if the request is invalid.
        """
        check_text(request.text, request.name)
        self._own_glossary(request)
        check_text(request.prefix, f"{request.name}: prefix")
        _, first = request.first_ids(self.tokenizer)
        if not request.text.strip():
            return []
        if not request.prefix:
            return first
        [prefix] = self.tokenizer.target.encode([request.prefix], first=())
        said = f"{request.name}: prefix {short_repr(request.prefix)}"
        if self.tokenizer.target.unk_id in prefix:
            tokens = short_repr(" ".join(self.tokenizer.target.tokens(prefix)))
            raise UserError(f"{said} has tokens outside the vocabulary ({tokens}); remove them.")
        if len(prefix) > self._longest_prefix:
            raise UserError(
                f"{said} has {len(prefix)} tokens; expected at most {self._longest_prefix} "
                "(decoding.max_extra_length, decoding.max_length - 1 or, with learned positions, "
                "model.max_positions - 1)."
            )
        return first + prefix
