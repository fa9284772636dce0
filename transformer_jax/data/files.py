"""The files of a text: globs expanded, and digests of contents that are remembered."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from transformer_jax.config import PairsConfig
from transformer_jax.errors import UserError

_DIGEST_CHARACTERS = 64
_SETTLED_SECONDS = 10.0  # more than the coarsest clock of a file system


def files_of(config: PairsConfig, root: str) -> list[tuple[Path, ...]]:
    """The (source, target) files of a text, or the (file,) of each TSV or JSONL, in order; empty for other kinds.

    A name that is no file but has ``*``, ``?`` or ``[`` is a glob: it stands for all files that it matches, sorted. Raises
    ``UserError`` if that is none, or if source and target of a text match different numbers of them.
    """
    if config.kind in ("tsv", "jsonl"):
        return [(path,) for name in config.source for path in _expanded(name, root)]
    if config.kind != "text":
        return []
    files: list[tuple[Path, ...]] = []
    for source, target in zip(config.source, config.target, strict=True):
        sides = _expanded(source, root), _expanded(target, root)
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
    names = [[(str(path.absolute()),) for path in paths] for paths in files]
    return [dataclasses.replace(config, source=source, target=target[0] if target else ()) for source, *target in names]


def digest(path: Path, memory: Path | None = None) -> str:
    """SHA-256 (hex) of a file's content, or what the folder ``memory`` has for its path, size and time of last change.

    A file that changed in the last seconds is not remembered: a second change might leave its time as it was.
    """
    before = path.stat()
    state = json.dumps([str(path.absolute()), before.st_size, before.st_ctime_ns])
    record = memory / hashlib.sha256(state.encode()).hexdigest() if memory else None
    if record is not None and record.is_file() and len(known := record.read_text()) == _DIGEST_CHARACTERS:
        return known
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    after = path.stat()
    settled = time.time() - after.st_ctime > _SETTLED_SECONDS and before.st_ctime_ns == after.st_ctime_ns
    if record is not None and settled:
        with suppress(OSError):  # what is not remembered is only slower
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(found)  # one torn by a crash is too short, and all who write it write the same
    return found


def _expanded(name: str, root: str) -> list[Path]:
    name, root = os.path.expanduser(name), os.path.expanduser(root)
    path = Path(root, name)
    if not glob.has_magic(name) or path.exists():
        return [path]
    found = glob.glob(os.path.join(glob.escape(root), name), recursive=True)
    files = [Path(file) for file in sorted(found) if os.path.isfile(file)]
    if not files:
        raise UserError(
            f"{name!r} matches no file; expected at least one, with * for any characters, ? for one, [ab] for one of these "
            f"and ** for any folders. Relative names start from data.root = {root!r}."
        )
    return files
