"""Dropout and its random keys."""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import Array


class DropoutKeys:
    """Random keys for one forward pass. Each call derives the next key, in program order.

    A module creates this object from its random key and passes it to its submodules.
    """

    def __init__(self, key: Array):
        """Derive keys from ``key``."""
        self.key = key
        self.num_derived = 0

    def __call__(self) -> Array:
        """Derive the key for the next mask."""
        self.num_derived += 1
        return jax.random.fold_in(self.key, self.num_derived - 1)


# A random key, or the keys that a module derives from it for submodules. None turns dropout off.
DropoutKey: TypeAlias = Array | DropoutKeys | None


def as_keys(key: DropoutKey) -> DropoutKeys | None:
    """Convert a random key to keys for submodules."""
    return key if key is None or isinstance(key, DropoutKeys) else DropoutKeys(key)


def mask_key(key: Array | DropoutKeys) -> Array:
    """Return the key for one mask: ``key`` if it is a random key, otherwise its next key."""
    return key() if isinstance(key, DropoutKeys) else key


@jax.named_scope("dropout")
def dropout(x: Array, rate: float, key: DropoutKey) -> Array:
    """Zero a fraction ``rate`` of the elements and scale up the rest. ``key=None`` drops nothing.

    ``rate`` is rounded to a multiple of 2^-16.
    """
    if key is None or rate == 0.0:
        return x
    # Scaling comes last, so gradients are scaled before they are masked and stored, and not again
    # in each matmul that reads them.
    scale = jnp.asarray(scale_up(rate), x.dtype)
    mask = keep_mask(x.shape, rate, mask_key(key))
    return jnp.where(mask, x, jnp.zeros((), x.dtype)) * scale


def keep_mask(shape: tuple[int, ...], rate: float, key: Array) -> Array:
    """Draw the mask of elements to keep, a bool array of this shape.

    Each element uses 16 random bits, half a 32-bit word. Two words give the bits of four elements,
    which are a quarter of the last axis apart: elements side by side would need transposes, which
    cost a sixth of a training step on a TPU.
    """
    *leading, last = shape
    # Splitting a key gives two random words per generator call; ``jax.random.bits`` gives one.
    words = jax.random.key_data(jax.random.split(key, (*leading, -(-last // 4))))
    halves = [half for i in range(2) for half in (words[..., i], words[..., i] >> 16)]
    masks_of_quarters = [half.astype(jnp.uint16) >= threshold(rate) for half in halves]
    return jnp.concatenate(masks_of_quarters, -1)[..., :last]


def scale_up(rate: float) -> float:
    """Return the scale factor for kept elements."""
    return 65536 / (65536 - threshold(rate))


def threshold(rate: float) -> int:
    """Return the smallest 16-bit random number that keeps an element."""
    assert 0 <= rate < 1, f"dropout rate is {rate}; expected a value in [0, 1)"
    return round(rate * 65536)
