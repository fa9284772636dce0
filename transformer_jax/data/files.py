"""Expansion of file names, globs, folders and URLs of input files."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from transformer_jax.data.text_files import COMPRESSED_SUFFIX
from transformer_jax.errors import UserError
from transformer_jax.storage.files import AnyPath, is_url, kind_of, remote_path, to_path

_SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev", "devel", "development"},
    "test": {"test", "testing", "eval", "evaluation"},
}


def expanded(name: str, root: str = "") -> list[AnyPath]:
    """Return the file with this name or, for a glob, all matching files in sorted order.

    Relative names start from the folder or URL ``root``. The name of an existing file is never
    treated as a glob. Raises ``UserError`` if a glob does not match any files, or matches a file
    and its compressed copy.
    """
    name = os.path.expanduser(name)
    root = os.path.expanduser(root)
    full_name = name if is_url(name) else os.path.join(root, name)
    path = to_path(full_name)
    if not glob.has_magic(name) or kind_of(path):
        return [path]
    pattern = name if is_url(name) else os.path.join(glob.escape(root), name)
    if isinstance(path, Path):
        matches = glob.glob(pattern, recursive=True)
    else:
        matches = [
            path.fs.unstrip_protocol(match) for match in path.fs.glob(remote_path(pattern).path)
        ]
    files = [file for file in map(to_path, sorted(matches)) if kind_of(file) == "file"]
    if not files:
        start = f" Relative names start from data.root = {root!r}." if root else ""
        raise UserError(
            f"{name!r} does not match any files. In a glob, * matches any characters, ? matches "
            f"one character, [ab] matches a or b, and ** matches any folders.{start}"
        )
    names = {str(file) for file in files}
    for file in files:
        if f"{file}{COMPRESSED_SUFFIX}" in names:
            raise UserError(
                f"{name!r} matches both {str(file)!r} and its compressed copy, so every line would "
                "count twice. Remove or rename one of the two files, or use a narrower glob."
            )
    return files


def _parquet_files(folder: str, root: str) -> list[AnyPath]:
    """Return the Parquet files in a folder. Raises ``UserError`` if they are of several splits."""
    files = expanded(f"{glob.escape(folder)}/*.parquet", root)
    splits = {split for file in files if (split := _split_of(file.name))}
    if len(splits) > 1:
        raise UserError(
            f"Folder {folder!r} contains several splits ({', '.join(sorted(splits))}); choose one "
            f"with a glob, such as '{folder}/train*.parquet'."
        )
    return files


def _split_of(name: str) -> str:
    """Return the split in the name of a file, as Hugging Face's datasets names them, or ""."""
    words = re.split(r"[^a-z]+", name.lower())
    for split, spellings in _SPLITS.items():
        if any(word in spellings for word in words):
            return split
    match = re.match(r"(.+)-\d+-of-\d+", name)  # for example newstest2014-00000-of-00001.parquet
    return match[1] if match else ""


def find_files(names: Iterable[tuple[str, ...]], root: str, kind: str) -> list[tuple[AnyPath, ...]]:
    """Return the files with these names, such as (source, target), in order, with globs expanded.

    Does not open the files. A folder of kind "parquet" stands for its .parquet files. Raises
    ``UserError`` if a file is missing, or if source and target match different numbers of files.
    """
    matched_files: list[tuple[AnyPath, ...]] = []
    for sides in names:
        files = [expanded(name, root) for name in sides]
        if kind == "parquet" and kind_of(files[0][0]) == "directory":
            files = [_parquet_files(sides[0].rstrip("/"), root)]
        counts = [len(matches) for matches in files]
        if len(set(counts)) > 1:
            descriptions = [
                f"{side} {name!r} matches {count} file(s)"
                for side, name, count in zip(("source", "target", "alignments"), sides, counts)
            ]
            raise UserError(
                f"{' and '.join(descriptions)}; expected the same number, paired in sorted order. "
                f"Relative names start from data.root = {root!r}."
            )
        matched_files += zip(*files)
    for file in chain.from_iterable(matched_files):
        if kind_of(file) != "file":
            raise UserError(
                f"{str(file)!r} is not a file; expected a {kind} file as source or target (or "
                "alignments) of data.train, data.dev or data.test. Relative names start from "
                f"data.root = {root!r}."
            )
    return matched_files
