"""Length buckets, which limit the number of shapes to compile."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import count, groupby, takewhile
from typing import NamedTuple

import jax
import numpy as np

from transformer_jax.decoding.continuous_batching import EMPTY
from transformer_jax.decoding.search import NOT_FORCED, Sentence
from transformer_jax.tokenization.special_ids import EOS_ID, PAD_ID


class Bucket(NamedTuple):
    """The shape of one compiled search, for sentences of similar length."""

    lengths: tuple[int, ...]
    """Padded source lengths for the encoder, EOS included. The last length is the capacity of the
    caches.
    """
    rows: int
    """Number of sentences decoded at a time."""
    terms: tuple[int, ...] = ()
    """Shape of each sentence's ``terms``; (): none."""

    @property
    def block_size(self) -> int:
        """Number of sentences encoded together, as one padded batch. It is small because few
        waiting sentences have the same padded length. On TPUs it is not, because XLA changes the
        layout of the KV cache before and after each block's search.
        """
        return self.rows if jax.default_backend() == "tpu" else max(1, self.rows // 4)

    def length_of(self, sentence: Sentence) -> int:
        """Return a sentence's padded source length, which depends only on its own length."""
        return self.lengths[bisect_left(self.lengths, len(sentence.tokens) + 1)]


def make_buckets(longest: int, batch_size: int) -> tuple[Bucket, ...]:
    """Make buckets for source lengths up to 128, 512, 2,048, ..., ``longest``. The first bucket has
    ``batch_size`` rows, and each later bucket has a quarter as many rows as the previous bucket.

    Padded lengths are 16, 24, 32, 48, 64, ... On accelerators they are 32, 64, 128, ..., because
    padding costs less there than compiling the encoder for more lengths.
    """

    widths = _widths(16) if jax.default_backend() == "cpu" else (32 << i for i in count())
    lengths = [*takewhile(lambda width: width < longest, widths), longest]
    groups = groupby(lengths, key=lambda length: (((length - 1) // 128).bit_length() + 1) // 2)
    return tuple(Bucket(tuple(group), max(1, batch_size // 4**power)) for power, group in groups)


def make_block(
    bucket: Bucket, sentences: Mapping[int, Sentence], longest_target: Callable[[int], int]
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Pad the source tokens of numbered sentences to the same length. Returns the tokens, the
    numbers and arguments of ``Method.start``. ``longest_target`` maps a source length to the
    maximum target length.
    """
    size, capacity = bucket.block_size, bucket.lengths[-1]
    length = max(map(bucket.length_of, sentences.values()), default=bucket.lengths[0])
    source_QS = np.full((size, length), PAD_ID, np.int32)
    number_Q, seed_Q = np.full(size, EMPTY, np.int32), np.zeros(size, np.uint32)
    limit_Q, wanted_Q = np.zeros((2, size), np.int32)
    prefix_QP = np.full((size, longest_target(capacity)), NOT_FORCED, np.int32)
    for place, (number, sentence) in enumerate(sentences.items()):
        source_length, prefix = len(sentence.tokens) + 1, sentence.prefix
        source_QS[place, :source_length] = [*sentence.tokens, EOS_ID]
        number_Q[place] = number
        limit_Q[place] = longest_target(source_length)
        prefix_QP[place, : len(prefix)] = prefix[: prefix_QP.shape[1]]
        seed_Q[place] = sentence.seed
        wanted_Q[place] = sentence.wanted
    start = {"limit_B": limit_Q, "prefix_BP": prefix_QP, "seed_B": seed_Q, "wanted_B": wanted_Q}
    if bucket.terms:
        start["terms_BKAM"] = np.full((size, *bucket.terms), -1, np.int32)
        for place, sentence in enumerate(sentences.values()):
            start["terms_BKAM"][place] = -1 if sentence.terms is None else sentence.terms
    return source_QS, number_Q, start


def padded_length(length: int, smallest: int) -> int:
    """Round ``length`` up to one of s, 3/2 s, 2 s, 3 s, 4 s, 6 s, ..., where s (``smallest``) is
    even. This limits the number of compiled shapes.
    """
    return next(width for width in _widths(smallest) if width >= length)


def _widths(smallest: int) -> Iterator[int]:
    for i in count():
        yield smallest << i
        yield smallest * 3 // 2 << i
