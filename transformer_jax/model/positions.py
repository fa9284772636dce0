"""Positional encodings (paper section 3.5), and positions in packed rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.settings.checks import Count, Positive, checked


@checked
def sinusoidal_positions(length: Count, d_model: Positive) -> np.ndarray:
    """Return sinusoidal positional encodings, float32 [length, d_model] (section 3.5).

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), and PE(pos, 2i + 1) is the cosine of the same
    angle. Raises ``UserError`` if d_model is odd.
    """
    if d_model % 2:
        raise UserError(
            f"d_model is {d_model}; expected an even number, because each sine has a cosine."
        )
    frequencies = 10000.0 ** -(np.arange(0, d_model, 2) / d_model)
    angles = np.arange(length)[:, None] * frequencies[None]
    waves = np.stack([np.sin(angles), np.cos(angles)], axis=2)
    return waves.reshape(length, d_model).astype(np.float32)


@checked
def segment_positions(segments_BL: jax.Array) -> jax.Array:
    """Return positions within each segment, int32 [B, L]. Segments 1 1 1 2 2 give 0 1 2 0 1."""
    index_1L = jnp.arange(segments_BL.shape[1], dtype=jnp.int32)[None]
    is_start_BL = jnp.pad(segments_BL[:, 1:] != segments_BL[:, :-1], ((0, 0), (1, 0)))
    return index_1L - jax.lax.cummax(jnp.where(is_start_BL, index_1L, 0), axis=1)
