"""Batch plan: the pairs in each step's batch, as a pure function of (corpus, config, seed, step).

An epoch contains every pair once. Rows are grouped into buckets, one for each batch shape. In the
bucketed layout, a row holds one pair. Buckets are filled from the shortest to the longest pairs,
and each one holds a whole number of batches. In the packed layout, a row holds several pairs, and
all rows are in one bucket. Empty rows pad the batches of the last bucket. Each epoch permutes the
rows of each bucket, splits them into batches, and shuffles all batches, so every epoch has the same
number of batches of each shape.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.data.bucketing import (
    batch_rows,
    choose_widths,
    even_batches,
    fill_buckets,
    packed_shape,
)
from transformer_jax.data.corpus import Corpus, ranges
from transformer_jax.data.mixing import Mix
from transformer_jax.data.packing import pack
from transformer_jax.settings.config import BatchConfig

Array = Any  # np.ndarray in the batch plan, jax.Array in the data loader

# Kinds of random permutations, as part of their seeds.
_BATCH_ORDER_KEY, _ROW_ORDER_KEY, _PACKING_ORDER_KEY = range(3)


class Batch(NamedTuple):
    """Batch of sentence pairs, int32. Sequences end with EOS and are padded with PAD.

    Targets have no BOS. Segment ids number the pairs in a row from 1, with 0 for padding. Both
    segment arrays are None if every row holds one pair. Rows can be empty (all PAD). Links are the
    column, counted from 1, of the source token that each target token links to, or 0 for no link.
    They are None if the corpus is not aligned.
    """

    source_BS: Array
    target_BT: Array
    source_segments_BS: Array | None = None
    target_segments_BT: Array | None = None
    links_BT: Array | None = None


class BatchPlan:
    """The batches of a corpus, indexed by step. Thread-safe.

    Memory: about 35 bytes per pair (packed: 70).
    """

    def __init__(
        self, corpus: Corpus | Mix, config: BatchConfig, *, seed: int, pad_id: int = 0
    ) -> None:
        """Choose batch shapes and build rows, padded with ``pad_id`` (``ModelConfig.pad_id``).
        Takes seconds for ten million pairs.

        Raises ``UserError`` if the token budget is too small for ``row_multiple`` rows of the
        maximum length, or (packed) a sentence is longer than a row.
        """
        self.packed = config.layout == "packed"
        self.aligned = len(corpus.sides) > 2
        self._corpus = corpus
        self._seed = seed
        self._pad_id = pad_id
        limits = (config.tokens, config.row_multiple)
        N = corpus.num_pairs
        assert N, "the corpus has no pairs"
        lengths_2N = corpus.lengths()
        tokens_2 = lengths_2N.sum(1, dtype=np.int64)
        if self.packed:
            S, T = packed_shape(lengths_2N.max(1).tolist(), tokens_2.tolist(), config.row_length)
            row_N = pack(
                lengths_2N[0], lengths_2N[1], S, T, permutation(N, seed, _PACKING_ORDER_KEY, 0)
            )
            max_rows = batch_rows(S, T, *limits)
            batches, B = even_batches(int(row_N.max()) + 1, max_rows, config.row_multiple)
            num_rows = batches * B
            buckets = [((S, T), np.arange(num_rows).reshape(batches, B))]
        else:
            row_N = np.arange(N)
            num_rows = N + 1  # the last row is empty
            S, T = lengths_2N.max(1).tolist()
            batch_rows(S, T, *limits)  # an error before choose_widths needs S x T x 8 bytes
            widths = choose_widths(lengths_2N, config.buckets, config.tokens)
            buckets = fill_buckets(lengths_2N, widths, *limits)
        order_N = np.argsort(row_N, kind="stable").astype(np.int32)
        ends = np.bincount(row_N, minlength=num_rows).cumsum(dtype=np.int32)
        self._rows = order_N, np.pad(ends, (1, 0))  # pairs sorted by row, and each row's start
        self._buckets = [rows_kB for _, rows_kB in buckets]
        self.shapes = tuple((rows_kB.shape[1], S, T) for (S, T), rows_kB in buckets)
        """Batch shapes (B, S, T), smallest S + T first. Each is compiled once."""
        num_batches_b = [len(rows_kB) for rows_kB in self._buckets]
        self.steps_per_epoch = sum(num_batches_b)
        positions_2 = num_batches_b @ np.array([(B * S, B * T) for B, S, T in self.shapes])
        source, target = (tokens_2 / positions_2).tolist()
        self.fill: tuple[float, float] = (source, target)
        """Fractions of source and target positions that hold real tokens, over all batches."""
        # Batches are prefetched, so two epochs can be in use at the same time.
        self._epoch = functools.lru_cache(maxsize=2)(self._shuffle)

    def shape(self, step: int) -> tuple[int, int, int]:
        """Return the shape (B, S, T) of a step's batch."""
        epoch, index_in_epoch = divmod(int(step), self.steps_per_epoch)
        return self._epoch(epoch)[index_in_epoch][0]

    def first_uses(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return the shapes of steps ``start`` to ``stop`` - 1, in order of first use."""
        stop = min(stop, start + 2 * self.steps_per_epoch)  # enough to include all shapes
        return list(dict.fromkeys(self.shape(step) for step in range(start, stop)))

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        """Return the batch of a step (counted from 0), or only its ``rows``, as NumPy arrays."""
        epoch, index_in_epoch = divmod(int(step), self.steps_per_epoch)
        (_, S, T), row_B = self._epoch(epoch)[index_in_epoch]
        pairs, starts = self._rows
        row = row_B[rows]
        pairs_per_row = starts[row + 1] - starts[row]
        pairs_of_batch = self._corpus.pairs_in_epoch(
            pairs[ranges(starts[row], pairs_per_row)], epoch
        )
        sources = self._corpus.read(0, pairs_of_batch)
        targets = self._corpus.read(1, pairs_of_batch)
        source_BS, source_segments_BS, source_starts = _fill_rows(
            sources, pairs_per_row, S, self._pad_id
        )
        target_BT, target_segments_BT, _ = _fill_rows(targets, pairs_per_row, T, self._pad_id)
        batch = Batch(source_BS, target_BT)
        if self.packed:
            batch = Batch(source_BS, target_BT, source_segments_BS, target_segments_BT)
        if self.aligned:
            links_in_pair, lengths = self._corpus.read(2, pairs_of_batch)
            links_in_row = links_in_pair + np.repeat(source_starts, lengths)
            links = np.where(links_in_pair, links_in_row, 0)
            links_BT, _, _ = _fill_rows((links, lengths), pairs_per_row, T, 0)
            batch = batch._replace(links_BT=links_BT)
        return batch

    def _shuffle(self, epoch: int) -> list[tuple[tuple[int, int, int], np.ndarray]]:
        """Return the shape and rows of each batch in an epoch, in order."""
        batches = []
        for bucket, (shape, rows_kB) in enumerate(zip(self.shapes, self._buckets)):
            order = permutation(rows_kB.size, self._seed, _ROW_ORDER_KEY, epoch, bucket)
            shuffled_kB = rows_kB.reshape(-1)[order].reshape(rows_kB.shape)
            batches += [(shape, row_B) for row_B in shuffled_kB]
        order = permutation(len(batches), self._seed, _BATCH_ORDER_KEY, epoch)
        return [batches[i] for i in order]


def _fill_rows(
    sequences: tuple[np.ndarray, np.ndarray], pairs_per_row: np.ndarray, L: int, padding: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lay out sequences (flat tokens and lengths) one after another in rows of length L.

    Returns tokens and segment ids, both int32 [B, L], and each sequence's start in its row.
    """
    tokens, lengths = sequences
    row = np.repeat(np.arange(len(pairs_per_row)), pairs_per_row)
    first_of_row = np.repeat(np.cumsum(pairs_per_row) - pairs_per_row, pairs_per_row)
    offsets = np.cumsum(lengths) - lengths
    starts = offsets - offsets[first_of_row]
    flat_positions = ranges(row * L + starts, lengths)
    tokens_BL = np.full((len(pairs_per_row), L), padding, np.int32)
    segments_BL = np.zeros_like(tokens_BL)
    tokens_BL.reshape(-1)[flat_positions] = tokens
    segments_BL.reshape(-1)[flat_positions] = np.repeat(
        np.arange(len(lengths)) - first_of_row + 1, lengths
    )
    return tokens_BL, segments_BL, starts


def permutation(n: int, seed: int, *key: int) -> np.ndarray:
    """Draw a random permutation of range(n), int32, identical on all platforms and NumPy releases.

    Sorts random integers whose low bits are the indices. NumPy keeps the raw bits of PCG64 stable,
    but not ``permutation``.
    """
    raw = np.random.PCG64(np.random.SeedSequence(seed % 2**64, spawn_key=key)).random_raw(n)
    mask = np.uint64((1 << n.bit_length()) - 1)
    keys = (raw & ~mask) | np.arange(n, dtype=np.uint64)
    keys.sort()
    return (keys & mask).astype(np.int32)
