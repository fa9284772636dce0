"""The batch plan: which pairs stand in step N, as a pure function of (corpus, config, seed, step).

Rows stand in buckets, one for each shape of batch. In the bucketed layout a row is one pair and its bucket the cheapest
shape that holds it; in the packed layout a row is several pairs and there is one bucket. Bucket b, with n_b rows, is an
endless stream: one fresh permutation of its rows after another, one an epoch. Its batch k is rows [k B_b, (k+1) B_b) of
the stream, so every batch is full and no pair is ever lost. Epoch e runs the batches k of each bucket with
floor(e n_b / B_b) <= k < floor((e+1) n_b / B_b), in an order shuffled across buckets. Steps before an epoch are thus a
closed form, and resuming needs the step alone. A bucket with fewer rows than a batch comes once in several epochs; a
corpus smaller than a batch repeats its pairs within one.

With K stored segmentations epoch e uses segmentation e mod K; rows, buckets and n_b then follow from that.
"""

from __future__ import annotations

import bisect
import functools
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.config import BatchConfig
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.packing import pack
from transformer_jax.errors import UserError

Array = Any  # a NumPy array as the plan makes it, a jax.Array as the loader hands it on

# What a random permutation is for; part of its seed.
_ORDER_OF_BATCHES, _ORDER_OF_ROWS, _ORDER_OF_PACKING = range(3)


class Batch(NamedTuple):
    """One step's pairs, int32. Sequences end with EOS (the target has no BOS) and are filled up with PAD = 0.

    Segments number the pairs of a row from 1, with 0 at padding; both are None where a row is one pair.
    """

    source_BS: Array
    target_BT: Array
    source_segments_BS: Array | None = None
    target_segments_BT: Array | None = None


class _Rows(NamedTuple):
    """One segmentation's rows, bucket by bucket: row r is ``pairs_N[row_starts[r] : row_starts[r + 1]]``."""

    pairs_N: np.ndarray
    row_starts: np.ndarray
    bucket_starts: np.ndarray


