"""Input lines and their translations, as plain text or JSONL."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias, TypeVar

from transformer_jax.data.sources import read_lines
from transformer_jax.errors import UserError, short_repr
from transformer_jax.settings.checks import Few, Section
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.translation.alignment import Alignment

T = TypeVar("T")

Format: TypeAlias = Literal["text", "jsonl", "html", "xml"]
"""Format of a file: a sentence per line, a JSON object per line, or one document."""
GlossaryTerms: TypeAlias = Mapping[str, str | Sequence[Any]]
"""Source terms, each with one target term or several alternatives (str). Or a ``Glossary``."""

OUTPUT_FIELDS = (
    *("translation", "score", "log_prob", "hypotheses", "unmet"),
    *("tokens", "token_scores", "source_tokens", "alignment"),
)
"""Fields of a JSON object that translation adds or overwrites."""


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
    format: Literal["text", "html", "xml"] = "text"
    """Format of the text and its translation. HTML and XML are divided into sentences."""
    glossary: GlossaryTerms = field(default_factory=dict, hash=False)
    """Target terms that the translation must contain, by source term, if that is in the text."""
    number: int = 0
    """Line number, used in messages and as the sampling seed. 0 stands for the line's position in
    the stream, counting from 1.
    """

    @classmethod
    def of(cls, line: str | Request, number: int) -> Request:
        """Return the line as a request, with this number unless it has one."""
        request = line if isinstance(line, Request) else cls(line)
        return request if request.number else replace(request, number=number)

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"Line {self.number}" if self.number else "The text"

    def first_ids(self, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """Return the token ids before the source and the target (``Tokenizer.first_ids``)."""
        languages = self.source_language, self.target_language
        return tokenizer.first_ids(*languages, f"{self.name}: ")


@dataclass(frozen=True)
class Record(Request):
    """One line of the input; its number is its position in the whole input, counting from 1."""

    fields: Sequence[tuple[str, str]] = ()
    """Names and values of the input JSON object. The values are JSON, as written in the input,
    because parsing changes numbers such as 1e400.
    """
    target: str | None = None
    """Target to score; None: translate."""


@dataclass(frozen=True)
class Translation:
    """A translation of a line."""

    text: str
    score: float
    """Ranking score: log_prob / ((c + length) / (c + 1))^alpha (``DecodingConfig``). For a line
    translated in segments, the mean of the segments' scores.
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

    def fields(
        self, token_scores: bool = False, alignments: Literal["hard", "soft"] | None = None
    ) -> dict[str, Any]:
        """Return JSON fields, with numbers rounded to four decimals: ``translation``, ``score`` and
        ``log_prob``. ``token_scores`` and ``alignments`` add fields as in ``Results``.
        """
        fields: dict[str, Any] = {"translation": self.text, "score": _number(self.score)}
        fields["log_prob"] = _number(self.log_prob)
        if self.unmet:
            fields["unmet"] = self.unmet
        soft, found = alignments == "soft", self.alignment
        if token_scores or soft:
            fields["tokens"] = [*self.tokens, "</s>"] if self.length else []
        if token_scores:
            fields["token_scores"] = list(map(_number, self.token_log_probs))
        if soft:
            rows = found.weights_TS.tolist() if found else []
            fields["source_tokens"] = found.source if found else ()
            fields["alignment"] = [list(map(_number, row)) for row in rows]
        elif alignments:
            fields["alignment"] = found.hard() if found else ""
        return fields


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


