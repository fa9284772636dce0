"""Requests and their translations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar

from transformer_jax.errors import UserError, short_repr
from transformer_jax.tokenization.languages import Affixes
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.translation.alignment import Alignment
from transformer_jax.translation.documents.formats import FormatName

T = TypeVar("T")

GlossaryTerms: TypeAlias = Mapping[str, str | Sequence[Any]]
"""Source terms, each with one target term or several alternatives (str). Or a ``Glossary``."""


@dataclass(frozen=True)
class Request:
    """A line to translate, with its own options."""

    text: str
    prefix: str = ""
    """Text that the translation must begin with."""
    source_language: str = ""
    """Language code of the text, for a many-to-many model; '': the tokenizer's default."""
    target_language: str = ""
    """Language code of the translation; '': the tokenizer's default."""
    format: Literal["text", FormatName] = "text"
    """Format of the text and its translation. HTML and XML are divided into sentences."""
    glossary: GlossaryTerms = field(default_factory=dict, hash=False)
    """Target terms that the translation must contain, by source term, if that is in the text."""
    line_number: int = 0
    """Line number, used in messages and as the sampling seed. 0 stands for the line's position in
    the stream, counting from 1.
    """

    @classmethod
    def of(cls, line: str | Request, line_number: int) -> Request:
        """Return the line as a request, with this line number unless it has one."""
        request = line if isinstance(line, Request) else cls(line)
        return request if request.line_number else replace(request, line_number=line_number)

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"Line {self.line_number}" if self.line_number else "The text"

    def affixes(self, tokenizer: Tokenizer) -> Affixes:
        """Return the token ids around the source and before the target."""
        languages = self.source_language, self.target_language
        return tokenizer.affixes(*languages, f"{self.name}: ")


@dataclass(frozen=True)
class Translation:
    """A translation of a line."""

    text: str
    score: float
    """Ranking score: log_prob / ((c + length) / (c + 1))^alpha (``DecodingConfig``). For a line
    translated in segments, the mean of the segments' scores; for a text of several sentences, the
    sum.
    """
    log_prob: float
    """Natural log-probability of all tokens, EOS included."""
    length: int
    """Number of tokens, including one EOS per segment of an overlong line."""
    tokens: tuple[str, ...] = ()
    """Vocabulary tokens without the last EOS: ``length - 1`` tokens. EOS separates the segments of
    an overlong line.
    """
    token_log_probs: tuple[float, ...] = ()
    """Log-probability of each token given the previous tokens, including EOS: ``length`` values."""
    alignment: Alignment | None = field(default=None, compare=False)
    """Alignment from ``Scorer.align``."""
    unmet: tuple[str, ...] = ()
    """Source terms of the glossary that lack a target term."""
    eos_token: str = field(default="</s>", compare=False)
    """The vocabulary's name of EOS."""


def check_text(text: object, name: str) -> None:
    """Raise ``UserError`` unless ``text`` is a string of valid Unicode."""
    if not isinstance(text, str):
        raise UserError(f"{name} is {short_repr(text)}; expected text (a str).")
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate such as \ud800
        raise UserError(f"{name} is not valid Unicode; expected no lone surrogates.") from None


def check_patterns(patterns: Sequence[str], name: str) -> None:
    """Raise ``UserError`` unless ``patterns`` are regular expressions."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(
                f"{name} is {short_repr(patterns)}; expected regular expressions; {pattern!r} is "
                f"not one ({error.msg})."
            ) from None


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Group items into lists of ``size``, lazily.

    If reading raises a ``UserError``, the preceding items are yielded first.
    """
    batch: list[T] = []
    try:
        for item in items:
            batch.append(item)
            if len(batch) == size:
                yield batch
                batch = []
    except UserError:
        if batch:
            yield batch
        raise
    if batch:
        yield batch
