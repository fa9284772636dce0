"""The output of decode.py: stdout, or a file that can be resumed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import BinaryIO, TypeAlias

from transformer_jax.errors import UserError
from transformer_jax.storage import locked

logger = logging.getLogger(__name__)

Write: TypeAlias = Callable[[Sequence[str]], None]


@contextmanager
def open_output(
    path: str | None, *, resume: bool = False, numbered: bool = False
) -> Iterator[tuple[Write, int]]:
    """A function that writes the lines of one sentence, and the number of sentences already there.

    Lines have left this process when that function returns. However the process ends, every line
    of a file but the last is complete.

    Args:
      path: file, device or named pipe; None: stdout.
      resume: keep the complete sentences of the file; without it the file starts empty.
      numbered: a sentence may have several lines, ``number ||| ...``.

    Raises:
        UserError: another process is writing the file.
        OSError: the file cannot be written.
    """
    if path is None:
        yield partial(_write, sys.stdout.buffer), 0
        return
    with open(path, "ab", buffering=0) as file, ExitStack() as stack:
        kept = size = 0
        if regular := Path(path).is_file():  # no device or named pipe
            try:
                stack.enter_context(locked(Path(path)))
            except BlockingIOError:
                raise UserError(
                    f"{path} is being written by another process; wait for it, or choose another "
                    "output."
                ) from None
            if resume:
                kept, size = complete_sentences(path, numbered=numbered)
            file.truncate(size)
        try:
            yield partial(_write, file), kept
        except BaseException as error:
            if regular:
                said = "%s keeps what is translated; the same command with --resume continues it."
                logger.info(said, path)
            if isinstance(error, OSError):  # a full disk, for example
                error.filename = error.filename or path
            raise


def complete_sentences(path: str | Path, *, numbered: bool) -> tuple[int, int]:
    """The number of sentences that a file holds in full, and their size in bytes.

    A last line without its newline does not count. Nor does the last sentence of a ``numbered``
    file: more of its lines may have been due.
    """
    count = start = size = 0  # start: of the last sentence
    last = None
    with open(path, "rb") as file:
        for line in file:
            number = line.partition(b" |||")[0] if numbered else size
            if not line.endswith(b"\n"):
                break
            if number != last:
                count, start, last = count + 1, size, number
            size += len(line)
    return (count - 1, start) if numbered and count else (count, size)


def _write(file: BinaryIO | FileIO, lines: Sequence[str]) -> None:
    # Half of a surrogate pair, in a field of JSON that is passed through, becomes an escape again.
    text = "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")
    while text:  # a full disk may take a part
        text = text[file.write(text) :]
    file.flush()
