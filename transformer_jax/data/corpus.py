"""The tokenised corpus: a list of shards, and how it is read.

Training tokenises its text as one shard. Many processes or machines may build several shards ahead
of it instead: see ``training/tokenize_ahead.py``. These, in order, hold what one shard of the whole
text would hold: same pairs, same order, same segmentations.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from transformer_jax.config import Config, DataConfig, PairsConfig
from transformer_jax.data.shards import (
    COUNTS,
    Sequences,
    Shard,
    build_shard,
    open_shard,
    require_pairs,
)
from transformer_jax.data.tokenize import TokeniseJob, flatten
from transformer_jax.errors import UserError
from transformer_jax.storage import local_path
from transformer_jax.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Corpus:
    """The pairs of all shards, N together, in K segmentations (1 unless sampled).

    Sequence ``v * N + i`` is pair ``i`` in segmentation ``v``.
    """

    fingerprint: str
    shards: tuple[Shard, ...]
    num_samples: int = 1
    """K."""
    directory: Path | None = None
    """Where what is computed from a large corpus is kept; None: nowhere."""

    @property
    def num_pairs(self) -> int:
        """N."""
        return int(self._ends[-1])

    @property
    def statistics(self) -> dict[str, int]:
        """Pairs: read, kept, and left out as empty, too_long, ratio, invalid_utf8."""
        return {name: sum(shard.statistics[name] for shard in self.shards) for name in COUNTS}

    @property
    def source_lengths(self) -> np.ndarray:
        """int32 [K, N], EOS counted."""
        return self.lengths(0, self.num_pairs)[0]

    @property
    def target_lengths(self) -> np.ndarray:
        """int32 [K, N], EOS counted."""
        return self.lengths(0, self.num_pairs)[1]

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([shard.num_pairs for shard in self.shards])

    def lengths(self, start: int, stop: int) -> np.ndarray:
        """Source and target lengths of pairs start to stop, int32 [2, K, stop - start]."""
        result = np.empty((2, self.num_samples, stop - start), np.int32)
        for shard, end in zip(self.shards, self._ends.tolist()):
            first = end - shard.num_pairs
            low, high = max(start, first), min(stop, end)
            for side, sequences in enumerate(shard.sides if low < high else ()):
                for v in range(self.num_samples):
                    at = v * shard.num_pairs - first
                    offsets = sequences.offsets[at + low : at + high + 1]
                    result[side, v, low - start : high - start] = np.diff(offsets)
        return result

    def source(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source tokens of these sequences, one after another, and the sequences' lengths."""
        return self._read(0, sequences)

    def target(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The target tokens of these sequences, one after another, and the sequences' lengths."""
        return self._read(1, sequences)

    def _read(self, side: int, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        v, pair = np.divmod(sequences, max(1, self.num_pairs))
        shard_of = np.searchsorted(self._ends, pair, side="right")
        starts, lengths = np.empty((2, len(sequences)), np.int64)
        places = []
        for k in np.flatnonzero(np.bincount(shard_of)).tolist():
            at, N = np.flatnonzero(shard_of == k), self.shards[k].num_pairs
            sequence = v[at] * N + pair[at] - (self._ends[k] - N)
            stored, offsets = self.shards[k].sides[side]
            starts[at] = offsets[sequence]
            lengths[at] = offsets[sequence + 1] - starts[at]
            places.append((stored, at))
        if len(places) == 1:  # the general way, below, is slower
            return stored[ranges(starts, lengths)], lengths
        tokens = np.empty(lengths.sum(), self.shards[0].sides[side].tokens.dtype)
        to = np.cumsum(lengths) - lengths
        for stored, at in places:
            tokens[ranges(to[at], lengths[at])] = stored[ranges(starts[at], lengths[at])]
        return tokens, lengths

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
        return cls(
            fingerprint, (Shard(fingerprint, (sides[0], sides[1]), len(sources), statistics),)
        )


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``arange(start, start + count)`` for each, one after another."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)


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
    shard = build_shard(job, Path(directory))
    return Corpus(shard.fingerprint, (shard,), job.num_samples, Path(directory))


def prepare_corpus(workdir: Path, config: Config, tokenizer: Tokenizer, name: str) -> Corpus:
    """The tokenised pairs of ``config.data.<name>`` (train, dev), built if need be.

    Only train is segmented at random. With ``data.shards`` above 1 its shards must have been built:
    ``UserError`` if one is missing.
    """
    job, directory = _job(config, tokenizer, name), corpus_folder(workdir, config)
    if name == "train" and config.data.shards > 1:
        jobs = job.shards(config.data.shards)
        shards = [_open_prepared(job, k, workdir, directory) for k, job in enumerate(jobs)]
        fingerprint = job.fingerprint(directory)
    else:
        shards = [build_shard(job, directory)]
        fingerprint = shards[0].fingerprint
    corpus = Corpus(fingerprint, tuple(shards), job.num_samples, directory)
    require_pairs(corpus.statistics, job.pairs)
    _log_statistics(name, corpus.statistics)
    return corpus


def prepare_shard(workdir: Path, config: Config, tokenizer: Tokenizer, number: int) -> Shard:
    """Shard ``number`` (from 0) of the ``config.data.shards`` of the training text, built if need
    be; it may be empty if there are others.
    """
    count = config.data.shards
    job = _job(config, tokenizer, "train").shards(count)[number]
    shard = build_shard(job, corpus_folder(workdir, config), may_be_empty=count > 1)
    _log_statistics(f"shard {number}/{count}", shard.statistics)
    return shard


def corpus_folder(workdir: Path, config: Config) -> Path:
    """Where tokenised text and the hashes of its files are kept."""
    return local_path(config.data.cache) if config.data.cache else workdir / "corpus"


def _job(config: Config, tokenizer: Tokenizer, name: str) -> TokeniseJob:
    job = TokeniseJob(getattr(config.data, name), tokenizer, config.data)
    sampling, num_samples = config.tokenizer.sampling, config.tokenizer.sampled_epochs
    if name != "train" or not sampling:
        return job
    return dataclasses.replace(job, sampling=sampling, num_samples=num_samples, seed=config.seed)


def _open_prepared(job: TokeniseJob, number: int, workdir: Path, directory: Path) -> Shard:
    count = job.data.shards
    fingerprint = job.fingerprint(directory)
    shard = open_shard(directory, fingerprint)
    if shard is None:
        folder, name = directory / fingerprint[:20], f"{number}/{count}"
        raise UserError(
            f"Shard {name} of the training text is {'damaged' if folder.exists() else 'missing'}: "
            f"{folder}; expected what this command makes of the text and settings as they are "
            "now:\n  python -m transformer_jax.training.tokenize_ahead --config "
            f"{workdir / 'config.json'} --workdir {workdir} --shard {name}"
        )
    return shard


def _log_statistics(name: str, statistics: dict[str, int]) -> None:
    counts = ", ".join(f"{count:,} {what}" for what, count in statistics.items())
    _log.info("%s pairs: %s", name, counts)