class BatchPlan:
    """The batches of a corpus by step. Safe to use from threads.

    Memory: 4 bytes for each pair and segmentation, and up to 16 for each pair, besides the corpus' own.
    """

    def __init__(self, corpus: Corpus, config: BatchConfig, *, seed: int) -> None:
        """Choose shapes and rows; takes seconds for millions of pairs.

        Raises ``UserError`` if the corpus is empty, the token budget is smaller than ``row_multiple`` of its longest
        rows, or (packed) a sentence is longer than a row.
        """
        if not corpus.num_pairs:
            raise UserError("The corpus has no pairs; expected at least one. Check its files and the filters in data.")
        self.packed = config.layout == "packed"
        self._corpus = corpus
        self._seed = seed
        self._source = (np.asarray(corpus.source_tokens), np.asarray(corpus.source_offsets))
        self._target = (np.asarray(corpus.target_tokens), np.asarray(corpus.target_offsets))
        s_KN, t_KN = corpus.source_lengths, corpus.target_lengths
        self._rows: list[_Rows]
        if self.packed:
            widths, self._rows = self._packed(s_KN, t_KN, config)
        else:
            widths, self._rows = self._bucketed(s_KN, t_KN, config)
        self.shapes: tuple[tuple[int, int, int], ...] = tuple((_batch_rows(S, T, config), S, T) for S, T in widths)
        """(B, S, T) of every batch there is, smallest S + T first; each is compiled once."""
        self._B = np.array([B for B, _, _ in self.shapes])
        counts_Kb = np.stack([np.diff(rows.bucket_starts) for rows in self._rows])
        # Rows in the buckets' streams before each epoch of a cycle through the segmentations, and after its end.
        self._before_Kb = np.concatenate([np.zeros_like(counts_Kb[:1]), np.cumsum(counts_Kb, 0)])
        per_cycle = self._before_Kb[-1]
        self.steps_per_epoch = float((per_cycle / self._B).sum()) / len(self._rows)
        """Mean over epochs; may be below 1."""
        padded_s, padded_t = (int(per_cycle @ np.array(width)) for width in zip(*widths))
        self.fill = (int(s_KN.sum(dtype=np.int64)) / padded_s, int(t_KN.sum(dtype=np.int64)) / padded_t)
        """Shares of real tokens among source and target positions, over all batches."""
        # Permutations of this epoch and its neighbours, which batches at its ends and prefetching need.
        self._order_of_rows = functools.lru_cache(maxsize=3 * len(self.shapes))(self._permute_rows)
        self._order_of_batches = functools.lru_cache(maxsize=3)(self._permute_batches)

    def shape(self, step: int) -> tuple[int, int, int]:
        """(B, S, T) of a step's batch."""
        bucket, _ = self._locate(step)
        return self.shapes[bucket]

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
        sequences, pairs_per_row = self._pairs(bucket, stream)
        source_BS, source_segments_BS = _fill_rows(*self._source, sequences, pairs_per_row, S)
        target_BT, target_segments_BT = _fill_rows(*self._target, sequences, pairs_per_row, T)
        if not self.packed:
            return Batch(source_BS, target_BT)
        return Batch(source_BS, target_BT, source_segments_BS, target_segments_BT)

    # Where a step stands: epoch, bucket, batch of the bucket.

    def _rows_before(self, epoch: int) -> np.ndarray:
        cycle, v = divmod(epoch, len(self._rows))
        return cycle * self._before_Kb[-1] + self._before_Kb[v]

    def _steps_before(self, epoch: int) -> int:
        return int((self._rows_before(epoch) // self._B).sum())

    def _epoch_of_step(self, step: int) -> int:
        """The one epoch with _steps_before(epoch) <= step < _steps_before(epoch + 1)."""
        if step < 0:
            raise IndexError(f"step is {step}; expected 0 or more")
        # Whole batches lag the even rate by less than one for each bucket, and by less than one cycle.
        beyond = int((step + len(self.shapes)) / self.steps_per_epoch) + len(self._rows) + 2
        return bisect.bisect_right(range(beyond), step, key=self._steps_before) - 1

    def _locate(self, step: int) -> tuple[int, int]:
        epoch = self._epoch_of_step(step)
        buckets, ks = self._order_of_batches(epoch)
        at = step - self._steps_before(epoch)
        return int(buckets[at]), int(ks[at])

    def _permute_batches(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        first, end = self._rows_before(epoch) // self._B, self._rows_before(epoch + 1) // self._B
        order = _permutation(int((end - first).sum()), self._seed, _ORDER_OF_BATCHES, epoch)
        buckets = np.repeat(np.arange(len(self.shapes)), end - first)
        return buckets[order], _ranges(first, end - first)[order]

    # Which pairs stand in a bucket's stream.

    def _permute_rows(self, epoch: int, bucket: int) -> np.ndarray:
        starts = self._rows[epoch % len(self._rows)].bucket_starts
        rows = int(starts[bucket + 1] - starts[bucket])
        return int(starts[bucket]) + _permutation(rows, self._seed, _ORDER_OF_ROWS, epoch, bucket)

    def _pairs(self, bucket: int, stream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The sequences (v N + pair) at these positions of a bucket's stream, and how many stand in each row."""
        K, before = len(self._rows), self._before_Kb[:, bucket]
        cycle, rest = np.divmod(stream, before[-1])
        epochs = cycle * K + np.searchsorted(before, rest, side="right") - 1
        sequences, pairs_per_row = [np.zeros(0, np.int64)], np.zeros(len(stream), np.int64)
        # The stream rises, but `rows` may run backwards: let each epoch's part keep its place in the batch.
        for epoch in dict.fromkeys(epochs.tolist()):
            here, v = np.flatnonzero(epochs == epoch), epoch % K
            rows = self._rows[v]
            row = self._order_of_rows(epoch, bucket)[rest[here] - before[v]]
            pairs_per_row[here] = count = rows.row_starts[row + 1] - rows.row_starts[row]
            pairs = rows.pairs_N[_ranges(rows.row_starts[row], count)]
            sequences.append(v * self._corpus.num_pairs + pairs.astype(np.int64))
        return np.concatenate(sequences), pairs_per_row

    # The rows of each segmentation.

    def _bucketed(self, s_KN: np.ndarray, t_KN: np.ndarray, config: BatchConfig) -> tuple[list[tuple[int, int]], list[_Rows]]:
        _require_room(int(s_KN.max()), int(t_KN.max()), config)
        histogram = np.zeros((int(s_KN.max()) + 1, int(t_KN.max()) + 1), np.int64)
        for s_N, t_N in zip(s_KN, t_KN, strict=True):
            cell_N = s_N.astype(np.int64) * histogram.shape[1] + t_N
            histogram += np.bincount(cell_N, minlength=histogram.size).reshape(histogram.shape)
        widths = choose_shapes(histogram, config, epochs=len(s_KN))
        # table[s, t]: the bucket for these lengths, the cheapest that holds them.
        table = np.zeros(histogram.shape, np.int16)
        for b, (S, T) in reversed(list(enumerate(widths))):
            table[: S + 1, : T + 1] = b
        N = s_KN.shape[1]
        row_starts = np.arange(N + 1, dtype=np.int32)
        layouts = []
        for s_N, t_N in zip(s_KN, t_KN, strict=True):
            bucket_N = table[s_N, t_N]
            pairs_N = np.argsort(bucket_N, kind="stable").astype(np.int32)
            ends = np.cumsum(np.bincount(bucket_N, minlength=len(widths)))
            layouts.append(_Rows(pairs_N, row_starts, np.concatenate([[0], ends])))
        return widths, layouts

    def _packed(self, s_KN: np.ndarray, t_KN: np.ndarray, config: BatchConfig) -> tuple[list[tuple[int, int]], list[_Rows]]:
        L, longest = config.row_length, [int(lengths.max()) for lengths in (s_KN, t_KN)]
        if max(longest) > L:
            raise UserError(
                f"batch.row_length is {L}; expected at least the longest sentence, which has {max(longest)} pieces: "
                "raise it, or lower data.max_source_length and data.max_target_length."
            )
        total = [int(lengths.sum(dtype=np.int64)) for lengths in (s_KN, t_KN)]
        # The shorter side in proportion, with room for its longest sentence, in multiples of 8, which suit matrix units.
        S, T = (min(L, -(-max(-(-L * total[i] // max(total)), longest[i]) // 8) * 8) for i in (0, 1))
        _require_room(S, T, config)
        layouts = []
        for v, (s_N, t_N) in enumerate(zip(s_KN, t_KN, strict=True)):
            row_N = pack(s_N, t_N, S, T, _permutation(len(s_N), self._seed, _ORDER_OF_PACKING, v))
            row_starts = np.concatenate([[0], np.cumsum(np.bincount(row_N))]).astype(np.int32)
            pairs_N = np.argsort(row_N, kind="stable").astype(np.int32)
            layouts.append(_Rows(pairs_N, row_starts, np.array([0, len(row_starts) - 1])))
        return [(S, T)], layouts


def choose_shapes(histogram: np.ndarray, config: BatchConfig, *, epochs: int = 1) -> list[tuple[int, int]]:
    """At most ``config.buckets`` shapes (S, T), smallest S + T first, that hold all pairs with little padding.

    ``histogram[s, t]`` counts the pairs of these lengths in so many epochs. Starts from equal shares of the pairs, then
    widens, narrows or drops one shape at a time for as long as that saves padded positions (S + T a row). Each shape in use
    is charged for a whole batch an epoch at least, which keeps a few rare pairs from getting one of their own.
    """
    cell_s, cell_t = np.nonzero(histogram)
    count = histogram[cell_s, cell_t]

    def cost(shapes: np.ndarray) -> float:
        S, T = shapes[np.argsort(shapes.sum(1), kind="stable")].T
        fits = (cell_s <= S[:, None]) & (cell_t <= T[:, None])
        if not fits.any(0).all():
            return np.inf
        pairs = np.bincount(fits.argmax(0), count, len(S))
        batch = config.tokens // np.maximum(np.maximum(S, T), 1)
        return float(np.where(pairs > 0, np.maximum(pairs, epochs * batch), 0) @ (S + T))

    quantile = (np.arange(1, config.buckets + 1) * count.sum() - 1) // config.buckets
    shapes = np.stack([_at_quantiles(lengths, count, quantile) for lengths in (cell_s, cell_t)], 1)
    best = cost(shapes)
    moves = [(ds, dt) for ds in (1, 0, -1) for dt in (1, 0, -1) if (ds, dt) != (0, 0)]
    for stride in (8, 4, 2, 1):
        improved = True
        while improved:
            improved = False
            for i in range(len(shapes)):
                for move in [*moves, None]:
                    changed = shapes.copy()
                    changed[i] = np.maximum(shapes[i] + stride * np.array(move), 0) if move else 0
                    if (value := cost(changed)) < best:
                        shapes, best, improved = changed, value, True
    # Only shapes that are used, each no larger than what it holds; shrinking one can make it the cheapest for others.
    result: list[tuple[int, int]] = []
    while result != (found := sorted({(int(S), int(T)) for S, T in shapes}, key=lambda shape: (sum(shape), shape))):
        result = found
        S, T = np.array(result).T
        bucket = ((cell_s <= S[:, None]) & (cell_t <= T[:, None])).argmax(0)
        shapes = np.array([(cell_s[bucket == b].max(), cell_t[bucket == b].max()) for b in np.unique(bucket)])
    return result


def _at_quantiles(lengths: np.ndarray, count: np.ndarray, quantile: np.ndarray) -> np.ndarray:
    order = np.argsort(lengths, kind="stable")
    return lengths[order][np.searchsorted(np.cumsum(count[order]), quantile, side="right")]


def _batch_rows(S: int, T: int, config: BatchConfig) -> int:
    return config.tokens // max(S, T) // config.row_multiple * config.row_multiple


def _require_room(S: int, T: int, config: BatchConfig) -> None:
    if not _batch_rows(S, T, config):
        raise UserError(
            f"batch.tokens is {config.tokens}; expected at least {max(S, T) * config.row_multiple}: batch.row_multiple = "
            f"{config.row_multiple} rows of {max(S, T)}, the longest. Raise it, or lower batch.row_multiple or "
            + ("batch.row_length." if config.layout == "packed" else "data.max_source_length and data.max_target_length.")
        )


def _permutation(n: int, seed: int, *key: int) -> np.ndarray:
    """A random permutation of n, int32, the same on every platform and for every release of NumPy.

    Sorts random bits with the index in their low end: raw bits of PCG64 are a stable interface, ``permutation`` is not.
    """
    raw = np.random.PCG64(np.random.SeedSequence(seed % 2**64, spawn_key=key)).random_raw(n)
    mask = np.uint64((1 << n.bit_length()) - 1)
    keys = (raw & ~mask) | np.arange(n, dtype=np.uint64)
    keys.sort()
    return (keys & mask).astype(np.int32)


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``arange(start, start + count)`` for each, one after another."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)


def _fill_rows(
    tokens: np.ndarray, offsets: np.ndarray, sequences: np.ndarray, pairs_per_row: np.ndarray, L: int
) -> tuple[np.ndarray, np.ndarray]:
    """Write sequences one after another into rows of length L. Returns tokens and segments, both int32 [B, L]."""
    starts = offsets[sequences]
    lengths = offsets[sequences + 1] - starts
    row = np.repeat(np.arange(len(pairs_per_row)), pairs_per_row)
    first_of_row = np.repeat(np.cumsum(pairs_per_row) - pairs_per_row, pairs_per_row)
    before = np.cumsum(lengths) - lengths
    to = _ranges(row * L + before - before[first_of_row], lengths)
    tokens_BL, segments_BL = np.zeros((2, len(pairs_per_row), L), np.int32)
    tokens_BL.reshape(-1)[to] = tokens[_ranges(starts, lengths)]
    segments_BL.reshape(-1)[to] = np.repeat(np.arange(len(sequences)) - first_of_row + 1, lengths)
    return tokens_BL, segments_BL
