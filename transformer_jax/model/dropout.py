"""Dropout: what is kept, and how random keys reach the places where something is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

# A random key; or what ``draw`` made of one, which a module hands to its parts in place of keys.
# With None nothing is dropped.
DropoutKey: TypeAlias = "jax.Array | Sequence[DropoutKey] | None"


class Site(NamedTuple):
    """A place where a share ``rate`` of an array's elements is dropped."""

    shape: tuple[int, ...]
    rate: float


@jax.named_scope("dropout")
def dropout(x: jax.Array, rate: float, key: DropoutKey) -> jax.Array:
    """Zero a share ``rate`` of the elements and scale up the rest; ``key=None`` changes nothing.

    Args:
      rate: exact to 2^-16.
      key: a random key, or the mask that was drawn from it: bool, True at what stays.
    """
    if key is None or rate == 0.0:
        return x
    # Scaled last: gradients are then scaled before they are masked and stored, and not once more in
    # each product that reads them.
    scale = jnp.asarray(scale_up(rate), x.dtype)
    return jnp.where(kept(Site(x.shape, rate), key), x, jnp.zeros((), x.dtype)) * scale


def kept(site: Site, key: DropoutKey) -> jax.Array:
    """What stays at a site, bool, by the key or mask that ``dropout`` takes."""
    assert isinstance(key, jax.Array)
    if key.dtype == jnp.bool_:
        return key
    return jnp.concatenate(_kept_quarters(key, site), -1)[..., : site.shape[-1]]


def scale_up(rate: float) -> float:
    """The factor that what is kept is multiplied by."""
    return 65536 / (65536 - _threshold(rate))


def draw(key: jax.Array, sites: Any, *, ahead: bool) -> DropoutKey:
    """For nested lists of sites, likewise nested: a key each, or its mask if ``ahead``.

    The masks are those that ``dropout`` draws from the keys, but those of one shape are drawn at
    once, and all are held in memory from then on, at 2 bits an element.
    """
    flat, structure = jax.tree.flatten(sites, is_leaf=lambda x: isinstance(x, Site))
    keys = jax.random.split(key, len(flat))
    drawn: list[DropoutKey] = list(keys)
    for site in dict.fromkeys(flat) if ahead else ():
        numbers = [i for i, other in enumerate(flat) if other == site]
        masks = _masks(keys[np.asarray(numbers)], site) if site.rate > 0 else [None] * len(numbers)
        for i, number in enumerate(numbers):
            drawn[number] = masks[i]
    return jax.tree.unflatten(structure, drawn)


def split_key(key: DropoutKey, count: int) -> Sequence[DropoutKey]:
    """``count`` keys from one; no key gives none, and what was drawn is split already."""
    if key is None:
        return [None] * count
    return list(jax.random.split(key, count)) if isinstance(key, jax.Array) else key


def _kept_quarters(key: jax.Array, site: Site) -> list[jax.Array]:
    """What stays of each quarter of the last axis: bool [..., last / 4], rounded up.

    Each element takes 16 random bits. Interleaving the quarters would cost a sixth of a training
    step on a TPU.
    """
    *leading, last = site.shape
    # A key's children are random words, two from each call of the generator, where
    # ``jax.random.bits`` makes one of them.
    words = jax.random.key_data(jax.random.split(key, (*leading, -(-last // 4))))
    halves = [half for i in range(2) for half in (words[..., i], words[..., i] >> 16)]
    return [half.astype(jnp.uint16) >= _threshold(site.rate) for half in halves]


@jax.named_scope("dropout")
def _masks(keys_N: jax.Array, site: Site) -> jax.Array:
    """The masks of several keys: bool [N, *site.shape]."""
    kept = jax.vmap(partial(_kept_quarters, site=site))(keys_N)
    packed = sum((each.astype(jnp.uint8) << i for i, each in enumerate(kept)), jnp.uint8(0))
    # Stored as they are, four elements a byte: XLA would rather store the random words.
    packed = jax.lax.optimization_barrier(packed)[..., None, :]
    places = jnp.arange(4, dtype=jnp.uint8).reshape((1,) * (packed.ndim - 2) + (4, 1))
    masks = ((packed >> places) & 1 != 0).reshape(*packed.shape[:-2], -1)
    return masks[..., : site.shape[-1]]


def _threshold(rate: float) -> int:
    return round(rate * 65536)
