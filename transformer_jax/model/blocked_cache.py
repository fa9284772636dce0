"""Keys and values in blocks of positions; blocks that no sentence uses are skipped (CPUs, TPUs).

Reading the cache is most of what a step's attention costs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

from transformer_jax.model.attention import MASKED

# Skipping costs some operations too: blocks have this size (self-attention, cross-attention) up to
# position 64, and from there each is as long as all before it together.
_BLOCKS = {"cpu": (16, 32), "tpu": (64, 64)}
_EQUAL_BLOCKS = 64

# Keys or values of consecutive positions: [B, H, S, K] each, of self-attention [B, H, T*W, K].
Blocks = tuple[jax.Array, ...]


@struct.dataclass
class LayerCache:
    """Keys and values that one decoder layer attends to."""

    self_keys: Blocks
    self_values: Blocks
    cross_keys: Blocks
    cross_values: Blocks


@struct.dataclass
class BlockedKeysValues:
    """Those of all layers. Position t of beam w lives in slot t * W + w."""

    layers: tuple[LayerCache, ...]

    @classmethod
    def empty(
        cls, cross: Sequence[tuple[jax.Array, ...]], *, beam_size: int, max_length: int
    ) -> BlockedKeysValues:
        """Those of the memory, [B, S, H, K] each, and an empty history for self-attention."""
        self_block, cross_block = _BLOCKS[jax.default_backend()]

        def memory(x_BSHK: jax.Array) -> Blocks:
            x_BHSK = x_BSHK.swapaxes(1, 2)
            return tuple(x_BHSK[:, :, i:j] for i, j in _ranges(x_BHSK.shape[2], cross_block))

        def history(x_BSHK: jax.Array) -> Blocks:
            batch, _, heads, width = x_BSHK.shape
            return tuple(
                jnp.zeros((batch, heads, (j - i) * beam_size, width), x_BSHK.dtype)
                for i, j in _ranges(max_length, self_block)
            )

        return cls(
            tuple(LayerCache(history(k), history(v), memory(k), memory(v)) for k, v in cross)
        )

    def lengths(self, capacity: int) -> tuple[int, ...]:
        """A step is never limited from outside, as it skips blocks by itself."""
        return (capacity,)

    def attention(
        self,
        source_mask_BS: jax.Array,
        ancestors_BWT: jax.Array,
        position_B: jax.Array,
        *,
        length: int | None,
    ) -> BlockedAttention:
        """The attention of the next step; ``length`` is not needed."""
        del position_B, length
        batch, beam_size, _ = ancestors_BWT.shape
        slots_W = jnp.arange(beam_size, dtype=jnp.int32)
        ancestors_BT1W = ancestors_BWT.swapaxes(1, 2)[:, :, None]
        visible_BTWW = ancestors_BT1W == slots_W[None, None, :, None]
        visible_B1LW = visible_BTWW.reshape(batch, 1, -1, beam_size)
        return BlockedAttention(self.layers, visible_B1LW, source_mask_BS[:, None, :, None])

    def append(
        self, keys_values: Sequence[tuple[jax.Array, jax.Array]], position_B: jax.Array
    ) -> BlockedKeysValues:
        """With each layer's new keys and values, [B, W, H, K], at these positions."""
        beam_size = keys_values[0][0].shape[1]
        rows_B1 = jnp.arange(len(position_B))[:, None]
        beams_1W = jnp.arange(beam_size, dtype=jnp.int32)[None]
        slots_BW = position_B[:, None] * beam_size + beams_1W

        def write(blocks: Blocks, new_BWHK: jax.Array) -> Blocks:
            written, start = [], 0
            for x_BHLK in blocks:
                length = x_BHLK.shape[2]
                # slots of other blocks lie outside and are dropped
                inside_BW = jnp.where(slots_BW >= start, slots_BW - start, length)
                written.append(x_BHLK.at[rows_B1, :, inside_BW].set(new_BWHK, mode="drop"))
                start += length
            return tuple(written)

        layers = tuple(
            dataclasses.replace(
                layer,
                self_keys=write(layer.self_keys, keys_BWHK),
                self_values=write(layer.self_values, values_BWHK),
            )
            for layer, (keys_BWHK, values_BWHK) in zip(self.layers, keys_values, strict=True)
        )
        return BlockedKeysValues(layers)

    def replace_rows(self, rows_R: jax.Array, fresh: BlockedKeysValues) -> BlockedKeysValues:
        """With the memory of other sentences in these rows. Old keys of self-attention stay,
        masked; old values become 0, as an infinite one times a weight of 0 would be NaN.
        """

        def put(old, new):  # type: ignore[no-untyped-def]
            return jax.tree.map(lambda x, y: x.at[rows_R].set(y, mode="drop"), old, new)

        layers = tuple(
            dataclasses.replace(
                old,
                self_values=put(old.self_values, (0,) * len(old.self_values)),
                cross_keys=put(old.cross_keys, new.cross_keys),
                cross_values=put(old.cross_values, new.cross_values),
            )
            for old, new in zip(self.layers, fresh.layers, strict=True)
        )
        return BlockedKeysValues(layers)


