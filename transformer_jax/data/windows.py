"""A large corpus is cut into windows, of which one at a time is in memory.

Each window has stripes from the whole length of the corpus: where files of different kinds follow
one another, every window has its share of every file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from transformer_jax.data.corpus import Corpus

_STRIPES = 1024  # in a full window; each is read in one go
_BLOCK = 2**20  # pairs whose lengths are read at a time


@dataclass(frozen=True)
class Window:
    """Some stripes of a corpus: the ``width`` pairs (the last may have fewer) at each start."""

    corpus: Corpus
    starts: range
    width: int

    def blocks(self) -> Iterator[np.ndarray]:
        """The pairs' lengths, int32 [2, K, n]: source and target, about 2^20 pairs at a time."""
        per_block = max(1, _BLOCK // self.width)
        for first in range(0, len(self.starts), per_block):
            stripes = [
                self.corpus.lengths(start, min(start + self.width, self.corpus.num_pairs))
                for start in self.starts[first : first + per_block]
            ]
            yield np.concatenate(stripes, axis=-1)

    def lengths(self) -> np.ndarray:
        """All pairs' lengths, int32 [2, K, N]: source and target."""
        return np.concatenate(list(self.blocks()), axis=-1)

    def pairs(self, index_N: np.ndarray) -> np.ndarray:
        """Where these pairs of the window stand in the corpus, int64."""
        stripe_N, within_N = np.divmod(index_N.astype(np.int64), self.width)
        return self.starts.start + stripe_N * self.starts.step + within_N


def windows_of(corpus: Corpus, most: int) -> list[Window]:
    """The fewest windows of at most ``most`` pairs; one if the corpus has no more than that."""
    N = corpus.num_pairs
    if most >= N:  # its stripes stand side by side, so any width gives the same window
        return [Window(corpus, range(0, N, _BLOCK), _BLOCK)]
    width = max(1, most // _STRIPES)
    count = math.ceil(math.ceil(N / width) / (most // width))
    return [Window(corpus, range(k * width, N, count * width), width) for k in range(count)]
