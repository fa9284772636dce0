"""Fused GPU attention for short sequences: Pallas kernels for the forward and backward passes.

XLA compiles unfused attention into transposes and many tiny matmuls. These kernels read queries,
keys and values in the layout of the merged projections and write only the results. Each program
handles all queries and keys of one row and head. The backward kernel recomputes the attention
weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

from transformer_jax.devices.sharding import BATCH_AXES
from transformer_jax.model.gpu import (
    compiler_params,
    divides_evenly,
    load,
    runs_kernels,
    shard_mapped,
    split_qkv,
    store,
)

# Score of a masked position. It is finite, so a fully masked row (padding) does not become NaN.
MASKED = -1e30


def supports(x_BTD: Array, query: Any, value: Any, mask_BHTS: Any) -> bool:
    """Return True if ``short_attention`` is faster than attention compiled by XLA.

    It is faster on GPUs, in bfloat16, with one mask per row and up to 64 tokens. cuDNN's attention
    is not an option, because its gradients are wrong for fully masked queries (padding). ``query``
    projects x to queries, and ``value`` projects to values.
    """
    B, T, _ = x_BTD.shape
    _, H, d_k = query.kernel.shape
    return (
        runs_kernels()
        and divides_evenly(B, H)
        and query.dtype == jnp.bfloat16
        and mask_BHTS is not None
        and mask_BHTS.shape[:3] == (B, 1, T)
        and max(mask_BHTS.shape[2:]) <= 64
        and {d_k, value.kernel.shape[2]} <= {16, 32, 64, 128}
    )


@jax.named_scope("dot_product_attention")
def short_attention(*arrays_and_mask: Any, interpret: bool = False) -> Array:
    """Compute fused attention over up to 128 tokens. K must be a power of two, at least 16.

    One to three arrays [B, L, H, K] hold queries, keys and values (``gpu.split_qkv``). Their
    gradients have the same layout. The last argument is the mask. Each device in the training
    step's mesh computes its own rows and heads. ``interpret`` runs the kernels on any device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    mask_spec = PartitionSpec(BATCH_AXES)
    heads_spec = PartitionSpec(BATCH_AXES, None, "tensor")
    specs = *[heads_spec] * (len(arrays_and_mask) - 1), mask_spec
    return shard_mapped(mesh, partial(_attention, interpret), specs, heads_spec)(*arrays_and_mask)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
@partial(jax.jit, static_argnums=0)  # traced and lowered once for all layers
def _attention(interpret: bool, *arrays_and_mask: Any) -> Array:
    *arrays, mask_B1TS = arrays_and_mask
    inputs = split_qkv(arrays)
    v, _, width = inputs[2]
    out = jax.ShapeDtypeStruct((*arrays[0].shape[:3], width), v.dtype)
    return _call(_forward_kernel, inputs, mask_B1TS, [out], interpret)[0]


@partial(jax.jit, static_argnums=0)
def _backward(interpret: bool, residuals: Any, d_out_BTHK: Array) -> tuple[Any, ...]:
    *arrays, mask_B1TS = residuals
    out_shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    inputs = [*split_qkv(arrays), (d_out_BTHK, 0, d_out_BTHK.shape[3])]
    return *_call(_backward_kernel, inputs, mask_B1TS, out_shapes, interpret), None


_attention.defvjp(lambda *arguments: (_attention(*arguments), arguments[1:]), _backward)


