"""Files here and in object stores: which names are URLs, one atomic write, one lock."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec

from transformer_jax.errors import UserError

log = logging.getLogger(__name__)


def is_url(name: str) -> bool:
    """Whether a name is a URL for fsspec rather than a path."""
    return "://" in name


def store_of(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and what the URL is called there."""
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # a package that is not installed; no such protocol
        raise UserError(
            f"{url!r} cannot be opened: {error}. Expected a path, or a URL that fsspec knows."
        ) from None


def is_stored(store: Any, path: str) -> bool:
    """Whether a store has this file; ``UserError`` where it does not tell, for want of a password
    or a network say.
    """
    try:  # not isfile() or exists(), which with some stores are False for any error
        return bool(store.info(path)["type"] == "file")
    except FileNotFoundError:
        return False
    except Exception as error:
        raise UserError(
            f"{store.unstrip_protocol(path)!r} cannot be read: {str(error) or type(error).__name__}"
        ) from error


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
def locked(path: Path, *, wait: bool = False, notice: str = "") -> Iterator[bool]:
    """Hold the lock file ``path`` until the context or this process ends.

    Raises ``BlockingIOError`` if another process holds it; with ``wait`` it logs ``notice`` and
    waits instead. Yields False, with a warning, on a file system without locks.
    """
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            if not wait:
                raise
            if notice:
                log.info(notice)
            fcntl.flock(file, fcntl.LOCK_EX)
            held = True
        except OSError:
            log.warning("%s is on a file system without locks: use it from one process.", path)
            held = False
        yield held
