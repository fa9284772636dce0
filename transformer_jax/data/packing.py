"""Several sentence pairs to a row, so that both sides of every row are nearly full.

A row has S source and T target positions and a pair takes some of both, so this is bin packing in
two dimensions. Pairs are dealt like cards, from long to short, in rounds of one pair a row: the
longest of a round go to the emptiest rows. With many pairs a row their sums even out, and the short
pairs of the last rounds fill the gaps. A round is a few array operations, so millions of pairs take
seconds; all arithmetic is on integers, so the result is the same on every machine. Rows hold pairs
of all lengths, which keeps batches alike.
"""

from __future__ import annotations

import numpy as np

# As many rows are opened as the pairs would fill to this share. A higher one leaves more pairs
# over, for which further rows are opened.
_FILL_PERCENT = 99
# Pairs are exchanged among this many rows with about equally many free positions (an eighth of all
# rows in long corpora), so that source and target fill up together. Fewer would leave one side
# short, more would leave the rows' sums uneven.
_GROUP = 4096
# Dealing ends when fewer than one in this many pairs of a round still fit.
_TIRED = 32


def pack(
    source_lengths: np.ndarray, target_lengths: np.ndarray, S: int, T: int, order: np.ndarray
) -> np.ndarray:
    """Give each pair a row so that no row holds more than S source and T target tokens.

    ``order`` is a permutation of the pairs; it decides which of several pairs of equal lengths goes
    where. No pair may be longer than S or T. Returns each pair's row, int32 [N], from 0; none is
    empty.
    """
    assert not len(order) or (source_lengths.max() <= S and target_lengths.max() <= T), (
        "a pair longer than a row"
    )
    s, t = source_lengths.astype(np.int64), target_lengths.astype(np.int64)
    left = order[np.argsort(-(s * T + t * S)[order], kind="stable")]
    row_N = np.full(len(s), -1, np.int32)
    opened = 0
    while len(left):
        needed = (
            int(
                max(
                    s[left].sum() * 100 // (S * _FILL_PERCENT),
                    t[left].sum() * 100 // (T * _FILL_PERCENT),
                )
            )
            + 1
        )
        rows = min(needed, len(left))
        left = _deal(left, s, t, row_N, np.full(rows, S), np.full(rows, T), opened)
        opened += rows
    return row_N


def _deal(
    left: np.ndarray,
    s: np.ndarray,
    t: np.ndarray,
    row_N: np.ndarray,
    free_s: np.ndarray,
    free_t: np.ndarray,
    first: int,
) -> np.ndarray:
    """Deal the pairs ``left`` (long to short) to new rows, numbered from ``first``; returns those
    that do not fit.
    """
    S, T = free_s[0], free_t[0]
    group_size = max(_GROUP, len(free_s) // 8)
    open_rows = np.arange(len(free_s))
    while len(left) and len(open_rows):
        dealt = min(len(left), len(open_rows))
        free = free_s[open_rows] * T + free_t[open_rows] * S
        row, pair = open_rows[np.argsort(-free, kind="stable")[:dealt]], left[:dealt]
        group = np.arange(dealt) // group_size
        row = row[np.lexsort((free_s[row] * T - free_t[row] * S, group))]
        pair = pair[np.lexsort((s[pair] * T - t[pair] * S, group))]
        fits = (s[pair] <= free_s[row]) & (t[pair] <= free_t[row])
        row, pair = row[fits], pair[fits]
        row_N[pair] = first + row
        free_s[row] -= s[pair]
        free_t[row] -= t[pair]
        left = np.concatenate((left[:dealt][row_N[left[:dealt]] < 0], left[dealt:]))
        if len(pair) * _TIRED < dealt:
            break
        if len(left):
            open_rows = np.flatnonzero((free_s >= s[left].min()) & (free_t >= t[left].min()))
    return left
