"""How many pairs have which lengths, and the few shapes of batch that hold them all with little
padding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from transformer_jax.config import BatchConfig
from transformer_jax.data.stripes import Stripes
from transformer_jax.errors import UserError

_BLOCK = 2**20  # pairs whose lengths are in memory at a time


class LengthCounts(NamedTuple):
    """``pairs[c]`` pairs have ``source[c]`` source and ``target[c]`` target tokens."""

    source: np.ndarray
    target: np.ndarray
    pairs: np.ndarray

    def per_bucket(self, table: np.ndarray, buckets: int) -> np.ndarray:
        """Pairs in each bucket of a ``bucket_table``, int64."""
        return np.bincount(table[self.source, self.target], self.pairs, buckets).astype(np.int64)


def count_lengths(window: Stripes) -> list[LengthCounts]:
    """Histograms of a window's pairs in each segmentation; reads their lengths once, a block at a
    time.
    """
    histograms = [np.zeros((1, 1), np.int64) for _ in range(window.corpus.num_samples)]
    for block in range(0, window.num_pairs, _BLOCK):
        for v, (s_N, t_N) in enumerate(
            zip(*window.lengths(block, min(block + _BLOCK, window.num_pairs)), strict=True)
        ):
            old = histograms[v]
            rows, columns = max(len(old), int(s_N.max()) + 1), max(len(old[0]), int(t_N.max()) + 1)
            cell_N = s_N.astype(np.int64) * columns + t_N
            histograms[v] = np.bincount(cell_N, minlength=rows * columns).reshape(rows, columns)
            histograms[v][: len(old), : len(old[0])] += old
    cells = [np.nonzero(histogram) for histogram in histograms]
    return [
        LengthCounts(source, target, h[source, target])
        for (source, target), h in zip(cells, histograms, strict=True)
    ]


def histogram_of(counts: list[LengthCounts]) -> np.ndarray:
    """``histogram[s, t]``: all of them together."""
    longest = [max(int(lengths[side].max()) for lengths in counts) for side in (0, 1)]
    histogram = np.zeros((longest[0] + 1, longest[1] + 1), np.int64)
    for lengths in counts:
        histogram[lengths.source, lengths.target] += lengths.pairs
    return histogram


def bucket_table(widths: list[tuple[int, int]]) -> np.ndarray:
    """``table[s, t]``: the bucket for these lengths, the first of these shapes (S, T) that holds
    them.
    """
    table = np.zeros(np.max(widths, 0) + 1, np.int16)
    for b, (S, T) in reversed(list(enumerate(widths))):
        table[: S + 1, : T + 1] = b
    return table


def packed_shape(histogram: np.ndarray, config: BatchConfig) -> tuple[int, int]:
    """(S, T) of packed rows; ``UserError`` if a sentence is longer than ``config.row_length``."""
    L, longest = config.row_length, [size - 1 for size in histogram.shape]
    if max(longest) > L:
        raise UserError(
            f"batch.row_length is {L}; expected at least the longest sentence, which has {max(longest)} tokens: "
            "raise it, or lower data.max_source_length and data.max_target_length."
        )
    total = total_lengths(histogram)
    # The shorter side in proportion, with room for its longest sentence, in multiples of 8, which
    # suit matrix units.
    S, T = (min(L, -(-max(-(-L * total[i] // max(total)), longest[i]) // 8) * 8) for i in (0, 1))
    return S, T


def total_lengths(histogram: np.ndarray) -> tuple[int, int]:
    """All source and all target tokens."""
    source, target = (
        int(histogram.sum(1 - side) @ np.arange(histogram.shape[side])) for side in (0, 1)
    )
    return source, target


def choose_shapes(
    histogram: np.ndarray, config: BatchConfig, *, epochs: int = 1
) -> list[tuple[int, int]]:
    """At most ``config.buckets`` shapes (S, T), smallest S + T first, that hold all pairs with
    little padding.

    ``histogram[s, t]`` counts the pairs of these lengths in so many epochs. Starts from equal
    shares of the pairs, then widens, narrows or drops one shape at a time for as long as that saves
    padded positions (S + T a row). Each shape in use is charged for a whole batch an epoch at
    least, which keeps a few rare pairs from getting one of their own.
    """
    cell_s, cell_t = np.nonzero(histogram)
    count = histogram[cell_s, cell_t]
    # below[s, t]: pairs with a source shorter than s and a target shorter than t.
    below = np.zeros((histogram.shape[0] + 1, histogram.shape[1] + 1), np.int64)
    below[1:, 1:] = histogram.cumsum(0).cumsum(1)

    def cost(shapes: np.ndarray) -> float:
        S, T = shapes[np.argsort(shapes.sum(1), kind="stable")].T
        # a pair goes to the first shape that holds it
        pairs = np.diff(_pairs_held(S, T, below), prepend=0)
        if pairs.sum() < below[-1, -1]:
            return np.inf
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
    # Only shapes that are used, each no larger than what it holds; shrinking one can make it the
    # cheapest for others.
    result: list[tuple[int, int]] = []
    while result != (
        found := sorted(
            {(int(S), int(T)) for S, T in shapes}, key=lambda shape: (sum(shape), shape)
        )
    ):
        result = found
        S, T = np.array(result).T
        bucket = ((cell_s <= S[:, None]) & (cell_t <= T[:, None])).argmax(0)
        shapes = np.array(
            [(cell_s[bucket == b].max(), cell_t[bucket == b].max()) for b in np.unique(bucket)]
        )
    return result


def _pairs_held(S: np.ndarray, T: np.ndarray, below: np.ndarray) -> np.ndarray:
    """How many pairs the first shape holds, the first or the second, the first three, ...

    Together they hold what lies under a staircase. Its steps are the sources' widths in order, and
    the height of each is the largest target among shapes at least as wide.
    """
    narrow_first = np.argsort(S, kind="stable")
    steps = np.minimum(S[narrow_first] + 1, len(below) - 1)
    heights = np.minimum(T[narrow_first] + 1, len(below[0]) - 1)
    among_first = np.where(narrow_first <= np.arange(len(S))[:, None], heights, 0)
    heights_bb = np.maximum.accumulate(among_first[:, ::-1], axis=1)[:, ::-1]
    return (below[steps, heights_bb] - below[np.concatenate([[0], steps[:-1]]), heights_bb]).sum(1)


def _at_quantiles(lengths: np.ndarray, count: np.ndarray, quantile: np.ndarray) -> np.ndarray:
    order = np.argsort(lengths, kind="stable")
    return lengths[order][np.searchsorted(np.cumsum(count[order]), quantile, side="right")]


def batch_rows(S: int, T: int, config: BatchConfig) -> int:
    """Rows B of a batch of rows of S and T positions."""
    return config.tokens // max(S, T) // config.row_multiple * config.row_multiple


def require_room(S: int, T: int, config: BatchConfig) -> None:
    """``UserError`` if no batch has such rows."""
    if not batch_rows(S, T, config):
        raise UserError(
            f"batch.tokens is {config.tokens}; expected at least {max(S, T) * config.row_multiple}: batch.row_multiple = "
            f"{config.row_multiple} rows of {max(S, T)}, the longest. Raise it, or lower batch.row_multiple or "
            + (
                "batch.row_length."
                if config.layout == "packed"
                else "data.max_source_length and data.max_target_length."
            )
        )
