"""Sequences of token ids as rows of an array: EOS and padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def with_eos(ids: Sequence[int], eos_id: int) -> list[int]:
    """Append EOS to ids without it. In some models, a language follows it."""
    return [*ids] if eos_id in ids else [*ids, eos_id]


def pad_rows(
    rows: Sequence[Sequence[int]], pad_id: int, *, length: int, num_rows: int | None = None
) -> np.ndarray:
    """Return rows of ids as int32 [B, ``length``], with padding after each row and, if B is
    ``num_rows``, after the last row.
    """
    padded_BL = np.full((num_rows or len(rows), length), pad_id, np.int32)
    for padded_L, row in zip(padded_BL, rows):
        padded_L[: len(row)] = row
    return padded_BL
