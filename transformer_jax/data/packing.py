"""Several sentence pairs to a row: which pairs share one, so that both sides of every row are
nearly full.

A row has S source and T target positions and a pair takes some of both, so this is bin packing in
two dimensions. It is solved as one deals cards: pairs go out from long to short in rounds of one
pair a row, the longest of a round to the rows with most room. With many pairs a row, sums even out
by themselves, and the short pairs of the last rounds fill the gaps. Every round is a few array
operations, so millions of pairs take seconds; all arithmetic is on integers, so the result is the
same on every machine. A row holds a bit of every length, which keeps batches alike.
"""

from __future__ import annotations

import numpy as np

# Rows are opened for this share of their capacity: higher leaves more pairs over, for which further
# rows are opened.
_FILL_PERCENT = 99
# Among so many rows of about equal room (an eighth of them, in long corpora) pairs are exchanged so
# that source and target fill up together: fewer would leave one side short, more would leave the
# rows' sums uneven.
_GROUP = 4096
# A pass ends when under one in so many dealt pairs still fits.
_TIRED = 32


def pack(
    source_lengths: np.ndarray, target_lengths: np.ndarray, S: int, T: int, order: np.ndarray
) -> np.ndarray:
    """Give each pair a row, such that no row holds more than S source and T target tokens.

    ``order`` is a permutation of the pairs: it decides which of several pairs of equal lengths goes
    where. Each length must be at most S or T. Returns each pair's row, int32 [N]; rows count from 0
    and none is empty.
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
    room_s: np.ndarray,
    room_t: np.ndarray,
    first: int,
) -> np.ndarray:
    """Deal the pairs ``left`` (long to short) to new rows, numbered from ``first``; returns those
    that found no room.
    """
    S, T = room_s[0], room_t[0]
    group_size = max(_GROUP, len(room_s) // 8)
    open_rows = np.arange(len(room_s))
    while len(left) and len(open_rows):
        dealt = min(len(left), len(open_rows))
        room = room_s[open_rows] * T + room_t[open_rows] * S
        row, pair = open_rows[np.argsort(-room, kind="stable")[:dealt]], left[:dealt]
        group = np.arange(dealt) // group_size
        row = row[np.lexsort((room_s[row] * T - room_t[row] * S, group))]
        pair = pair[np.lexsort((s[pair] * T - t[pair] * S, group))]
        fits = (s[pair] <= room_s[row]) & (t[pair] <= room_t[row])
        row, pair = row[fits], pair[fits]
        row_N[pair] = first + row
        room_s[row] -= s[pair]
        room_t[row] -= t[pair]
        left = np.concatenate((left[:dealt][row_N[left[:dealt]] < 0], left[dealt:]))
        if len(pair) * _TIRED < dealt:
            break
        if len(left):
            open_rows = np.flatnonzero((room_s >= s[left].min()) & (room_t >= t[left].min()))
    return left
