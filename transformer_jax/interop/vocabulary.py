"""Another library's vocabulary with our special ids: which of its rows each of our tokens takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


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


def arrange(
    vocabulary: Mapping[str, int], *, pad: str, start: str, eos: str, unk: str
) -> Arrangement:
    """Place the tokens of ``vocabulary``, four of which are special there.

    ``start`` is what the decoder begins with; a vocabulary of sources only may lack it. MarianMT
    decodes from PAD: that row is our BOS then, and our PAD a new one, which nothing ever reads.
    """
    own_pad = pad not in (start, eos, unk)
    own_start = start in vocabulary and start not in (pad, eos, unk)
    tokens = [
        _unused_name("<pad>", vocabulary) if pad in (eos, unk) else pad,
        start if own_start else _unused_name("<s>", vocabulary),
        eos,
        unk,
    ]
    rows = [vocabulary[pad] if own_pad else -1, vocabulary.get(start, -1)]
    rows += [vocabulary[eos], vocabulary[unk]]
    others = sorted(vocabulary.keys() - {pad, start, eos, unk}, key=vocabulary.__getitem__)
    new_V = np.zeros(len(tokens + others), bool)
    new_V[:2] = not own_pad, start not in vocabulary or start in (eos, unk)
    return Arrangement(tokens + others, np.array(rows + [vocabulary[t] for t in others]), new_V)


def _unused_name(wanted: str, taken: Mapping[str, int]) -> str:
    while wanted in taken:
        wanted = f"<{wanted}>"
    return wanted
