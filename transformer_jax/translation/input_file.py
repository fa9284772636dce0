"""Input of decode.py: plain text, JSONL, or one HTML or XML document."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

from transformer_jax.data.text_files import read_lines, read_text
from transformer_jax.errors import UserError
from transformer_jax.translation.documents.formats import FORMATS, FormatName
from transformer_jax.translation.requests import Request, check_text

logger = logging.getLogger(__name__)

Format: TypeAlias = Literal["text", "jsonl", FormatName]
"""Format of a file: a sentence per line, a JSON object per line, or one document."""


@dataclass(frozen=True)
class Record(Request):
    """One line of the input; its number is its position in the whole input, counting from 1."""

    fields: Sequence[tuple[str, str]] = ()
    """Names and values of the input JSON object. The values are JSON, as written in the input,
    because parsing changes numbers such as 1e400.
    """
    target: str | None = None
    """Target to score; None: translate."""


def read_records(
    source: str | Path | BinaryIO,
    format: Format = "text",
    text_field: str = "text",
    *,
    markup: FormatName | None = None,
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
    if format in FORMATS:
        text = read_text(source)
        _warn_of_charset(text, name)
        yield Record(text, format=format, line_number=1)
        return
    pairs = zip_longest(read_lines(source), read_lines(targets) if targets else ())
    for line_number, (line, target) in islice(enumerate(pairs, 1), shard[0], None, shard[1]):
        if targets and (line is None or target is None):
            shorter = name if line is None else targets
            longer = targets if line is None else name
            raise UserError(
                f"{shorter} has no line {line_number}, but {longer} does; both files must have the "
                "same number of lines because targets are paired with the input line by line."
            )
        record = Record(line, line_number=line_number, target=target, format=markup or "text")
        if format == "jsonl":
            record = _from_json(record, f"{name}, line {line_number}", text_field)
        yield record


def _warn_of_charset(text: str, name: str) -> None:
    """Log a warning if a document says that it is not UTF-8, in which it is read and written."""
    declared = _CHARSET.search(text, 0, 4096)
    charset = declared and (declared["html"] or declared["xml"])
    if charset and charset.lower() not in ("utf-8", "utf8", "us-ascii"):
        message = "%s declares the encoding %s, but is read and written as UTF-8; change it there."
        logger.warning(message, name, charset)


_CHARSET = re.compile(
    r"<meta[^>]+charset\s*=\s*[\"']?\s*(?P<html>[\w-]+)"
    r"|<\?xml[^>]+encoding\s*=\s*[\"'](?P<xml>[\w-]+)",
    re.IGNORECASE,
)


def _parse_int(digits: str) -> int | float:
    """Parse an integer. A very long one becomes a float, because ``int`` takes quadratic time."""
    return int(digits) if len(digits) < 1000 else float(digits)


# parse_constant raises ValueError for NaN and Infinity.
_JSON_DECODER = json.JSONDecoder(parse_constant=int, parse_int=_parse_int)
_SEPARATORS = re.compile(r"[ \t\r\n:,]*")


def _fields(line: str) -> list[tuple[str, str]]:
    """Split a JSON object into names and values. The values are JSON, as written in the line."""
    texts = list[str]()
    end = line.index("{") + 1
    while line[start := _SEPARATORS.match(line, end).end()] != "}":  # type: ignore[union-attr]
        _, end = _JSON_DECODER.raw_decode(line, start)
        texts.append(line[start:end])
    names = [json.loads(name) for name in texts[::2]]
    return list(zip(names, texts[1::2]))


def _from_json(record: Record, location: str, text_field: str) -> Record:
    """Parse the JSON object in the record's text."""
    try:
        values = _JSON_DECODER.decode(record.text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{location} is not valid JSON ({error}); expected an object.") from None
    if not isinstance(values, dict):
        raise UserError(
            f"{location} is a JSON {type(values).__name__}; "
            f"expected an object with a {text_field!r} field."
        )
    if text_field not in values:
        names = ", ".join(list(values)[:20]) or "none"
        raise UserError(
            f"{location} has no {text_field!r} field; choose another with --text-field. "
            f"Fields of this line: {names}."
        )
    text = values[text_field]
    check_text(text, f"{location}: field {text_field!r}")
    # Scoring and empty texts ignore the prefix. Exported tables give every line all fields, so a
    # prefix may be null.
    prefix = "" if record.target is not None or not text.strip() else values.get("prefix") or ""
    check_text(prefix, f"{location}: field 'prefix'")
    options: dict[str, Any] = {"glossary": values.get("glossary") or {}}
    for name in ("source_language", "target_language"):
        options[name] = values.get(name) or ""
        check_text(options[name], f"{location}: field {name!r}")
    text = text.replace("\n", " ") if record.format == "text" else text
    prefix = prefix.replace("\n", " ")
    return replace(record, text=text, prefix=prefix, fields=_fields(record.text), **options)
