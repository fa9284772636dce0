"""Top-k and log-sum-exp over the vocabulary.

Shape letters: R rows (B sentences, W beams each), V columns, K largest values, Q chunks of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

_CHUNK = 128


class Shortlist(NamedTuple):
    """Tokens that may continue the hypotheses of B sentences: G groups of K tokens, each group of
    one beam.
    """

    beams_BG: Array
    tokens_BGK: Array
    logits_BGK: Array


@jax.named_scope("top_k")
def top_k(x_RV: Array, k: int) -> tuple[Array, Array]:
    """Compute ``jax.lax.top_k`` of each row. On CPU and GPU it runs in two exact stages, which are
    several times faster on wide rows.

    The first stage selects the ``best_chunks``. As they are in order, ties go to the lowest index.
    """
    rows, width = x_RV.shape
    if jax.default_backend() == "tpu" or width < 2 * k * _CHUNK:
        return jax.lax.top_k(x_RV, k)
    chunks = best_chunks(x_RV, chunk_maxima(x_RV)[:, None], k)
    values_RK, columns_RK = jax.lax.top_k(chunks.logits_BGK.reshape(rows, -1), k)
    ids_RC = chunks.tokens_BGK.reshape(rows, -1)
    return values_RK, jnp.take_along_axis(ids_RC, columns_RK, axis=1)


@jax.named_scope("argmax")
def argmax(x_RV: Array) -> Array:
    """Compute ``jnp.argmax`` of each row, [R]. On a CPU, in two exact stages, as ``top_k``."""
    width = x_RV.shape[1]
    if jax.default_backend() != "cpu" or width < 2 * _CHUNK:
        return jax.lax.argmax(x_RV, 1, jnp.int32)
    chunk_R = jax.lax.argmax(chunk_maxima(x_RV), 1, jnp.int32)
    ids_RC = chunk_R[:, None] * _CHUNK + jnp.arange(_CHUNK)[None]
    x_RC = jnp.take_along_axis(x_RV, jnp.minimum(ids_RC, width - 1), axis=1)
    x_RC = jnp.where(ids_RC < width, x_RC, -jnp.inf)
    return chunk_R * _CHUNK + jax.lax.argmax(x_RC, 1, jnp.int32)


@jax.named_scope("log_softmax")
def log_sum_exp(x_RV: Array) -> Array:
    """Compute ``jax.nn.logsumexp`` of each row, [R, 1].

    On a CPU, by chunks and with a matmul: XLA's loops over whole rows are several times slower. The
    matmul has eight equal columns because XLA does not use the same kernel for one.
    """
    if jax.default_backend() != "cpu":
        return jax.nn.logsumexp(x_RV, axis=-1, keepdims=True)
    largest_R1 = chunk_maxima(x_RV).max(axis=-1, keepdims=True)
    largest_R1 = jnp.where(jnp.isfinite(largest_R1), largest_R1, 0)
    ones_NV = jnp.ones((8, x_RV.shape[1]), jnp.float32)
    sums_RN = jnp.einsum("RV,NV->RN", jnp.exp(x_RV - largest_R1), ones_NV)
    return jnp.log(sums_RN[:, :1]) + largest_R1


def has_chunks(logits_RV: Array, k: int) -> bool:
    """Return True if ``best_chunks`` is faster than ``top_k`` of each row."""
    return jax.default_backend() == "cpu" and logits_RV.shape[1] >= 2 * k * _CHUNK


@jax.named_scope("top_k")
def best_chunks(logits_RV: Array, maxima_BWQ: Array, k: int) -> Shortlist:
    """Return the k chunks of each sentence with the largest maxima, in the order of beams and token
    ids. They hold the k largest values, because k maxima outrank any value in other chunks.

    ``maxima_BWQ`` are the ``chunk_maxima``, or increasing functions of each beam's.
    """
    B, W, Q = maxima_BWQ.shape
    V = logits_RV.shape[1]
    _, chunks_BG = jax.lax.top_k(maxima_BWQ.reshape(B, W * Q), k)
    chunks_BG = jnp.sort(chunks_BG, axis=1)
    beams_BG = chunks_BG // Q
    tokens_BGK = (chunks_BG % Q)[:, :, None] * _CHUNK + jnp.arange(_CHUNK)[None, None]
    indices_BGK = beams_BG[:, :, None] * V + jnp.minimum(tokens_BGK, V - 1)
    logits_BX = jnp.take_along_axis(
        logits_RV.reshape(B, W * V), indices_BGK.reshape(B, k * _CHUNK), axis=1, mode="clip"
    )
    logits_BGK = jnp.where(tokens_BGK < V, logits_BX.reshape(B, k, _CHUNK), -jnp.inf)
    return Shortlist(beams_BG, tokens_BGK, logits_BGK)


def chunk_maxima(x_RV: Array) -> Array:
    """Compute the maximum of each chunk of 128 columns, [R, Q]."""
    padding = ((0, 0), (0, -x_RV.shape[1] % _CHUNK))
    return jax.lax.reduce_window(x_RV, -jnp.inf, jax.lax.max, (1, _CHUNK), (1, _CHUNK), padding)
