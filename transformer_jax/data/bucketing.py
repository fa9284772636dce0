"""Bucket widths with little padding, and assignment of pairs to buckets and batches."""

from __future__ import annotations

from itertools import product

import numpy as np

from transformer_jax.errors import UserError


def choose_widths(lengths_2N: np.ndarray, count: int, tokens: int) -> list[tuple[int, int]]:
    """Choose at most ``count`` bucket widths (S, T), in ascending order, that need little padding.

    The last width fits all pairs. Starts with the same number of pairs in each bucket, then widens,
    narrows or drops one bucket at a time as long as that reduces the number of positions (S + T per
    row). Each bucket counts as at least one full batch of ``tokens`` per epoch, so a few rare pairs
    do not get their own bucket.
    """
    # histogram[s, t]: number of pairs with s source and t target tokens.
    S, T = (int(longest) + 1 for longest in lengths_2N.max(1))
    source_lengths_N, target_lengths_N = lengths_2N.astype(np.int64)
    histogram = np.bincount(source_lengths_N * T + target_lengths_N, minlength=S * T).reshape(S, T)
    # num_shorter[s, t]: number of pairs with fewer than s source and fewer than t target tokens.
    num_shorter = np.pad(histogram.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    longest = np.array(histogram.shape) - 1

    def cost(widths_b2: np.ndarray) -> float:
        S, T = widths_b2.T
        pairs = np.diff(num_shorter[S + 1, T + 1], prepend=0)
        batch = tokens // widths_b2.max(1).clip(1)
        return float(np.where(pairs > 0, np.maximum(pairs, batch), 0) @ (S + T))

    quantiles = (np.arange(1, count + 1) * histogram.sum() - 1) // count
    source_sums = histogram.sum(1).cumsum()
    target_sums = histogram.sum(0).cumsum()
    widths = np.stack(
        [np.searchsorted(sums, quantiles, "right") for sums in (source_sums, target_sums)], axis=1
    )
    lowest_cost = cost(widths)
    for stride in (8, 4, 2, 1):
        previous_cost = np.inf
        while lowest_cost < previous_cost:
            previous_cost = lowest_cost
            for b, steps in product(range(count), product((1, 0, -1), repeat=2)):
                if any(steps):
                    candidate = widths.copy()
                    candidate[b] += stride * np.array(steps)
                else:  # drop bucket b; the first bucket is then empty
                    candidate = np.insert(np.delete(widths, b, axis=0), 0, 0, axis=0)
                candidate[-1] = longest
                candidate = np.sort(candidate.clip(0, longest), axis=0)
                candidate_cost = cost(candidate)
                if candidate_cost < lowest_cost:
                    widths = candidate
                    lowest_cost = candidate_cost
    return [(S, T) for S, T in widths.tolist()]


def fill_buckets(
    lengths_2N: np.ndarray, widths: list[tuple[int, int]], tokens: int, multiple: int
) -> list[tuple[tuple[int, int], np.ndarray]]:
    """Return each bucket's width (S, T) and the pairs in its batches, int32 [batches, B].

    Pairs are sorted by bucket, then by length, and split into batches. The longest pairs of a
    bucket that do not fill a batch move to the next bucket, and widths are adjusted to the pairs.
    In the last bucket, index N (no pair) pads the batches. See ``batch_rows`` for ``tokens`` and
    ``multiple``.
    """
    _, N = lengths_2N.shape
    bucket_N = np.max([np.searchsorted(*side) for side in zip(np.array(widths).T, lengths_2N)], 0)
    length_N = lengths_2N.sum(0)
    order_N = np.argsort(bucket_N * (length_N.max() + 1) + length_N, kind="stable")
    start = 0
    filled = []
    for width, end in zip(widths, np.bincount(bucket_N, minlength=len(widths)).cumsum().tolist()):
        B = batch_rows(*width, tokens, multiple)
        batches = (end - start) // B
        if end == N:
            batches, B = even_batches(N - start, B, multiple)
        stop = start + batches * B
        if batches:
            rows_R = np.full(batches * B, N, np.int32)
            rows_R[: N - start] = order_N[start:stop]
            S, T = lengths_2N[:, order_N[start:stop]].max(1).tolist()
            filled.append(((S, T), rows_R.reshape(batches, B)))
        start = stop
    return filled


def even_batches(rows: int, max_rows: int, multiple: int) -> tuple[int, int]:
    """Return the number of batches needed for all rows, and the number of rows B in each.

    B is a multiple of ``multiple``, at most ``max_rows``, and as small as possible.
    """
    batches = -(-rows // max_rows)
    B = -(-rows // max(batches, 1) // multiple) * multiple
    return batches, B


def packed_shape(longest: list[int], tokens: list[int], L: int) -> tuple[int, int]:
    """Return the shape (S, T) of packed rows with at most L positions per side.

    ``longest`` and ``tokens`` are the length of the longest sentence and the number of tokens on
    each side. Raises ``UserError`` if a sentence is longer than L.
    """
    if max(longest) > L:
        raise UserError(
            f"batch.row_length is {L}; expected at least {max(longest)}, the number of "
            "tokens in the longest sentence. Raise it, or lower data.max_source_length and "
            "data.max_target_length."
        )
    shape = []
    for side in (0, 1):
        # The shorter side is scaled in proportion, but fits its longest sentence.
        proportional_length = -(-L * tokens[side] // max(tokens))
        length = max(proportional_length, longest[side])
        # Matrix units prefer multiples of 8.
        shape.append(min(L, -(-length // 8) * 8))
    S, T = shape
    return S, T


def batch_rows(S: int, T: int, tokens: int, multiple: int) -> int:
    """Return the number of rows B in a batch with widths S and T.

    B is a multiple of ``multiple`` with at most ``tokens`` positions per side. Raises ``UserError``
    if ``tokens`` is too small for ``multiple`` rows.
    """
    longest = max(S, T, 1)
    if rows := tokens // longest // multiple * multiple:
        return rows
    raise UserError(
        f"batch.tokens is {tokens}; expected at least {longest * multiple}, to fit "
        f"batch.row_multiple = {multiple} rows of {longest} tokens. Raise it, or lower "
        "batch.row_multiple or the row length (data.max_source_length and data.max_target_length "
        "or, if packed, batch.row_length)."
    )
