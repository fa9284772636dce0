"""The batch plan: which pairs stand in step N, as a pure function of (corpus, config, seed, step).

Rows stand in buckets, one for each shape of batch. In the bucketed layout a row is one pair and its
bucket the cheapest shape that holds it; in the packed layout a row is several pairs and there is
one bucket. Bucket b, with n_b rows, is an endless stream: one fresh permutation of its rows after
another, one an epoch. Its batch k is rows [k B_b, (k+1) B_b) of the stream, so every batch is full
and no pair is ever lost. Epoch e takes the batches k of each bucket with floor(e n_b / B_b) <= k <
floor((e+1) n_b / B_b), in an order shuffled across buckets. Steps before an epoch are thus a sum
over the n_b, and resuming needs the step alone. A bucket with fewer rows than a batch comes once in
several epochs; a corpus smaller than a batch repeats its pairs within one.

With K stored segmentations epoch e uses segmentation e mod K; rows, buckets and n_b then follow
from that.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.config import BatchConfig
from transformer_jax.data.bucketing import (
    batch_rows,
    bucket_table,
    choose_shapes,
    length_histogram,
    packed_shape,
    total_lengths,
)
from transformer_jax.data.corpus import Corpus, ranges
from transformer_jax.data.packing import pack
from transformer_jax.errors import UserError

Array = Any  # a NumPy array as the plan makes it, a jax.Array as the loader hands it on

_STEPS_LOOKED_AT = 5000  # for the first of each shape: seconds
_LENGTH_STEP = 16  # ``whole_corpus`` rounds lengths up to a multiple of this: few shapes to compile

# What a random permutation is for; part of its seed.
_OF_BATCHES, _OF_ROWS, _OF_PACKING = range(3)


class Batch(NamedTuple):
    """One step's pairs, int32. Sequences end with EOS (the target has no BOS); PAD = 0 follows.

    Segments number the pairs of a row from 1, with 0 at padding; both are None where a row is one
    pair.
    """

    source_BS: Array
    target_BT: Array
    source_segments_BS: Array | None = None
    target_segments_BT: Array | None = None


class _Rows(NamedTuple):
    """The corpus' rows in one segmentation, bucket by bucket.

    Row r holds the pairs ``pairs_N[row_starts[r] : row_starts[r + 1]]``; bucket b the rows from
    ``bucket_starts[b]`` to ``bucket_starts[b + 1] - 1``.
    """

    pairs_N: np.ndarray
    row_starts: np.ndarray
    bucket_starts: np.ndarray


class BatchPlan:
    """The batches of a corpus by step. Safe to use from threads.

    Memory: about 30 bytes a pair (packed: 65) while rows are made, and 12 more for each further
    segmentation; then half of that or less.
    """

    def __init__(self, corpus: Corpus, config: BatchConfig, *, seed: int) -> None:
        """Choose shapes and make rows; takes seconds for ten million pairs.

        Raises ``UserError`` if the corpus is empty, the token budget is smaller than
        ``row_multiple`` of its longest rows, or (packed) a sentence is longer than a row.
        """
        if not corpus.num_pairs:
            raise UserError(
                "The corpus has no pairs; expected at least one. Check its files and the filters "
                "in data."
            )
        self.packed = config.layout == "packed"
        self._corpus, self._seed = corpus, seed
        lengths_2KN = corpus.lengths()
        histogram = length_histogram(lengths_2KN)
        if self.packed:
            widths = [packed_shape(histogram, config)]
        else:
            widths = choose_shapes(histogram, config, epochs=corpus.num_samples)
        self.shapes: tuple[tuple[int, int, int], ...] = tuple(
            (batch_rows(S, T, config), S, T) for S, T in widths
        )
        """(B, S, T) of every batch there is, smallest S + T first; each is compiled once."""
        self._B = np.array(self.shapes)[:, 0]
        self._rows = self._make_rows(lengths_2KN, widths)
        # Rows in the buckets' streams before each epoch of a cycle through the segmentations, and
        # after its end.
        self._before_Kb = _cumulative(np.array([np.diff(r.bucket_starts) for r in self._rows]))
        per_cycle = self._before_Kb[-1]
        self.steps_per_epoch = float((per_cycle / self._B).sum()) / corpus.num_samples
        """Mean over epochs; may be below 1."""
        tokens, padded = total_lengths(histogram), (per_cycle @ np.array(widths)).tolist()
        self.fill = (tokens[0] / padded[0], tokens[1] / padded[1])
        """Shares of real tokens among source and target positions, over all batches."""
        # For this epoch and its neighbours, which prefetching and batches at an epoch's ends need.
        self._order_of_batches = functools.lru_cache(maxsize=3)(self._permute_batches)
        self._order_of_rows = functools.lru_cache(maxsize=3 * len(self.shapes))(self._permute_rows)

    def shape(self, step: int) -> tuple[int, int, int]:
        """(B, S, T) of a step's batch."""
        bucket, _ = self._locate(step)
        return self.shapes[bucket]

    def first_uses(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """The shapes of steps ``start`` to ``stop`` - 1, in the order of first use.

        The first 5,000 steps are looked at; shapes that are not among them follow.
        """
        end = min(stop, start + _STEPS_LOOKED_AT)
        first: dict[tuple[int, int, int], None] = {}
        for step in range(start, end):
            first[self.shape(step)] = None
            if len(first) == len(self.shapes):
                break
        return list(first | dict.fromkeys(self.shapes if end < stop else ()))

    def epoch(self, step: int) -> float:
        """Epochs done before a step: whole ones, and the share of the current one's batches."""
        epoch = self._epoch_of_step(step)
        first, end = self._steps_before(epoch), self._steps_before(epoch + 1)
        return epoch + (step - first) / (end - first)

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """The batch of a step (from 0), or only ``rows`` of it, as NumPy arrays."""
        bucket, k = self._locate(step)
        B, S, T = self.shapes[bucket]
        stream = np.arange(k * B, (k + 1) * B)[rows]
        sequences, pairs_per_row = self._sequences(bucket, stream)
        batch = _fill_batch(self._corpus, sequences, pairs_per_row, S, T)
        return batch if self.packed else Batch(batch.source_BS, batch.target_BT)

    # Where a step stands: epoch, bucket, batch of the bucket.

    def _batches_before(self, epoch: int) -> np.ndarray:
        """Batches that each bucket has had before an epoch, [b]."""
        cycle, v = divmod(epoch, self._corpus.num_samples)
        return (cycle * self._before_Kb[-1] + self._before_Kb[v]) // self._B

    def _steps_before(self, epoch: int) -> int:
        return int(self._batches_before(epoch).sum())

    def _epoch_of_step(self, step: int) -> int:
        """The one epoch with _steps_before(epoch) <= step < _steps_before(epoch + 1)."""
        if step < 0:
            raise IndexError(f"step is {step}; expected 0 or more")
        # Whole batches lag the even rate by less than one for each bucket, and by less than one
        # cycle.
        lag = len(self.shapes)
        beyond = int((step + lag) / self.steps_per_epoch) + self._corpus.num_samples + 2
        return bisect.bisect_right(range(beyond), step, key=self._steps_before) - 1

    def _locate(self, step: int) -> tuple[int, int]:
        epoch = self._epoch_of_step(step)
        buckets, ks = self._order_of_batches(epoch)
        at = step - self._steps_before(epoch)
        return int(buckets[at]), int(ks[at])

    def _permute_batches(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        first_b, end_b = self._batches_before(epoch), self._batches_before(epoch + 1)
        buckets = np.repeat(np.arange(len(self.shapes)), end_b - first_b)
        order = permutation(len(buckets), self._seed, _OF_BATCHES, epoch)
        return buckets[order], ranges(first_b, end_b - first_b)[order]

    def _permute_rows(self, epoch: int, bucket: int) -> np.ndarray:
        v = epoch % self._corpus.num_samples
        first, end = self._before_Kb[v : v + 2, bucket].tolist()
        return permutation(end - first, self._seed, _OF_ROWS, epoch, bucket)

    # Which sequences stand in a row.

    def _sequences(self, bucket: int, stream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The corpus' sequences at these positions of a bucket's stream, and how many each row
        holds.
        """
        N, K = self._corpus.num_pairs, self._corpus.num_samples
        before_K = self._before_Kb[:, bucket]
        cycle, rest = np.divmod(stream, before_K[-1])
        v = np.searchsorted(before_K, rest, side="right") - 1
        epochs, place = cycle * K + v, rest - before_K[v]
        sequences, pairs_per_row = [np.zeros(0, np.int64)], np.zeros(len(stream), np.int64)
        # The stream rises, but its positions may be asked for backwards: each epoch's rows keep
        # their place in the batch.
        for epoch in dict.fromkeys(epochs.tolist()):
            here, rows = np.flatnonzero(epochs == epoch), self._rows[epoch % K]
            order = self._order_of_rows(epoch, bucket)
            row = rows.bucket_starts[bucket] + order[place[here]]
            pairs_per_row[here] = count = rows.row_starts[row + 1] - rows.row_starts[row]
            pairs = rows.pairs_N[ranges(rows.row_starts[row], count)]
            sequences.append(epoch % K * N + pairs.astype(np.int64))
        return np.concatenate(sequences), pairs_per_row

    def _make_rows(self, lengths_2KN: np.ndarray, widths: list[tuple[int, int]]) -> list[_Rows]:
        """The rows in each segmentation."""
        N, rows = self._corpus.num_pairs, []
        one_each, table = np.arange(N + 1, dtype=np.int32), bucket_table(widths)
        for v, (s_N, t_N) in enumerate(zip(*lengths_2KN)):
            if self.packed:
                order = permutation(N, self._seed, _OF_PACKING, v)
                pairs_N, row_starts = _grouped(pack(s_N, t_N, *widths[0], order))
                row_starts = row_starts.astype(np.int32)
                rows.append(_Rows(pairs_N, row_starts, np.array([0, len(row_starts) - 1])))
            else:
                pairs_N, bucket_starts = _grouped(table[s_N, t_N], len(widths))
                rows.append(_Rows(pairs_N, one_each, bucket_starts))
        return rows


def whole_corpus(corpus: Corpus, *, tokens: int, row_multiple: int) -> Iterator[Batch]:
    """Every pair of the first segmentation once, short ones first, for losses on dev and test.

    A batch of sentences up to L long has ``tokens // L`` rows, as a multiple of ``row_multiple``
    and at least that; rows that are left hold padding alone.
    """
    length_N = _padded_lengths(corpus)
    for rows, length, _ in whole_corpus_shapes(corpus, tokens=tokens, row_multiple=row_multiple):
        pairs = np.flatnonzero(length_N == length)
        for start in range(0, len(pairs), rows):
            chosen = pairs[start : start + rows]
            one_each = (np.arange(rows) < len(chosen)).astype(np.int64)
            batch = _fill_batch(corpus, chosen, one_each, length, length)
            yield Batch(batch.source_BS, batch.target_BT)


def whole_corpus_shapes(
    corpus: Corpus, *, tokens: int, row_multiple: int
) -> list[tuple[int, int, int]]:
    """(B, S, T) of the batches of ``whole_corpus``, in their order, each once."""
    return [
        (max(1, tokens // length // row_multiple) * row_multiple, length, length)
        for length in np.unique(_padded_lengths(corpus)).tolist()
    ]


def _padded_lengths(corpus: Corpus) -> np.ndarray:
    """The length, source or target, to which ``whole_corpus`` pads each pair."""
    longest_N = corpus.lengths()[:, 0].max(0)
    return np.minimum(-(-longest_N // _LENGTH_STEP) * _LENGTH_STEP, longest_N.max())


def _fill_batch(
    corpus: Corpus, sequences: np.ndarray, pairs_per_row: np.ndarray, S: int, T: int
) -> Batch:
    source_BS, source_segments_BS = _fill_rows(corpus.source(sequences), pairs_per_row, S)
    target_BT, target_segments_BT = _fill_rows(corpus.target(sequences), pairs_per_row, T)
    return Batch(source_BS, target_BT, source_segments_BS, target_segments_BT)


def _fill_rows(
    sequences: tuple[np.ndarray, np.ndarray], pairs_per_row: np.ndarray, L: int
) -> tuple[np.ndarray, np.ndarray]:
    """Put sequences, given as flat tokens and lengths, one after another into rows of length L.

    Returns tokens and segments, both int32 [B, L].
    """
    tokens, lengths = sequences
    row = np.repeat(np.arange(len(pairs_per_row)), pairs_per_row)
    first_of_row = np.repeat(np.cumsum(pairs_per_row) - pairs_per_row, pairs_per_row)
    before = np.cumsum(lengths) - lengths
    to = ranges(row * L + before - before[first_of_row], lengths)
    tokens_BL, segments_BL = np.zeros((2, len(pairs_per_row), L), np.int32)
    tokens_BL.reshape(-1)[to] = tokens
    segments_BL.reshape(-1)[to] = np.repeat(np.arange(len(lengths)) - first_of_row + 1, lengths)
    return tokens_BL, segments_BL


def _grouped(group_N: np.ndarray, groups: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Members of group 0, then of 1, ..., int32 [N], and where each starts and the last ends, of at
    least so many groups.
    """
    members = np.argsort(group_N, kind="stable").astype(np.int32)
    return members, _cumulative(np.bincount(group_N, minlength=groups))


def _cumulative(counts: np.ndarray) -> np.ndarray:
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
