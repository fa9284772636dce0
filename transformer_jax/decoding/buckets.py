"""The few shapes that searches are compiled for, and where in them sentences wait."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby, takewhile
from typing import NamedTuple

import jax
import numpy as np

from transformer_jax.decoding.continuous_batching import Waiting
from transformer_jax.decoding.models import Source
from transformer_jax.decoding.search import NOT_FORCED
from transformer_jax.special_ids import EOS_ID, PAD_ID

# A search holds so many batches: its end, where no sentence waits any more, is what costs.
_BATCHES = 32
_PREFIX_STEP = 8  # prefixes are padded to a multiple of this: few shapes


class Sentence(NamedTuple):
    """What to translate."""

    tokens: Sequence[int]
    """Source tokens without EOS, fewer than ``Engine.longest_source``."""
    prefix: Sequence[int] = ()
    """Target tokens that the translation must begin with."""
    seed: int = 0
    """Makes the samples of sentences differ."""


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

    On accelerators only for 32, 64, 128, ...: there padding costs less than compiling an encoder.
    """

    widths = _widths(16) if jax.default_backend() == "cpu" else (32 << i for i in count())
    lengths = [*takewhile(lambda width: width < longest, widths), longest]
    groups = groupby(lengths, key=lambda length: (((length - 1) // 128).bit_length() + 1) // 2)
    return tuple(Bucket(tuple(group), max(1, batch_size // 4**power)) for power, group in groups)


def padded_length(length: int, smallest: int) -> int:
    """The next of s, 3/2 s, 2 s, 3 s, 4 s, 6 s, ... (s is even): few shapes to compile."""
    return next(width for width in _widths(smallest) if width >= length)


def _widths(smallest: int) -> Iterator[int]:
    for i in count():
        yield smallest << i
        yield smallest * 3 // 2 << i


@dataclass(frozen=True)
class Layout:
    """Which bucket, block and place each sentence waits in, where ``shares`` devices search."""

    buckets: tuple[Bucket, ...]
    shares: int

    def searches(self, sentences: Sequence[Sentence]) -> Iterator[tuple[Bucket, dict[int, int]]]:
        """The bucket of each search, and the places of its sentences by their index: blocks of one
        encoded length, longest first.
        """
        lengths = [length for bucket in self.buckets for length in bucket.lengths]
        of_length: dict[int, list[int]] = defaultdict(list)
        for index in sorted(range(len(sentences)), key=lambda index: -len(sentences[index].tokens)):
            of_length[lengths[length_index(sentences[index], lengths)]].append(index)
        for bucket in self.buckets:
            size = bucket.block_size * self.shares
            blocks = [
                of_length[length][first : first + size]
                for length in reversed(bucket.lengths)
                for first in range(0, len(of_length[length]), size)
            ]
            for first in range(0, len(blocks), bucket.num_blocks):
                yield bucket, self.places(bucket, blocks[first : first + bucket.num_blocks])

    def places(self, bucket: Bucket, blocks: list[list[int]]) -> dict[int, int]:
        """Sentences are dealt out to the devices in turn, from block to block."""
        places: dict[int, int] = {}
        for block, indices in enumerate(blocks):
            for i, index in enumerate(indices):
                device = len(places) % self.shares
                first = (device * bucket.num_blocks + block) * bucket.block_size
                places[index] = first + i // self.shares
        return places

    def waiting(
        self,
        bucket: Bucket,
        sentences: dict[int, Sentence],
        longest_target: Callable[[int], int],
    ) -> tuple[Waiting, np.ndarray]:
        """The sentences at these of Q = devices x blocks x block size places, and how many there
        are in each block of each device. ``longest_target`` limits a target by the length of its
        source.
        """
        counts = np.zeros((self.shares, bucket.num_blocks), np.int32)
        for place in sentences:
            counts.ravel()[place // bucket.block_size] += 1
        waiting = waiting_arrays(
            sentences,
            size=counts.size * bucket.block_size,
            lengths=bucket.lengths,
            longest_target=longest_target,
        )
        return waiting, counts


def waiting_arrays(
    sentences: Mapping[int, Sentence],
    *,
    size: int,
    lengths: Sequence[int],
    longest_target: Callable[[int], int],
    longest_prefix: int = 1,
) -> Waiting:
    """The sentences at these of ``size`` places. Prefixes are padded to the longest one, and to
    ``longest_prefix`` tokens at least: an array without elements crashes jaxlib 0.11.2 where
    several devices search.
    """
    longest_prefix = max([longest_prefix, *(len(each.prefix) for each in sentences.values())])
    padded_prefix = -(-longest_prefix // _PREFIX_STEP) * _PREFIX_STEP
    source = Source(
        tokens_BS=np.full((size, lengths[-1]), PAD_ID, np.int32),
        length_index_B=np.zeros(size, np.int32),
    )
    waiting = Waiting(
        source,
        limit_Q=np.zeros(size, np.int32),
        prefix_QP=np.full((size, padded_prefix), NOT_FORCED, np.int32),
        seed_Q=np.zeros(size, np.uint32),
    )
    for place, sentence in sentences.items():
        length = len(sentence.tokens) + 1
        source.tokens_BS[place, :length] = [*sentence.tokens, EOS_ID]
        source.length_index_B[place] = length_index(sentence, lengths)
        waiting.limit_Q[place] = longest_target(length)
        waiting.prefix_QP[place, : len(sentence.prefix)] = sentence.prefix
        waiting.seed_Q[place] = sentence.seed
    return waiting


def length_index(sentence: Sentence, lengths: Sequence[int]) -> int:
    """Which of ``lengths`` a sentence is encoded in: its own one decides, end symbol included."""
    return bisect_left(lengths, len(sentence.tokens) + 1)
