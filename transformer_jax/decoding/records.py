"""What ``decode.py`` reads: plain lines or JSONL, the whole of it or a part, with faults reported
by line.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, TypeVar

from transformer_jax.data.sources import read_lines
from transformer_jax.decoding.translator import Request, Translation
from transformer_jax.errors import UserError

_T = TypeVar("_T")
# Fields that the output may add.
OUTPUT_FIELDS = (
    "translation",
    "score",
    "log_prob",
    "hypotheses",
    "tokens",
    "token_scores",
    "source_tokens",
    "alignment",
)


class Record(NamedTuple):
    """One line of the input."""

    number: int
    """Its position in the whole input, from 0."""
    text: str
    prefix: str = ""
    """What the translation must start with."""
    json: str | None = None
    """The JSON object that it came from, as it was written."""
    target: str = ""
    """What is to be scored as its translation."""

    def request(self) -> Request:
        """What the translator is asked."""
        return Request(self.text, self.prefix, self.number + 1)


def read_records(
    source: str | Path | BinaryIO,
    *,
    format: Literal["text", "jsonl"] = "text",
    text_field: str = "text",
    part: tuple[int, int] = (0, 1),
) -> Iterator[Record]:
    """The lines of a file (``.gz`` too) or stream, or those that part i of n has: i, i + n, i + 2n,
    ...

    Raises ``UserError`` with the line's number where one is not UTF-8, or in JSONL not an object
    with the field.
    """
    index, count = part
    for number, line in islice(enumerate(read_lines(source)), index, None, count):
        if format == "text":
            yield Record(number, line)
        else:
            yield _parse(line, number, f"{_name(source)}, line {number + 1}", text_field)


def open_records(
    source: str | Path | BinaryIO,
    *,
    format: Literal["text", "jsonl"] = "text",
    text_field: str = "text",
    part: tuple[int, int] = (0, 1),
    targets: str | Path | None = None,
    hold: bool = False,
) -> Callable[[], Iterator[Record]]:
    """A function that gives the input's records, as ``read_records`` does, with their lines of
    ``targets`` if that is a file.

    A file is checked to its end here, so that its faults show before any work, and can be read
    again and again. A stream is read once, as far as it is asked for, unless it is to be held in
    memory (which ``targets`` takes too).

    Raises:
        UserError: a ``text_field`` that has a meaning already, faults of a file, or targets that
          are more or fewer than the input's lines.
    """
    if text_field in (*OUTPUT_FIELDS, "prefix"):
        what = (
            "what a translation begins with" if text_field == "prefix" else "the output's own field"
        )
        raise UserError(
            f"text_field is {text_field!r}; expected another name: {what} has this one."
        )
    read = partial(read_records, source, format=format, text_field=text_field, part=part)
    if isinstance(source, str | Path):
        records: Callable[[], Iterator[Record]] = read
    elif hold or targets is not None:
        held = list(read())
        records = lambda: iter(held)  # noqa: E731
    else:
        once = read()
        return lambda: once
    count = sum(1 for _ in records())
    if targets is None:
        return records

    def lines() -> Iterator[str]:
        return islice(read_lines(targets), part[0], None, part[1])

    if (wanted := sum(1 for _ in lines())) != count:
        raise UserError(
            f"{_name(source)} has {count:,} lines and {targets} has {wanted:,}{' in this part' * (part[1] > 1)}; "
            "expected as many in both: line N of one is the target of line N of the other."
        )
    return lambda: (
        record._replace(target=target, prefix="")
        for record, target in zip(records(), lines(), strict=True)
    )


class UntilFault(Iterator[_T]):
    """The items before the first one that raises ``UserError``; ``fault`` keeps the error until
    they are dealt with.
    """

    def __init__(self, items: Iterable[_T]):
        self._items = iter(items)
        self.fault: UserError | None = None

    def __next__(self) -> _T:
        if self.fault is not None:
            raise StopIteration
        try:
            return next(self._items)
        except UserError as fault:
            self.fault = fault
            raise StopIteration from None


def paired(
    records: Iterable[Record], stream: Callable[[Iterator[Record]], Iterable[list[Translation]]]
) -> Iterator[tuple[Record, list[Translation]]]:
    """Each record with what ``stream`` makes of it; holds as many of them as the stream is ahead of
    its results.
    """
    waiting: deque[Record] = deque()

    def read() -> Iterator[Record]:
        for record in records:
            waiting.append(record)
            yield record

    for translations in stream(read()):
        yield waiting.popleft(), translations


def _parse(line: str, number: int, where: str, text_field: str) -> Record:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}); expected one object a line.") from None
    if not isinstance(values, dict):
        raise UserError(
            f"{where} is a JSON {type(values).__name__}; expected an object with the field {text_field!r}."
        )
    if text_field not in values:
        raise UserError(
            f"{where} has no field {text_field!r}; expected text there (--text-field names another one). "
            f"Fields of this line: {', '.join(values) or 'none'}."
        )
    text, prefix = values[text_field], values.get("prefix")
    prefix = "" if prefix is None else prefix  # null: tables give every line all fields
    for name, value in ((text_field, text), ("prefix", prefix)):
        if not isinstance(value, str):
            raise UserError(f"{where} has {value!r} in field {name!r}; expected text there.")
        try:
            value.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, written as \ud800
            raise UserError(
                f"{where}: field {name!r} is not valid Unicode; expected whole characters."
            ) from None
    return Record(number, text.replace("\n", " "), prefix.replace("\n", " "), line)


def _name(source: str | Path | BinaryIO) -> str:
    return (
        str(source) if isinstance(source, str | Path) else str(getattr(source, "name", "the input"))
    )
