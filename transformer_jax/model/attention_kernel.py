"""Attention between short sequences on a GPU: one Pallas kernel for the result, one for gradients.

XLA makes transposes and many tiny products of ``attention.dot_product_attention``. The kernels
read queries, keys and values where the projections leave them and write nothing but results: a
program has all queries and keys of one row and head, and the gradients compute the weights again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

# The score of a masked position. Finite, so that a row of padding, which sees nothing, has no NaN.
MASKED = -1e30

ON = False  # until measured
_LONGEST = 128  # a program holds scores of so many queries and keys
_HEAD_WIDTHS = (16, 32, 64, 128)


def takes(q_BTHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array) -> bool:
    """Whether ``short_attention`` is the way to compute this."""
    return (
        ON
        and jax.default_backend() == "gpu"
        and jax.device_count() == 1  # XLA would gather a kernel's inputs from all devices
        and all(x.dtype == jnp.bfloat16 for x in (q_BTHK, k_BSHK, v_BSHK))
        and max(q_BTHK.shape[1], k_BSHK.shape[1]) <= _LONGEST
        and {q_BTHK.shape[-1], v_BSHK.shape[-1]} <= set(_HEAD_WIDTHS)
    )


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def short_attention(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    mask_BHTS: jax.Array | None,
    interpret: bool = False,
) -> jax.Array:
    """``dot_product_attention`` of these; ``interpret`` runs the kernels on any device."""
    shape = *q_BTHK.shape[:-1], v_BSHK.shape[-1]
    arrays, out = (q_BTHK, k_BSHK, v_BSHK), jax.ShapeDtypeStruct(shape, v_BSHK.dtype)
    return _call(_forward_kernel, mask_BHTS, arrays, (out,), interpret)[0]


def _forward(q: Any, k: Any, v: Any, mask: Any, interpret: bool) -> tuple[jax.Array, Any]:
    return short_attention(q, k, v, mask, interpret), (q, k, v, mask)


def _backward(interpret: bool, residuals: Any, d_out_BTHK: jax.Array) -> tuple[Any, ...]:
    *arrays, mask_BHTS = residuals
    outs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    return *_call(_backward_kernel, mask_BHTS, (*arrays, d_out_BTHK), outs, interpret), None


short_attention.defvjp(_forward, _backward)


def _call(kernel: Any, mask_BHTS: Any, arrays: Any, outs: Any, interpret: bool) -> Any:
    """A program for each row and head."""
    q_BTHK, k_BSHK = arrays[:2]
    (B, T, H, _), S = q_BTHK.shape, k_BSHK.shape[1]
    if mask_BHTS is None:
        mask_BHTS = jnp.ones((1, 1, 1, S), bool)
    own_row, own_head = mask_BHTS.shape[0] > 1, mask_BHTS.shape[1] > 1
    queries = 1 if mask_BHTS.shape[2] == 1 else _block(T)
    of_mask = pl.BlockSpec(
        (None, None, queries, _block(S)), lambda b, h: (b * own_row, h * own_head, 0, 0)
    )

    def of_head(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, _block(x.shape[1]), None, x.shape[3]), lambda b, h: (b, 0, h, 0))

    return pl.pallas_call(
        partial(kernel, T, S),
        grid=(B, H),
        in_specs=[of_mask, *map(of_head, arrays)],
        out_specs=[of_head(x) for x in outs],
        out_shape=outs,
        compiler_params=triton.CompilerParams(num_warps=_warps(T, S), num_stages=1),
        interpret=interpret,
    )(mask_BHTS.astype(jnp.int8), *arrays)


def _block(length: int) -> int:
    """Blocks are powers of two, of at least the 16 that a product takes."""
    return max(16, pl.next_power_of_2(length))


def _warps(T: int, S: int) -> int:
    return 2 if max(T, S) <= 32 else 4 if max(T, S) <= 64 else 8


def _forward_kernel(
    T: int, S: int, mask_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any
) -> None:
    q_TK, k_SK, v_SK = _load(q_ref, T), _load(k_ref, S), _load(v_ref, S)
    weights_TS, _ = _weights(q_TK, k_SK, mask_ref, T, S)
    _store(out_ref, _dot(weights_TS.astype(v_SK.dtype), v_SK, (1, 0)), T)


def _backward_kernel(
    T: int,
    S: int,
    mask_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    d_out_ref: Any,
    d_q_ref: Any,
    d_k_ref: Any,
    d_v_ref: Any,
) -> None:
    q_TK, k_SK, v_SK, d_out_TK = (
        _load(ref, length) for ref, length in ((q_ref, T), (k_ref, S), (v_ref, S), (d_out_ref, T))
    )
    weights_TS, allowed_TS = _weights(q_TK, k_SK, mask_ref, T, S)
    _store(d_v_ref, _dot(weights_TS.astype(v_SK.dtype), d_out_TK, (0, 0)), S)
    d_weights_TS = _dot(d_out_TK, v_SK, (1, 1))
    mean_T = (weights_TS * d_weights_TS).sum(axis=1)
    d_scores_TS = weights_TS * (d_weights_TS - mean_T[:, None]) * q_TK.shape[1] ** -0.5
    d_scores_TS = jnp.where(allowed_TS, d_scores_TS, 0.0).astype(q_TK.dtype)
    _store(d_q_ref, _dot(d_scores_TS, k_SK, (1, 0)), T)
    _store(d_k_ref, _dot(d_scores_TS, q_TK, (0, 0)), S)


def _weights(
    q_TK: jax.Array, k_SK: jax.Array, mask_ref: Any, T: int, S: int
) -> tuple[jax.Array, jax.Array]:
    """Softmax weights in float32, 0 past the last key; and where attention is allowed."""
    scores_TS = _dot(q_TK, k_SK, (1, 1)) * q_TK.shape[1] ** -0.5
    queries = 1 if mask_ref.shape[0] == 1 else T
    mask_TS = _load(mask_ref, queries, S)
    allowed_TS = jnp.broadcast_to(mask_TS != 0, scores_TS.shape)
    scores_TS = jnp.where(allowed_TS, scores_TS, MASKED)
    is_key_TS = _inside(scores_TS.shape, scores_TS.shape[0], S)
    if is_key_TS is not None:
        scores_TS = jnp.where(is_key_TS, scores_TS, -jnp.inf)
    exp_TS = jnp.exp(scores_TS - scores_TS.max(axis=1)[:, None])
    return exp_TS / exp_TS.sum(axis=1)[:, None], allowed_TS


def _inside(shape: tuple[int, ...], rows: int, columns: int) -> jax.Array | None:
    """Which elements of a block lie in the array; None if all."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return None if shape == (rows, columns) else (row < rows) & (column < columns)


def _load(ref: Any, rows: int, columns: int | None = None) -> jax.Array:
    inside = _inside(ref.shape, rows, columns or ref.shape[1])
    return ref[...] if inside is None else triton.load(ref, mask=inside, other=0)


def _store(ref: Any, x_LK: jax.Array, length: int) -> None:
    mask = _inside(ref.shape, length, ref.shape[1])
    triton.store(ref, x_LK.astype(ref.dtype), mask=mask)


def _dot(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """The product over one axis of each, in float32."""
    contracted = ((axes[0],), (axes[1],))
    return jax.lax.dot_general(x, y, (contracted, ((), ())), preferred_element_type=jnp.float32)
