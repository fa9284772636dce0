"""The tokenised corpus: token arrays of sentence pairs, in memory or in a folder.

Text is tokenised once, into ``<directory>/<fingerprint>``, a folder named after the text and all
settings that matter; its arrays are then opened by memory map. It is written under another name and
renamed when complete. Its manifest has the checksum of each array, so the folder can be copied.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import shutil
import uuid
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from transformer_jax.config import Config, DataConfig, PairsConfig
from transformer_jax.data.sources import ParallelText
from transformer_jax.data.tokenize import TokeniseJob, flatten, tokenised
from transformer_jax.errors import UserError, shown
from transformer_jax.storage import local_path, locked
from transformer_jax.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

COUNTS = ("read", "kept", "empty", "too_long", "ratio", "invalid_utf8")
"""Of pairs, in ``Corpus.statistics``: read, kept, and left out for these reasons."""

_TEMPORARY = "tmp-"
MANIFEST = "manifest.json"
_SIDES = ("source", "target")


class Sequences(NamedTuple):
    """Sequence j is ``tokens[offsets[j] : offsets[j + 1]]``; it ends with EOS and has no BOS."""

    tokens: np.ndarray
    """uint16, or int32 where the vocabulary is larger than that."""
    offsets: np.ndarray
    """int64."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """N pairs in K segmentations (1 unless sampled).

    Sequence ``i * K + v`` is pair ``i`` in segmentation ``v``.
    """

    fingerprint: str
    sides: tuple[Sequences, Sequences]
    """Source and target."""
    statistics: dict[str, int]
    """Pairs: read, kept, and left out as empty, too_long, ratio, invalid_utf8."""
    num_samples: int = 1
    """K."""

    @property
    def num_pairs(self) -> int:
        """N."""
        return (len(self.sides[0].offsets) - 1) // self.num_samples

    def lengths(self) -> np.ndarray:
        """Source and target lengths, EOS counted: int32 [2, K, N]."""
        lengths = np.stack([np.diff(offsets).astype(np.int32) for _, offsets in self.sides])
        return lengths.reshape(2, self.num_pairs, self.num_samples).swapaxes(1, 2)

    def read(self, side: int, pairs: np.ndarray, v: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """The source (side 0) or target (1) tokens of these pairs in segmentation ``v``, one
        sequence after another, and the sequences' lengths.
        """
        tokens, offsets = self.sides[side]
        sequences = pairs.astype(np.int64) * self.num_samples + v
        starts = offsets[sequences]
        lengths = offsets[sequences + 1] - starts
        return tokens[ranges(starts, lengths)], lengths

    @classmethod
    def from_lists(
        cls, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> Corpus:
        """A corpus in memory from token ids without EOS, which is added here."""
        if len(sources) != len(targets):
            raise UserError(
                f"There are {len(sources)} sources and {len(targets)} targets; expected as many of "
                "both."
            )
        digest, sides = hashlib.sha256(), []
        for lists in (sources, targets):
            tokens, lengths = flatten(lists, np.dtype(np.int32))
            digest.update(tokens.tobytes())
            digest.update(lengths.tobytes())
            offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            sides.append(Sequences(tokens, offsets))
        statistics = dict.fromkeys(COUNTS, 0) | {"read": len(sources), "kept": len(sources)}
        fingerprint = digest.hexdigest()
        return cls(fingerprint, (sides[0], sides[1]), statistics)


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``arange(start, start + count)`` for each, one after another."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)


def build_corpus(
    text: PairsConfig | ParallelText,
    tokenizer: Tokenizer,
    data: DataConfig,
    directory: str | Path,
    *,
    sampling: float = 0.0,
    num_samples: int = 1,
    seed: int = 0,
) -> Corpus:
    """Tokenise ``text`` into ``directory``, or open what an earlier call with the same inputs and
    settings left there.

    Leaves out and counts pairs that are empty, longer than ``data`` allows or of too unequal length
    (in any segmentation); ``UserError`` if none is left. With ``sampling`` (see
    ``Tokenizer.source.encode``) draws ``num_samples`` segmentations. The result does not depend on
    ``data.workers``.
    """
    if isinstance(text, PairsConfig):
        text = ParallelText(text, data.root)
    sampled = (sampling, num_samples, seed) if sampling else ()
    return _open_or_build(text, TokeniseJob(tokenizer, data, *sampled), Path(directory))


def prepare_corpus(
    directory: Path, text: ParallelText, tokenizer: Tokenizer, config: Config, name: str
) -> Corpus:
    """The tokenised text of ``config.data.<name>`` (train, dev), built if need be.

    Only train is segmented at random.
    """
    corpus = build_corpus(
        text,
        tokenizer,
        config.data,
        directory,
        sampling=config.tokenizer.sampling if name == "train" else 0.0,
        num_samples=config.tokenizer.sampled_epochs,
        seed=config.seed,
    )
    counts = ", ".join(f"{count:,} {what}" for what, count in corpus.statistics.items())
    _log.info("%s pairs: %s", name, counts)
    return corpus


def corpus_folder(workdir: Path, config: Config) -> Path:
    """The directory of tokenised texts."""
    return local_path(config.data.cache) if config.data.cache else workdir / "corpus"


def corpus_name(fingerprint: str) -> str:
    """The name of a corpus' folder."""
    return fingerprint[:20]


