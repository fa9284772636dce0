"""What requests and answers hold; ``/docs`` shows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from transformer_jax import Translation

CONTENT_TYPES = "application/json", "application/x-www-form-urlencoded"


def _rounded(x: float) -> float | None:
    return round(x, 4) if math.isfinite(x) else None  # JSON has no infinities


Rounded = Annotated[float | None, BeforeValidator(_rounded)]


class Query(BaseModel):
    """A request to /translate; the fields up to ``api_key`` are LibreTranslate's."""

    model_config = ConfigDict(extra="forbid")

    q: str | list[str] = Field(description="A text, or several.", examples=["A man sleeps."])
    source: str = Field("auto", description="Its language; auto: the only one there is.")
    target: str = Field(description="The language to translate into.", examples=["de"])
    format: Literal["text"] = Field("text", description="HTML is not supported.")
    alternatives: int = Field(0, ge=0, description="Other translations, fewer than the beam size.")
    api_key: str = Field("", description="Ignored.")
    prefix: str = Field("", description="What each text's translation must begin with.")
    details: bool = Field(False, description="Also return scores and tokens.")
    attention: bool = Field(False, description="Details with attention weights.")
    split: bool = Field(True, description="Cut texts into sentences; false: each is one.")

    @property
    def texts(self) -> list[str]:
        """The text, or the texts."""
        return [self.q] if isinstance(self.q, str) else self.q


class Hypothesis(BaseModel):
    """One translation of a sentence, as ``decode.py --format jsonl`` writes it."""

    translation: str
    score: Rounded
    log_prob: Rounded
    tokens: list[str]
    token_scores: list[Rounded]
    source_tokens: list[str] | None = None
    alignment: list[list[Rounded]] | None = None

    @classmethod
    def of(cls, t: Translation, **more: Any) -> Self:
        """A translation, with ``more`` fields."""
        return cls(
            translation=t.text,
            score=t.score,
            log_prob=t.log_prob,
            tokens=[*t.tokens, "</s>"] if t.length else [],
            token_scores=list(t.token_log_probs),
            source_tokens=t.alignment and list(t.alignment.source),
            alignment=t.alignment and t.alignment.weights_TS.tolist(),
            **more,
        )


class Sentence(Hypothesis):
    """A sentence of a text, its best translation and, if alternatives are wanted, all of them."""

    source: str
    hypotheses: list[Hypothesis] | None = None

    @classmethod
    def of_ranked(cls, translations: Sequence[Translation], ranked: bool, **more: Any) -> Self:
        """A sentence, given its translations, best first; ``ranked``: with all of them."""
        hypotheses = [Hypothesis.of(each) for each in translations] if ranked else None
        return cls.of(translations[0], hypotheses=hypotheses, **more)


class StreamedSentence(Sentence):
    """A sentence as an event: its place, and what stands before its translation."""

    index: int
    before: str


class Detected(BaseModel):
    """The language of the texts."""

    language: str
    confidence: float


class Answer(BaseModel):
    """The answer of /translate; what is a list for several texts is none for one."""

    translatedText: str | list[str]
    alternatives: list[str] | list[list[str]] | None = None
    detectedLanguage: Detected | None = None
    sentences: list[list[Sentence]] | None = None


class Language(BaseModel):
    """A language to translate from, and into which."""

    code: str
    name: str
    targets: list[str]


class Status(BaseModel):
    """Whether the server translates."""

    status: Literal["ok", "compiling", "failed"]


class Error(BaseModel):
    """What was wrong, and what is allowed."""

    error: str
    limit: int | None = None


def request_body() -> dict[str, Any]:
    """The OpenAPI description of what /translate reads."""
    schema = {"schema": Query.model_json_schema()}
    return {"requestBody": {"required": True, "content": dict.fromkeys(CONTENT_TYPES, schema)}}
