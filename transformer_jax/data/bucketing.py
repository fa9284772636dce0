"""How many pairs have which lengths, and the few shapes of batch that hold them all with little
padding.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from transformer_jax.config import BatchConfig
from transformer_jax.errors import UserError


def default_buckets(platform: str) -> int:
    """How many shapes ``batch.buckets = None`` means on a backend, "cpu" or another.

    Compiling one takes seconds on a CPU and most of a minute elsewhere. Eight instead of twelve
    cost 2 to 4% of the real tokens in a batch (docs/performance.md).
    """
    return 12 if platform == "cpu" else 8


def length_histogram(lengths_2KN: np.ndarray) -> np.ndarray:
    """How many pairs, in all segmentations, have s source and t target tokens: int64 [S, T]."""
    S, T = (int(longest) + 1 for longest in lengths_2KN.max((1, 2)))
    counts = np.zeros(S * T, np.int64)
    for s_N, t_N in zip(*lengths_2KN):
        counts += np.bincount(s_N.astype(np.int64) * T + t_N, minlength=S * T)
    return counts.reshape(S, T)


def bucket_table(widths: list[tuple[int, int]]) -> np.ndarray:
    """``table[s, t]``: the bucket for these lengths, the first (S, T) that holds them."""
    table = np.zeros(np.max(widths, 0) + 1, np.int16)
    for b, (S, T) in reversed(list(enumerate(widths))):
        table[: S + 1, : T + 1] = b
    return table


def fill_buckets(
    lengths_2KN: np.ndarray, widths: list[tuple[int, int]], config: BatchConfig
) -> list[tuple[tuple[int, int], np.ndarray]]:
    """The width (S, T) of each bucket and the pairs of its batches, int32 [K, batches, B].

    In each of K segmentations a pair belongs to the first bucket that holds it. Every segmentation
    fills the same number of batches; the longest pairs that remain move up to the next bucket that
    holds all of this one, and the width follows. Where no such bucket exists, numbers that are no
    pairs (N) fill the batches.
    """
    K, N = lengths_2KN.shape[1:]
    buckets_K = [_by_bucket(lengths_2KN[:, v], widths) for v in range(K)]
    filled = []
    for b, (S, T) in enumerate(widths):
        waiting, B = [buckets[b] for buckets in buckets_K], batch_rows(S, T, config)
        larger = (c for c in range(b + 1, len(widths)) if widths[c][0] >= S and widths[c][1] >= T)
        if (c := next(larger, None)) is None:
            batches, B = even_batches(max(map(len, waiting)), B, config)
        else:
            batches = min(map(len, waiting)) // B
            for buckets in buckets_K:
                buckets[c] = np.append(buckets[b][batches * B :], buckets[c])
        if batches:
            rows_KR = np.full((K, batches * B), N, np.int32)
            width = np.zeros(2, np.int64)
            for v, pairs in enumerate(waiting):
                pairs = pairs[: batches * B]
                rows_KR[v, : len(pairs)] = pairs
                width = np.maximum(width, lengths_2KN[:, v, pairs].max(1))
            filled.append(((int(width[0]), int(width[1])), rows_KR.reshape(K, batches, B)))
    return filled


def _by_bucket(lengths_2N: np.ndarray, widths: list[tuple[int, int]]) -> list[np.ndarray]:
    """The pairs of each bucket, the shortest first."""
    bucket_N, size_N = bucket_table(widths)[tuple(lengths_2N)], lengths_2N.sum(0)
    order = np.argsort(bucket_N * (size_N.max() + 1) + size_N, kind="stable").astype(np.int32)
    return np.split(order, np.cumsum(np.bincount(bucket_N, minlength=len(widths)))[:-1])


def even_batches(rows: int, most: int, config: BatchConfig) -> tuple[int, int]:
    """How many batches of at most so many rows hold all rows, and how many rows B each needs."""
    batches = -(-rows // most)
    return batches, -(-rows // max(batches, 1) // config.row_multiple) * config.row_multiple


def packed_shape(longest: list[int], tokens: list[int], config: BatchConfig) -> tuple[int, int]:
    """(S, T) of packed rows, from the longest sentence and the number of tokens of either side;
    ``UserError`` if a sentence is longer than ``config.row_length`` or rows are too long for the
    token budget.
    """
    L = config.row_length
    if max(longest) > L:
        raise UserError(
            f"batch.row_length is {L}; expected at least the longest sentence, which has "
            f"{max(longest)} tokens: raise it, or lower data.max_source_length and "
            "data.max_target_length."
        )
    # The shorter side in proportion, but long enough for its longest sentence, in multiples of 8,
    # which suit matrix units.
    S, T = (min(L, -(-max(-(-L * tokens[i] // max(tokens)), longest[i]) // 8) * 8) for i in (0, 1))
    _check_budget(max(S, T), config, remedy="batch.row_length")
    return S, T


def choose_shapes(
    histogram: np.ndarray, config: BatchConfig, *, epochs: int = 1
) -> list[tuple[int, int]]:
    """At most ``config.buckets`` shapes (S, T), smallest S + T first, that hold all pairs with
    little padding (None: as many as on a CPU); ``UserError`` if the longest are too long for the
    token budget.

    ``histogram[s, t]`` counts the pairs of these lengths in so many epochs. Starts from equal
    shares of the pairs, then widens, narrows or drops one shape at a time for as long as that saves
    padded positions (S + T a row). Each shape in use is charged for a whole batch an epoch at
    least, which keeps a few rare pairs from getting one of their own.
    """
    remedy = "data.max_source_length and data.max_target_length"
    _check_budget(max(histogram.shape) - 1, config, remedy=remedy)
    # below[s, t]: pairs with a source shorter than s and a target shorter than t.
    below = np.pad(histogram.cumsum(0).cumsum(1), ((1, 0), (1, 0)))

    def cost(shapes: np.ndarray) -> float:
        S, T = shapes[np.argsort(shapes.sum(1), kind="stable")].T
        # a pair goes to the first shape that holds it
        pairs = np.diff(_pairs_held(S, T, below), prepend=0)
        if pairs.sum() < below[-1, -1]:
            return np.inf
        batch = config.tokens // np.maximum(S, T).clip(1)
        return float(np.where(pairs > 0, np.maximum(pairs, epochs * batch), 0) @ (S + T))

    count = config.buckets or default_buckets("cpu")
    quantile = (np.arange(1, count + 1) * histogram.sum() - 1) // count
    below_S, below_T = (histogram.sum(other).cumsum() for other in (1, 0))
    shapes = np.stack([np.searchsorted(sums, quantile, "right") for sums in (below_S, below_T)], 1)
    best = cost(shapes)
    moves = [move for move in product((1, 0, -1), repeat=2) if any(move)]
    for stride in (8, 4, 2, 1):
        before = np.inf
        while best < before:
            before = best
            for i, move in product(range(len(shapes)), [*moves, None]):
                changed = shapes.copy()
                changed[i] = np.maximum(shapes[i] + stride * np.array(move), 0) if move else 0
                if (value := cost(changed)) < best:
                    shapes, best = changed, value
    # Only shapes that are used, each no larger than what it holds; shrinking one can make it the
    # cheapest for others.
    cells = np.argwhere(histogram)
    result: list[tuple[int, int]] = []
    while result != (found := sorted({(S, T) for S, T in shapes.tolist()}, key=_by_size)):
        result = found
        bucket = bucket_table(result)[tuple(cells.T)]
        shapes = np.array([cells[bucket == b].max(0) for b in np.unique(bucket)])
    return result


def _by_size(shape: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    return sum(shape), shape


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


def batch_rows(S: int, T: int, config: BatchConfig) -> int:
    """Rows B of a batch of rows of S and T positions."""
    return config.tokens // max(S, T) // config.row_multiple * config.row_multiple


def _check_budget(longest: int, config: BatchConfig, *, remedy: str) -> None:
    if not batch_rows(longest, longest, config):
        raise UserError(
            f"batch.tokens is {config.tokens}; expected at least {longest * config.row_multiple}: "
            f"batch.row_multiple = {config.row_multiple} rows of {longest}, the longest. Raise it, "
            f"or lower batch.row_multiple or {remedy}."
        )
