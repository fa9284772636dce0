"""Fused dropout, residual sum and layer norm on a GPU: one Pallas kernel forward, one backward.

XLA reads the rows several times: for statistics, for results, and for the gradients of scale and
bias. These kernels read them once.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from transformer_jax.model.gpu import load, runs_kernels, shares, store

_BLOCK = 8192  # elements per program, in whole rows


def takes(x_BLD: jax.Array) -> bool:
    """Return True if ``residual_norm`` is faster than the code that XLA generates."""
    D = x_BLD.shape[-1]
    fits = x_BLD.dtype == jnp.bfloat16 and 128 <= D <= 2048 and D & (D - 1) == 0
    return fits and runs_kernels() and shares() == (1, 1)


def residual_norm(
    x_BLD: jax.Array,
    y_BLD: jax.Array,
    keep_BLD: jax.Array,
    scale_D: jax.Array,
    bias_D: jax.Array,
    *,
    factor: float,
    epsilon: float,
    interpret: bool = False,
) -> jax.Array:
    """Compute LayerNorm(x + Dropout(y)); D is a power of two.

    ``keep_BLD`` is the dropout mask, bool, and ``factor`` the scale of kept elements. ``epsilon``
    is an argument of the norm. ``interpret`` runs the kernels on any device.
    """
    settings = _Settings(factor, epsilon, interpret)
    rows = (array.reshape(-1, len(scale_D)) for array in (x_BLD, y_BLD, keep_BLD))
    return _residual_norm(settings, *rows, scale_D, bias_D).reshape(x_BLD.shape)


class _Settings(NamedTuple):
    factor: float
    epsilon: float
    interpret: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _residual_norm(settings: _Settings, *arrays: Any) -> jax.Array:
    return _forward(settings, *arrays)[0]


def _forward(settings: _Settings, *arrays: Any) -> tuple[jax.Array, Any]:
    x_LD, y_LD, keep_LD, scale_D, bias_D = arrays
    arrays = x_LD, y_LD, keep_LD.astype(jnp.int8), scale_D, bias_D
    out_LD, sum_LD = _call(_forward_kernel, arrays, [x_LD, x_LD], settings)
    return out_LD, (sum_LD, arrays[2], scale_D)


def _backward(settings: _Settings, residuals: Any, d_out_LD: jax.Array) -> tuple[Any, ...]:
    sum_LD, keep_LD, scale_D = residuals
    programs, D = pl.cdiv(sum_LD.size, _BLOCK), len(scale_D)
    of_rows = jax.ShapeDtypeStruct((programs, 1, D), jnp.float32)
    d_x_LD, d_y_LD, *sums = _call(
        _backward_kernel,
        (sum_LD, keep_LD, d_out_LD, scale_D),
        [sum_LD, sum_LD, of_rows, of_rows],
        settings,
    )
    return d_x_LD, d_y_LD, None, *(each.sum(axis=(0, 1)) for each in sums)


_residual_norm.defvjp(_forward, _backward)


def _call(kernel: Any, arrays: Any, outs: Any, settings: _Settings) -> list[jax.Array]:
    """Run one program per block of rows; it also writes one row of each array of sums."""
    count, D = arrays[0].shape

    def spec(x: Any) -> pl.BlockSpec:
        if x.ndim == 1:
            return pl.BlockSpec((D,), lambda i: (0,))
        if x.ndim == 3:
            return pl.BlockSpec((None, None, D), lambda i: (i, 0, 0))
        return pl.BlockSpec((_BLOCK // D, D), lambda i: (i, 0))

    return pl.pallas_call(
        partial(kernel, count, settings.factor, settings.epsilon),
        grid=(pl.cdiv(count, _BLOCK // D),),
        in_specs=[*map(spec, arrays)],
        out_specs=[*map(spec, outs)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs],
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=1),
        interpret=settings.interpret,
    )(*arrays)


def _forward_kernel(count: int, factor: float, epsilon: float, *refs: Any) -> None:
    x_ref, y_ref, keep_ref, scale_ref, bias_ref, out_ref, sum_ref = refs
    inside = _inside(x_ref.shape, count)
    x_LD, y_LD, keep_LD = (load(ref, inside) for ref in (x_ref, y_ref, keep_ref))
    sum_LD = x_LD.astype(jnp.float32) + _kept(y_LD.astype(jnp.float32), keep_LD, factor)
    sum_LD = sum_LD.astype(sum_ref.dtype)
    store(sum_ref, sum_LD, inside)
    normal_LD, _ = _normal(sum_LD, epsilon)
    out_LD = normal_LD * scale_ref[...][None] + bias_ref[...][None]
    store(out_ref, out_LD, inside)


def _backward_kernel(count: int, factor: float, epsilon: float, *refs: Any) -> None:
    sum_ref, keep_ref, d_out_ref, scale_ref, d_x_ref, d_y_ref, d_scale_ref, d_bias_ref = refs
    inside = _inside(sum_ref.shape, count)
    normal_LD, inverse_L = _normal(load(sum_ref, inside), epsilon)
    d_out_LD = load(d_out_ref, inside).astype(jnp.float32)
    d_scale_ref[...] = (d_out_LD * normal_LD).sum(axis=0)
    d_bias_ref[...] = d_out_LD.sum(axis=0)
    d_normal_LD = d_out_LD * scale_ref[...][None]
    along_L = _mean(d_normal_LD * normal_LD)
    d_LD = d_normal_LD - _mean(d_normal_LD)[:, None] - normal_LD * along_L[:, None]
    d_LD *= inverse_L[:, None]
    store(d_x_ref, d_LD, inside)
    d_y_LD = _kept(d_LD, load(keep_ref, inside), factor)
    store(d_y_ref, d_y_LD, inside)


def _normal(x_LD: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """Normalize rows to mean 0 and variance 1 in float32; also return 1 / standard deviation."""
    x_LD = x_LD.astype(jnp.float32)
    centred_LD = x_LD - _mean(x_LD)[:, None]
    inverse_L = jax.lax.rsqrt(_mean(centred_LD * centred_LD) + epsilon)
    return centred_LD * inverse_L[:, None], inverse_L


def _mean(x_LD: jax.Array) -> jax.Array:
    return x_LD.sum(axis=1) / x_LD.shape[1]


def _kept(x_LD: jax.Array, keep_LD: jax.Array, factor: float) -> jax.Array:
    return jnp.where(keep_LD != 0, x_LD * factor, 0.0)


def _inside(shape: tuple[int, ...], count: int) -> jax.Array | None:
    """Return the mask of the block's rows inside the array, or None if all are inside."""
    if count % shape[0] == 0:
        return None
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return pl.program_id(0) * shape[0] + row < count
