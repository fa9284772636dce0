"""Another library's vocabulary with our special ids: which of its rows each of our tokens takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

# at the start of a line in multilingual models: the language to translate into
TAG = re.compile(r">>.*<<")


class SpecialIds(NamedTuple):
    """Ids in the other vocabulary. ``start`` is what the decoder begins with; None for a vocabulary
    of sources only.
    """

    pad: int
    start: int | None
    eos: int
    unk: int


class Arrangement(NamedTuple):
    """Our vocabulary, made from theirs."""

    tokens: list[str]
    """By our ids: PAD, BOS, EOS, UNK, the other tokens in their old order."""
    rows_V: np.ndarray
    """int: the row of the other vocabulary that each of our rows is a copy of; -1: a row that is
    not there.
    """
    new_V: np.ndarray
    """bool: rows that the other model does not have, which must never receive probability."""


def arrange(vocabulary: Mapping[str, int], special: SpecialIds) -> Arrangement:
    """Place the tokens of ``vocabulary``.

    MarianMT decodes from PAD: that row is our BOS then, and our PAD a new one, which nothing ever
    reads.
    """
    tokens_there = {i: token for token, i in vocabulary.items()}
    pad, start, eos, unk = special
    own_pad = pad not in (start, eos, unk)
    own_start = start is not None and start not in (pad, eos, unk)
    rows = [pad if own_pad else -1, -1 if start is None else start, eos, unk]
    new = [not own_pad, start in (None, eos, unk), False, False]
    tokens = [
        _unused_name("<pad>", vocabulary) if pad in (eos, unk) else tokens_there[pad],
        tokens_there[start] if own_start else _unused_name("<s>", vocabulary),  # type: ignore[index]
        tokens_there[eos],
        tokens_there[unk],
    ]
    others = [i for i in sorted(tokens_there) if i not in rows]
    tokens += [tokens_there[i] for i in others]
    return Arrangement(tokens, np.array(rows + others), np.array(new + [False] * len(others)))


def _unused_name(wanted: str, taken: Mapping[str, int]) -> str:
    while wanted in taken:
        wanted = f"<{wanted}>"
    return wanted