@dataclasses.dataclass(frozen=True)
class BlockedAttention:
    """What the hypotheses of one step can see."""

    layers: tuple[LayerCache, ...]
    visible_B1LW: jax.Array
    source_mask_B1S1: jax.Array

    def to_history(
        self, layer: int, q_BWHK: jax.Array, own_BWHK: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Self-attention, [B, W, H, K], and the newest key and value, to be written when all layers
        have read: then XLA's CPU backend copies no block.
        """
        cache = self.layers[layer]
        keys_values = cache.self_keys, cache.self_values
        attended_BWHK = attend_to_blocks(q_BWHK, *keys_values, self.visible_B1LW, own_BWHK=own_BWHK)
        return attended_BWHK, own_BWHK

    def to_source(self, layer: int, q_BWHK: jax.Array) -> jax.Array:
        """Cross-attention, [B, W, H, K]."""
        cache = self.layers[layer]
        keys_values = cache.cross_keys, cache.cross_values
        return attend_to_blocks(q_BWHK, *keys_values, self.source_mask_B1S1)


def _ranges(length: int, block: int) -> list[tuple[int, int]]:
    """Where blocks begin and end."""
    ranges, start = [], 0
    while start < length:
        stop = min(length, start + (block if start < _EQUAL_BLOCKS else start))
        ranges.append((start, stop))
        start = stop
    return ranges


# Attention over some positions: the largest score, the sum of exp(score - largest), and the sum of
# values with those weights; float32 [B, H, 1, W], [B, H, 1, W], [B, H, W, K].
_Partial = tuple[jax.Array, jax.Array, jax.Array]


def attend_to_blocks(
    q_BWHK: jax.Array,
    keys: Blocks,
    values: Blocks,
    mask_BHLW: jax.Array,
    *,
    own_BWHK: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Equation 1 for each hypothesis over the cached positions it can see: [B, W, H, K].

    In self-attention ``own_BWHK``, the newest key and value, come apart from the cache: as the
    cache is read before it is written, XLA updates it in place. Weights have the hypotheses last:
    XLA's CPU backend computes such narrow products three to five times as fast that way.

    A block that a hypothesis does not see weighs exactly 0 for it, computed or skipped.
    """
    q_BHWK = q_BWHK.swapaxes(1, 2) * jnp.asarray(q_BWHK.shape[-1] ** -0.5, q_BWHK.dtype)

    def attend(k_BHLK: jax.Array, v_BHLK: jax.Array, mask_BHLW: jax.Array) -> _Partial:
        scores_BHLW = jnp.einsum(
            "BHLK,BHWK->BHLW", k_BHLK, q_BHWK, preferred_element_type=jnp.float32
        )
        scores_BHLW = jnp.where(mask_BHLW, scores_BHLW, MASKED)
        largest_BH1W = scores_BHLW.max(axis=2, keepdims=True)
        weights_BHLW = jnp.exp(scores_BHLW - largest_BH1W)
        out_BHWK = jnp.einsum(
            "BHLW,BHLK->BHWK",
            weights_BHLW.astype(v_BHLK.dtype),
            v_BHLK,
            preferred_element_type=jnp.float32,
        )
        return largest_BH1W, weights_BHLW.sum(axis=2, keepdims=True), out_BHWK

    # The first block is never skipped: it seldom could be, and something must be divided by.
    ends = list(itertools.accumulate(k_BHLK.shape[2] for k_BHLK in keys))
    masks = jnp.split(mask_BHLW, ends[:-1], axis=2)
    first, *others = zip(keys, values, masks, strict=True)
    parts = [attend(*first)]
    largest_BH1W, total_BH1W, out_BHWK = parts[0]

    def skip(*_: jax.Array) -> _Partial:
        masked_BH1W = jnp.full_like(largest_BH1W, MASKED)
        return masked_BH1W, jnp.zeros_like(total_BH1W), jnp.zeros_like(out_BHWK)

    parts += [jax.lax.cond(block[2].any(), attend, skip, *block) for block in others]
    if own_BWHK is not None:
        k_BHWK, v_BHWK = (x.swapaxes(1, 2).astype(jnp.float32) for x in own_BWHK)
        own_BH1W = (q_BHWK.astype(jnp.float32) * k_BHWK).sum(axis=-1)[:, :, None]
        parts.insert(0, (own_BH1W, jnp.ones_like(own_BH1W), v_BHWK))
    return _joined(parts).swapaxes(1, 2).astype(q_BWHK.dtype)


def _joined(parts: list[_Partial]) -> jax.Array:
    """Attention over all positions, [B, H, W, K], from that over some of them each."""
    largest, totals, outs = zip(*parts, strict=True)
    largest_NBH1W = jnp.stack(largest)
    factors_NBH1W = jnp.exp(largest_NBH1W - largest_NBH1W.max(axis=0, keepdims=True))
    total_BH1W = (factors_NBH1W * jnp.stack(totals)).sum(axis=0)
    weighted = (x * factor.swapaxes(2, 3) for x, factor in zip(outs, factors_NBH1W, strict=True))
    out_BHWK = sum(weighted, jnp.zeros_like(outs[0]))
    return out_BHWK / total_BH1W.swapaxes(2, 3)
