"""Fused dropout, residual addition and layer norm: forward and backward Pallas GPU kernels.

XLA reads the rows several times: for statistics, for results, and for the gradients of scale and
bias. These kernels read them once. The forward kernel draws the mask of ``dropout.keep_mask`` and
stores it for the backward pass, four elements per byte. Each row is split into quarters, [4, C].
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

from transformer_jax.devices.sharding import BATCH_AXES
from transformer_jax.model import gpu
from transformer_jax.model.dropout import scale_up

_BLOCK_ELEMENTS = 8192  # elements per program, in whole rows


def supports(x_BLD: Array) -> bool:
    """Return True if ``residual_norm`` is faster than the code that XLA generates."""
    D = x_BLD.shape[-1]
    is_supported = x_BLD.dtype == jnp.bfloat16 and 128 <= D <= 2048 and D & (D - 1) == 0
    return is_supported and gpu.runs_kernels() and gpu.divides_evenly(len(x_BLD))


def residual_norm(
    x_BLD: Array,
    y_BLD: Array,
    key: Array,
    scale_D: Array,
    bias_D: Array,
    *,
    rate: float,
    epsilon: float,
    interpret: bool = False,
) -> Array:
    """Compute LayerNorm(x + Dropout(y)). D must be a power of two.

    ``epsilon`` is added to the variance. Each device in the training step's mesh computes its own
    rows. ``interpret`` runs the kernels on any device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    shards = gpu.row_shards(mesh)
    C = len(scale_D) // 4
    # For each device: the key, and the counter for its first random words.
    first_N1 = jnp.arange(shards, dtype=jnp.uint32)[:, None] * (x_BLD.size // shards // 4)
    key_N2 = jnp.broadcast_to(jax.random.key_data(key), (shards, 2))
    key_and_counter = jnp.concatenate([key_N2, first_N1], axis=1).reshape(-1)
    rows = (array.reshape(-1, 4, C) for array in (x_BLD, y_BLD))
    norm_parameters = (array.reshape(4, C) for array in (scale_D, bias_D))
    settings = _NormSettings(rate, epsilon, mesh, interpret)
    return _residual_norm(settings, *rows, key_and_counter, *norm_parameters).reshape(x_BLD.shape)


class _NormSettings(NamedTuple):
    rate: float
    epsilon: float
    mesh: Any  # mesh of the forward pass; the backward pass is traced outside it
    interpret: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _residual_norm(settings: _NormSettings, *arrays: Any) -> Array:
    return _forward(settings, *arrays)[0]


@partial(jax.jit, static_argnums=0)  # traced and lowered once for all layers
def _forward(settings: _NormSettings, *arrays: Any) -> tuple[Array, Any]:
    x_L4C, _, _, scale_4C, _ = arrays
    mask = jax.ShapeDtypeStruct((len(x_L4C), 1, scale_4C.shape[1]), jnp.uint8)
    out_shapes = [x_L4C, x_L4C, mask]
    out_L4C, sum_L4C, mask_bits_L1C = _call(_forward_kernel, settings, arrays, out_shapes)
    return out_L4C, (sum_L4C, mask_bits_L1C, scale_4C)


@partial(jax.jit, static_argnums=0)
def _backward(settings: _NormSettings, residuals: Any, d_out_L4C: Array) -> tuple[Any, ...]:
    sum_L4C, _, scale_4C = residuals
    shards = gpu.row_shards(settings.mesh)
    num_programs = shards * pl.cdiv(sum_L4C.size // shards, _BLOCK_ELEMENTS)
    sums_shape = jax.ShapeDtypeStruct((num_programs, 1, *scale_4C.shape), jnp.float32)
    out_shapes = [sum_L4C, sum_L4C, sums_shape, sums_shape]
    d_x, d_y, *sums = _call(_backward_kernel, settings, (*residuals, d_out_L4C), out_shapes)
    d_scale, d_bias = (partial_sums.sum(axis=(0, 1)) for partial_sums in sums)
    return d_x, d_y, None, d_scale, d_bias


_residual_norm.defvjp(_forward, _backward)


def _call(kernel: Any, settings: _NormSettings, arrays: Any, out_shapes: Any) -> list[Array]:
    """Run one program per block of rows. It also writes one row of each array of partial sums."""
    shards = gpu.row_shards(settings.mesh)
    out_shapes = [
        jax.ShapeDtypeStruct((len(x) // shards, *x.shape[1:]), x.dtype) for x in out_shapes
    ]

    def on_shard(*arrays: Array) -> Any:
        num_rows, _, C = arrays[0].shape
        block = _BLOCK_ELEMENTS // (4 * C)

        def spec(x: Any) -> pl.BlockSpec:
            if x.ndim == 4:  # partial sums
                return pl.BlockSpec((None, None, 4, C), lambda i: (i, 0, 0, 0))
            if x.ndim == 3:
                return pl.BlockSpec((block, *x.shape[1:]), lambda i: (i, 0, 0))
            return pl.BlockSpec(x.shape, lambda i: (0,) * x.ndim)

        return pl.pallas_call(
            partial(kernel, settings, num_rows),
            grid=(pl.cdiv(num_rows, block),),
            in_specs=[*map(spec, arrays)],
            out_specs=[*map(spec, out_shapes)],
            out_shape=out_shapes,
            compiler_params=gpu.compiler_params(8),
            interpret=settings.interpret,
        )(*arrays)

    rows_spec = PartitionSpec(BATCH_AXES)
    replicated = PartitionSpec()
    specs = tuple(replicated if x.ndim == 2 else rows_spec for x in arrays)
    return gpu.shard_mapped(settings.mesh, on_shard, specs, rows_spec)(*arrays)


def _forward_kernel(settings: _NormSettings, num_rows: int, *refs: Any) -> None:
    x_ref, y_ref, key_and_counter_ref, scale_ref, bias_ref, out_ref, sum_ref, mask_bits_ref = refs
    in_bounds = gpu.rows_in_bounds(x_ref.shape, num_rows)
    mask_bits_L1C = gpu.draw_dropout_mask(key_and_counter_ref, mask_bits_ref.shape, settings.rate)
    gpu.store(mask_bits_ref, mask_bits_L1C, gpu.rows_in_bounds(mask_bits_ref.shape, num_rows))
    x_L4C, y_L4C = (gpu.load(ref, in_bounds).astype(jnp.float32) for ref in (x_ref, y_ref))
    sum_L4C = (x_L4C + _apply_dropout(y_L4C, mask_bits_L1C, settings.rate)).astype(sum_ref.dtype)
    gpu.store(sum_ref, sum_L4C, in_bounds)
    normalized_L4C, _ = _normalize(sum_L4C, settings.epsilon)
    gpu.store(out_ref, normalized_L4C * scale_ref[...][None] + bias_ref[...][None], in_bounds)


def _backward_kernel(settings: _NormSettings, num_rows: int, *refs: Any) -> None:
    sum_ref, mask_bits_ref, scale_ref, d_out_ref, d_x_ref, d_y_ref, d_scale_ref, d_bias_ref = refs
    in_bounds = gpu.rows_in_bounds(sum_ref.shape, num_rows)
    normalized_L4C, inverse_L11 = _normalize(gpu.load(sum_ref, in_bounds), settings.epsilon)
    d_out_L4C = gpu.load(d_out_ref, in_bounds).astype(jnp.float32)
    d_scale_ref[...] = (d_out_L4C * normalized_L4C).sum(axis=0)
    d_bias_ref[...] = d_out_L4C.sum(axis=0)
    d_normalized_L4C = d_out_L4C * scale_ref[...][None]
    along_L11 = _mean(d_normalized_L4C * normalized_L4C)
    d_sum_L4C = (
        d_normalized_L4C - _mean(d_normalized_L4C) - normalized_L4C * along_L11
    ) * inverse_L11
    gpu.store(d_x_ref, d_sum_L4C, in_bounds)
    mask_bits_L1C = gpu.load(
        mask_bits_ref, gpu.rows_in_bounds(mask_bits_ref.shape, num_rows)
    ).astype(jnp.int32)
    gpu.store(d_y_ref, _apply_dropout(d_sum_L4C, mask_bits_L1C, settings.rate), in_bounds)


def _normalize(x_L4C: Array, epsilon: float) -> tuple[Array, Array]:
    """Return rows with mean 0 and variance 1, in float32, and 1 / standard deviation."""
    x_L4C = x_L4C.astype(jnp.float32)
    centered_L4C = x_L4C - _mean(x_L4C)
    inverse_L11 = jax.lax.rsqrt(_mean(centered_L4C * centered_L4C) + epsilon)
    return centered_L4C * inverse_L11, inverse_L11


def _mean(x_L4C: Array) -> Array:
    return (x_L4C.sum(axis=2).sum(axis=1) / (4 * x_L4C.shape[2]))[:, None, None]


def _apply_dropout(x_L4C: Array, mask_bits_L1C: Array, rate: float) -> Array:
    """Zero the elements that the mask drops, and scale up the others."""
    quarter_L4C = jax.lax.broadcasted_iota(jnp.int32, x_L4C.shape, 1)
    keep_L4C = (jnp.broadcast_to(mask_bits_L1C, x_L4C.shape) >> quarter_L4C) & 1
    return jnp.where(keep_L4C != 0, x_L4C * scale_up(rate), 0.0)
