"""Keys and values of which a step reads only the first positions, as many as are in use (GPUs).

A GPU waits for memory and for launches. How many positions a step attends to is chosen before the
step, so that nothing is skipped inside it, and the attention of a layer is written so that XLA
makes it one kernel: scores, softmax and weighted sum.
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
        """Those of the memory, [B, S, H, K] each, and none of self-attention yet."""
        source = tuple(jnp.concatenate(of_layer, axis=-1).swapaxes(1, 2) for of_layer in cross)
        history = tuple(
            jnp.zeros((*x_BHSJ.shape[:2], max_length * beam_size, x_BHSJ.shape[3]), x_BHSJ.dtype)
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
        batch, beam_size, _ = ancestors_BWT.shape
        slots_W = jnp.arange(beam_size, dtype=jnp.int32)
        ancestors_BWT = ancestors_BWT[:, :, :length]
        positions_1T = jnp.arange(ancestors_BWT.shape[2])[None]
        is_new_B1T = (positions_1T == position_B[:, None])[:, None]
        ancestors_BWT = jnp.where(is_new_B1T, slots_W[None, :, None], ancestors_BWT)
        visible_BWTW = ancestors_BWT[..., None] == slots_W[None, None, None]
        return PrefixAttention(
            self,
            position_B,
            visible_BWL=visible_BWTW.reshape(batch, beam_size, -1),
            source_mask_BS=source_mask_BS[:, :length],
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
    visible_BWL: jax.Array
    source_mask_BS: jax.Array

    def to_history(
        self, layer: int, q_BWHK: jax.Array, own_BWHK: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Self-attention, [B, W, H, K], and the layer's history with the newest key and value."""
        old_BHLJ, new_BWHJ = self.cache.history[layer], jnp.concatenate(own_BWHK, axis=-1)
        batch, beam_size, length = self.visible_BWL.shape
        slots_BW = self.position_B[:, None] * beam_size + jnp.arange(beam_size)[None]
        at = jnp.arange(batch)[:, None], slice(None), slots_BW
        written_BHLJ = old_BHLJ.at[at].set(new_BWHJ, mode="drop")
        # Slots after the newest position may hold what another sentence left.
        is_used_BL = jnp.arange(length)[None] <= slots_BW[:, -1:]
        out_BWHK = _attend(
            q_BWHK, written_BHLJ[:, :, :length], self.visible_BWL[:, :, None], is_used_BL
        )
        return out_BWHK, written_BHLJ

    def to_source(self, layer: int, q_BWHK: jax.Array) -> jax.Array:
        """Cross-attention, [B, W, H, K]."""
        return _attend(q_BWHK, self._source(layer), self._is_source, self.source_mask_BS)

    def source_weights(self, layer: int, q_BWHK: jax.Array) -> jax.Array:
        """The weights of cross-attention, mean over the heads: float32 [B, W, S]."""
        k_BHSK = self._source(layer)[..., : q_BWHK.shape[-1]]
        weights_BWS = _weights(q_BWHK, k_BHSK, self._is_source).mean(axis=2)
        padding = self.cache.source[layer].shape[2] - weights_BWS.shape[2]
        return jnp.pad(weights_BWS, ((0, 0), (0, 0), (0, padding)))

    def _source(self, layer: int) -> jax.Array:
        return self.cache.source[layer][:, :, : self.source_mask_BS.shape[1]]

    @property
    def _is_source(self) -> jax.Array:
        return self.source_mask_BS[:, None, None]


def _attend(
    q_BWHK: jax.Array, kv_BHLJ: jax.Array, visible_BWHL: jax.Array, is_used_BL: jax.Array
) -> jax.Array:
    """Equation 1 for each hypothesis, [B, W, H, K]; axes W and H of the mask may be 1.

    What no hypothesis of a sentence has used may be infinite.
    """
    d_k = q_BWHK.shape[-1]
    k_BHLK, v_BHLK = kv_BHLJ[..., :d_k], kv_BHLJ[..., d_k:]
    weights_BWHL = _weights(q_BWHK, k_BHLK, visible_BWHL)
    v_BHLK = jnp.where(is_used_BL[:, None, :, None], v_BHLK, 0).astype(jnp.float32)
    return _sum_of_products(weights_BWHL[..., None], v_BHLK[:, None], axis=3).astype(q_BWHK.dtype)


def _weights(q_BWHK: jax.Array, k_BHLK: jax.Array, visible_BWHL: jax.Array) -> jax.Array:
    """The attention weights, float32 [B, W, H, L]."""
    q_BWHK = (q_BWHK * jnp.asarray(q_BWHK.shape[-1] ** -0.5, q_BWHK.dtype)).astype(jnp.float32)
    k_BHLK = k_BHLK.astype(jnp.float32)
    scores_BWHL = _sum_of_products(q_BWHK[:, :, :, None], k_BHLK[:, None], axis=4)
    return jax.nn.softmax(jnp.where(visible_BWHL, scores_BWHL, MASKED), axis=-1)


def _sum_of_products(x: jax.Array, y: jax.Array, *, axis: int) -> jax.Array:
    """A contraction that XLA can join with what is around it. An einsum would be a kernel of its
    own, which wants its operands copied; and without the constraint XLA would have the terms of
    each sum side by side, and transpose the cache for that.
    """
    products = x * y
    layout = Layout(tuple(range(products.ndim)))
    return with_layout_constraint(products, layout).sum(axis=axis)