def open_corpus(directory: Path, fingerprint: str) -> Corpus | None:
    """The corpus in ``directory`` with this fingerprint; None if it is absent or corrupt."""
    folder = directory / corpus_name(fingerprint)
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        arrays = {
            name: np.memmap(folder / name, dtype, "r") for name, dtype in manifest["dtypes"].items()
        }
        checksums = {name: zlib.crc32(array.data) for name, array in arrays.items()}
        if manifest["fingerprint"] != fingerprint or manifest["checksums"] != checksums:
            return None
        source, target = (
            Sequences(arrays[f"{side}_tokens"], arrays[f"{side}_offsets"]) for side in _SIDES
        )
        statistics, num_samples = manifest["statistics"], manifest["num_samples"]
        return Corpus(fingerprint, (source, target), statistics, num_samples)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _open_or_build(text: ParallelText, job: TokeniseJob, directory: Path) -> Corpus:
    directory.mkdir(parents=True, exist_ok=True)
    fingerprint = job.fingerprint(text)
    if corpus := open_corpus(directory, fingerprint):
        return corpus
    notice = f"Another process is tokenising text in {directory}; waiting for it."
    with locked(directory / ".lock", wait=True, notice=notice) as alone:
        if corpus := open_corpus(directory, fingerprint):  # built while this process waited
            return corpus
        if (final := directory / corpus_name(fingerprint)).exists():
            _log.warning("The tokenised corpus %s is corrupt; it is built again.", final)
            shutil.rmtree(final)
        for left in directory.glob(f"{_TEMPORARY}*") if alone else ():  # by a killed process
            shutil.rmtree(left)
        temporary = directory / f"{_TEMPORARY}{uuid.uuid4().hex}"
        temporary.mkdir()
        try:
            fingerprint = _write(temporary, text, job)
            _publish(temporary, directory / corpus_name(fingerprint))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(
                f"The disk of {str(directory)!r} is full; expected room for the tokenised corpus: "
                "free some, or set data.cache."
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    corpus = open_corpus(directory, fingerprint)
    assert corpus is not None, f"{directory / corpus_name(fingerprint)} was just written"
    return corpus


def _write(folder: Path, text: ParallelText, job: TokeniseJob) -> str:
    """Tokenise and hash the text in one pass; returns the corpus' fingerprint."""
    counts = Counter(dict.fromkeys(COUNTS, 0))
    pairs = text.pairs(invalid_utf8=job.data.invalid_utf8, counts=counts)
    dtypes = {f"{side}_offsets": np.dtype(np.int64) for side in _SIDES}
    dtypes |= {f"{side}_tokens": dtype for side, dtype in zip(_SIDES, job.dtypes())}
    checksums, ends = dict.fromkeys(dtypes, 0), np.zeros((2, 1), np.int64)
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / name).open("wb")) for name in dtypes}

        def append(name: str, array: np.ndarray) -> None:
            _append(files[name], array)
            checksums[name] = zlib.crc32(array.data, checksums[name])

        # Closed also after an error: its processes end.
        chunks = stack.enter_context(closing(tokenised(pairs, job)))
        for side in _SIDES:
            append(f"{side}_offsets", np.zeros(1, np.int64))
        for sides, statistics in chunks:
            counts.update(statistics)
            for side, (tokens, lengths), end in zip(_SIDES, sides, ends):
                offsets = end + np.cumsum(lengths, dtype=np.int64)
                append(f"{side}_tokens", tokens)
                append(f"{side}_offsets", offsets)
                end[:] = offsets[-1:] if len(offsets) else end
    counts["read"] += counts["invalid_utf8"]
    if not counts["kept"]:
        raise UserError(
            "No sentence pair is left of {read:,} read in {where}: {empty:,} empty, {too_long:,} "
            "longer than data.max_source_length or data.max_target_length, {ratio:,} beyond "
            "data.max_length_ratio, {invalid_utf8:,} not UTF-8; expected at least one: check the "
            "text, or relax these settings.".format(
                **counts, where=shown(text.config.source or text.config.kind)
            )
        )
    fingerprint = job.fingerprint(text)
    manifest = {
        "fingerprint": fingerprint,
        "num_samples": job.num_samples,
        "dtypes": {name: dtype.name for name, dtype in dtypes.items()},
        "checksums": checksums,
        "statistics": counts,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return fingerprint


def _append(file: BinaryIO, array: np.ndarray) -> None:
    file.write(array.data)


def _publish(temporary: Path, final: Path) -> None:
    """Give the finished folder its name."""
    try:
        temporary.rename(final)
    except OSError:
        if not final.exists():  # else a builder whose locks do not reach here came first
            raise
