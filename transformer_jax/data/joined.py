"""Arrays end to end that stay where they are: on disk, by memory map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np


class Joined:
    """One-dimensional arrays one after another; indexing with a slice, an integer or an array of
    integers >= 0 reads them.

    Token p reads as ``tokens[p] + shifts[p]``. Only what is asked for is brought into memory.
    """

    def __init__(self, tokens: Sequence[np.ndarray], shifts: Sequence[int] | None = None) -> None:
        self.dtype = tokens[0].dtype
        self._tokens = tokens
        self._shifts = (
            np.zeros(len(tokens), self.dtype) if shifts is None else np.asarray(shifts, self.dtype)
        )
        self._starts = np.concatenate([[0], np.cumsum([len(token) for token in tokens])])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int | slice | np.ndarray) -> np.ndarray:
        if isinstance(index, slice):
            start, stop, stride = index.indices(len(self))
            assert stride == 1, "a slice with a stride"
            parts = [np.zeros(0, self.dtype)]
            for p in range(
                *np.searchsorted(self._starts[:-1], [start, stop], side="right") - [1, 0]
            ):
                begin = int(self._starts[p])
                parts.append(
                    self._tokens[p][max(0, start - begin) : max(0, stop - begin)] + self._shifts[p]
                )
            return np.concatenate(parts)
        index = np.asarray(index)
        token = np.searchsorted(self._starts, index, side="right") - 1
        result = np.empty(index.shape, self.dtype)
        for p in np.flatnonzero(np.bincount(token.ravel())).tolist():
            here = token == p
            result[here] = self._tokens[p][index[here] - self._starts[p]] + self._shifts[p]
        return result[()]


Array: TypeAlias = np.ndarray | Joined
