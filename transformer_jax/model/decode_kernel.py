"""Attention in a decoding step on a GPU: Pallas kernels for the history and the source.

Each program handles all hypotheses of one sentence and head. It reads only the positions that the
sentence uses. ``kv_cache._attend_to_blocks`` is the reference implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from transformer_jax.model.attention_kernel import MASKED
from transformer_jax.model.gpu import compiler_params, load, runs_kernels, split_qkv, store

POSITIONS_PER_BLOCK = 16  # positions per iteration; divides the number of positions in a cache

# Largest score, sum of exp(score - largest score), and weighted sum of values; float32.
_State = tuple[Array, Array, Array]


def supports(q_BWHK: Any, v_BHLK: Any) -> bool:
    """Return True if the kernels support this device, beam size and head widths.

    Head widths must be powers of two, and a beam's queries must fit into a program's registers.
    """
    beam_size = q_BWHK.shape[1]
    widths = q_BWHK.shape[3], v_BHLK.shape[3]
    powers_of_two = all(width & (width - 1) == 0 for width in widths)
    return runs_kernels() and powers_of_two and beam_size * max(widths) <= 1024


def attend_to_history(
    arrays_BWHK: Sequence[Array],
    history: Sequence[Array],
    ancestors_BWT: Array,
    position_B: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, tuple[Array, ...]]:
    """Attend from each hypothesis to its history and its newest token. Returns [B, W, H, K].

    One to three arrays hold the newest queries, keys and values (``gpu.split_qkv``). Also returns
    ``history``, [B, H, T * W, K] each, with the newest keys and values written in place.
    ``interpret`` runs the kernel on any device.
    """
    sentences = position_B, ancestors_BWT
    out, *history = _run_for_each_head(_history_kernel, sentences, arrays_BWHK, history, interpret)
    return out, tuple(history)


def attend_to_source(
    q_BWHK: Array, source: Sequence[Array], mask_BS: Array, *, interpret: bool = False
) -> Array:
    """Attend to the source's keys and values [B, H, S, K]. Returns [B, W, H, K]."""
    ends_1S = jnp.arange(1, mask_BS.shape[1] + 1, dtype=jnp.int32)[None]
    sentences = jnp.where(mask_BS, ends_1S, 0).max(axis=1), mask_BS.astype(jnp.int8)
    return _run_for_each_head(_source_kernel, sentences, [q_BWHK], source, interpret)[0]


@partial(jax.jit, static_argnums=(0, 4))  # traced and lowered once for all layers
def _run_for_each_head(
    kernel: Any, sentences: Any, arrays: Any, caches: Any, interpret: bool
) -> list[Any]:
    """Run one program of a kernel for each sentence and head. Returns [B, W, H, K] and the updated
    caches: keys and values of ``_history_kernel``, none of ``_source_kernel``.

    A ``BlockSpec`` says which part of an array the program of head h and sentence b sees: the size
    of the part on each axis (None: one index, and the axis goes), and which part it is.

    Args:
      sentences: arrays [B, ...] whose part is a sentence.
      arrays: queries, or queries, keys and values (``split_qkv``), [B, W, H, K] each. The part is
        all hypotheses of a sentence, in one head.
      caches: keys and values, [B, H, L, K] each. The part is one head of a sentence.
    """
    B, W, H, width = arrays[0].shape
    K = caches[1].shape[3]
    out = jax.ShapeDtypeStruct((B, W, H, K), arrays[0].dtype)
    is_history = kernel is _history_kernel
    beams = split_qkv(arrays) if is_history else [(*arrays, 0, width)]
    updated_caches = caches if is_history else []
    cache_shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated_caches]

    def sentence_spec(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda h, b: (b, *[0] * (x.ndim - 1)))

    def beams_spec(_: Any, i: int, width: int) -> pl.BlockSpec:
        # The number of hypotheses in a program must be a power of two.
        shape = None, pl.next_power_of_2(W), None, width
        return pl.BlockSpec(shape, lambda h, b: (b, 0, h, i))

    def cache_spec(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *x.shape[2:]), lambda h, b: (b, h, 0, 0))

    num_inputs_before_caches = len(sentences) + len(beams)

    return pl.pallas_call(
        partial(kernel, W),
        grid=(H, B),  # heads vary fastest, because they are adjacent in memory
        in_specs=[
            *map(sentence_spec, sentences),
            *(beams_spec(x, i, width) for x, i, width in beams),
            *map(cache_spec, caches),
        ],
        out_specs=[beams_spec(out, 0, K), *map(cache_spec, cache_shapes)],
        out_shape=[out, *cache_shapes],
        # The updated caches overwrite the old ones; output 0 is ``out``.
        input_output_aliases={
            num_inputs_before_caches + i: 1 + i for i in range(len(updated_caches))
        },
        compiler_params=compiler_params(4),
        interpret=interpret,
    )(*sentences, *(x for x, _, _ in beams), *caches)


