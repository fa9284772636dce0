"""Top-k over the vocabulary.

Shape letters: R rows, V columns, K largest values, Q chunks of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

_CHUNK = {"cpu": 32, "gpu": 128}


@jax.named_scope("top_k")
def top_k(x_RV: Array, k: int) -> tuple[Array, Array]:
    """Compute ``jax.lax.top_k`` of each row. On CPU and GPU it runs in two exact stages, which are
    several times faster on wide rows.

    The first stage selects the k chunks with the largest maxima. They hold the k largest values,
    because k maxima outrank any value in other chunks. Sorting the chunks breaks ties in favor of
    the lowest index.
    """
    (rows, width), chunk = x_RV.shape, _CHUNK.get(jax.default_backend(), 0)
    if not chunk or width < 2 * k * chunk:
        return jax.lax.top_k(x_RV, k)
    padding = ((0, 0), (0, -width % chunk))
    maxima_RQ = jax.lax.reduce_window(x_RV, -jnp.inf, jax.lax.max, (1, chunk), (1, chunk), padding)
    _, chunks_RK = jax.lax.top_k(maxima_RQ, k)
    ids_RKC = jnp.sort(chunks_RK, axis=-1)[:, :, None] * chunk + jnp.arange(chunk)[None, None]
    ids_RC = ids_RKC.reshape(rows, k * chunk)
    x_RC = jnp.take_along_axis(x_RV, jnp.minimum(ids_RC, width - 1), axis=1)
    values_RK, places_RK = jax.lax.top_k(jnp.where(ids_RC < width, x_RC, -jnp.inf), k)
    return values_RK, jnp.take_along_axis(ids_RC, places_RK, axis=1)
