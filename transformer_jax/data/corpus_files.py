"""Corpora on disk: text is tokenised once; the token arrays are then opened by memory map.

A corpus lives in ``<directory>/<fingerprint>``, named after its text and all settings that matter.
It is written under another name and renamed when complete, so a crash leaves a temporary folder
that nobody opens. If two processes build one corpus, the second waits and opens what the first one
built.
"""

from __future__ import annotations

import dataclasses
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

import numpy as np

from transformer_jax.config import Config, DataConfig, PairsConfig
from transformer_jax.data.corpus import COUNTS, Corpus, Sequences
from transformer_jax.data.sources import read_pairs
from transformer_jax.data.tokenize import TokeniseJob, tokenised
from transformer_jax.errors import UserError
from transformer_jax.storage import local_path, locked
from transformer_jax.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_STALE_SECONDS = 600.0  # an abandoned temporary folder is deleted at this age
_TEMPORARY = "tmp-"
_MANIFEST = "manifest.json"
_SIDES = ("source", "target")


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

    Leaves out and counts pairs that are empty, longer than ``data`` allows or of too unequal length
    (in any segmentation); ``UserError`` if none is left. With ``sampling`` (see
    ``Tokenizer.encode_source``) draws ``num_samples`` segmentations. The result does not depend on
    ``data.workers``.
    """
    job = TokeniseJob(pairs, tokenizer, data)
    if sampling:
        job = dataclasses.replace(job, sampling=sampling, num_samples=num_samples, seed=seed)
    return _open_or_build(job, Path(directory))


def prepare_corpus(workdir: Path, config: Config, tokenizer: Tokenizer, name: str) -> Corpus:
    """The tokenised pairs of ``config.data.<name>`` (train, dev), built if need be.

    Only train is segmented at random.
    """
    corpus = build_corpus(
        getattr(config.data, name),
        tokenizer,
        config.data,
        corpus_folder(workdir, config),
        sampling=config.tokenizer.sampling if name == "train" else 0.0,
        num_samples=config.tokenizer.sampled_epochs,
        seed=config.seed,
    )
    counts = ", ".join(f"{count:,} {what}" for what, count in corpus.statistics.items())
    _log.info("%s pairs: %s", name, counts)
    return corpus


def corpus_folder(workdir: Path, config: Config) -> Path:
    """Where tokenised text is kept."""
    return local_path(config.data.cache) if config.data.cache else workdir / "corpus"


def _open_or_build(job: TokeniseJob, directory: Path) -> Corpus:
    directory.mkdir(parents=True, exist_ok=True)
    fingerprint = job.fingerprint()
    if corpus := open_corpus(directory, fingerprint):
        return corpus
    _remove_stale(directory)
    final = directory / fingerprint[:20]
    notice = f"Another process is tokenising the same text ({final}); waiting for it."
    with locked(_lock_file(final), wait=True, notice=notice):
        if corpus := open_corpus(directory, fingerprint):  # built while this process waited
            return corpus
        if final.exists():
            _log.warning("The tokenised corpus %s is damaged; it is built again.", final)
        temporary = directory / f"{_TEMPORARY}{final.name}-{uuid.uuid4().hex}"
        temporary.mkdir()
        try:
            _write(temporary, fingerprint, job)
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


def _write(folder: Path, fingerprint: str, job: TokeniseJob) -> None:
    counts = Counter(dict.fromkeys(COUNTS, 0))
    data = job.data
    pairs = read_pairs(job.pairs, data.root, invalid_utf8=data.invalid_utf8, counts=counts)
    with closing(tokenised(pairs, job)) as chunks:  # also after an error: its processes end
        for chunk in chunks:
            counts.update(chunk.statistics)
            for side, segmentations in zip(_SIDES, chunk.flat, strict=True):
                for v, (tokens, lengths) in enumerate(segmentations):
                    _append(_tokens_file(folder, side, v), tokens)
                    _append(folder / f"{side}_lengths.{v}", lengths)
    counts["read"] += counts["invalid_utf8"]
    _require_pairs(counts, job.pairs)
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


def _publish(temporary: Path, final: Path, fingerprint: str) -> Corpus:
    """Give the finished folder its name, unless another builder was faster: locks do not reach
    everywhere.
    """
    for path in (*temporary.iterdir(), temporary):
        _sync(path)
    exists, corpus = final.exists(), open_corpus(final.parent, fingerprint)
    if corpus is None:
        if exists:  # damaged
            final.rename(temporary / "damaged")
            shutil.rmtree(temporary / "damaged")
        try:
            temporary.rename(final)
        except OSError:
            if not final.exists():  # else the other builder's name for it came first
                raise
        _sync(final.parent)
        corpus = open_corpus(final.parent, fingerprint)
    assert corpus is not None, f"{final} was just written and does not open"
    return corpus


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_corpus(directory: Path, fingerprint: str) -> Corpus | None:
    """The corpus in ``directory`` with this fingerprint; None if it is absent or damaged."""
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
        return Corpus(
            fingerprint,
            (source, target),
            num_pairs=manifest["num_pairs"],
            statistics=manifest["statistics"],
            num_samples=manifest["num_samples"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _map(path: Path, dtype: str) -> np.ndarray:
    # an empty file cannot be mapped
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


def _require_pairs(statistics: dict[str, int], pairs: PairsConfig) -> None:
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
