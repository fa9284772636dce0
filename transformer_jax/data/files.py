"""The files of a text, on disk or in an object store: globs expanded, and digests of contents that
are remembered.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from transformer_jax.config import PairsConfig
from transformer_jax.errors import UserError
from transformer_jax.storage import is_stored, is_url, store_of

_DIGEST_CHARACTERS = 64
_SETTLED_SECONDS = 10.0  # more than the coarsest clock of a file system


@dataclass(frozen=True)
class Url:
    """What pathlib's Path is to a file on disk, to one that fsspec reads: s3://, gs://, az://,
    https:// and others.
    """

    name: str

    def __str__(self) -> str:
        return self.name

    def is_file(self) -> bool:
        """Whether it is there; ``UserError`` where the store does not tell."""
        return is_stored(*store_of(self.name))

    def open(self, mode: str = "rb") -> Any:
        """A stream of its bytes."""
        store, path = store_of(self.name)
        return store.open(path, mode)

    def version(self) -> str:
        """Another one when the content has changed, as the store tells (its ETag, or size and
        date); '' if it does not tell.
        """
        store, path = store_of(self.name)
        return "" if self.name.startswith(("http:", "https:")) else str(store.ukey(path))


File = Path | Url


def open_file(file: str | File) -> BinaryIO:
    """A stream of a file's bytes, as they are stored."""
    if isinstance(file, str):
        file = Url(file) if is_url(file) else Path(file)
    return file.open("rb")


def files_of(config: PairsConfig, root: str) -> list[tuple[File, ...]]:
    """The (source, target) files of a text, or the (file,) of each TSV or JSONL, in order; empty
    for other kinds.

    A name that is no file but has ``*``, ``?`` or ``[`` is a glob: it stands for all files that it
    matches, sorted. Raises ``UserError`` if that is none, or if source and target of a text match
    different numbers of them.
    """
    if config.kind in ("tsv", "jsonl"):
        return [(path,) for name in config.source for path in expanded(name, root)]
    if config.kind != "text":
        return []
    files: list[tuple[File, ...]] = []
    for source, target in zip(config.source, config.target, strict=True):
        sides = expanded(source, root), expanded(target, root)
        if len(sides[0]) != len(sides[1]):
            raise UserError(
                f"source {source!r} stands for {len(sides[0])} file(s) and target {target!r} for {len(sides[1])}; expected "
                f"as many of both: they pair up in sorted order. Relative names start from data.root = {root!r}."
            )
        files += zip(*sides)
    return files


def one_file_each(config: PairsConfig, root: str = "") -> list[PairsConfig]:
    """A text cut into what can be read apart, in order: a config for each file, or pair of files.

    TFDS, number names, and a text with a ``limit``, which counts through all files, cannot be cut.
    """
    files = files_of(config, root)
    if len(files) < 2 or config.limit is not None:
        return [config]
    names = [[(_absolute(file),) for file in sides] for sides in files]
    return [
        dataclasses.replace(config, source=source, target=target[0] if target else ())
        for source, *target in names
    ]


def digest(file: File, memory: Path | None = None) -> str:
    """SHA-256 (hex) of a file's content, or what the folder ``memory`` has for its name, size and
    time of last change.

    A file on disk that changed in the last seconds is not remembered: a second change might leave
    its time as it was.
    """
    state = _state(file)
    record = (
        memory / hashlib.sha256(json.dumps(state).encode()).hexdigest()
        if memory and state[-1]
        else None
    )
    if (
        record is not None
        and record.is_file()
        and len(known := record.read_text()) == _DIGEST_CHARACTERS
    ):
        return known
    with open_file(file) as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
    settled = isinstance(file, Url) or time.time() - file.stat().st_ctime > _SETTLED_SECONDS
    if record is not None and settled and _state(file) == state:
        with suppress(OSError):  # what is not remembered is only slower
            record.parent.mkdir(parents=True, exist_ok=True)
            # one torn by a crash is too short, and all who write it write the same
            record.write_text(found)
    return found


def _state(file: File) -> list[Any]:
    if isinstance(file, Url):
        return [file.name, file.version()]
    stat = file.stat()
    return [str(file.absolute()), stat.st_size, stat.st_ctime_ns]


def _absolute(file: File) -> str:
    return file.name if isinstance(file, Url) else str(file.absolute())


def expanded(name: str, root: str = "") -> list[File]:
    """The files that a name stands for, from the folder or URL ``root``: itself, or if it is a glob
    all that match, sorted.

    Raises ``UserError`` if a glob matches none.
    """
    if is_url(name) or (is_url(root) and not os.path.isabs(name)):
        url = Url(name if is_url(name) else f"{root.rstrip('/')}/{name}")
        if not glob.has_magic(url.name) or url.is_file():
            return [url]
        store, pattern = store_of(url.name)
        files: list[File] = [
            Url(store.unstrip_protocol(path))
            for path in sorted(store.glob(pattern))
            if store.isfile(path)
        ]
    else:
        name, root = os.path.expanduser(name), os.path.expanduser(root)
        path = Path(root, name)
        if not glob.has_magic(name) or path.exists():
            return [path]
        found = glob.glob(os.path.join(glob.escape(root), name), recursive=True)
        files = [Path(file) for file in sorted(found) if os.path.isfile(file)]
    if not files:
        raise UserError(
            f"{name!r} matches no file; expected at least one, with * for any characters, ? for one, [ab] for one of these "
            f"and ** for any folders.{f' Relative names start from data.root = {root!r}.' if root else ''}"
        )
    return files
