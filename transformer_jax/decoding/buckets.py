"""The few shapes that searches are compiled for."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

# A search holds so many batches: its end, where no sentence waits any more, is what costs.
_BATCHES = 32


class Bucket(NamedTuple):
    """One compiled function: a search of sentences of similar lengths."""

    lengths: tuple[int, ...]
    """Source lengths, end symbol included, that sentences are encoded in; caches have the capacity
    for the last one.
    """
    rows: int
    """Sentences that each device has in progress."""

    @property
    def block_size(self) -> int:
        """Sentences that a device encodes at a time, all in one shape. Few, as seldom exactly as
        many of a length wait.
        """
        return max(1, self.rows // 4)

    @property
    def num_blocks(self) -> int:
        """Blocks that wait on a device in one search."""
        return _BATCHES * self.rows // self.block_size


def make_buckets(longest: int, batch_size: int) -> tuple[Bucket, ...]:
    """A bucket for the lengths 16, 24, 32, ..., 128, one for those up to 512, one up to 2,048,
    ..., to the longest; each with a quarter of the rows of the one before.
    """
    lengths = sorted({min(padded_length(length, 16), longest) for length in range(1, longest + 1)})
    groups = groupby(lengths, key=lambda length: (((length - 1) // 128).bit_length() + 1) // 2)
    return tuple(Bucket(tuple(group), max(1, batch_size // 4**power)) for power, group in groups)


def padded_length(length: int, smallest: int) -> int:
    """The next of s, 3/2 s, 2 s, 3 s, 4 s, 6 s, ... (s is even): few shapes to compile."""
    return next(
        width << i
        for i in range(64)
        for width in (smallest, smallest * 3 // 2)
        if width << i >= length
    )
