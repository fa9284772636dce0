"""Output of decode.py: stdout or a resumable file."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import BinaryIO, TypeAlias

from transformer_jax.storage.files import locked
from transformer_jax.translation.output_formats import RecordOfLine

logger = logging.getLogger(__name__)

WriteFunction: TypeAlias = Callable[[str], None]


@contextmanager
def open_output(
    path: str | None, *, resume: bool = False, record_of_line: RecordOfLine | None = None
) -> Iterator[tuple[WriteFunction, int]]:
    """Open the output. Yields a function that writes the lines of one record, and the number of
    records already in the file.

    The function flushes its lines before it returns. If the process is killed, only the last line
    of the file can be incomplete.

    Args:
      path: file, device or named pipe; None means stdout.
      resume: keep the complete records in the file; otherwise the file is overwritten.
      record_of_line: see ``output_formats.Writer``.

    Raises:
        UserError: another process is writing the file.
        OSError: the file cannot be written.
    """
    if path is None:
        yield partial(_write, sys.stdout.buffer), 0
        return
    with open(path, "ab", buffering=0) as file, ExitStack() as stack:
        num_complete = size = 0
        is_regular_file = Path(path).is_file()  # not a device or named pipe
        if is_regular_file:
            busy_message = (
                f"{path} is being written by another process; wait for it to finish, or choose "
                "another output file."
            )
            stack.enter_context(locked(Path(path), busy_message))
            if resume:
                num_complete, size = count_complete_records(path, record_of_line)
            file.truncate(size)
        try:
            yield partial(_write, file), num_complete
        except BaseException as error:
            if is_regular_file:
                message = "Finished lines are in %s; run the command again with --resume to "
                message += "continue."
                logger.info(message, path)
            if isinstance(error, OSError):  # a full disk, for example
                error.filename = error.filename or path
            raise


def count_complete_records(
    path: str | Path, record_of_line: RecordOfLine | None = None
) -> tuple[int, int]:
    """Count the complete records in a file. Returns their number and their size in bytes.

    A last line without a newline does not count. If records can have several lines, the last record
    does not count either, because some of its lines may be missing.
    """
    count = 0
    size = 0
    start = 0  # of the last record
    last_record: bytes | None = None
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            record = None if record_of_line is None else record_of_line(line)
            if record is None or record != last_record:
                count += 1
                start = size
                last_record = record
            size += len(line)
    if record_of_line is None or not count:
        return count, size
    return count - 1, start


def _write(file: BinaryIO | FileIO, text: str) -> None:
    # A lone surrogate in a passed-through JSON field is written as an escape again.
    remaining = text.encode(errors="backslashreplace")
    while remaining:  # a full disk may accept only part of it
        remaining = remaining[file.write(remaining) :]
    file.flush()
