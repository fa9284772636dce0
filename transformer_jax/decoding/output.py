"""What ``decode.py`` writes about a sentence: plain lines or JSONL, n-best lists, scores,
alignments.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformer_jax.decoding.alignment import Alignment
from transformer_jax.decoding.records import Record
from transformer_jax.decoding.translator import Translation
from transformer_jax.errors import UserError

_BEFORE_FIELD = re.compile(r"\s*[{,]\s*(?=\")")


@dataclass(frozen=True)
class Output:
    """What is written about a sentence.

    Text: the translation; with ``scores`` alone its log-probability; with ``nbest`` > 1 so many
    lines, best first, as ``number ||| translation ||| score``; hard alignments follow as ``||| 0-0
    1-2``.

    JSONL: the object that was read, its other fields as they were, and ``translation``, ``score``,
    ``log_prob``; on request ``hypotheses`` (a list of the same), ``tokens`` and ``token_scores``
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
        if self.nbest < 1:
            raise UserError(f"nbest is {self.nbest}; expected at least 1.")
        for name, wanted in (
            ("--token-scores", self.token_scores),
            ("--alignments soft", self.alignments == "soft"),
        ):
            if wanted and self.format == "text":
                raise UserError(
                    f"{name} does not go with --format text; expected --format jsonl, which has a place for them."
                )

    @property
    def group_size(self) -> int:
        """Lines that stand for a sentence, at most."""
        return self.nbest if self.format == "text" else 1

    def lines(
        self,
        record: Record,
        translations: Sequence[Translation],
        alignments: Sequence[Alignment | None] | None = None,
    ) -> list[str]:
        """The lines that stand for one sentence."""
        aligned = alignments or [None] * len(translations)
        if self.format == "jsonl":
            return [self._json(record, translations, aligned)]
        lines = []
        for t, alignment in zip(translations, aligned, strict=True):
            columns = [f"{t.log_prob:.4f}" if self.scores else t.text]
            if self.nbest > 1:
                columns = [str(record.number), *columns, f"{t.score:.4f}"]
            if self.alignments:
                columns.append(alignment.hard() if alignment else "")
            lines.append(" ||| ".join(columns))
        return lines

    def _json(
        self,
        record: Record,
        translations: Sequence[Translation],
        alignments: Sequence[Alignment | None],
    ) -> str:
        hypotheses = [
            self._fields(t, alignment)
            for t, alignment in zip(translations, alignments, strict=True)
        ]
        fields = hypotheses[0] | ({"hypotheses": hypotheses} if self.nbest > 1 else {})
        read = record.json or "{}"
        if fields.keys() & json.loads(read).keys():  # from an earlier translation
            read = without_fields(read, set(fields))
        # What was read is not written anew: no number, escape or order of fields changes on the
        # way.
        rest, end = (
            read.rstrip().removesuffix("}").rstrip(),
            json.dumps(fields, ensure_ascii=False)[1:],
        )
        return f"{rest}{'' if rest == '{' else ', '}{end}"

    def _fields(self, t: Translation, alignment: Alignment | None) -> dict[str, Any]:
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
            fields["source_tokens"] = list(alignment.source) if alignment else []
            fields["alignment"] = (
                [list(map(_number, row)) for row in alignment.weights_TS.tolist()]
                if alignment
                else []
            )
        elif self.alignments:
            fields["alignment"] = alignment.hard() if alignment else ""
        return fields


def without_fields(text: str, names: set[str]) -> str:
    """A JSON object without the fields of these names; of the others not a letter changes."""
    read, kept = json.JSONDecoder().raw_decode, []
    field = _BEFORE_FIELD.match(text)
    while field:
        name, end = read(text, field.end())
        _, end = read(text, len(text) - len(text[end:].lstrip(" \t\r\n:")))
        if name not in names:
            kept.append(text[field.end() : end])
        field = _BEFORE_FIELD.match(text, end)
    return f"{{{', '.join(kept)}}}"


def _number(x: float) -> float | None:
    """Four digits after the point; JSON has no infinities."""
    return round(float(x), 4) if math.isfinite(x) else None