def _history_kernel(W: int, position_ref: Any, ancestors_ref: Any, *refs: Any) -> None:
    q_ref, k_ref, v_ref, old_k_ref, old_v_ref, out_ref, new_k_ref, new_v_ref = refs
    position = position_ref[...]
    T = ancestors_ref.shape[1]
    beams_W1 = jnp.arange(len(out_ref))[:, None]
    is_beam_W1 = beams_W1 < W
    q_WK, k_WK, v_WK = (_load(ref, beams_W1, is_beam_W1) for ref in (q_ref, k_ref, v_ref))

    def attend(i: Any, state: _State) -> _State:
        positions_1T = i * POSITIONS_PER_BLOCK + jnp.arange(POSITIONS_PER_BLOCK)[None]
        is_visible_WT = is_beam_W1 & (positions_1T < position)
        at = ancestors_ref.at[beams_W1, positions_1T]
        slots_WT1 = (positions_1T * W + load(at, is_visible_WT))[:, :, None]
        rows = slots_WT1, is_visible_WT[:, :, None]
        return _attend(state, q_WK, _load(old_k_ref, *rows), _load(old_v_ref, *rows), is_visible_WT)

    score_W = (_scaled(q_WK) * k_WK.astype(jnp.float32)).sum(axis=1)
    state = score_W, jnp.ones_like(score_W), v_WK.astype(jnp.float32)
    _store(out_ref, beams_W1, is_beam_W1, _attention(attend, jnp.minimum(position, T), state))
    # A finished sentence can be past the last position.
    for ref, x_WK in (new_k_ref, k_WK), (new_v_ref, v_WK):
        _store(ref, position * W + beams_W1, is_beam_W1 & (position < T), x_WK)


def _source_kernel(W: int, length_ref: Any, mask_ref: Any, *refs: Any) -> None:
    q_ref, k_ref, v_ref, out_ref = refs
    beams_W1 = jnp.arange(len(out_ref))[:, None]
    q_WK = _load(q_ref, beams_W1, beams_W1 < W)

    def attend(i: Any, state: _State) -> _State:
        positions_S = i * POSITIONS_PER_BLOCK + jnp.arange(POSITIONS_PER_BLOCK)
        is_visible_1S = mask_ref[positions_S][None] != 0
        at = positions_S[None, :, None], is_visible_1S[:, :, None]
        return _attend(state, q_WK, _load(k_ref, *at), _load(v_ref, *at), is_visible_1S)

    zeros_WK = jnp.zeros(out_ref.shape, jnp.float32)
    state = jnp.full(len(out_ref), MASKED, jnp.float32), zeros_WK.sum(axis=1), zeros_WK
    # A row without a sentence reads one masked block, because the divisor must not be 0.
    out_WK = _attention(attend, jnp.maximum(length_ref[...], 1), state)
    _store(out_ref, beams_W1, beams_W1 < W, out_WK)


def _attention(attend: Any, count: Array, state: _State) -> Array:
    """Return the weighted mean of values, [W, K], over ``count`` positions."""
    num_iterations = (count + POSITIONS_PER_BLOCK - 1) // POSITIONS_PER_BLOCK
    _, total_W, out_WK = jax.lax.fori_loop(0, num_iterations, attend, state)
    return out_WK / total_W[:, None]


def _attend(state: _State, q_WK: Any, k_WTK: Any, v_WTK: Any, is_visible_WT: Any) -> _State:
    """Add more positions to the state. Axis W of keys, values and mask can be 1."""
    old_largest_W, total_W, out_WK = state
    scores_WT = (_scaled(q_WK)[:, None] * k_WTK.astype(jnp.float32)).sum(axis=2)
    scores_WT = jnp.where(is_visible_WT, scores_WT, MASKED)
    largest_W = jnp.maximum(old_largest_W, scores_WT.max(axis=1))
    scale_W = jnp.exp(old_largest_W - largest_W)
    weights_WT = jnp.exp(scores_WT - largest_W[:, None])
    added_WK = (weights_WT[:, :, None] * v_WTK.astype(jnp.float32)).sum(axis=1)
    total_W = total_W * scale_W + weights_WT.sum(axis=1)
    return largest_W, total_W, out_WK * scale_W[:, None] + added_WK


def _scaled(q_WK: Array) -> Array:
    return (q_WK * jnp.asarray(q_WK.shape[1] ** -0.5, q_WK.dtype)).astype(jnp.float32)


def _load(ref: Any, rows: Array, mask: Array) -> Array:
    """Load whole rows, or 0 where masked. The last axis of ``rows`` and ``mask`` is 1."""
    at, shape = _row_refs(ref, rows)
    return load(at, jnp.broadcast_to(mask, shape))


def _store(ref: Any, rows: Array, mask: Array, x: Array) -> None:
    at, shape = _row_refs(ref, rows)
    store(at, x, jnp.broadcast_to(mask, shape))


def _row_refs(ref: Any, rows: Array) -> tuple[Any, tuple[int, ...]]:
    shape = *rows.shape[:-1], ref.shape[1]
    return ref.at[rows, jax.lax.broadcasted_iota(jnp.int32, shape, rows.ndim - 1)], shape
