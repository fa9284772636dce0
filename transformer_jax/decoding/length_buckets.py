"""Length buckets, which limit the number of shapes to compile."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import count, groupby, takewhile
from typing import Any, NamedTuple

import jax
import numpy as np

from transformer_jax.decoding.search import NOT_FORCED, SearchMethod, Sentence
from transformer_jax.tokenization.rows import pad_rows, with_eos


class Bucket(NamedTuple):
    """The shape of one compiled search, for sentences of similar length."""

    lengths: tuple[int, ...]
    """Padded source lengths for the encoder, EOS included. The last length is the capacity of the
    caches.
    """
    num_rows: int
    """Number of sentences decoded at a time."""
    terms: tuple[int, ...] = ()
    """Shape of each sentence's ``terms``; (): none."""

    @property
    def encode_batch_size(self) -> int:
        """Number of sentences encoded together, as one padded batch. It is small because few
        waiting sentences have the same padded length. On TPUs it is not, because XLA changes the
        layout of the KV cache before and after each search.
        """
        divisor = {"tpu": 1, "cpu": 2}.get(jax.default_backend(), 4)
        return max(1, self.num_rows // divisor)

    def padded_source_length(self, sentence: Sentence) -> int:
        """Return a sentence's padded source length, which depends only on its own length."""
        return self.lengths[bisect_left(self.lengths, len(sentence.tokens) + 1)]


def make_buckets(max_length: int, batch_size: int, min_rows: int = 1) -> tuple[Bucket, ...]:
    """Make buckets for source lengths up to 128, 512, 2,048, ..., ``max_length``. The first bucket
    has ``batch_size`` rows, and each later bucket has a quarter as many rows as the previous
    bucket, but at least ``min_rows``.

    Padded lengths are 16, 24, 32, 48, 64, ... On accelerators they are 32, 64, 128, ..., because
    padding costs less there than compiling the encoder for more lengths.
    """

    padded_lengths = (
        _padded_lengths(16) if jax.default_backend() == "cpu" else (32 << i for i in count())
    )
    lengths = [*takewhile(lambda length: length < max_length, padded_lengths), max_length]
    groups = groupby(lengths, key=lambda length: (((length - 1) // 128).bit_length() + 1) // 2)
    return tuple(
        Bucket(tuple(group), max(min_rows, batch_size // 4**power)) for power, group in groups
    )


class PaddedBatch(NamedTuple):
    """Sentences as arrays; B is the number of rows in their bucket."""

    source_BS: Any
    start_arguments: dict[str, Any]
    """Arguments of ``SearchMethod.start``."""


def pad_batch(
    bucket: Bucket,
    sentences: Sequence[Sentence],
    max_target_length: Callable[[int], int],
    method: SearchMethod,
) -> PaddedBatch:
    """Pad sentences to the same length, and their number to ``bucket.num_rows``.

    ``max_target_length`` maps a source length to the maximum target length. ``method`` has the ids
    of PAD and EOS.
    """
    B = bucket.num_rows
    S = max(map(bucket.padded_source_length, sentences), default=bucket.lengths[0])
    P = max_target_length(bucket.lengths[-1])
    sources = [with_eos(sentence.tokens, method.eos_id) for sentence in sentences]
    limit_B = np.zeros(B, np.int32)
    num_hypotheses_B = np.zeros(B, np.int32)
    prefix_BP = np.full((B, P), NOT_FORCED, np.int32)
    seed_B = np.zeros(B, np.uint32)
    terms_BKAM = np.full((B, *bucket.terms), -1, np.int32)
    for row, sentence in enumerate(sentences):
        limit_B[row] = max_target_length(len(sources[row]))
        num_hypotheses_B[row] = sentence.num_hypotheses
        prefix_BP[row, : len(sentence.prefix)] = sentence.prefix[:P]
        seed_B[row] = sentence.seed
        if sentence.terms is not None:
            terms_BKAM[row] = sentence.terms
    start_arguments = {
        "limit_B": limit_B,
        "prefix_BP": prefix_BP,
        "seed_B": seed_B,
        "num_hypotheses_B": num_hypotheses_B,
    }
    if bucket.terms:
        start_arguments["terms_BKAM"] = terms_BKAM
    source_BS = pad_rows(sources, method.pad_id, length=S, num_rows=B)
    return PaddedBatch(source_BS, start_arguments)


def padded_length(length: int, smallest: int) -> int:
    """Round ``length`` up to one of s, 3/2 s, 2 s, 3 s, 4 s, 6 s, ..., where s (``smallest``) is
    even. This limits the number of compiled shapes.
    """
    return next(padded for padded in _padded_lengths(smallest) if padded >= length)


def _padded_lengths(smallest: int) -> Iterator[int]:
    for i in count():
        yield smallest << i
        yield smallest * 3 // 2 << i
