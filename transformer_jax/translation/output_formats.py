"""Output of decode.py: flags, the fields of JSON, and a writer for each format."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, TypeAlias

from transformer_jax.settings.checks import Section, SmallCount
from transformer_jax.translation.documents.formats import FORMATS
from transformer_jax.translation.input_file import Format, Record
from transformer_jax.translation.requests import Translation


@dataclass(frozen=True)
class OutputFlags(Section, prefix="--"):
    """Output for each translation."""

    nbest: SmallCount = 1
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


@dataclass(frozen=True, kw_only=True)
class OutputFields:
    """What translation adds to a JSON object. Numbers have four decimals; NaN is null."""

    translation: str
    score: float | None
    log_prob: float | None
    unmet: Sequence[str] | None = None
    """Source terms of the glossary that lack a target term."""
    tokens: Sequence[str] | None = None
    token_scores: Sequence[float | None] | None = None
    source_tokens: Sequence[str] | None = None
    alignment: str | Sequence[Sequence[float | None]] | None = None
    """Pairs i-j: word i of the source and word j of the translation, split at whitespace and
    counting from 0. Or a matrix with a row for each of ``tokens`` and a column for each of
    ``source_tokens``, EOS included.
    """
    hypotheses: Sequence[OutputFields] | None = None
    """All translations, best first."""


FIELD_NAMES = tuple(field.name for field in fields(OutputFields))
"""Fields of a JSON object that translation adds or overwrites."""


def output_values(
    translation: Translation,
    *,
    token_scores: bool = False,
    alignments: Literal["hard", "soft"] | None = None,
) -> dict[str, Any]:
    """Return the values of ``OutputFields`` for a translation, without those that have not been
    asked for.
    """
    alignment = translation.alignment
    values: dict[str, Any] = {
        "translation": translation.text,
        "score": _number(translation.score),
        "log_prob": _number(translation.log_prob),
    }
    if translation.unmet:
        values["unmet"] = translation.unmet
    if token_scores or alignments == "soft":
        values["tokens"] = (
            [*translation.tokens, translation.eos_token] if translation.length else []
        )
    if token_scores:
        values["token_scores"] = [_number(x) for x in translation.token_log_probs]
    if alignments == "soft":
        rows = alignment.weights_TS.tolist() if alignment else []
        values["source_tokens"] = alignment.source if alignment else ()
        values["alignment"] = [[_number(x) for x in row] for row in rows]
    elif alignments == "hard":
        values["alignment"] = alignment.hard() if alignment else ""
    return values


RecordOfLine: TypeAlias = Callable[[bytes], bytes]


class Writer(Protocol):
    """Writes the translations of one record in one format."""

    record_of_line: RecordOfLine | None
    """Names the record of a line of output; neighboring lines of one record have the same name.
    None: each record is one line."""

    def text(self, record: Record, translations: Sequence[Translation]) -> str:
        """Return the output for a record, with its line ending."""


def output_writer(flags: OutputFlags, format: Format, *, log_probs: bool = False) -> Writer:
    """Return the writer for an input format. ``log_probs`` is for text: see ``TextWriter``."""
    if format in FORMATS:
        return DocumentWriter()
    if format == "jsonl":
        return JsonWriter(flags)
    return TextWriter(flags, log_probs=log_probs)


_SEPARATOR = " ||| "


class TextWriter:
    """Plain text: a line for each translation."""

    def __init__(self, flags: OutputFlags, *, log_probs: bool = False):
        """``log_probs`` replaces translations with their log-probabilities."""
        self.record_of_line: RecordOfLine | None = _number_column if flags.nbest > 1 else None
        self._flags = flags
        self._log_probs = log_probs

    def text(self, record: Record, translations: Sequence[Translation]) -> str:
        """Return a line for each translation, with columns."""
        return "".join(self._line(record, translation) for translation in translations)

    def _line(self, record: Record, translation: Translation) -> str:
        columns = [f"{translation.log_prob:.4f}" if self._log_probs else translation.text]
        if self._flags.nbest > 1:
            columns = [str(record.line_number - 1), *columns, f"{translation.score:.4f}"]
        if self._flags.alignments:
            columns.append(translation.alignment.hard() if translation.alignment else "")
        return _SEPARATOR.join(columns) + "\n"


def _number_column(line: bytes) -> bytes:
    return line.partition(_SEPARATOR.encode())[0]


class JsonWriter:
    """JSONL: an object with the fields of the input object, then ``OutputFields``."""

    record_of_line: RecordOfLine | None = None

    def __init__(self, flags: OutputFlags):
        self._flags = flags

    def text(self, record: Record, translations: Sequence[Translation]) -> str:
        """Return one line."""
        hypotheses = [
            output_values(
                translation,
                token_scores=self._flags.token_scores,
                alignments=self._flags.alignments,
            )
            for translation in translations
        ]
        added = dict(hypotheses[0])
        if self._flags.nbest > 1:
            added["hypotheses"] = hypotheses
        fields = [
            f"{json.dumps(name, ensure_ascii=False)}: {value}"
            for name, value in record.fields
            if name not in added
        ]
        fields.append(json.dumps(added, ensure_ascii=False)[1:])
        return "{" + ", ".join(fields) + "\n"


class DocumentWriter:
    """HTML and XML: the document."""

    record_of_line: RecordOfLine | None = None

    def text(self, record: Record, translations: Sequence[Translation]) -> str:
        """Return the document, whose end is that of the input."""
        return translations[0].text


def _number(x: float) -> float | None:
    """Round to four decimals; None for NaN and infinities, which JSON does not support."""
    return round(float(x), 4) if math.isfinite(x) else None
