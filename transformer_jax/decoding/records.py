"""The lines that decode.py reads and writes: plain text or JSONL."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Literal

from transformer_jax.data.sources import json_object, read_lines
from transformer_jax.decoding.trained_models import check_text
from transformer_jax.decoding.translator import Request, Translation
from transformer_jax.errors import UserError


@dataclass(frozen=True)
class Record(Request):
    """One line of the input; its number is its position in the whole input, from 1."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of the JSON object that it came from."""
    target: str = ""
    """What is to be scored as its translation."""


@dataclass(frozen=True)
class Records:
    """The records of an input: of a file (``.gz`` too), again and again; of a stream, once.

    Iterating raises ``UserError`` with the line's number where a line is not UTF-8, or in JSONL not
    an object with the field, and where ``targets`` has more or fewer lines than the input.
    """

    source: str | Path | BinaryIO
    format: Literal["text", "jsonl"] = "text"
    text_field: str = "text"
    shard: tuple[int, int] = (0, 1)
    """i of n: lines i, i + n, i + 2n, ..."""
    targets: str | Path | None = None
    """File of the records' targets, line by line."""

    def __iter__(self) -> Iterator[Record]:
        lines = islice(enumerate(read_lines(self.source), 1), self.shard[0], None, self.shard[1])
        if self.targets is None:
            yield from (self._record(number, line) for number, line in lines)
            return
        targets = islice(read_lines(self.targets), self.shard[0], None, self.shard[1])
        for done, (line, target) in enumerate(zip_longest(lines, targets)):
            if line is None or target is None:
                here = done + (line is not None) + sum(1 for _ in lines)
                there = done + (target is not None) + sum(1 for _ in targets)
                raise UserError(
                    f"{self._name} has {here:,} lines and {self.targets} has {there:,}"
                    f"{' in this shard' * (self.shard[1] > 1)}; expected as many in both: "
                    "line N of one is the target of line N of the other."
                )
            yield replace(self._record(*line), target=target, prefix="")

    @property
    def _name(self) -> str:
        if isinstance(self.source, str | Path):
            return str(self.source)
        return str(getattr(self.source, "name", "the input"))

    def _record(self, number: int, line: str) -> Record:
        if self.format == "text":
            return Record(line, number=number)
        where = f"{self._name}, line {number}"
        values = json_object(line, where, self.text_field)
        if self.text_field not in values:
            names = ", ".join(list(values)[:20]) or "none"
            raise UserError(
                f"{where} has no field {self.text_field!r}; expected text there (--text-field "
                f"names another one). Fields of this line: {names}."
            )
        text, prefix = values[self.text_field], values.get("prefix")
        prefix = "" if prefix is None else prefix  # null: tables give every line all fields
        check_text(text, f"{where}: field {self.text_field!r}")
        check_text(prefix, f"{where}: field 'prefix'")
        return Record(text.replace("\n", " "), prefix.replace("\n", " "), number, values)


@dataclass(frozen=True)
class OutputFormat:
    """How a sentence is written.

    Text: the translation; with ``scores`` its log-probability instead; with ``nbest`` > 1 that many
    lines, best first, as ``number ||| translation ||| score``; hard alignments follow as ``||| 0-0
    1-2``.

    JSONL: the fields of the object that was read, and ``translation``, ``score``, ``log_prob``; on
    request ``hypotheses`` (a list of the same), ``tokens`` and ``token_scores``
    (EOS last), ``alignment``.

    A hard alignment is a list of pairs i-j: word i of the source (split at white space, from 0) and
    word j of the translation. A soft one is a matrix: a row for each of ``tokens``, a column for
    each of ``source_tokens``, EOS included.
    """

    format: Literal["text", "jsonl"] = "text"
    nbest: int = 1
    scores: bool = False
    """Text: the log-probability instead of the translation."""
    token_scores: bool = False
    alignments: Literal["hard", "soft"] | None = None

    def __post_init__(self) -> None:
        if self.format == "text" and self.alignments == "soft":
            raise UserError("alignments is soft with --format text; expected hard, or JSONL.")

    @property
    def lines_per_sentence(self) -> int:
        """At most."""
        return self.nbest if self.format == "text" else 1

    def lines(self, record: Record, translations: Sequence[Translation]) -> list[str]:
        """The lines of one sentence."""
        if self.format == "jsonl":
            fields = {**record.fields, **self.fields(translations)}
            return [json.dumps(fields, ensure_ascii=False)]
        lines = []
        for t in translations:
            columns = [f"{t.log_prob:.4f}" if self.scores else t.text]
            if self.nbest > 1:
                columns = [str(record.number - 1), *columns, f"{t.score:.4f}"]
            if self.alignments:
                columns.append(t.alignment.hard() if t.alignment else "")
            lines.append(" ||| ".join(columns))
        return lines

    def fields(self, translations: Sequence[Translation]) -> dict[str, Any]:
        """What JSONL says of a sentence."""
        fields = list(map(self._fields, translations))
        return fields[0] | ({"hypotheses": fields} if self.nbest > 1 else {})

    def _fields(self, t: Translation) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "translation": t.text,
            "score": _number(t.score),
            "log_prob": _number(t.log_prob),
        }
        soft = self.alignments == "soft"
        if self.token_scores or soft:
            fields["tokens"] = [*t.tokens, "</s>"] if t.length else []
        if self.token_scores:
            fields["token_scores"] = list(map(_number, t.token_log_probs))
        if soft:
            rows = t.alignment.weights_TS.tolist() if t.alignment else []
            fields["source_tokens"] = list(t.alignment.source) if t.alignment else []
            fields["alignment"] = [list(map(_number, row)) for row in rows]
        elif self.alignments:
            fields["alignment"] = t.alignment.hard() if t.alignment else ""
        return fields


def _number(x: float) -> float | None:
    """Four digits after the point; JSON has no infinities."""
    return round(float(x), 4) if math.isfinite(x) else None
