"""Where a token stands: sinusoids (paper section 3.5), rotary positions, relative position bias."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def sinusoidal_positions(length: int, d_model: int, *, layout: str = "interleaved") -> np.ndarray:
    """Sinusoidal position vectors, float32 [length, d_model] (section 3.5).

    ``interleaved``: PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos of the
    same, as in the paper. ``split``: all sines, then all cosines, with tensor2tensor's wavelengths
    10000^(i / (d_model / 2 - 1)).
    """
    half = d_model // 2
    exponents = np.arange(half) / (half if layout == "interleaved" else max(half - 1, 1))
    angles = np.arange(length)[:, None] * 10000.0 ** -exponents[None, :]
    waves = np.stack([np.sin(angles), np.cos(angles)], axis=2 if layout == "interleaved" else 1)
    return waves.reshape(length, d_model).astype(np.float32)


def segment_positions(segments_BL: jax.Array) -> jax.Array:
    """Positions within each segment, int32 [B, L]: 0 1 2 0 1 for segments 1 1 1 2 2."""
    index_1L = jnp.arange(segments_BL.shape[1], dtype=jnp.int32)[None]
    is_start_BL = jnp.pad(segments_BL[:, 1:] != segments_BL[:, :-1], ((0, 0), (1, 0)))
    return index_1L - jax.lax.cummax(jnp.where(is_start_BL, index_1L, 0), axis=1)


def rotated(x_BLHK: jax.Array, positions_BL: jax.Array) -> jax.Array:
    """Queries or keys, turned by their positions: rotary position embedding (Su et al., 2021).

    Dimension i of the first half of K and the same of the second half are turned by the angle
    position / 10000^(2i / K). A query and a key then score by how far apart they are. Axis B of
    ``positions_BL`` may be 1.
    """
    half = x_BLHK.shape[-1] // 2
    frequencies_K = 10000.0 ** -(np.arange(half, dtype=np.float32) / half)
    angles_BL1K = positions_BL[:, :, None, None] * frequencies_K[None, None, None]
    cos, sin = jnp.cos(angles_BL1K), jnp.sin(angles_BL1K)
    a, b = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x_BLHK.dtype)


class RelativeBias(nnx.Module):
    """A learned addend to attention scores for each head and distance (T5: Raffel et al., 2020).

    Distances share 32 buckets: one for each short distance, then wider and wider ones up to 128 and
    beyond. Where keys may come later, half of the buckets are for those. T5 does not divide scores
    by sqrt(d_k); here they are divided before the bias is added.
    """

    num_buckets, max_distance = 32, 128

    def __init__(self, num_heads: int, *, causal: bool, rngs: nnx.Rngs):
        """``causal``: no key comes later than its query."""
        initializer = nnx.initializers.normal(num_heads**-0.5)
        self.table = nnx.Param(initializer(rngs.params(), (self.num_buckets, num_heads)))
        self.causal = causal

    def __call__(self, query_positions_BT: jax.Array, key_positions_BS: jax.Array) -> jax.Array:
        """Float32 [B, H, T, S]."""
        ahead_BTS = key_positions_BS[:, None, :] - query_positions_BT[:, :, None]
        bias_BTSH = jnp.take(self.table[...], self._buckets(ahead_BTS), axis=0)
        return bias_BTSH.transpose(0, 3, 1, 2)

    def _buckets(self, ahead: jax.Array) -> jax.Array:
        """The bucket of a key so many positions after its query."""
        number = self.num_buckets if self.causal else self.num_buckets // 2
        distance = jnp.maximum(-ahead, 0) if self.causal else jnp.abs(ahead)
        first = jnp.where(ahead > 0, self.num_buckets - number, 0)
        exact = number // 2
        scale = (number - exact) / math.log(self.max_distance / exact)
        far = exact + (jnp.log(jnp.maximum(distance, exact) / exact) * scale).astype(jnp.int32)
        return first + jnp.where(distance < exact, distance, jnp.minimum(far, number - 1))