def _call(kernel: Any, inputs: Any, mask_B1TS: Any, out_shapes: Any, interpret: bool) -> Any:
    """Run one program per row and head. Block sizes are powers of two, at least 16.

    The kernel reads each part of an array separately, but writes whole arrays.
    """
    B, _, T, S = mask_B1TS.shape
    block = {length: max(16, pl.next_power_of_2(length)) for length in (T, S)}

    def block_spec(x: Any, i: int, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, block[x.shape[1]], None, width), lambda h, b: (b, 0, h, i))

    warps = 2 if max(T, S) <= 32 else 4 if max(T, S) <= 64 else 8
    return pl.pallas_call(
        partial(kernel, T, S),
        grid=(out_shapes[0].shape[2], B),  # heads vary fastest, because they are adjacent in memory
        in_specs=[
            pl.BlockSpec((None, None, block[T], block[S]), lambda h, b: (b, 0, 0, 0)),
            *(block_spec(x, i, width) for x, i, width in inputs),
        ],
        out_specs=[block_spec(x, 0, x.shape[3]) for x in out_shapes],
        out_shape=out_shapes,
        compiler_params=compiler_params(warps),
        interpret=interpret,
    )(mask_B1TS.astype(jnp.int8), *(x for x, _, _ in inputs))


def _forward_kernel(T: int, S: int, mask_ref: Any, *refs: Any) -> None:
    q_TK, k_SK, v_SK = map(_load, refs, (T, S, S))
    weights_TS, _ = _weights(q_TK, k_SK, mask_ref, T, S)
    _store((refs[3], 0, v_SK.shape[1]), _dot(weights_TS.astype(v_SK.dtype), v_SK, (1, 0)), T)


def _backward_kernel(T: int, S: int, mask_ref: Any, *refs: Any) -> None:
    q_TK, k_SK, v_SK, d_out_TK = map(_load, refs, (T, S, S, T))
    weights_TS, allowed_TS = _weights(q_TK, k_SK, mask_ref, T, S)
    d_q, d_k, d_v = split_qkv(refs[4:])
    _store(d_v, _dot(weights_TS.astype(v_SK.dtype), d_out_TK, (0, 0)), S)
    d_weights_TS = _dot(d_out_TK, v_SK, (1, 1))
    mean_T = (weights_TS * d_weights_TS).sum(axis=1)
    d_scores_TS = weights_TS * (d_weights_TS - mean_T[:, None]) * q_TK.shape[1] ** -0.5
    d_scores_TS = jnp.where(allowed_TS, d_scores_TS, 0.0).astype(q_TK.dtype)
    _store(d_q, _dot(d_scores_TS, k_SK, (1, 0)), T)
    _store(d_k, _dot(d_scores_TS, q_TK, (0, 0)), S)


def _weights(q_TK: Any, k_SK: Any, mask_ref: Any, T: int, S: int) -> tuple[Array, Array]:
    """Return float32 softmax weights (0 past the last key) and the mask of allowed positions."""
    scores_TS = _dot(q_TK, k_SK, (1, 1)) * q_TK.shape[1] ** -0.5
    allowed_TS = _load(mask_ref, T, S) != 0
    scores_TS = jnp.where(allowed_TS, scores_TS, MASKED)
    is_in_bounds_TS = _in_bounds(scores_TS.shape, scores_TS.shape[0], S)
    if is_in_bounds_TS is not None:
        scores_TS = jnp.where(is_in_bounds_TS, scores_TS, -jnp.inf)
    exp_TS = jnp.exp(scores_TS - scores_TS.max(axis=1)[:, None])
    return exp_TS / exp_TS.sum(axis=1)[:, None], allowed_TS


def _in_bounds(shape: tuple[int, ...], rows: int, columns: int) -> Array | None:
    """Return the mask of the block's elements that are inside the array, or None if all are."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return None if shape == (rows, columns) else (row < rows) & (column < columns)


def _load(ref: Any, rows: int, columns: int | None = None) -> Array:
    return load(ref, _in_bounds(ref.shape, rows, columns or ref.shape[1]))


def _store(part: tuple[Any, int, int], x_LK: Array, rows: int) -> None:
    ref, i, width = part
    store(ref.at[:, pl.ds(i * width, width)], x_LK, _in_bounds(x_LK.shape, rows, width))


def _dot(x: Array, y: Array, axes: tuple[int, int]) -> Array:
    """Contract one axis of each matrix, accumulating in float32."""
    summed_axes = ((axes[0],), (axes[1],))
    return jax.lax.dot_general(x, y, (summed_axes, ((), ())), preferred_element_type=jnp.float32)
