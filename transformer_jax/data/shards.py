"""A shard of a corpus on disk: token arrays, tokenised once, then opened by memory map.

A shard lives in ``<directory>/<fingerprint>``, named after its text and all settings that matter.
It is written under another name and renamed when complete, so a crash leaves a temporary folder
that nobody opens. If two processes build one shard, the second waits and opens what the first one
built.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
import uuid
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from transformer_jax.config import PairsConfig
from transformer_jax.data.files import one_file_each
from transformer_jax.data.sources import read_pairs
from transformer_jax.data.tokenize import TokeniseJob, tokenised
from transformer_jax.errors import UserError
from transformer_jax.storage import locked

_log = logging.getLogger(__name__)

_STALE_SECONDS = 600.0  # an abandoned temporary folder is deleted at this age
_TEMPORARY = "tmp-"
_MANIFEST = "manifest.json"
_SIDES = ("source", "target")
COUNTS = ("read", "kept", "empty", "too_long", "ratio", "invalid_utf8")
"""Of pairs, in ``Shard.statistics``: read, kept, and left out for these reasons."""


class Sequences(NamedTuple):
    """Sequence j is ``tokens[offsets[j] : offsets[j + 1]]``; it ends with EOS and has no BOS."""

    tokens: np.ndarray
    """uint16, or int32 where the vocabulary is larger than that."""
    offsets: np.ndarray
    """int64."""


class Shard(NamedTuple):
    """N pairs in K segmentations: sequence ``v * N + i`` is pair ``i`` in segmentation ``v``."""

    fingerprint: str
    sides: tuple[Sequences, Sequences]
    """Source and target."""
    num_pairs: int
    statistics: dict[str, int]


def build_shard(job: TokeniseJob, directory: Path, *, may_be_empty: bool = False) -> Shard:
    """The shard that a job makes; opened if it is there already."""
    directory.mkdir(parents=True, exist_ok=True)
    fingerprint = job.fingerprint(directory)
    if shard := open_shard(directory, fingerprint):
        return shard
    _remove_stale(directory)
    final = directory / fingerprint[:20]
    notice = f"Another process is tokenising the same text ({final}); waiting for it."
    with locked(_lock_file(final), wait=True, notice=notice):
        if shard := open_shard(directory, fingerprint):  # built while this process waited
            return shard
        if final.exists():
            _log.warning("The tokenised corpus %s is damaged; it is built again.", final)
        temporary = directory / f"{_TEMPORARY}{final.name}-{uuid.uuid4().hex}"
        temporary.mkdir()
        try:
            _write(temporary, fingerprint, job, may_be_empty=may_be_empty)
            return _publish(temporary, final, fingerprint)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(
                f"The disk of {str(directory)!r} is full; expected room for the tokenised corpus: "
                "free some, or set data.cache."
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _lock_file(final: Path) -> Path:
    # a file: other machines would not see the lock of a folder on a network file system
    return final.with_name(f".{final.name}.lock")


def _remove_stale(directory: Path) -> None:
    """Delete what killed builders left: their locks went with them."""
    for folder in directory.glob(f"{_TEMPORARY}*"):
        final = directory / folder.name.removeprefix(_TEMPORARY).partition("-")[0]
        with suppress(OSError):
            newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - newest > _STALE_SECONDS:
                with locked(_lock_file(final)) as held:
                    if held:
                        shutil.rmtree(folder)


def _write(folder: Path, fingerprint: str, job: TokeniseJob, *, may_be_empty: bool) -> None:
    counts = Counter(dict.fromkeys(COUNTS, 0))
    data = job.data
    files = (
        read_pairs(file, data.root, invalid_utf8=data.invalid_utf8, counts=counts)
        for file in one_file_each(job.pairs, data.root)
    )
    with closing(tokenised(files, job)) as chunks:  # also after an error: its processes end
        for chunk in chunks:
            counts.update(chunk.statistics)
            for side, segmentations in zip(_SIDES, chunk.flat, strict=True):
                for v, (tokens, lengths) in enumerate(segmentations):
                    _append(_tokens_file(folder, side, v), tokens)
                    _append(folder / f"{side}_lengths.{v}", lengths)
    counts["read"] += counts["invalid_utf8"]
    if not may_be_empty:
        require_pairs(counts, job.pairs)
    for side in _SIDES:
        _join_segmentations(folder, side, job.num_samples)
    manifest = {
        "fingerprint": fingerprint,
        "num_pairs": counts["kept"],
        "num_samples": job.num_samples,
        "dtypes": [dtype.name for dtype in job.dtypes()],
        "sizes": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
        "statistics": counts,
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _join_segmentations(folder: Path, side: str, num_samples: int) -> None:
    """Put the segmentations' tokens into one file, and make offsets of their lengths."""
    offset = 0
    _append(folder / f"{side}_offsets", np.zeros(1, np.int64))
    for v in range(num_samples):
        lengths_file, tokens_file = folder / f"{side}_lengths.{v}", _tokens_file(folder, side, v)
        lengths_file.touch()  # there may have been no chunk
        tokens_file.touch()
        if v:
            with (
                open(tokens_file, "rb") as tokens,
                open(_tokens_file(folder, side, 0), "ab") as all,
            ):
                shutil.copyfileobj(tokens, all, 2**20)
            tokens_file.unlink()
        with open(lengths_file, "rb") as file:
            while len(lengths := np.fromfile(file, np.int32, 2**20)):
                ends = offset + np.cumsum(lengths, dtype=np.int64)
                offset = int(ends[-1])
                _append(folder / f"{side}_offsets", ends)
        lengths_file.unlink()


