"""Schemas of requests and responses, shown at ``/docs``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from transformer_jax import Request, Translation
from transformer_jax.translation.documents.formats import FormatName
from transformer_jax.translation.output_formats import OutputFields, output_values

# Characters of a query that is planned and answered without another thread.
_SHORT_QUERY = 500

CONTENT_TYPES = "application/json", "application/x-www-form-urlencoded"


class Query(BaseModel):
    """A request to /translate. The fields up to ``api_key`` are the same as in LibreTranslate."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    q: str | list[str] = Field(examples=["A man sleeps."])
    """A text or a list of texts."""
    source: str = "auto"
    """Source language; can be auto if only one fits the target."""
    target: str = Field(examples=["de"])
    """Target language."""
    format: Literal["text", FormatName] = "text"
    """Format of the texts."""
    alternatives: int = Field(0, ge=0)
    """Number of alternatives, less than the beam size."""
    api_key: Any = None
    """Ignored."""
    apiKey: Any = None
    """Ignored; a client's name for ``api_key``."""
    prefix: str = ""
    """Text that each translation begins with."""
    glossary: dict[str, str | list[str]] = Field({}, examples=[{}])
    """Target terms that must occur, by source term."""
    details: bool = False
    """Also return scores and tokens."""
    attention: bool = False
    """Also return details and attention weights."""
    split: bool = True
    """Whether to split texts into sentences."""

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, fields: Any) -> Any:
        """Treat null, and empty strings other than ``q``, as absent. Keep only the first invalid
        item, because pydantic builds an error for each of them, which takes time.
        """
        if not isinstance(fields, dict):
            return fields
        present = dict[str, Any]()
        for name, value in fields.items():
            if name != "q" and value in (None, ""):
                continue
            if name not in cls.model_fields:
                return {"q": "", "target": "any", name: value}
            present[name] = value
        if isinstance(present.get("q"), list):
            present["q"] = _up_to_first_invalid(present["q"])
        if isinstance(present.get("glossary"), dict):
            present["glossary"] = _terms_up_to_first_invalid(present["glossary"])
        return present

    @property
    def texts(self) -> list[str]:
        """``q`` as a list."""
        return [self.q] if isinstance(self.q, str) else self.q

    def requests(self, **options: Any) -> list[Request]:
        """Return a ``Request`` for each text. ``options`` are those that depend on the model:
        glossary and languages.
        """
        return [Request(text, self.prefix, format=self.format, **options) for text in self.texts]

    @property
    def plan_options(self) -> dict[str, Any]:
        """Options of ``Translator.plan``."""
        return {"num_hypotheses": 1 + self.alternatives, "split_sentences": self.split}

    @property
    def is_short(self) -> bool:
        """Whether all work on the query's text takes a few milliseconds, even in the worst case.
        A thread would take more time than most of it.
        """
        return (
            self.num_characters <= _SHORT_QUERY
            and self.format == "text"
            and not (self.attention or self.glossary)
        )

    @property
    def num_characters(self) -> int:
        """Number of characters of all texts, the prefix and the glossary."""
        count = len(self.prefix) + sum(map(len, self.texts))
        for source, targets in self.glossary.items():
            count += len(source)
            count += len(targets) if isinstance(targets, str) else sum(map(len, targets))
        return count


def _up_to_first_invalid(texts: list[Any]) -> list[Any]:
    """Return a list of texts, or a list of its first item that is not a text."""
    return next(([text] for text in texts if not isinstance(text, str)), texts)


def _terms_up_to_first_invalid(glossary: dict[str, Any]) -> dict[str, Any]:
    """Return a glossary, or a glossary of its first invalid term."""
    for source, targets in glossary.items():
        if isinstance(targets, list):
            invalid = _up_to_first_invalid(targets)
            if invalid is not targets:
                return {source: invalid}
        elif not isinstance(targets, str):
            return {source: targets}
    return glossary


@dataclass(frozen=True, kw_only=True)
class SentenceResponse(OutputFields):
    """A source sentence with its best translation, and all hypotheses if requested. The other
    fields are those of ``decode.py --format jsonl``.
    """

    source: str

    @classmethod
    def from_translations(
        cls, translations: Sequence[Translation], ranked: bool, **more: Any
    ) -> Self:
        """Build a sentence from its translations, best first; ``ranked`` includes all of them."""
        hypotheses = None
        if ranked:
            hypotheses = [OutputFields(**_values(translation)) for translation in translations]
        return cls(**_values(translations[0]), hypotheses=hypotheses, **more)


def _values(translation: Translation) -> dict[str, Any]:
    alignments: Literal["soft"] | None = "soft" if translation.alignment else None
    return output_values(translation, token_scores=True, alignments=alignments)


@dataclass(frozen=True, kw_only=True)
class SentenceEvent(SentenceResponse):
    """A ``sentence`` event, which adds the sentence's index and the text before its translation
    (usually whitespace).
    """

    index: int
    before: str


class Detected(BaseModel):
    """The detected source language."""

    language: str
    confidence: float


class Answer(BaseModel):
    """The response of /translate. Fields are single values for one text and lists for a list of
    texts.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    translatedText: str | list[str]
    alternatives: list[str] | list[list[str]] | None = None
    detectedLanguage: Detected | list[Detected] | None = None
    unmet: list[str] | None = None
    """Source terms of the glossary that lack a target term."""
    sentences: list[list[SentenceResponse]] | None = None


class Language(BaseModel):
    """A language and the languages it can be translated into, if any."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    code: str
    name: str
    """The code; LibreTranslate clients expect this field."""
    targets: list[str]


ServerState = Literal["ok", "compiling", "failed"]


class Status(BaseModel):
    """Server status."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    status: ServerState
    engine: str
    """Program that searches: jax, ctranslate2, or both for different models."""


class Error(BaseModel):
    """An error message and, if a limit was exceeded, the limit."""

    error: str
    limit: int | None = None


def request_body() -> dict[str, Any]:
    """Return the OpenAPI description of /translate's request body."""
    schema = {"schema": Query.model_json_schema()}
    return {"requestBody": {"required": True, "content": dict.fromkeys(CONTENT_TYPES, schema)}}
