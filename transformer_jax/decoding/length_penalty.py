"""Length penalty (length normalization) for ranking finished hypotheses."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def length_penalty(lengths: Array | int, alpha: float, offset: float = 5.0) -> Array:
    """Compute ((c + length) / (c + 1))^alpha, which divides log-probabilities; c is ``offset`` (Wu
    et al., 2016, equation 14: c = 5; the paper's section 6.1 uses alpha = 0.6).
    """
    lengths = jnp.asarray(lengths, jnp.float32)
    return ((offset + lengths) / (offset + 1)) ** alpha