def _tokens_file(folder: Path, side: str, v: int) -> Path:
    return folder / (f"{side}_tokens.{v}" if v else f"{side}_tokens")


def _append(path: Path, array: np.ndarray) -> None:
    # opened anew each time: with many segmentations there are many files
    with open(path, "ab") as file:
        file.write(array.data)


def _publish(temporary: Path, final: Path, fingerprint: str) -> Shard:
    """Give the finished folder its name, unless another builder was faster: locks do not reach
    everywhere.
    """
    for path in (*temporary.iterdir(), temporary):
        _sync(path)
    exists, shard = final.exists(), open_shard(final.parent, fingerprint)
    if shard is None:
        if exists:  # damaged
            final.rename(temporary / "damaged")
            shutil.rmtree(temporary / "damaged")
        try:
            temporary.rename(final)
        except OSError:
            if not final.exists():  # else the other builder's name for it came first
                raise
        _sync(final.parent)
        shard = open_shard(final.parent, fingerprint)
    assert shard is not None, f"{final} was just written and does not open"
    return shard


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_shard(directory: Path, fingerprint: str) -> Shard | None:
    """The shard in ``directory`` with this fingerprint; None if it is absent or damaged."""
    folder = directory / fingerprint[:20]
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        sizes = manifest["sizes"]
        if manifest["fingerprint"] != fingerprint or any(
            (folder / name).stat().st_size != size for name, size in sizes.items()
        ):
            return None
        source, target = (
            Sequences(
                _map(folder / f"{side}_tokens", dtype), _map(folder / f"{side}_offsets", "int64")
            )
            for side, dtype in zip(_SIDES, manifest["dtypes"], strict=True)
        )
        num_pairs, statistics = manifest["num_pairs"], manifest["statistics"]
        return Shard(fingerprint, (source, target), num_pairs, statistics)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _map(path: Path, dtype: str) -> np.ndarray:
    # an empty file cannot be mapped
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


def require_pairs(statistics: dict[str, int], pairs: PairsConfig) -> None:
    """``UserError`` if no pair was kept."""
    if not statistics["kept"]:
        where = (
            ", ".join(map(repr, pairs.source[:3])) + ", ..." * (len(pairs.source) > 3)
            or f"data of kind {pairs.kind!r}"
        )
        raise UserError(
            "No sentence pair is left of {read:,} read in {where}: {empty:,} empty, {too_long:,} "
            "longer than data.max_source_length or data.max_target_length, {ratio:,} beyond "
            "data.max_length_ratio, {invalid_utf8:,} not UTF-8; expected at least one: check the "
            "text, or relax these settings.".format(**statistics, where=where)
        )
