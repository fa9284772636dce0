"""Lines to translate and their translations, read and written as plain text or JSONL."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from transformer_jax.config_checks import Positive, Section
from transformer_jax.data.sources import read_lines
from transformer_jax.decoding.alignment import Alignment
from transformer_jax.errors import UserError, shown

T = TypeVar("T")

OUTPUT_FIELDS = (
    *("translation", "score", "log_prob", "hypotheses"),
    *("tokens", "token_scores", "source_tokens", "alignment"),
)
"""The fields that translating adds to a JSON object, or replaces."""


@dataclass(frozen=True)
class Request:
    """A line to translate, with options of its own."""

    text: str
    prefix: str = ""
    """What the translation must begin with."""
    number: int = 0
    """The line's number, for messages and for the random numbers of sampling; 0: its place in the
    stream, from 1.
    """


@dataclass(frozen=True)
class Record(Request):
    """One line of the input; its number is its position in the whole input, from 1."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of the JSON object that it came from."""
    target: str = ""
    """What is to be scored as its translation."""


@dataclass(frozen=True)
class Translation:
    """One translation of one line."""

    text: str
    score: float
    """What the search ranks by: log_prob / ((c + length) / (c + 1))^alpha (``DecodingConfig``). Of
    a line that was translated in segments: the mean of theirs.
    """
    log_prob: float
    """Natural logarithm of the probability of all tokens, EOS included."""
    length: int
    """Tokens, EOS included (one for each segment of an over-long line)."""
    tokens: tuple[str, ...] = ()
    """As in the vocabulary, without EOS; between segments of an over-long line it is there:
    ``length - 1`` tokens.
    """
    token_log_probs: tuple[float, ...] = ()
    """Log-probability of each token given those before it, EOS included: ``length`` numbers."""
    alignment: Alignment | None = field(default=None, compare=False)
    """What ``Scorer.align`` adds."""


def check_text(text: object, name: str) -> None:
    """``UserError`` unless ``text`` is a string of whole characters."""
    if not isinstance(text, str):
        raise UserError(f"{name} is {shown(text)}; expected text (a str).")
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, written as \ud800
        raise UserError(f"{name} is not valid Unicode; expected whole characters.") from None


def read_records(
    source: str | Path | BinaryIO,
    format: Literal["text", "jsonl"] = "text",
    text_field: str = "text",
    *,
    shard: tuple[int, int] = (0, 1),
    targets: str | Path | None = None,
) -> Iterator[Record]:
    """The records of a file (``.gz`` too) or a stream, read as far as they are asked for.

    Args:
      shard: i of n: lines i, i + n, i + 2n, ...
      targets: file of the records' targets, line by line.

    Raises:
      UserError: with its number, a line that is not UTF-8, or in JSONL not an object with the
        field; or that only one of the input and ``targets`` has.
    """
    name = str(source if isinstance(source, str | Path) else getattr(source, "name", "the input"))
    pairs = zip_longest(read_lines(source), read_lines(targets) if targets else ())
    for number, (line, target) in islice(enumerate(pairs, 1), shard[0], None, shard[1]):
        if targets and (line is None or target is None):
            short, other = (name, targets) if line is None else (targets, name)
            raise UserError(
                f"{short} has no line {number}, but {other} has; expected as many in both: line N "
                "of one is the target of line N of the other."
            )
        record = Record(line, number=number, target=target or "")
        if format == "jsonl":
            record = _from_json(record, f"{name}, line {number}", text_field)
        yield record


def _from_json(record: Record, where: str, text_field: str) -> Record:
    """The record whose text so far is a JSON object."""
    try:
        values = json.loads(record.text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}); expected one object a line.") from None
    if not isinstance(values, dict):
        raise UserError(
            f"{where} is a JSON {type(values).__name__}; "
            f"expected an object with the field {text_field!r}."
        )
    if text_field not in values:
        names = ", ".join(list(values)[:20]) or "none"
        raise UserError(
            f"{where} has no field {text_field!r}; expected text there (--text-field "
            f"names another one). Fields of this line: {names}."
        )
    # A table gives every line all fields: a prefix may be null.
    text, prefix = values[text_field], values.get("prefix") or ""
    check_text(text, f"{where}: field {text_field!r}")
    check_text(prefix, f"{where}: field 'prefix'")
    text, prefix = text.replace("\n", " "), prefix.replace("\n", " ")
    return replace(record, text=text, prefix=prefix, fields=values)


def blocks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Blocks of ``size`` items; no item is read before the blocks before it are taken.

    A ``UserError`` while reading is raised after the items before it were given.
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
class Results(Section):
    """What is written about a translation."""

    nbest: Positive = 1
    """More than 1: this many lines a sentence, best first, as `number ||| translation ||| score`;
    JSONL: `hypotheses`. Sampling draws as many, if --beam-size does not ask for more."""
    alignments: Literal["hard", "soft"] | None = None
    """hard: after each translation ` ||| 0-0 1-2`, source word - target word. soft (JSONL): a
    matrix over tokens."""
    alignment_layer: int = -1
    """Decoder layer whose attention is the alignment; negative: from the last."""
    token_scores: bool = False
    """JSONL: each token and its log-probability."""

    def text(
        self, record: Record, translations: Sequence[Translation], *, scores: bool = False
    ) -> list[str]:
        """Lines of plain text; with ``scores`` log-probabilities in place of the translations."""
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
        """A line of JSON: the fields of the object that was read, and ``OUTPUT_FIELDS``.

        A hard alignment is a list of pairs i-j: word i of the source (split at white space, from 0)
        and word j of the translation. A soft one is a matrix: a row for each of ``tokens``, a
        column for each of ``source_tokens``, EOS included.
        """
        fields = list(map(self._fields, translations))
        hypotheses = {"hypotheses": fields} if self.nbest > 1 else {}
        return [json.dumps({**record.fields, **fields[0], **hypotheses}, ensure_ascii=False)]

    def _fields(self, t: Translation) -> dict[str, Any]:
        fields: dict[str, Any] = {"translation": t.text}
        fields |= {"score": _number(t.score), "log_prob": _number(t.log_prob)}
        soft, found = self.alignments == "soft", t.alignment
        if self.token_scores or soft:
            fields["tokens"] = [*t.tokens, "</s>"] if t.length else []
        if self.token_scores:
            fields["token_scores"] = list(map(_number, t.token_log_probs))
        if soft:
            rows = found.weights_TS.tolist() if found else []
            fields["source_tokens"] = found.source if found else ()
            fields["alignment"] = [list(map(_number, row)) for row in rows]
        elif self.alignments:
            fields["alignment"] = found.hard() if found else ""
        return fields


def _number(x: float) -> float | None:
    """Four digits after the point; JSON has no infinities."""
    return round(float(x), 4) if math.isfinite(x) else None
