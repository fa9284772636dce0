"""Score by which finished hypotheses are ranked: log-probability / length penalty."""

from __future__ import annotations

from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from transformer_jax.settings.config import SearchSettings

LogProbs = TypeVar("LogProbs", Array, float)


def ranking_score(log_probs: LogProbs, lengths: Array | int, settings: SearchSettings) -> LogProbs:
    """Compute the scores of hypotheses: arrays [B] or [B, W] and lengths [B], or two numbers.

    The score must not fall if log-probability or length grows: beam search stops when the best live
    log-probability, with the maximum length, scores no better than the finished hypotheses.
    """
    penalty = length_penalty(lengths, settings.length_penalty, settings.length_offset)
    if isinstance(log_probs, float):
        return log_probs / float(penalty)
    return log_probs / penalty.reshape(penalty.shape + (1,) * (log_probs.ndim - penalty.ndim))


def length_penalty(lengths: Array | np.ndarray | int, alpha: float, offset: float = 5.0) -> Array:
    """Compute the length penalty ((c + length) / (c + 1))^alpha; c is ``offset`` (Wu et al., 2016,
    equation 14: c = 5; the paper's section 6.1 uses alpha = 0.6).
    """
    float_lengths: Any
    if isinstance(lengths, np.ndarray):  # without compiling anything
        float_lengths = lengths.astype(np.float32)
    else:
        float_lengths = jnp.asarray(lengths, jnp.float32)
    return ((offset + float_lengths) / (offset + 1)) ** alpha
