"""Dropout and its random keys in a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.errors import UserError


class DropoutKeys:
    """Dropout masks of one forward pass; each call draws one with its own key, in program order.

    A module creates these from its random key and passes them to its submodules.
    """

    def __init__(self, key: jax.Array, drawn: Sequence[jax.Array] = ()):
        """``drawn``: all masks, if they were drawn in advance."""
        if not isinstance(key, jax.Array):
            raise UserError(
                f"dropout_key has type {type(key).__name__}; expected a random key, for example "
                "jax.random.key(0), or rngs.dropout() of an nnx.Rngs."
            )
        self.key, self._drawn = key, drawn
        self.asked: list[tuple[tuple[int, ...], float]] = []  # shape and rate of each mask

    def __call__(self, shape: tuple[int, ...], rate: float) -> jax.Array:
        """Draw a mask: bool of this shape, True for elements to keep."""
        number = len(self.asked)
        self.asked.append((shape, rate))
        if self._drawn:
            return self._drawn[number]
        return kept(shape, rate, jax.random.fold_in(self.key, number))


# A random key, or the keys that a module derives from it for submodules. None turns dropout off.
DropoutKey: TypeAlias = jax.Array | DropoutKeys | None


def as_keys(key: DropoutKey) -> DropoutKeys | None:
    """Derive keys for submodules; ``UserError`` if ``key`` is not a random key."""
    return key if key is None or isinstance(key, DropoutKeys) else DropoutKeys(key)


def drawn_ahead(run: Callable[[DropoutKeys], Any], key: jax.Array) -> DropoutKeys:
    """Draw all masks of ``run`` in advance, in one call for each shape and rate.

    All masks stay in memory, at 2 bits per element. ``run`` is traced an extra time.
    """
    keys = DropoutKeys(key)
    jax.eval_shape(lambda: run(keys))
    masks = [jnp.empty(0)] * len(keys.asked)
    for site in dict.fromkeys(keys.asked):
        numbers = np.asarray([i for i, other in enumerate(keys.asked) if other == site])
        keys_N = jax.vmap(partial(jax.random.fold_in, key))(numbers)
        for number, mask in zip(numbers, _masks(keys_N, *site), strict=True):
            masks[number] = mask
    return DropoutKeys(key, masks)


@jax.named_scope("dropout")
def dropout(x: jax.Array, rate: float, key: DropoutKey) -> jax.Array:
    """Zero a fraction ``rate`` of the elements and scale up the rest; ``key=None`` drops nothing.

    Args:
      rate: dropout probability, rounded to a multiple of 2^-16.
      key: a random key, or a mask that is already drawn: bool, True for elements to keep.
    """
    if key is None or rate == 0.0:
        return x
    # Scaled last: gradients are then scaled before they are masked and stored, not again in each
    # matmul that reads them.
    scale = jnp.asarray(scale_up(rate), x.dtype)
    return jnp.where(kept(x.shape, rate, key), x, jnp.zeros((), x.dtype)) * scale


def kept(shape: tuple[int, ...], rate: float, key: DropoutKey) -> jax.Array:
    """Return the mask of elements to keep, bool of this shape; ``key`` as in ``dropout``."""
    if not isinstance(key, jax.Array):
        keys = as_keys(key)
        assert keys is not None
        return keys(shape, rate)
    if key.dtype == jnp.bool_:
        return key
    return jnp.concatenate(_kept_quarters(key, shape, rate), -1)[..., : shape[-1]]


def scale_up(rate: float) -> float:
    """Return the scale factor for kept elements."""
    return 65536 / (65536 - _threshold(rate))


def _kept_quarters(key: jax.Array, shape: tuple[int, ...], rate: float) -> list[jax.Array]:
    """Draw masks for the four quarters of the last axis: bool [..., last / 4], rounded up.

    Each element uses 16 random bits. Interleaving the quarters would cost a sixth of a training
    step on a TPU.
    """
    *leading, last = shape
    # Splitting a key yields two random words per call of the generator; ``jax.random.bits`` yields
    # one.
    words = jax.random.key_data(jax.random.split(key, (*leading, -(-last // 4))))
    halves = [half for i in range(2) for half in (words[..., i], words[..., i] >> 16)]
    return [half.astype(jnp.uint16) >= _threshold(rate) for half in halves]


@jax.named_scope("dropout")
def _masks(keys_N: jax.Array, shape: tuple[int, ...], rate: float) -> jax.Array:
    """Draw one mask for each key: bool [N, *shape]."""
    quarters = jax.vmap(partial(_kept_quarters, shape=shape, rate=rate))(keys_N)
    packed = sum((each.astype(jnp.uint8) << i for i, each in enumerate(quarters)), jnp.uint8(0))
    # The barrier makes XLA store four elements per byte instead of the random words.
    packed = jax.lax.optimization_barrier(packed)[..., None, :]
    places = jnp.arange(4, dtype=jnp.uint8).reshape((1,) * (packed.ndim - 2) + (4, 1))
    masks = ((packed >> places) & 1 != 0).reshape(*packed.shape[:-2], -1)
    return masks[..., : shape[-1]]


def _threshold(rate: float) -> int:
    return round(rate * 65536)
