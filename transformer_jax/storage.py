"""Files on this machine: one atomic write, one lock."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace the content of a file: a reader, or a crash, sees the old content or the new, never
    a part of it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock file ``path`` for as long as the context, or this process, lasts.

    Raises ``BlockingIOError`` if another process holds it, unless told to ``wait``. A file system
    without locks is reported, and the work goes on.
    """
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:
            log.warning("%s is on a file system without locks: use it from one process.", path)
        yield
