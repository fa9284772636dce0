"""Keys and values of which a step reads only the first positions, as many as are in use (GPUs).

A GPU waits for memory and for launches. How many positions a step attends to is chosen before the
step, so that nothing is skipped inside it, and each hypothesis reads its own history only. An
attention is four kernels: scores, softmax, and the weighted sum in two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental.layout import Layout, with_layout_constraint

from transformer_jax.model.attention import MASKED

# Positions that a step may be limited to: so many, twice as many, and so on. Each is compiled by
# itself, and left out if the whole is not much longer.
_SHORTEST = 32
_MOST = 3 / 4
# Numbers of positions are multiples of this. So few values are added up by one thread, others next
# to it; for 32 or more XLA starts a block of 1,024 threads, most of which wait.
_TOGETHER = 16


@struct.dataclass
class PrefixKeysValues:
    """One array a layer: a position's key and value stand side by side, J = d_k + d_v.

    Position t of beam w lives in slot t * W + w of the T * W of self-attention.
    """

    history: tuple[jax.Array, ...]  # [B, H, T*W, J] each
    source: tuple[jax.Array, ...]  # [B, H, S, J] each

    @classmethod
    def empty(
        cls, cross: Sequence[tuple[jax.Array, ...]], *, beam_size: int, max_length: int
    ) -> PrefixKeysValues:
        """Those of the memory, [B, S, H, K] each, and an empty history for self-attention."""
        slots = _padded(max_length) * beam_size
        source = tuple(
            _pad(jnp.concatenate(of_layer, axis=-1).swapaxes(1, 2), axis=2) for of_layer in cross
        )
        history = tuple(
            jnp.zeros((*x_BHSJ.shape[:2], slots, x_BHSJ.shape[3]), x_BHSJ.dtype)
            for x_BHSJ in source
        )
        return cls(history, source)

    def lengths(self, capacity: int) -> tuple[int, ...]:
        """32, 64, ..., and the capacity."""
        shorter, length = [], _SHORTEST
        while length <= capacity * _MOST:
            shorter.append(length)
            length *= 2
        return (*shorter, capacity)

    def attention(
        self,
        source_mask_BS: jax.Array,
        ancestors_BWT: jax.Array,
        position_B: jax.Array,
        *,
        length: int | None,
    ) -> PrefixAttention:
        """The attention of the next step, over the first ``length`` positions."""
        beam_size = ancestors_BWT.shape[1]
        beams_1W1 = jnp.arange(beam_size, dtype=jnp.int32)[None, :, None]
        ancestors_BWT = _pad(ancestors_BWT[:, :, :length], axis=2)
        positions_1T = jnp.arange(ancestors_BWT.shape[2], dtype=jnp.int32)[None]
        is_new_B1T = (positions_1T == position_B[:, None])[:, None]
        ancestors_BWT = jnp.where(is_new_B1T, beams_1W1, jnp.maximum(ancestors_BWT, 0))
        return PrefixAttention(
            self,
            position_B,
            slots_BWT=positions_1T[:, None] * beam_size + ancestors_BWT,
            is_written_BT=positions_1T <= position_B[:, None],
            is_source_BS=_pad(source_mask_BS[:, :length], axis=1),
        )

    def append(self, written: Sequence[jax.Array], position_B: jax.Array) -> PrefixKeysValues:
        """With what ``PrefixAttention.to_history`` has written."""
        del position_B
        return PrefixKeysValues(tuple(written), self.source)

    def replace_rows(self, rows_R: jax.Array, fresh: PrefixKeysValues) -> PrefixKeysValues:
        """With the memory of other sentences in these rows; what was written stays, unseen."""
        both = zip(self.source, fresh.source, strict=True)
        source = tuple(old.at[rows_R].set(new, mode="drop") for old, new in both)
        return PrefixKeysValues(self.history, source)


@dataclass(frozen=True)
class PrefixAttention:
    """What the hypotheses of one step can see."""

    cache: PrefixKeysValues
    position_B: jax.Array
    slots_BWT: jax.Array  # where each hypothesis finds its own history, its newest token included
    is_written_BT: jax.Array
    is_source_BS: jax.Array

    def to_history(
        self, layer: int, q_BWHK: jax.Array, own_BWHK: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Self-attention, [B, W, H, K], and the layer's history with the newest key and value."""
        old_BHLJ, new_BWHJ = self.cache.history[layer], jnp.concatenate(own_BWHK, axis=-1)
        batch, beam_size, heads, _ = new_BWHJ.shape
        rows_B, beams_1W = jnp.arange(batch), jnp.arange(beam_size)[None]
        new_BW = self.position_B[:, None] * beam_size + beams_1W
        written_BHLJ = old_BHLJ.at[rows_B[:, None], :, new_BW].set(new_BWHJ, mode="drop")
        of_heads = jnp.arange(heads)[None, None, :, None]
        own = rows_B[:, None, None, None], of_heads, self.slots_BWT[:, :, None]
        kv_BWHTJ = written_BHLJ.at[own].get(mode="promise_in_bounds", wrap_negative_indices=False)
        mask_BWHT = self.is_written_BT[:, None, None]
        return _attend(q_BWHK, kv_BWHTJ, mask_BWHT), written_BHLJ

    def to_source(self, layer: int, q_BWHK: jax.Array) -> jax.Array:
        """Cross-attention, [B, W, H, K]."""
        return _attend(q_BWHK, self._source(layer), self.is_source_BS[:, None, None])

    def _source(self, layer: int) -> jax.Array:
        return self.cache.source[layer][:, None, :, : self.is_source_BS.shape[1]]


