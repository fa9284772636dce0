"""The few shapes that searches are compiled for."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count, groupby, takewhile
from typing import NamedTuple

import jax
import numpy as np

from transformer_jax.decoding.continuous_batching import NOBODY, Block
from transformer_jax.decoding.search import NOT_FORCED
from transformer_jax.special_ids import EOS_ID, PAD_ID


class Sentence(NamedTuple):
    """What to translate."""

    tokens: Sequence[int]
    """Source tokens without EOS, fewer than ``Engine.longest_source``."""
    prefix: Sequence[int] = ()
    """Target tokens that the translation must begin with."""
    seed: int = 0
    """Makes the samples of sentences differ."""
    wanted: int | None = None
    """Hypotheses that are enough; None: as many as the search returns."""


class Bucket(NamedTuple):
    """One compiled search, for sentences of similar lengths."""

    lengths: tuple[int, ...]
    """Source lengths, end symbol included, that sentences are encoded in; caches have the capacity
    for the last one.
    """
    rows: int
    """Sentences that each device has in progress."""
    num_devices: int = 1

    @property
    def block_size(self) -> int:
        """Sentences that a device encodes at a time, all in one shape. Few, as seldom exactly as
        many of a length wait; several devices wait for each other after each block.
        """
        return max(1, self.rows // (4 if self.num_devices == 1 else 2))

    def length_of(self, sentence: Sentence) -> int:
        """The length that a sentence is encoded in: its own one decides, end symbol included."""
        return self.lengths[bisect_left(self.lengths, len(sentence.tokens) + 1)]


def make_buckets(longest: int, batch_size: int, num_devices: int = 1) -> tuple[Bucket, ...]:
    """A bucket for the lengths 16, 24, 32, ..., 128, one for those up to 512, one up to 2,048,
    ..., to the longest; each with a quarter of the rows of the one before. The devices share
    ``batch_size`` rows.

    On accelerators only for 32, 64, 128, ...: there padding costs less than compiling an encoder.
    """

    widths = _widths(16) if jax.default_backend() == "cpu" else (32 << i for i in count())
    lengths = [*takewhile(lambda width: width < longest, widths), longest]
    groups = groupby(lengths, key=lambda length: (((length - 1) // 128).bit_length() + 1) // 2)
    rows = batch_size // num_devices
    return tuple(
        Bucket(tuple(group), max(1, rows // 4**power), num_devices) for power, group in groups
    )


def bucket_index(buckets: Sequence[Bucket], sentence: Sentence) -> int:
    """Which bucket a sentence is searched in."""
    return bisect_left([bucket.lengths[-1] for bucket in buckets], len(sentence.tokens) + 1)


def in_blocks(
    buckets: Sequence[Bucket], sentences: Sequence[Sentence]
) -> Iterator[tuple[Bucket, list[list[int]]]]:
    """Each bucket with its sentences' indices in blocks of one encoded length, longest first."""
    of_length: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index in sorted(range(len(sentences)), key=lambda index: -len(sentences[index].tokens)):
        number = bucket_index(buckets, sentences[index])
        of_length[number, buckets[number].length_of(sentences[index])].append(index)
    for number, bucket in enumerate(buckets):
        size = bucket.block_size * bucket.num_devices
        blocks = [
            indices[first : first + size]
            for (its, _), indices in of_length.items()
            if its == number
            for first in range(0, len(indices), size)
        ]
        if blocks:
            yield bucket, blocks


def make_block(
    bucket: Bucket,
    dealt: Sequence[Mapping[int, Sentence]],
    longest_target: Callable[[int], int],
    num_hypotheses: int,
) -> tuple[np.ndarray, Block]:
    """The source tokens of numbered sentences of one encoded length, and all else of their block
    but the cache. ``dealt`` has those of each device; ``longest_target`` limits a target by the
    length of its source.
    """
    size, capacity = bucket.block_size, bucket.lengths[-1]
    length = max(map(bucket.length_of, chain(*(its.values() for its in dealt))), default=0)
    source_QS = np.full((len(dealt) * size, length or bucket.lengths[0]), PAD_ID, np.int32)
    number_Q, limit_Q, seed_Q, wanted_Q = np.zeros((4, len(source_QS)), np.int32)
    number_Q[:], wanted_Q[:] = NOBODY, num_hypotheses
    prefix_QP = np.full((len(source_QS), longest_target(capacity)), NOT_FORCED, np.int32)
    for device, sentences in enumerate(dealt):
        for place, (number, sentence) in enumerate(sentences.items(), device * size):
            source_length, prefix = len(sentence.tokens) + 1, sentence.prefix
            source_QS[place, :source_length] = [*sentence.tokens, EOS_ID]
            number_Q[place] = number
            limit_Q[place] = longest_target(source_length)
            prefix_QP[place, : len(prefix)] = prefix[: prefix_QP.shape[1]]
            seed_Q[place] = np.uint32(sentence.seed).view(np.int32)
            wanted_Q[place] = sentence.wanted or num_hypotheses
    return source_QS, Block(number_Q, limit_Q, prefix_QP, seed_Q.view(np.uint32), wanted_Q, ())


def padded_length(length: int, smallest: int) -> int:
    """The next of s, 3/2 s, 2 s, 3 s, 4 s, 6 s, ... (s is even): few shapes to compile."""
    return next(width for width in _widths(smallest) if width >= length)


def _widths(smallest: int) -> Iterator[int]:
    for i in count():
        yield smallest << i
        yield smallest * 3 // 2 << i
