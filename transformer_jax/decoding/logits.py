"""Log-sum-exp and top-k of rows as wide as the vocabulary, in few passes over them.

Letters: R rows, V columns, Q chunks of a row, C columns of some chunks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from transformer_jax.decoding.constraints import masked

_CHUNK_ON_CPU, _CHUNK_ON_GPU = 32, 128
_MOST_ON_GPU = 16  # for more of the largest than that, XLA sorts whole rows

_LOWEST = float(jnp.finfo(jnp.float32).min)


def log_sum_exp(x_RV: Array) -> tuple[Array, Array | None]:
    """The logarithm of each row's sum of exponentials, [R, 1]: NaN or inf if the row has one. On a
    GPU also the ``maxima_RQ`` that ``top_k`` wants, as both take one pass.
    """
    if jax.default_backend() != "gpu":
        return jax.nn.logsumexp(x_RV, axis=-1, keepdims=True), None
    maxima_RQ, sums_RQ = _chunk_maxima_and_sums(x_RV)
    return jax.nn.logsumexp(maxima_RQ + jnp.log(sums_RQ), axis=-1, keepdims=True), maxima_RQ


def top_k(
    x_RV: Array,
    k: int,
    forbidden_RF: Array | None = None,
    maxima_RQ: Array | None = None,
) -> tuple[Array, Array]:
    """``jax.lax.top_k`` of each row, in two exact stages.

    Indices in ``forbidden_RF`` count as IMPOSSIBLE in their row (-1: none). The k + F largest
    values hold the k largest that are allowed, so that no second array as wide as ``x_RV`` is
    written.

    The first stage takes chunks by their maxima (``maxima_RQ``, if ``log_sum_exp`` has found them),
    which is several times faster on wide rows. They hold those k values too: of the chunks that go
    before the chunk of such a value, each has a larger one, or a forbidden one on top. Sorted
    chunks keep the order among equal values: the lowest index first.
    """

    (rows, width), backend = x_RV.shape, jax.default_backend()
    if forbidden_RF is None:
        forbidden_RF = jnp.zeros((rows, 0), jnp.int32)
    num_chosen = k + forbidden_RF.shape[1]
    chunk = _CHUNK_ON_GPU if backend == "gpu" else _CHUNK_ON_CPU
    num_chunks = -(-width // chunk)
    if backend == "tpu" or num_chunks < 2 * num_chosen:
        if backend == "cpu" or num_chosen == k or num_chosen > _MOST_ON_GPU:
            return jax.lax.top_k(masked(x_RV, jnp.arange(width)[None], forbidden_RF), k)
        x_RC, ids_RC = jax.lax.top_k(x_RV, min(num_chosen, width))
        values_RK, places_RK = jax.lax.top_k(masked(x_RC, ids_RC, forbidden_RF), k)
        return values_RK, jnp.take_along_axis(ids_RC, places_RK, axis=1)
    if maxima_RQ is None:
        padding = ((0, 0), (0, num_chunks * chunk - width))
        maxima_RQ = jax.lax.reduce_window(
            x_RV, -jnp.inf, jax.lax.max, (1, chunk), (1, chunk), padding
        )
    _, chunks_RK = jax.lax.top_k(maxima_RQ, num_chosen)
    ids_RKC = jnp.sort(chunks_RK, axis=-1)[:, :, None] * chunk + jnp.arange(chunk)[None, None]
    ids_RC = ids_RKC.reshape(rows, num_chosen * chunk)
    x_RC = jnp.take_along_axis(x_RV, jnp.minimum(ids_RC, width - 1), axis=1)
    x_RC = jnp.where(ids_RC < width, masked(x_RC, ids_RC, forbidden_RF), -jnp.inf)
    values_RK, places_RK = jax.lax.top_k(x_RC, k)
    return values_RK, jnp.take_along_axis(ids_RC, places_RK, axis=1)


def _chunk_maxima_and_sums(x_RV: Array) -> tuple[Array, Array]:
    """Of each chunk the largest value and the sum of exp(value - largest), in one pass.

    Values below the lowest finite one count as that one, so that no difference is NaN.
    """
    chunk, (rows, width) = _CHUNK_ON_GPU, x_RV.shape
    num_chunks = -(-width // chunk)
    padding = ((0, 0), (0, num_chunks * chunk - width))
    x_RV = jnp.pad(jnp.maximum(x_RV, _LOWEST), padding, constant_values=_LOWEST)
    counts_1V = (jnp.arange(num_chunks * chunk) < width).astype(jnp.float32)[None]
    x_RQC = x_RV.reshape(rows, num_chunks, chunk)
    counts_RQC = jnp.broadcast_to(counts_1V.reshape(1, num_chunks, chunk), x_RQC.shape)

    def joined(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        largest = jnp.maximum(a[0], b[0])
        return largest, a[1] * jnp.exp(a[0] - largest) + b[1] * jnp.exp(b[0] - largest)

    nothing = jnp.float32(_LOWEST), jnp.float32(0)
    largest_RQ, total_RQ = jax.lax.reduce((x_RQC, counts_RQC), nothing, joined, (2,))
    return largest_RQ, total_RQ
