"""Batches that hold every pair of a corpus exactly once, for losses on dev and test."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from transformer_jax.data.batching import Batch
from transformer_jax.data.corpus import Corpus

_LENGTH_STEP = 16  # lengths are rounded up to a multiple of this: few shapes to compile


def whole_corpus(corpus: Corpus, *, tokens: int, row_multiple: int) -> Iterator[Batch]:
    """Every pair of the first segmentation once, short ones first; rows that are left in a batch
    hold padding alone.

    A batch of sentences up to L long has ``tokens // L`` rows, as a multiple of ``row_multiple``
    and at least that.
    """
    longest_N = np.maximum(corpus.source_lengths[0], corpus.target_lengths[0])
    length_N = np.minimum(-(-longest_N // _LENGTH_STEP) * _LENGTH_STEP, longest_N.max())
    for length in np.unique(length_N):
        pairs = np.flatnonzero(length_N == length)
        rows = max(1, tokens // int(length) // row_multiple) * row_multiple
        for start in range(0, len(pairs), rows):
            chosen = pairs[start : start + rows]
            source_BS, target_BT = np.zeros((2, rows, int(length)), np.int32)
            for row, pair in enumerate(chosen):
                source = corpus.source_tokens[
                    corpus.source_offsets[pair] : corpus.source_offsets[pair + 1]
                ]
                target = corpus.target_tokens[
                    corpus.target_offsets[pair] : corpus.target_offsets[pair + 1]
                ]
                source_BS[row, : len(source)] = source
                target_BT[row, : len(target)] = target
            yield Batch(source_BS, target_BT)