def matching_places(text: str, patterns: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the places that match a pattern, from left to right. The first pattern has priority.
    Patterns are not joined, because each has groups of its own.
    """
    none = len(text), 0
    end, places = 0, dict.fromkeys(patterns, (-1, 0))  # of the next match
    while True:
        for pattern, (start, _) in places.items():
            if start < end:
                matches = re.compile(pattern).finditer(text, end)
                places[pattern] = next((match.span() for match in matches if match[0]), none)
        place = min(places.values(), key=itemgetter(0), default=none)
        if place == none:
            return
        yield place
        end = place[1]


def read_records(
    source: str | Path | BinaryIO,
    format: Format = "text",
    text_field: str = "text",
    *,
    markup: Literal["html", "xml"] | None = None,
    shard: tuple[int, int] = (0, 1),
    targets: str | Path | None = None,
) -> Iterator[Record]:
    """Read the records of a file (optionally ``.gz``) or a stream, lazily.

    Args:
      format: see ``Format``.
      markup: format of each line or field of text.
      shard: (i, n) reads only lines i, i + n, i + 2n, ..., counting from 0.
      targets: file with a target for each line.

    Raises:
      UserError: a line is not UTF-8, or (in JSONL) is not an object with the field; the input and
        ``targets`` have different numbers of lines. The message includes the line number.
    """
    name = str(source if isinstance(source, str | Path) else getattr(source, "name", "the input"))
    if format in ("html", "xml"):
        yield Record("\n".join(read_lines(source, keep_returns=True)), format=format, number=1)
        return
    pairs = zip_longest(read_lines(source), read_lines(targets) if targets else ())
    for number, (line, target) in islice(enumerate(pairs, 1), shard[0], None, shard[1]):
        if targets and (line is None or target is None):
            short, other = (name, targets) if line is None else (targets, name)
            raise UserError(
                f"{short} has no line {number}, but {other} does; both files must have the same "
                "number of lines because targets are paired with the input line by line."
            )
        record = Record(line, number=number, target=target, format=markup or "text")
        if format == "jsonl":
            record = _from_json(record, f"{name}, line {number}", text_field)
        yield record


_JSON = json.JSONDecoder(parse_constant=int)  # raises ValueError for NaN and Infinity
_GAP = re.compile(r"[ \t\r\n:,]*")


def _fields(line: str) -> list[tuple[str, str]]:
    """Split a JSON object into names and values. The values are JSON, as written in the line."""
    texts, end = [], line.index("{") + 1
    while line[start := _GAP.match(line, end).end()] != "}":  # type: ignore[union-attr]
        _, end = _JSON.raw_decode(line, start)
        texts.append(line[start:end])
    return list(zip(map(json.loads, texts[::2]), texts[1::2]))


def _from_json(record: Record, where: str, text_field: str) -> Record:
    """Parse the JSON object in the record's text."""
    try:
        values = _JSON.decode(record.text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not valid JSON ({error}); expected an object.") from None
    if not isinstance(values, dict):
        raise UserError(
            f"{where} is a JSON {type(values).__name__}; "
            f"expected an object with a {text_field!r} field."
        )
    if text_field not in values:
        names = ", ".join(list(values)[:20]) or "none"
        raise UserError(
            f"{where} has no {text_field!r} field; choose another with --text-field. "
            f"Fields of this line: {names}."
        )
    text = values[text_field]
    check_text(text, f"{where}: field {text_field!r}")
    # Scoring and empty texts ignore the prefix. Exported tables give every line all fields, so a
    # prefix may be null.
    prefix = "" if record.target is not None or not text.strip() else values.get("prefix") or ""
    check_text(prefix, f"{where}: field 'prefix'")
    codes: dict[str, Any] = {"glossary": values.get("glossary") or {}}
    for name in ("source_language", "target_language"):
        codes[name] = values.get(name) or ""
        check_text(codes[name], f"{where}: field {name!r}")
    text = text.replace("\n", " ") if record.format == "text" else text
    prefix = prefix.replace("\n", " ")
    return replace(record, text=text, prefix=prefix, fields=_fields(record.text), **codes)


def blocks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Group items into blocks of ``size``, lazily.

    If reading raises a ``UserError``, the preceding items are yielded first.
    """
    block: list[T] = []
    try:
        for item in items:
            block.append(item)
            if len(block) == size:
                yield block
                block = []
    except UserError:
        if block:
            yield block
        raise
    if block:
        yield block


@dataclass(frozen=True)
class Results(Section, prefix="--"):
    """Output for each translation."""

    nbest: Few = 1
    """Number of translations per sentence. If more than 1, each is a line `number ||| translation
    ||| score`, best first; in JSONL, the `hypotheses` field lists them. Sampling draws this many,
    whatever --beam-size is.
    """
    alignments: Literal["hard", "soft"] | None = None
    """hard: append pairs of source and target words, such as ` ||| 0-0 1-2`, to each translation.
    soft (JSONL): add a matrix over tokens."""
    alignment_layer: int | None = None
    """Decoder layer whose cross-attention, averaged over heads, gives the alignment: 0 is the first
    layer, -1 the last. None: as model.alignment_layer says, by default the last layer."""
    token_scores: bool = False
    """JSONL: add each token and its log-probability."""

    def text(
        self, record: Record, translations: Sequence[Translation], *, scores: bool = False
    ) -> list[str]:
        """Return lines of plain text; ``scores`` replaces translations with log-probabilities."""
        lines = []
        for t in translations:
            columns = [f"{t.log_prob:.4f}" if scores else t.text]
            if self.nbest > 1:
                columns = [str(record.number - 1), *columns, f"{t.score:.4f}"]
            if self.alignments:
                columns.append(t.alignment.hard() if t.alignment else "")
            lines.append(" ||| ".join(columns))
        return lines

    def json(self, record: Record, translations: Sequence[Translation]) -> list[str]:
        """Return a line of JSON with the fields of the input object and ``OUTPUT_FIELDS``.

        A hard alignment is a string of pairs i-j: word i of the source and word j of the
        translation, split at whitespace and counting from 0. A soft alignment is a matrix with a
        row for each of ``tokens`` and a column for each of ``source_tokens``, EOS included.
        """
        fields = [t.fields(self.token_scores, self.alignments) for t in translations]
        hypotheses = {"hypotheses": fields} if self.nbest > 1 else {}
        added = fields[0] | hypotheses
        texts = [
            f"{json.dumps(name, ensure_ascii=False)}: {value}"
            for name, value in record.fields
            if name not in added
        ]
        return ["{" + ", ".join([*texts, json.dumps(added, ensure_ascii=False)[1:]])]


def _number(x: float) -> float | None:
    """Round to four decimals; None for NaN and infinities, which JSON does not support."""
    return round(float(x), 4) if math.isfinite(x) else None
