"""A window of the corpus: its rows, bucket by bucket, and their order in every epoch."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from transformer_jax.data.bucketing import bucket_table
from transformer_jax.data.packing import pack
from transformer_jax.data.stripes import Stripes

# What a random permutation is for; part of its seed.
ORDER_OF_BATCHES, ORDER_OF_ROWS, ORDER_OF_PACKING, ORDER_OF_WINDOWS = range(4)


class _Rows(NamedTuple):
    """One segmentation's rows, bucket by bucket: row r is the window's pairs
    ``pairs_N[row_starts[r] : row_starts[r + 1]]``.
    """

    pairs_N: np.ndarray
    row_starts: np.ndarray
    bucket_starts: np.ndarray


class Window:
    """Some pairs of a corpus as rows of the given widths; the window's number goes into the seeds.

    A bucket's stream is all of its rows in the order of epoch 0, then in that of epoch 1, and so
    on.
    Memory: 4 bytes for each pair and segmentation, and up to 16 for each pair; several times that
      while it is made.
    """

    def __init__(
        self, stripes: Stripes, widths: list[tuple[int, int]], *, packed: bool, seed: int
    ) -> None:
        self._stripes, N = stripes, stripes.num_pairs
        lengths = zip(*stripes.lengths(0, N), strict=True)

        def permuted(n: int, *purpose: int) -> np.ndarray:
            return permutation(n, seed, *purpose, *window_key(stripes.first))

        if packed:
            orders = (permuted(N, ORDER_OF_PACKING, v) for v in range(stripes.corpus.num_samples))
            self._rows = [
                _packed(s_N, t_N, *widths[0], order)
                for (s_N, t_N), order in zip(lengths, orders, strict=True)
            ]
        else:
            table, row_starts = bucket_table(widths), np.arange(N + 1, dtype=np.int32)
            self._rows = [
                _bucketed(table[s_N, t_N], len(widths), row_starts) for s_N, t_N in lengths
            ]
        self.counts_Kb = np.stack([np.diff(rows.bucket_starts) for rows in self._rows])
        """Rows in each bucket."""
        self._before_Kb = cumulative(self.counts_Kb)
        rows_K = self._rows

        # Of this epoch and its neighbours, which batches at its ends and prefetching need. No
        # method: a window that its own cache refers to would outlive its use until the garbage
        # collector comes by.
        @functools.lru_cache(maxsize=3 * len(widths))
        def order_of_rows(epoch: int, bucket: int) -> np.ndarray:
            first, end = (
                int(start)
                for start in rows_K[epoch % len(rows_K)].bucket_starts[bucket : bucket + 2]
            )
            return first + permuted(end - first, ORDER_OF_ROWS, epoch, bucket)

        self._order_of_rows = order_of_rows

    def sequences(self, bucket: int, stream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The corpus' sequences at these positions of a bucket's stream, and how many stand in each
        row.
        """
        K, before = len(self._rows), self._before_Kb[:, bucket]
        cycle, rest = np.divmod(stream, before[-1])
        epochs = cycle * K + np.searchsorted(before, rest, side="right") - 1
        sequences, pairs_per_row = [np.zeros(0, np.int64)], np.zeros(len(stream), np.int64)
        # The stream rises, but its positions may be asked for backwards: each epoch's part keeps
        # its place in the batch.
        for epoch in dict.fromkeys(epochs.tolist()):
            here, v = np.flatnonzero(epochs == epoch), epoch % K
            rows = self._rows[v]
            row = self._order_of_rows(epoch, bucket)[rest[here] - before[v]]
            pairs_per_row[here] = count = rows.row_starts[row + 1] - rows.row_starts[row]
            pairs = rows.pairs_N[ranges(rows.row_starts[row], count)]
            sequences.append(v * self._stripes.corpus.num_pairs + self._stripes.pairs(pairs))
        return np.concatenate(sequences), pairs_per_row


def _packed(s_N: np.ndarray, t_N: np.ndarray, S: int, T: int, order: np.ndarray) -> _Rows:
    row_N = pack(s_N, t_N, S, T, order)
    row_starts = np.concatenate([[0], np.cumsum(np.bincount(row_N))]).astype(np.int32)
    return _Rows(
        np.argsort(row_N, kind="stable").astype(np.int32),
        row_starts,
        np.array([0, len(row_starts) - 1]),
    )


def _bucketed(bucket_N: np.ndarray, buckets: int, row_starts: np.ndarray) -> _Rows:
    pairs_N = np.argsort(bucket_N, kind="stable").astype(np.int32)
    return _Rows(pairs_N, row_starts, cumulative(np.bincount(bucket_N, minlength=buckets)))


def window_key(number: int) -> tuple[int, ...]:
    """A window's part of seeds: none for the first, so that small corpora have the seeds that they
    had before windows.
    """
    return (number,) if number else ()


def cumulative(counts: np.ndarray) -> np.ndarray:
    """Sums before each entry along the first axis, and after the last."""
    return np.concatenate([np.zeros_like(counts[:1]), np.cumsum(counts, 0)])


def permutation(n: int, seed: int, *key: int) -> np.ndarray:
    """A random permutation of n, int32, the same on every platform and for every release of NumPy.

    Sorts random bits with the index in their low end: raw bits of PCG64 are a stable interface,
    ``permutation`` is not.
    """
    raw = np.random.PCG64(np.random.SeedSequence(seed % 2**64, spawn_key=key)).random_raw(n)
    mask = np.uint64((1 << n.bit_length()) - 1)
    keys = (raw & ~mask) | np.arange(n, dtype=np.uint64)
    keys.sort()
    return (keys & mask).astype(np.int32)


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``arange(start, start + count)`` for each, one after another."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)
