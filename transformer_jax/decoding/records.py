"""The lines that decode.py reads and writes: plain text or JSONL."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, starmap, zip_longest
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

    def record(number: int, line: str) -> Record:
        if format == "text":
            return Record(line, number=number)
        return _from_json(line, f"{name}, line {number}", text_field, number)

    lines = islice(enumerate(read_lines(source), 1), shard[0], None, shard[1])
    if targets is None:
        yield from starmap(record, lines)
        return
    its_targets = islice(read_lines(targets), shard[0], None, shard[1])
    for done, (line, target) in enumerate(zip_longest(lines, its_targets)):
        if line is None or target is None:
            short, other = (name, targets) if line is None else (targets, name)
            raise UserError(
                f"{short} has no line {1 + shard[0] + done * shard[1]}, but {other} has; expected "
                "as many in both: line N of one is the target of line N of the other."
            )
        yield replace(record(*line), target=target)


def _from_json(line: str, where: str, text_field: str, number: int) -> Record:
    values = json_object(line, where, text_field)
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
    return Record(text.replace("\n", " "), prefix.replace("\n", " "), number, values)


@dataclass(frozen=True)
class OutputFormat:
    """How a sentence is written.

    Text: the translation; with ``scores`` its log-probability instead; with ``nbest`` > 1 that many
    lines, best first, as ``number ||| translation ||| score``; alignments follow, always hard, as
    ``||| 0-0 1-2``.

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
            fields = list(map(self._fields, translations))
            hypotheses = {"hypotheses": fields} if self.nbest > 1 else {}
            return [json.dumps({**record.fields, **fields[0], **hypotheses}, ensure_ascii=False)]
        lines = []
        for t in translations:
            columns = [f"{t.log_prob:.4f}" if self.scores else t.text]
            if self.nbest > 1:
                columns = [str(record.number - 1), *columns, f"{t.score:.4f}"]
            if self.alignments:
                columns.append(t.alignment.hard() if t.alignment else "")
            lines.append(" ||| ".join(columns))
        return lines

    def _fields(self, t: Translation) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "translation": t.text,
            "score": _number(t.score),
            "log_prob": _number(t.log_prob),
        }
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
