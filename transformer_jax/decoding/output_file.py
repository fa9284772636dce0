"""The output of decode.py: stdout, or a file that can be resumed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from io import FileIO
from itertools import groupby
from operator import itemgetter
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
    with ExitStack() as stack:
        file, kept = stack.enter_context(open(path, "ab", buffering=0)), 0
        if regular := Path(path).is_file():
            _lock(Path(path), stack)
            kept, size = complete_sentences(path, numbered=numbered) if resume else (0, 0)
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
    sentences = size = last = 0
    with open(path, "rb") as file:
        lines = enumerate(line for line in file if line.endswith(b"\n"))
        for _, group in groupby(lines, key=_number if numbered else itemgetter(0)):
            last = sum(len(line) for _, line in group)
            sentences, size = sentences + 1, size + last
    return (sentences - 1, size - last) if numbered and sentences else (sentences, size)


def _number(numbered_line: tuple[int, bytes]) -> bytes:
    return numbered_line[1].partition(b" |||")[0]


def _lock(path: Path, stack: ExitStack) -> None:
    try:
        stack.enter_context(locked(path))
    except BlockingIOError:
        raise UserError(
            f"{path} is being written by another process; wait for it, or choose another output."
        ) from None


def _write(file: BinaryIO | FileIO, lines: Sequence[str]) -> None:
    # Half of a surrogate pair, in a field of JSON that is passed through, becomes an escape again.
    text = "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")
    while text:  # a full disk may take a part
        text = text[file.write(text) :]
    file.flush()
