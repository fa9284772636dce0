"""A large corpus cut into windows that are all alike: each has stripes from the whole length of
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from transformer_jax.data.corpus import Corpus

_PER_WINDOW = 1024  # stripes; each is read in one go


@dataclass(frozen=True)
class Stripes:
    """The pairs of one window: of the corpus' blocks of ``width`` pairs, number ``first`` and every
    ``stride``-th from there.

    Where files of different kinds stand one after another, each window so has its share of every
    file.
    """

    corpus: Corpus
    first: int
    stride: int
    width: int

    @property
    def num_pairs(self) -> int:
        """N of this window."""
        rounds, rest = divmod(self.corpus.num_pairs, self.stride * self.width)
        return rounds * self.width + min(max(rest - self.first * self.width, 0), self.width)

    def lengths(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """As those of the corpus, of pairs start to stop of this window: source and target, each
        int32 [K, stop - start].
        """
        sides = np.empty((2, self.corpus.num_samples, stop - start), np.int32)
        for here, there, count in self._runs(start, stop):
            for side, lengths in zip(sides, self.corpus.lengths(there, there + count)):
                side[:, here - start : here - start + count] = lengths
        return sides[0], sides[1]

    def pairs(self, index_N: np.ndarray) -> np.ndarray:
        """The numbers in the corpus, int64, of pairs of this window."""
        stripe_N, within_N = np.divmod(index_N.astype(np.int64), self.width)
        return (stripe_N * self.stride + self.first) * self.width + within_N

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Pairs start to stop as runs of neighbours in the corpus: number here, number there, how
        many.
        """
        while start < stop:
            stripe, within = divmod(start, self.width)
            count = min(self.width - within, stop - start)
            yield start, (stripe * self.stride + self.first) * self.width + within, count
            start += count


def windows_of(corpus: Corpus, window: int) -> list[Stripes]:
    """The fewest windows of at most ``window`` pairs that have stripes of one width, some thousand
    each; or one, the corpus.
    """
    if corpus.num_pairs <= window:
        return [Stripes(corpus, 0, 1, corpus.num_pairs)]
    width = max(1, window // _PER_WINDOW)
    stripes = -(-corpus.num_pairs // width)
    count = -(-stripes // (window // width))
    return [Stripes(corpus, number, count, width) for number in range(count)]
