"""The tokenised corpus: flat token arrays on disk, built once by several processes, then opened by
memory map.

A corpus lives in ``<directory>/<fingerprint>``. It is written under another name and renamed when
whole, so what opens is whole: a crash leaves a temporary folder that nobody opens. Of two builders
the second waits, and finds the first one's work.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transformer_jax.config import DataConfig, PairsConfig
from transformer_jax.data.files import one_file_each
from transformer_jax.data.joined import Array
from transformer_jax.data.sources import read_pairs
from transformer_jax.data.tokenize import TokeniseJob, flatten, tokenised
from transformer_jax.errors import UserError
from transformer_jax.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_STALE_SECONDS = 600.0  # an abandoned temporary folder is deleted at this age
_TEMPORARY = "tmp-"
_MANIFEST = "manifest.json"
_SIDES = ("source", "target")


@dataclass(frozen=True, eq=False)
class Corpus:
    """N pairs in K segmentations (1 unless sampled): sequence ``v * N + i`` is pair ``i`` in
    segmentation ``v``.

    Sequence ``j`` of a side is ``tokens[offsets[j] : offsets[j + 1]]``. Each ends with EOS; there
    is no BOS.
    """

    fingerprint: str
    num_pairs: int
    num_samples: int
    source_tokens: Array
    """uint16, or int32 where the vocabulary is larger than that."""
    source_offsets: Array
    """int64 [K * N + 1]."""
    target_tokens: Array
    target_offsets: Array
    statistics: dict[str, int]
    """Pairs: read, kept, and left out as empty, too_long, ratio, invalid_utf8."""
    directory: Path | None = None
    """Where what is worked out from a large corpus is kept for the next time; None: nowhere."""

    @property
    def source_lengths(self) -> np.ndarray:
        """int32 [K, N], EOS counted."""
        return self.lengths(0, self.num_pairs)[0]

    @property
    def target_lengths(self) -> np.ndarray:
        """int32 [K, N], EOS counted."""
        return self.lengths(0, self.num_pairs)[1]

    def lengths(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and target lengths of the pairs from start to stop, each int32 [K, stop - start],
        EOS counted.
        """
        sides = np.empty((2, self.num_samples, stop - start), np.int32)
        for side, offsets in zip(sides, (self.source_offsets, self.target_offsets)):
            for v in range(self.num_samples):
                ends = offsets[v * self.num_pairs + start : v * self.num_pairs + stop + 1]
                np.subtract(ends[1:], ends[:-1], out=side[v], casting="unsafe")
        return sides[0], sides[1]

    @classmethod
    def from_lists(
        cls, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> Corpus:
        """A corpus in memory from token ids without EOS, which is added here."""
        if len(sources) != len(targets):
            raise UserError(
                f"There are {len(sources)} sources and {len(targets)} targets; expected as many of both."
            )
        arrays = [
            array for side in (sources, targets) for array in flatten(side, np.dtype(np.int32))
        ]
        offsets = [
            np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) for lengths in arrays[1::2]
        ]
        digest = hashlib.sha256()
        for array in arrays:
            digest.update(array.tobytes())
        n = len(sources)
        statistics = {
            "read": n,
            "kept": n,
            "empty": 0,
            "too_long": 0,
            "ratio": 0,
            "invalid_utf8": 0,
        }
        return cls(
            digest.hexdigest(), n, 1, arrays[0], offsets[0], arrays[2], offsets[1], statistics
        )


def build_corpus(
    pairs: PairsConfig,
    tokenizer: Tokenizer,
    data: DataConfig,
    directory: str | Path,
    *,
    sampling: float = 0.0,
    num_samples: int = 1,
    seed: int = 0,
) -> Corpus:
    """Tokenise ``pairs`` into ``directory``, or open what an earlier call with the same inputs and
    settings left there.

    Pairs that are empty, longer than ``data`` allows or of too unequal length (in any segmentation)
    are left out and counted; ``UserError`` if none is left. With ``sampling`` (see
    ``Tokenizer.encode_source``) ``num_samples`` segmentations are drawn. The result does not depend
    on ``data.workers``.
    """
    num_samples = num_samples if sampling else 1
    job = TokeniseJob(tokenizer, data, float(sampling), num_samples, seed if sampling else 0)
    return build(job, pairs, Path(directory))


