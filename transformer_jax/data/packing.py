"""Sequence packing: several sentence pairs per row, with source and target nearly full.

A row has S source and T target positions, and a pair uses some of each, so this is bin packing in
two dimensions. Pairs are dealt like cards, longest first, one pair per row in each round. The
longest pairs of a round go to the emptiest rows. With many pairs per row, row totals become
similar, and the short pairs of the last rounds fill the gaps. A round takes only a few array
operations, so packing millions of pairs takes seconds. All arithmetic uses integers, so the result
is the same on every machine. Every row holds pairs of all lengths, so batches have similar
contents.
"""

from __future__ import annotations

import numpy as np

# Target fill of new rows. With a higher target, more pairs would not fit and need extra rows.
_FILL_PERCENT = 99
# Pairs are matched to rows within groups of this many rows with similar free space (an eighth of
# all rows in large corpora), so that source and target fill up together. Smaller groups would leave
# one side short. Larger groups would make row totals uneven.
_GROUP_SIZE = 4096
# Dealing stops after a round in which fewer than one in this many pairs fit.
_STOP_BELOW_ONE_IN = 32


def pack(
    source_lengths: np.ndarray, target_lengths: np.ndarray, S: int, T: int, order: np.ndarray
) -> np.ndarray:
    """Assign each pair to a row so that no row holds more than S source and T target tokens.

    ``order`` is a permutation of the pairs that breaks ties between pairs of equal length. Pairs
    must not be longer than S or T. Returns the row index of each pair, int32 [N]. No row is empty.
    """
    # Both sides use the same scale: each side of a row has capacity S * T. A pair takes s * T of
    # the source and t * S of the target.
    capacity = S * T
    s = source_lengths.astype(np.int64) * T
    t = target_lengths.astype(np.int64) * S
    assert (s <= capacity).all() and (t <= capacity).all(), "a pair longer than a row"
    remaining = order[np.argsort(-(s + t)[order], kind="stable")]
    row_N = np.full(len(order), -1, np.int32)
    num_rows = 0
    while len(remaining):
        filled = max(s[remaining].sum(), t[remaining].sum()) * 100 // (capacity * _FILL_PERCENT)
        free_s, free_t = np.full((2, min(int(filled) + 1, len(remaining))), capacity)
        remaining = _fill_new_rows(remaining, s, t, free_s, free_t, row_N, num_rows)
        num_rows += len(free_s)
    return row_N


def _fill_new_rows(
    remaining: np.ndarray,
    s: np.ndarray,
    t: np.ndarray,
    free_s: np.ndarray,
    free_t: np.ndarray,
    row_N: np.ndarray,
    first: int,
) -> np.ndarray:
    """Deal the remaining pairs ``remaining`` (longest first) to new rows, numbered from ``first``.

    Returns the pairs that did not fit.
    """
    group_size = max(_GROUP_SIZE, len(free_s) // 8)
    open_rows = np.arange(len(free_s))
    while len(remaining) and len(open_rows):
        candidates, remaining_later = np.split(remaining, [len(open_rows)])
        group = np.arange(len(candidates)) // group_size
        pair = candidates[np.lexsort((s[candidates] - t[candidates], group))]
        row = open_rows[np.argsort(-(free_s + free_t)[open_rows], kind="stable")[: len(candidates)]]
        row = row[np.lexsort((free_s[row] - free_t[row], group))]
        is_fitting = (s[pair] <= free_s[row]) & (t[pair] <= free_t[row])
        row = row[is_fitting]
        pair = pair[is_fitting]
        row_N[pair] = first + row
        free_s[row] -= s[pair]
        free_t[row] -= t[pair]
        remaining = np.concatenate((candidates[row_N[candidates] < 0], remaining_later))
        if len(pair) * _STOP_BELOW_ONE_IN < len(candidates):
            break
        if len(remaining):
            open_rows = np.flatnonzero(
                (free_s >= s[remaining].min()) & (free_t >= t[remaining].min())
            )
    return remaining
