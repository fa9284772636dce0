"""The length penalty, by which all searches and scores rank hypotheses."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def length_divisor(
    lengths: Array | int, length_penalty: float, length_offset: float = 5.0
) -> Array:
    """((c + length) / (c + 1))^alpha (Wu et al., 2016, equation 14: c = 5; the paper's section 6.1
    takes alpha = 0.6).
    """
    lengths = jnp.asarray(lengths, jnp.float32)
    return ((length_offset + lengths) / (length_offset + 1)) ** length_penalty