def build(
    job: TokeniseJob, pairs: PairsConfig, directory: Path, *, may_be_empty: bool = False
) -> Corpus:
    """``build_corpus`` for a job; one part of many may be empty."""
    directory.mkdir(parents=True, exist_ok=True)
    final, fingerprint = locate(job, pairs, directory)
    if corpus := open_corpus(final, fingerprint):
        return corpus
    _remove_stale(directory)
    with _locked(final):
        if corpus := open_corpus(final, fingerprint):  # built while this process waited
            return corpus
        if final.exists():
            _log.warning("The tokenised corpus %s is damaged; it is built again.", final)
        temporary = directory / f"{_TEMPORARY}{final.name}-{uuid.uuid4().hex}"
        temporary.mkdir()
        try:
            _write(temporary, fingerprint, pairs, job, may_be_empty)
            return _publish(temporary, final, fingerprint)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(
                f"The disk of {str(directory)!r} is full; expected room for the tokenised corpus: free some, or set data.cache."
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def locate(job: TokeniseJob, pairs: PairsConfig, directory: Path) -> tuple[Path, str]:
    """The folder in ``directory`` of the corpus that a job makes of a text, and its fingerprint."""
    fingerprint = job.fingerprint(pairs, digests=directory / "digests")
    return directory / fingerprint[:20], fingerprint


def require_pairs(statistics: dict[str, int], pairs: PairsConfig) -> None:
    """``UserError`` if no pair was kept."""
    if not statistics["kept"]:
        where = (
            ", ".join(map(repr, pairs.source[:3])) + ", ..." * (len(pairs.source) > 3)
            or f"data of kind {pairs.kind!r}"
        )
        raise UserError(
            "No sentence pair is left of {read:,} read in {where}: {empty:,} empty, {too_long:,} longer than "
            "data.max_source_length or data.max_target_length, {ratio:,} beyond data.max_length_ratio, {invalid_utf8:,} not "
            "UTF-8; expected at least one: check the text, or relax these settings.".format(
                **statistics, where=where
            )
        )


def _write(
    folder: Path, fingerprint: str, pairs: PairsConfig, job: TokeniseJob, may_be_empty: bool
) -> None:
    counts = {"read": 0, "kept": 0, "empty": 0, "too_long": 0, "ratio": 0, "invalid_utf8": 0}
    files = (
        read_pairs(file, job.data.root, invalid_utf8=job.data.invalid_utf8, counts=counts)
        for file in one_file_each(pairs, job.data.root)
    )
    with closing(tokenised(files, job)) as chunks:  # also after an error: its processes end
        for chunk in chunks:
            for name, count in chunk.statistics.items():
                counts[name] += count
            for side, flat in zip(_SIDES, chunk.flat, strict=True):
                for v, (tokens, lengths) in enumerate(flat):
                    _append(folder / f"{side}_tokens.{v}", tokens)
                    _append(folder / f"{side}_lengths.{v}", lengths)
    counts["read"] += counts["invalid_utf8"]
    if not may_be_empty:
        require_pairs(counts, pairs)
    for side in _SIDES:
        for v in range(job.num_samples):  # there may have been no chunk
            (folder / f"{side}_tokens.{v}").touch()
            (folder / f"{side}_lengths.{v}").touch()
        first, *others = [folder / f"{side}_tokens.{v}" for v in range(job.num_samples)]
        with open(first, "ab") as whole:
            for other in others:
                with open(other, "rb") as part:
                    shutil.copyfileobj(part, whole, 2**20)
                other.unlink()
        first.rename(folder / f"{side}_tokens")
        offset = 0
        _append(folder / f"{side}_offsets", np.zeros(1, np.int64))
        for v in range(job.num_samples):
            lengths_file = folder / f"{side}_lengths.{v}"
            with open(lengths_file, "rb") as file:
                while len(lengths := np.fromfile(file, np.int32, 2**20)):
                    ends = offset + np.cumsum(lengths, dtype=np.int64)
                    offset = int(ends[-1])
                    _append(folder / f"{side}_offsets", ends)
            lengths_file.unlink()
    manifest = {
        "fingerprint": fingerprint,
        "num_pairs": counts["kept"],
        "num_samples": job.num_samples,
        "dtypes": [dtype.name for dtype in job.dtypes()],
        "sizes": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
        "statistics": counts,
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _append(path: Path, array: np.ndarray) -> None:
    # opened anew each time: with many segmentations there are many files
    with open(path, "ab") as file:
        file.write(array.data)


def _publish(temporary: Path, final: Path, fingerprint: str) -> Corpus:
    """Give the finished folder its name, unless another builder's corpus bears it: locks do not
    reach everywhere.
    """
    for path in (*temporary.iterdir(), temporary):
        _sync(path)
    corpus = open_corpus(final, fingerprint)
    if corpus is None:
        if final.exists():  # damaged
            final.rename(temporary / "damaged")
            shutil.rmtree(temporary / "damaged")
        temporary.rename(final)
        _sync(final.parent)
        corpus = open_corpus(final, fingerprint)
    assert corpus is not None, f"{final} was just written and does not open"
    return corpus


def open_corpus(folder: Path, fingerprint: str) -> Corpus | None:
    """The corpus in ``folder``; None if it is absent or damaged."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        whole = all(
            (folder / name).stat().st_size == size for name, size in manifest["sizes"].items()
        )
        if not whole or manifest["fingerprint"] != fingerprint:
            return None
        tokens = [
            _map(folder / f"{side}_tokens", np.dtype(dtype))
            for side, dtype in zip(_SIDES, manifest["dtypes"], strict=True)
        ]
        offsets = [_map(folder / f"{side}_offsets", np.dtype(np.int64)) for side in _SIDES]
        return Corpus(
            fingerprint,
            manifest["num_pairs"],
            manifest["num_samples"],
            tokens[0],
            offsets[0],
            tokens[1],
            offsets[1],
            manifest["statistics"],
            folder.parent,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    # nothing cannot be mapped
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


def _remove_stale(directory: Path) -> None:
    """Delete what killed builders left: their locks went with them."""
    for folder in directory.glob(f"{_TEMPORARY}*"):
        final = directory / folder.name.removeprefix(_TEMPORARY).partition("-")[0]
        with suppress(OSError):
            newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - newest > _STALE_SECONDS:
                with _locked(final, wait=False):
                    shutil.rmtree(folder)


@contextmanager
def _locked(final: Path, *, wait: bool = True) -> Iterator[None]:
    """Be the only builder of a corpus, or with ``wait=False`` raise ``OSError``; the lock ends with
    the process.

    A file is locked, not a folder, whose lock would not be seen by other machines on a file system
    of the network.
    """
    with open(final.parent / f".{final.name}.lock", "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            _log.info("Another process is tokenising the same text (%s); waiting for it.", final)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: age alone protects what a builder writes
            if not wait:
                raise
        yield


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
