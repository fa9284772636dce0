"""Dropout, and the random keys that layers hand to their parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp


@jax.named_scope("dropout")
def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero a share ``rate`` of the elements and scale up the rest; ``key=None`` changes nothing.

    Each element takes 16 random bits, half of what a float32 Bernoulli draw costs; the rate is
    exact to 2^-16. The two halves of the random words go to the two halves of the last axis:
    interleaving them would cost a sixth of a training step on a TPU.
    """
    if key is None or rate == 0.0:
        return x
    threshold = round(rate * 65536)
    *leading, last = x.shape
    words = jax.random.bits(key, (*leading, -(-last // 2)), jnp.uint32)
    halves = [words.astype(jnp.uint16), (words >> 16).astype(jnp.uint16)]
    keep = jnp.concatenate(halves, axis=-1)[..., :last] >= threshold
    scale = jnp.asarray(65536 / (65536 - threshold), x.dtype)
    return jnp.where(keep, x * scale, jnp.zeros((), x.dtype))


def split_key(key: jax.Array | None, count: int) -> list[jax.Array | None]:
    """``count`` keys from one; no key gives none."""
    return [None] * count if key is None else list(jax.random.split(key, count))


def fold_key(key: jax.Array | None, number: int) -> jax.Array | None:
    """The key of part ``number``; no key gives none."""
    return None if key is None else jax.random.fold_in(key, number)
