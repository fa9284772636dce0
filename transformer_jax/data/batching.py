"""The batch plan: which pairs stand in step N, as a pure function of (corpus, config, seed, step).

Rows stand in buckets, one for each shape of batch. In the bucketed layout a row is one pair and its
bucket the cheapest shape that holds it; in the packed layout a row is several pairs and there is
one bucket. The pairs are cut into windows of at most ``batch.window``, each with stripes from the
whole corpus (``stripes.py``), and shapes are those of the whole corpus. Bucket b of window w, with
n_wb rows, is an endless stream: one fresh permutation of its rows after another, one an epoch. Its
batch k is rows [k B_b, (k+1) B_b) of the stream, so every batch is full and no pair is ever lost.
Epoch e takes the windows in an order shuffled anew, and of each the batches k of each bucket with
floor(e n_wb / B_b) <= k < floor((e+1) n_wb / B_b), in an order shuffled across buckets. Steps
before an epoch, and before a window in it, are thus sums over the n_wb, and resuming needs the step
alone. A bucket with fewer rows than a batch comes once in several epochs; a corpus smaller than a
batch repeats its pairs within one.

With K stored segmentations epoch e uses segmentation e mod K; rows, buckets and n_wb then follow
from that.

In memory are the n_wb and the rows of one window, made when a step first needs it. Counting takes
one pass over the lengths (packed: packing every window once); with more than one window the counts
are kept beside the corpus.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import json
import os
import uuid
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.config import BatchConfig
from transformer_jax.data.bucketing import (
    batch_rows,
    bucket_table,
    choose_shapes,
    count_lengths,
    histogram_of,
    packed_shape,
    require_room,
    total_lengths,
)
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.joined import Array as StoredArray
from transformer_jax.data.stripes import windows_of
from transformer_jax.data.windows import (
    ORDER_OF_BATCHES,
    ORDER_OF_WINDOWS,
    Window,
    cumulative,
    permutation,
    ranges,
    window_key,
)
from transformer_jax.errors import UserError

Array = Any  # a NumPy array as the plan makes it, a jax.Array as the loader hands it on

_FORMAT = 2  # of stored counts: raise it when the same corpus and config would give others


class Batch(NamedTuple):
    """One step's pairs, int32. Sequences end with EOS (the target has no BOS) and are filled up
    with PAD = 0.

    Segments number the pairs of a row from 1, with 0 at padding; both are None where a row is one
    pair.
    """

    source_BS: Array
    target_BT: Array
    source_segments_BS: Array | None = None
    target_segments_BT: Array | None = None


class _Counts(NamedTuple):
    """What a plan must know of all windows: widths (S, T) of the buckets, rows in them, and all
    tokens of both sides.
    """

    widths: list[tuple[int, int]]
    rows_MKb: np.ndarray
    tokens: tuple[int, int]


class BatchPlan:
    """The batches of a corpus by step. Safe to use from threads.

    Memory: that of one ``Window``, besides what the corpus itself takes; it is made again when a
      step leads elsewhere.
    """

    def __init__(self, corpus: Corpus, config: BatchConfig, *, seed: int) -> None:
        """Choose shapes and count rows; takes seconds for millions of pairs.

        Raises ``UserError`` if the corpus is empty, the token budget is smaller than
        ``row_multiple`` of its longest rows, or (packed) a sentence is longer than a row.
        """
        if not corpus.num_pairs:
            raise UserError(
                "The corpus has no pairs; expected at least one. Check its files and the filters in data."
            )
        self.packed = config.layout == "packed"
        self._corpus, self._config, self._seed = corpus, config, seed
        self._stripes_M = windows_of(corpus, config.window)
        self._window = functools.lru_cache(maxsize=1)(self._make_window)
        self._widths, rows_MKb, tokens = (
            self._stored_counts() if len(self._stripes_M) > 1 else self._count()
        )
        self.shapes: tuple[tuple[int, int, int], ...] = tuple(
            (batch_rows(S, T, config), S, T) for S, T in self._widths
        )
        """(B, S, T) of every batch there is, smallest S + T first; each is compiled once."""
        self._B = np.array([B for B, _, _ in self.shapes])
        # Rows in the buckets' streams before each epoch of a cycle through the segmentations, and
        # after its end.
        self._before_KMb = cumulative(rows_MKb.swapaxes(0, 1))
        per_cycle = self._before_KMb[-1].sum(0)
        self.steps_per_epoch = float((per_cycle / self._B).sum()) / corpus.num_samples
        """Mean over epochs; may be below 1."""
        padded_s, padded_t = (int(per_cycle @ np.array(width)) for width in zip(*self._widths))
        self.fill = (tokens[0] / padded_s, tokens[1] / padded_t)
        """Shares of real tokens among source and target positions, over all batches."""
        self._order_of_windows = functools.lru_cache(maxsize=3)(self._permute_windows)
        self._order_of_batches = functools.lru_cache(maxsize=3)(self._permute_batches)

    def shape(self, step: int) -> tuple[int, int, int]:
        """(B, S, T) of a step's batch."""
        _, bucket, _ = self._locate(step)
        return self.shapes[bucket]

    def epoch(self, step: int) -> float:
        """Epochs done before a step: whole ones, and the share of the current one's batches."""
        epoch = self._epoch_of_step(step)
        first, end = self._steps_before(epoch), self._steps_before(epoch + 1)
        return epoch + (step - first) / (end - first)

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """The batch of a step (from 0), or only ``rows`` of it, as NumPy arrays."""
        window, bucket, k = self._locate(step)
        B, S, T = self.shapes[bucket]
        sequences, pairs_per_row = self._window(window).sequences(
            bucket, np.arange(k * B, (k + 1) * B)[rows]
        )
        corpus = self._corpus
        source_BS, source_segments_BS = _fill_rows(
            corpus.source_tokens, corpus.source_offsets, sequences, pairs_per_row, S
        )
        target_BT, target_segments_BT = _fill_rows(
            corpus.target_tokens, corpus.target_offsets, sequences, pairs_per_row, T
        )
        if not self.packed:
            return Batch(source_BS, target_BT)
        return Batch(source_BS, target_BT, source_segments_BS, target_segments_BT)

    # Where a step stands: epoch, window, bucket, batch of the bucket.

    def _rows_before(self, epoch: int) -> np.ndarray:
        cycle, v = divmod(epoch, self._corpus.num_samples)
        return cycle * self._before_KMb[-1] + self._before_KMb[v]

    def _steps_before(self, epoch: int) -> int:
        return int((self._rows_before(epoch) // self._B).sum())

    def _epoch_of_step(self, step: int) -> int:
        """The one epoch with _steps_before(epoch) <= step < _steps_before(epoch + 1)."""
        if step < 0:
            raise IndexError(f"step is {step}; expected 0 or more")
        # Whole batches lag the even rate by less than one for each bucket of each window, and by
        # less than one cycle.
        lag = self._before_KMb[0].size
        beyond = int((step + lag) / self.steps_per_epoch) + self._corpus.num_samples + 2
        return bisect.bisect_right(range(beyond), step, key=self._steps_before) - 1

    def _locate(self, step: int) -> tuple[int, int, int]:
        epoch = self._epoch_of_step(step)
        at = step - self._steps_before(epoch)
        windows, steps_before = self._order_of_windows(epoch)
        place = int(np.searchsorted(steps_before, at, side="right")) - 1
        window = int(windows[place])
        buckets, ks = self._order_of_batches(epoch, window)
        at -= int(steps_before[place])
        return window, int(buckets[at]), int(ks[at])

    def _permute_windows(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        steps_M = (
            self._rows_before(epoch + 1) // self._B - self._rows_before(epoch) // self._B
        ).sum(1)
        order = permutation(len(steps_M), self._seed, ORDER_OF_WINDOWS, epoch)
        return order, cumulative(steps_M[order])[:-1]

    def _permute_batches(self, epoch: int, window: int) -> tuple[np.ndarray, np.ndarray]:
        first, end = (self._rows_before(e)[window] // self._B for e in (epoch, epoch + 1))
        order = permutation(
            int((end - first).sum()), self._seed, ORDER_OF_BATCHES, epoch, *window_key(window)
        )
        buckets = np.repeat(np.arange(len(self.shapes)), end - first)
        return buckets[order], ranges(first, end - first)[order]

    # What stands in the windows.

    def _make_window(self, number: int) -> Window:
        return Window(self._stripes_M[number], self._widths, packed=self.packed, seed=self._seed)

    def _count(self) -> _Counts:
        config = self._config
        lengths_MK = [count_lengths(stripes) for stripes in self._stripes_M]
        histogram = histogram_of([lengths for lengths_K in lengths_MK for lengths in lengths_K])
        S, T = (
            packed_shape(histogram, config)
            if self.packed
            else (size - 1 for size in histogram.shape)
        )
        require_room(S, T, config)
        tokens = total_lengths(histogram)
        if self.packed:
            self._widths = [(S, T)]
            rows_MKb = np.stack([self._window(w).counts_Kb for w in range(len(lengths_MK))])
            return _Counts(self._widths, rows_MKb, tokens)
        widths = choose_shapes(histogram, config, epochs=self._corpus.num_samples)
        table = bucket_table(widths)
        rows = [
            [lengths.per_bucket(table, len(widths)) for lengths in lengths_K]
            for lengths_K in lengths_MK
        ]
        return _Counts(widths, np.array(rows), tokens)

    def _stored_counts(self) -> _Counts:
        """``_count``, or what it found the last time."""
        directory = self._corpus.directory
        if directory is None:
            return self._count()
        settings = [_FORMAT, self._corpus.fingerprint, dataclasses.asdict(self._config), self._seed]
        path = (
            directory
            / f"counts-{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:20]}.json"
        )
        with suppress(OSError, ValueError):
            widths, rows_MKb, tokens = json.loads(path.read_text())
            return _Counts([(S, T) for S, T in widths], np.array(rows_MKb), tokens)
        counts = self._count()
        temporary = directory / f".{path.name}.{uuid.uuid4().hex}"
        with suppress(OSError):  # what is not stored is only slower
            temporary.write_text(
                json.dumps([counts.widths, counts.rows_MKb.tolist(), counts.tokens])
            )
            os.replace(temporary, path)
        return counts


def _fill_rows(
    tokens: StoredArray,
    offsets: StoredArray,
    sequences: np.ndarray,
    pairs_per_row: np.ndarray,
    L: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Write sequences one after another into rows of length L. Returns tokens and segments, both
    int32 [B, L].
    """
    starts = offsets[sequences]
    lengths = offsets[sequences + 1] - starts
    row = np.repeat(np.arange(len(pairs_per_row)), pairs_per_row)
    first_of_row = np.repeat(np.cumsum(pairs_per_row) - pairs_per_row, pairs_per_row)
    before = np.cumsum(lengths) - lengths
    to = ranges(row * L + before - before[first_of_row], lengths)
    tokens_BL, segments_BL = np.zeros((2, len(pairs_per_row), L), np.int32)
    tokens_BL.reshape(-1)[to] = tokens[ranges(starts, lengths)]
    segments_BL.reshape(-1)[to] = np.repeat(np.arange(len(sequences)) - first_of_row + 1, lengths)
    return tokens_BL, segments_BL
