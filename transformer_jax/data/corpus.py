"""The tokenised corpus: token arrays of sentence pairs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from transformer_jax.data.tokenize import flatten
from transformer_jax.errors import UserError

COUNTS = ("read", "kept", "empty", "too_long", "ratio", "invalid_utf8")
"""Of pairs, in ``Corpus.statistics``: read, kept, and left out for these reasons."""


class Sequences(NamedTuple):
    """Sequence j is ``tokens[offsets[j] : offsets[j + 1]]``; it ends with EOS and has no BOS."""

    tokens: np.ndarray
    """uint16, or int32 where the vocabulary is larger than that."""
    offsets: np.ndarray
    """int64."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """N pairs in K segmentations (1 unless sampled).

    Sequence ``v * N + i`` is pair ``i`` in segmentation ``v``.
    """

    fingerprint: str
    sides: tuple[Sequences, Sequences]
    """Source and target."""
    num_pairs: int
    """N."""
    statistics: dict[str, int]
    """Pairs: read, kept, and left out as empty, too_long, ratio, invalid_utf8."""
    num_samples: int = 1
    """K."""

    def lengths(self) -> np.ndarray:
        """Source and target lengths, EOS counted: int32 [2, K, N]."""
        lengths = np.stack([np.diff(offsets).astype(np.int32) for _, offsets in self.sides])
        return lengths.reshape(2, self.num_samples, self.num_pairs)

    def source(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source tokens of these sequences, one after another, and the sequences' lengths."""
        return _read(self.sides[0], sequences)

    def target(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The target tokens of these sequences, one after another, and the sequences' lengths."""
        return _read(self.sides[1], sequences)

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
        return cls(fingerprint, (sides[0], sides[1]), len(sources), statistics)


def _read(side: Sequences, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    starts = side.offsets[sequences]
    lengths = side.offsets[sequences + 1] - starts
    return side.tokens[ranges(starts, lengths)], lengths


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``arange(start, start + count)`` for each, one after another."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)
