"""Translates text: one translation per line, in input order."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Self

import jax

from transformer_jax.decoding.engine import Engine, search_together
from transformer_jax.decoding.ensemble import Ensemble
from transformer_jax.decoding.scheduler import SearchEngine
from transformer_jax.errors import UserError, short_repr
from transformer_jax.model.transformer import Transformer
from transformer_jax.pretrained.loading import local_workdir, pretrained_workdir
from transformer_jax.settings.config import DecodingConfig, EngineName
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.translation.ctranslate2_engine import CTranslate2Engine
from transformer_jax.translation.engine_choice import choose_engine
from transformer_jax.translation.glossary import Glossary
from transformer_jax.translation.loading import check_vocabulary, load_models
from transformer_jax.translation.markup import PLACEHOLDERS
from transformer_jax.translation.plan import Plan, PlanBuilder
from transformer_jax.translation.requests import (
    GlossaryTerms,
    Request,
    Translation,
    batched,
    check_patterns,
)
from transformer_jax.translation.scoring import Scorer
from transformer_jax.translation.tags import TagCheck

logger = logging.getLogger(__name__)


class Translator:
    """A model or an ensemble, with its tokenizer and search settings.

    A line's translation depends only on the line and the settings, not on its neighbors.

    Attributes:
      engines: one ``Engine`` per device, which searches over token ids, or a single one if
        ``ctranslate2`` searches.
      ctranslate2: the engine that searches instead, or None.
    """

    def __init__(
        self,
        model: Transformer | Ensemble,
        tokenizer: Tokenizer,
        config: DecodingConfig | None = None,
        *,
        devices: Sequence[jax.Device] = (),
        glossary: GlossaryTerms | None = None,
        ctranslate2: CTranslate2Engine | None = None,
    ):
        """Divide lines and the ``config.batch_size`` rows evenly among ``devices`` (default: the
        parameters' device). ``glossary`` applies to every line; a line's own glossary adds to it.
        ``ctranslate2`` is from ``choose_engine``; alignments still come from ``model``.

        Raises:
          UserError: model and tokenizer have different vocabulary sizes; ``config.suppress`` has
            tokens outside the vocabulary; ``config.weights`` is int8 without AVX-512 VNNI; a term
            of ``glossary`` is invalid.
        """
        check_vocabulary(model, tokenizer)
        self.tokenizer = tokenizer
        self.config = config or DecodingConfig()
        self._devices = devices
        self.ctranslate2 = ctranslate2
        suppressed_ids = tuple(tokenizer.target.suppressed_ids(self.config.suppress))
        self.engines = self._make_engines(model, suppressed_ids)
        unk_id = tokenizer.target.unk_id
        self._plan_builder = PlanBuilder(
            tokenizer,
            frozenset(suppressed_ids if unk_id is None else (unk_id, *suppressed_ids)),
            max_source_tokens=self.engines[0].max_source_length - 1,  # EOS takes one position
            max_prefix_tokens=self.config.max_target_length(1, model.config.position_limit) - 1,
            no_terms_because=self._no_terms_because(),
            tags=TagCheck(tokenizer),
        )
        self._glossary = self.tokenize_glossary(glossary or {}, "The glossary")

    def _no_terms_because(self) -> str:
        """Return the reason that sentences cannot have terms, or ""."""
        if self.ctranslate2:
            return "The engine is ctranslate2; expected jax"
        if self.config.method != "beam":
            return f"decoding.method is {self.config.method!r}; expected 'beam'"
        return ""

    def _make_engines(
        self, model: Transformer | Ensemble, suppressed_ids: tuple[int, ...]
    ) -> list[Engine]:
        """Make one engine for each device that searches."""
        batch_size = -(-self.config.batch_size // max(1, len(self._devices)))
        engine = Engine(
            model,
            dataclasses.replace(self.config, batch_size=batch_size),
            suppressed_ids=suppressed_ids,
            unscored_prefix_length=self.tokenizer.unscored_prefix_length,
            device=self._devices[0] if self._devices else None,
        )
        if self.ctranslate2:  # it searches until new parameters are assigned
            return [engine]
        return [engine, *map(engine.copy_to, self._devices[1:])]

    @classmethod
    def from_workdir(
        cls,
        workdir: str | Path | Sequence[str | Path],
        *,
        devices: Sequence[jax.Device] = (),
        glossary: GlossaryTerms | None = None,
        engine: EngineName = "jax",
        jax_only: str = "",
        **settings: Any,
    ) -> Self:
        """Load the model of a training run, or an ensemble (``load_models``, with ``settings``).
        ``engine`` and ``jax_only`` are those of ``choose_engine``.
        """
        model, tokenizer, config = load_models(workdir, **settings)
        ctranslate2 = None
        if engine != "jax":
            if glossary and not jax_only:
                jax_only = "A glossary works"
            folder = workdir if isinstance(workdir, str | Path) else workdir[0]
            ctranslate2 = choose_engine(
                *(engine, local_workdir(folder), model, tokenizer, config), jax_only=jax_only
            )
        return cls(
            *(model, tokenizer, config),
            devices=devices,
            glossary=glossary,
            ctranslate2=ctranslate2,
        )

    @property
    def search_engines(self) -> Sequence[SearchEngine]:
        """The engines that search: ``engines``, or CTranslate2 once for each of its workers."""
        if self.ctranslate2:
            return [self.ctranslate2] * self.ctranslate2.num_workers
        return self.engines

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
        new parameters without recompilation, with JAX. Arrays may be shared: do not donate them
        meanwhile.
        """
        return self.engines[0].parameters

    @parameters.setter
    def parameters(self, parameters: Any) -> None:
        self.__dict__.pop("scorer", None)
        self.ctranslate2 = None  # has the old parameters
        engine = self.engines[0]
        engine.parameters = parameters
        self.engines = [engine, *map(engine.copy_to, self._devices[1:])]

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
        self,
        lines: Iterable[str | Request],
        *,
        num_hypotheses: int = 1,
        window: int | None = None,
        layer: int | None = None,
        split_sentences: bool | None = None,
        protect: Sequence[str] = PLACEHOLDERS,
    ) -> Iterator[list[Translation]]:
        """Translate lines, and HTML and XML documents (``Request.format``), in order. Yields the
        ``num_hypotheses`` best translations of each (at most ``config.beam_size``, at least one),
        best first.

        Reads and translates ``window`` lines at a time (default: 100 batches). An empty line gives
        one empty translation. So does a line for which the search finds no translation, with a
        warning and NaN scores. A line of more than ``config.max_source_length`` tokens, EOS
        included, is translated in segments, with a warning.

        If ``split_sentences``, each line is divided into sentences, which are translated alone.
        Scores of a text with several sentences are sums.

        Each block of a document, such as a paragraph, is divided into sentences. Inline tags go
        around the words that align with theirs (``Scorer.align``, with this ``layer``).
        ``protect`` are regular expressions of placeholders, such as ``{name}``, which do not
        change; see ``Document``.

        Raises:
          UserError: at the call, ``lines`` is a single line; during iteration, a line is not text,
            or a prefix has unknown tokens or is too long.
        """
        if isinstance(lines, str | bytes | Request):
            raise UserError(
                f"lines is {short_repr(lines)}; expected an iterable of lines, such as a list."
            )
        check_patterns(protect, "protect")
        requests = map(Request.of, lines, count(1))
        plans = (
            self.plan(request, num_hypotheses, split_sentences=split_sentences, protect=protect)
            for request in requests
        )
        size = window or 100 * self.config.batch_size
        return chain.from_iterable(self._run(block, layer) for block in batched(plans, size))

    def documents(
        self,
        documents: Iterable[Request],
        *,
        layer: int | None = None,
        protect: Sequence[str] = PLACEHOLDERS,
    ) -> Iterator[Translation]:
        """Return the best translation of each document; see ``stream``."""
        translated = self.stream(documents, layer=layer, protect=protect)
        return (translations[0] for translations in translated)

    def plan(self, request: Request, num_hypotheses: int = 1, **options: Any) -> Plan:
        """Plan the translation of a request: ``plan.sentences`` are for the search, and
        ``plan.join(hypotheses)`` returns the translations. ``options``: see ``PlanBuilder.plan``.
        """
        return self._plan_builder.plan(request, self._glossary, num_hypotheses, **options)

    def tokenize_glossary(self, terms: GlossaryTerms, name: str) -> Glossary:
        """Tokenize a glossary once for many requests. ``name`` is for messages. Raises
        ``UserError`` if a term is invalid.
        """
        return self._plan_builder.glossary(terms, name)

    def log_glossary(self) -> None:
        """Log how many terms of the translator's glossary have occurred in the input."""
        if self._glossary:
            message = "%d of the glossary's %d source terms occur in the input."
            logger.info(message, self._glossary.num_used, len(self._glossary))

    def _run(self, plans: Sequence[Plan], layer: int | None) -> Iterator[list[Translation]]:
        """Search for the sentences of all plans together."""
        sentences = [sentence for plan in plans for sentence in plan.sentences]
        hypotheses = iter(search_together(self.search_engines, sentences))
        part_translations = [
            plan.join_segments(list(islice(hypotheses, len(plan.sentences)))) for plan in plans
        ]
        self._align(plans, part_translations, layer)
        for plan, translations in zip(plans, part_translations):
            yield plan.join_parts(translations)

    def _align(
        self,
        plans: Sequence[Plan],
        part_translations: Sequence[list[list[Translation]]],
        layer: int | None,
    ) -> None:
        """Add an alignment to the translations of the parts that need one."""
        unaligned = [
            (part, translations)
            for plan, parts in zip(plans, part_translations)
            for part, translations in zip(plan.parts, parts)
            if part.needs_alignment
        ]
        pairs = [(part.request, t) for part, translations in unaligned for t in translations]
        if pairs:
            aligned = iter(self.scorer.align(pairs, layer=layer))
            for _, translations in unaligned:
                translations[:] = islice(aligned, len(translations))
