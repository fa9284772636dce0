"""Expansion of file names, globs, folders and URLs of input files."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from transformer_jax.errors import UserError
from transformer_jax.storage.files import AnyPath, is_url, kind_of, remote_path, to_path


def expanded(name: str, root: str = "") -> list[AnyPath]:
    """Return the file with this name or, for a glob, all matching files in sorted order.

    Relative names start from the folder or URL ``root``. The name of an existing file is never
    treated as a glob. Raises ``UserError`` if a glob does not match any files, or matches a file
    and its ``.gz`` copy.
    """
    name, root = os.path.expanduser(name), os.path.expanduser(root)
    full = name if is_url(name) else os.path.join(root, name)
    path = to_path(full)
    if not glob.has_magic(name) or kind_of(path):
        return [path]
    pattern = name if is_url(name) else os.path.join(glob.escape(root), name)
    if isinstance(path, Path):
        found = glob.glob(pattern, recursive=True)
    else:
        matches = path.fs.glob(remote_path(pattern).path)
        found = [path.fs.unstrip_protocol(match) for match in matches]
    files = [file for file in map(to_path, sorted(found)) if kind_of(file) == "file"]
    if not files:
        start = f" Relative names start from data.root = {root!r}." if root else ""
        raise UserError(
            f"{name!r} does not match any files. In a glob, * matches any characters, ? matches "
            f"one character, [ab] matches a or b, and ** matches any folders.{start}"
        )
    names = dict.fromkeys(map(str, files))
    if twice := next((each for each in names if f"{each}.gz" in names), None):
        raise UserError(
            f"{name!r} matches both {twice!r} and its compressed copy, whose lines would count "
            "twice; expected one of them. Remove or rename the other, or use a narrower glob."
        )
    return files


def _parquet_files(folder: str, root: str) -> list[AnyPath]:
    """Return the Parquet files in a folder. Raises ``UserError`` if they are of several splits."""
    files = expanded(f"{glob.escape(folder)}/*.parquet", root)
    matches = [re.match(r"(.+)-\d+-of-\d+", file.name) for file in files]  # as on Hugging Face
    splits = sorted({match[1] for match in matches if match})
    if len(splits) > 1:
        raise UserError(
            f"Folder {folder!r} contains several splits ({', '.join(splits)}); choose one with a "
            f"glob, such as '{folder}/train-*.parquet'."
        )
    return files


def find_files(names: Iterable[tuple[str, ...]], root: str, kind: str) -> list[tuple[AnyPath, ...]]:
    """Return the files with these names, such as (source, target), in order, with globs expanded.

    Does not open the files. A folder of kind "parquet" stands for its .parquet files. Raises
    ``UserError`` if a file is missing, or if source and target match different numbers of files.
    """
    found: list[tuple[AnyPath, ...]] = []
    for sides in names:
        files = [expanded(name, root) for name in sides]
        if kind == "parquet" and kind_of(files[0][0]) == "directory":
            files = [_parquet_files(sides[0].rstrip("/"), root)]
        counts = [len(each) for each in files]
        if len(set(counts)) > 1:
            each = zip(("source", "target", "alignments"), sides, counts)
            matches = (f"{side} {name!r} matches {count} file(s)" for side, name, count in each)
            raise UserError(
                f"{' and '.join(matches)}; expected the same number, paired in sorted order. "
                f"Relative names start from data.root = {root!r}."
            )
        found += zip(*files)
    for file in chain.from_iterable(found):
        if kind_of(file) != "file":
            raise UserError(
                f"{str(file)!r} is not a file; expected a {kind} file as source or target (or "
                "alignments) of data.train, data.dev or data.test. Relative names start from "
                f"data.root = {root!r}."
            )
    return found
