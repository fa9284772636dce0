"""Input and output of the search as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Sentence(NamedTuple):
    """A sentence to translate."""

    tokens: Sequence[int]
    """Source tokens without EOS, fewer than ``Engine.longest_source``."""
    prefix: Sequence[int] = ()
    """Target tokens that the translation must begin with."""
    seed: int = 0
    """Sampling seed of the sentence."""
    wanted: int = 1
    """Number of hypotheses to find, at most ``decoding.beam_size``."""


class Hypothesis(NamedTuple):
    """A translation as token ids, with its scores."""

    tokens: list[int]
    """Target tokens without EOS."""
    score: float
    log_prob: float
    token_log_probs: list[float]
    """Log-probabilities of ``tokens``, then of EOS."""