def _attend(q_BWHK: jax.Array, kv_BWHLJ: jax.Array, mask_BWHL: jax.Array) -> jax.Array:
    """Equation 1 for each hypothesis, [B, W, H, K]; axes B, W and H of the others may be 1.

    Products are written out as sums, which XLA joins with the gathering, so that nothing gathered
    is written to memory; einsums would be kernels of their own. What is masked may be infinite.
    The barriers keep XLA from a single kernel, which takes twice as long as these.
    """
    d_k = q_BWHK.shape[-1]
    k_BWHLK, v_BWHLK = kv_BWHLJ[..., :d_k], kv_BWHLJ[..., d_k:]
    scaled_BWHK = (q_BWHK * jnp.asarray(d_k**-0.5, q_BWHK.dtype)).astype(jnp.float32)
    scores_BWHL = _row_major(scaled_BWHK[:, :, :, None] * k_BWHLK.astype(jnp.float32)).sum(axis=-1)
    scores_BWHL = jax.lax.optimization_barrier(scores_BWHL)
    weights_BWHL = jax.nn.softmax(jnp.where(mask_BWHL, scores_BWHL, MASKED), axis=-1)
    v_BWHLK = jnp.where(mask_BWHL[..., None], v_BWHLK, 0).astype(jnp.float32)
    weighted_BWHLK = _row_major(jax.lax.optimization_barrier(weights_BWHL)[..., None] * v_BWHLK)
    *shape_BWH, length, d_v = weighted_BWHLK.shape
    parts = weighted_BWHLK.reshape(*shape_BWH, length // _TOGETHER, _TOGETHER, d_v).sum(axis=4)
    return jax.lax.optimization_barrier(parts).sum(axis=3).astype(q_BWHK.dtype)


def _row_major(x: jax.Array) -> jax.Array:
    """``x``, with K next to each other as in the cache. XLA would have a sum's terms next to each
    other, and transpose the whole cache for that.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _padded(length: int) -> int:
    return -(-length // _TOGETHER) * _TOGETHER


def _pad(x: jax.Array, *, axis: int) -> jax.Array:
    padding = [(0, 0)] * x.ndim
    padding[axis] = 0, _padded(x.shape[axis]) - x.shape[axis]
    return jnp.pad(x, padding)
