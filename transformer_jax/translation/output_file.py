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

logger = logging.getLogger(__name__)

WriteFunction: TypeAlias = Callable[[str], None]


@contextmanager
def open_output(
    path: str | None, *, resume: bool = False, numbered: bool = False
) -> Iterator[tuple[WriteFunction, int]]:
    """Open the output. Yields a function that writes the lines of one sentence, and the number of
    sentences already in the file.

    The function flushes its lines before it returns. If the process is killed, only the last line
    of the file can be incomplete.

    Args:
      path: file, device or named pipe; None means stdout.
      resume: keep the complete sentences in the file; otherwise the file is overwritten.
      numbered: a sentence may have several lines, ``number ||| ...``.

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
                num_complete, size = count_complete_sentences(path, numbered=numbered)
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


def count_complete_sentences(path: str | Path, *, numbered: bool) -> tuple[int, int]:
    """Count the complete sentences in a file. Returns their number and their size in bytes.

    A last line without a newline does not count. The last sentence of a ``numbered`` file does not
    count either, because some of its lines may be missing.
    """
    count = start = size = 0  # start: offset of the last sentence
    last = None
    with open(path, "rb") as file:
        for line in file:
            number = line.partition(b" |||")[0] if numbered else size
            if not line.endswith(b"\n"):
                break
            if number != last:
                count += 1
                start = size
                last = number
            size += len(line)
    return (count - 1, start) if numbered and count else (count, size)


def _write(file: BinaryIO | FileIO, text: str) -> None:
    # A lone surrogate in a passed-through JSON field is written as an escape again.
    remaining = text.encode(errors="backslashreplace")
    while remaining:  # a full disk may accept only part of it
        remaining = remaining[file.write(remaining) :]
    file.flush()
