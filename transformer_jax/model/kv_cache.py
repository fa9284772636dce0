"""The key/value cache (KV cache) of the decoder, and attention over it.

``_attend_to_blocks`` attends to all slots of a sentence under a mask. It skips blocks that no
sentence uses, as reading the cache dominates the cost of attention. On most GPUs, the kernels of
``decode_kernel.py`` take its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from transformer_jax.model import decode_kernel
from transformer_jax.model.attention_kernel import MASKED

_NOT_WRITTEN = -1
# End positions of the blocks (self-attention, cross-attention). From position 64 on, each block is
# as long as all earlier blocks together, because skipping a block also takes time. A GPU has one
# block.
_LONG = [64 << i for i in range(20)]
_ENDS = {
    "cpu": ([16, 32, 48, *_LONG], [32, *_LONG]),
    "tpu": (_LONG, _LONG),
    "gpu": ([], []),
}
# Keys and values of consecutive positions, [B, H, L, K] each. L counts slots: S, or T * W in a
# history.
Block = tuple[jax.Array, jax.Array]


@struct.dataclass
class DecoderCache:
    """Decoding state of W hypotheses for each of B sentences, each sentence at its own position.

    Self-attention keys and values never move: position t of beam w stays in slot t * W + w.
    Reordering beams changes only the small table ``ancestors_BWT``. For each beam and position, the
    table has the beam whose slot holds that position. The beams of a sentence share its
    cross-attention keys and values.
    """

    history: tuple[tuple[Block, ...], ...]  # of each layer
    source: tuple[tuple[Block, ...], ...]
    source_mask_BS: jax.Array  # True: a real source token
    ancestors_BWT: jax.Array  # int32; -1: not written
    position_B: jax.Array  # int32: number of tokens read so far
    max_length: int = struct.field(pytree_node=False)  # capacity in steps, at most T

    def reorder(self, parents_BW: jax.Array) -> DecoderCache:
        """Make beam w continue beam ``parents_BW[b, w]``."""
        ancestors_BWT = jnp.take_along_axis(self.ancestors_BWT, parents_BW[:, :, None], axis=1)
        return dataclasses.replace(self, ancestors_BWT=ancestors_BWT)

    def replace_rows(self, rows_R: jax.Array, fresh: DecoderCache) -> DecoderCache:
        """Put the R new sentences of ``fresh`` into rows ``rows_R``.

        A row number equal to B is skipped. Only the source arrays of ``fresh`` are read. Old
        self-attention keys stay, masked. Old values become 0: an infinite value times a weight of
        0 would be NaN.
        """

        def put(old: Any, new: Any) -> Any:
            return jax.tree.map(lambda x, y: x.at[rows_R].set(y, mode="drop"), old, new)

        return dataclasses.replace(
            self,
            history=tuple(tuple((k, put(v, 0)) for k, v in layer) for layer in self.history),
            source=put(self.source, fresh.source),
            source_mask_BS=put(self.source_mask_BS, fresh.source_mask_BS),
            ancestors_BWT=put(self.ancestors_BWT, _NOT_WRITTEN),
            position_B=put(self.position_B, 0),
        )

    def cleared(self) -> DecoderCache:
        """Return an empty cache of the same capacity. Old entries stay, masked."""
        return dataclasses.replace(
            self,
            source_mask_BS=jnp.zeros_like(self.source_mask_BS),
            ancestors_BWT=jnp.full_like(self.ancestors_BWT, _NOT_WRITTEN),
            position_B=jnp.zeros_like(self.position_B),
        )

    def layers(self) -> list[LayerAttention]:
        """Return each layer's attention in the next step."""
        batch, beam_size, _ = self.ancestors_BWT.shape
        ancestors_BT1W = self.ancestors_BWT.swapaxes(1, 2)[:, :, None]
        visible_BTWW = ancestors_BT1W == jnp.arange(beam_size)[None, None, :, None]
        visible_B1LW = visible_BTWW.reshape(batch, 1, -1, beam_size)
        layers = zip(self.history, self.source, strict=True)
        return [LayerAttention(self, visible_B1LW, *each) for each in layers]

    def append(self, layers: Sequence[LayerAttention]) -> DecoderCache:
        """Append one position to each layer: the newest keys and values."""
        _, W, T = self.ancestors_BWT.shape
        is_new_BT = jnp.arange(T)[None] == self.position_B[:, None]
        beams_1W1 = jnp.arange(W, dtype=jnp.int32)[None, :, None]
        return dataclasses.replace(
            self,
            # Written after all layers have read, so that XLA's CPU backend copies no block.
            history=tuple(
                _written(layer.history, layer.own, self.position_B) if layer.own else layer.history
                for layer in layers
            ),
            ancestors_BWT=jnp.where(is_new_BT[:, None], beams_1W1, self.ancestors_BWT),
            position_B=self.position_B + 1,
        )


@dataclasses.dataclass
class LayerAttention:
    """Attention of one layer over its part of the cache in one step; arrays are [B, W, H, K]."""

    cache: DecoderCache
    visible_B1LW: jax.Array  # slots of the history that each hypothesis sees
    history: tuple[Block, ...]
    source: tuple[Block, ...]
    own: Block | None = None  # the newest key and value, not yet in the history

    def to_history(self, q_BWHK: jax.Array, k_BWHK: jax.Array, v_BWHK: jax.Array) -> jax.Array:
        """Attend from the newest tokens to the cached tokens and to themselves."""
        self.own = own = k_BWHK, v_BWHK
        ancestors_BWT, position_B = self.cache.ancestors_BWT, self.cache.position_B

        def plain(*blocks: Block) -> jax.Array:
            return _attend_to_blocks(q_BWHK, blocks, self.visible_B1LW, own)

        def plain_step(block: Block) -> Any:
            return plain(block), *_written([block], own, position_B)

        def kernel_step(block: Block) -> Any:
            step = decode_kernel.attend_to_history
            return step(q_BWHK, own, block, ancestors_BWT, position_B)

        if not decode_kernel.takes(q_BWHK, v_BWHK):
            return plain(*self.history)
        steps = {"cuda": kernel_step, "default": plain_step}
        out_BWHK, *history = jax.lax.platform_dependent(*self.history, **steps)
        self.history, self.own = tuple(history), None
        return out_BWHK

    def to_source(self, q_BWHK: jax.Array) -> jax.Array:
        """Attend from the newest tokens to the source."""
        mask_BS = self.cache.source_mask_BS

        def plain(*blocks: Block) -> jax.Array:
            return _attend_to_blocks(q_BWHK, blocks, mask_BS[:, None, :, None])

        def kernel(block: Block) -> jax.Array:
            return decode_kernel.attend_to_source(q_BWHK, block, mask_BS)

        if not decode_kernel.takes(q_BWHK, self.source[0][1]):
            return plain(*self.source)
        return jax.lax.platform_dependent(*self.source, cuda=kernel, default=plain)


def empty_cache(
    cross: Sequence[tuple[jax.Array, jax.Array]],
    source_mask_BS: jax.Array,
    *,
    beam_size: int,
    max_length: int,
    source_capacity: int = 0,
) -> DecoderCache:
    """Create an empty cache for ``max_length`` steps; later steps are dropped silently.

    Args:
      cross: cross-attention keys and values of each layer, [B, S, H, K].
      source_capacity: source positions to pad S to. Results stay the same, on a CPU bit-exactly.
    """
    batch, length = source_mask_BS.shape
    multiple = decode_kernel.POSITIONS
    S, T = (-(-n // multiple) * multiple for n in (max(length, source_capacity), max_length))
    ends_T, ends_S = _ENDS[jax.default_backend()]

    def of_source(x_BSHK: jax.Array) -> list[jax.Array]:
        padding = (0, 0), (0, 0), (0, S - length), (0, 0)
        x_BHSK = jnp.pad(x_BSHK.swapaxes(1, 2), padding)
        return jnp.split(x_BHSK, [n for n in ends_S if n < S], axis=2)

    def of_history(x_BSHK: jax.Array) -> list[jax.Array]:
        B, _, H, K = x_BSHK.shape
        slots_BHLK = jnp.zeros((B, H, T * beam_size, K), x_BSHK.dtype)
        return jnp.split(slots_BHLK, [n * beam_size for n in ends_T if n < T], axis=2)

    return DecoderCache(
        history=tuple(tuple(zip(*map(of_history, layer), strict=True)) for layer in cross),
        source=tuple(tuple(zip(*map(of_source, layer), strict=True)) for layer in cross),
        source_mask_BS=jnp.pad(source_mask_BS, ((0, 0), (0, S - length))),
        ancestors_BWT=jnp.full((batch, beam_size, T), _NOT_WRITTEN, jnp.int32),
        position_B=jnp.zeros(batch, jnp.int32),
        max_length=max_length,
    )


def _written(blocks: Sequence[Block], own: Block, position_B: jax.Array) -> tuple[Block, ...]:
    """Write the newest keys and values, [B, W, H, K], into the history at these positions."""
    beam_size = own[0].shape[1]
    rows_B1 = jnp.arange(len(position_B))[:, None]
    slots_BW = position_B[:, None] * beam_size + jnp.arange(beam_size, dtype=jnp.int32)[None]
    written, start = [], 0
    for block in blocks:
        length = block[0].shape[2]
        # slots of other blocks are out of bounds and dropped
        inside_BW = jnp.where(slots_BW >= start, slots_BW - start, length)
        at = rows_B1, slice(None), inside_BW
        k_BHLK, v_BHLK = (old.at[at].set(x, mode="drop") for old, x in zip(block, own, strict=True))
        written.append((k_BHLK, v_BHLK))
        start += length
    return tuple(written)


def _attend_to_blocks(
    q_BWHK: jax.Array, blocks: Sequence[Block], mask_BHLW: jax.Array, own: Block | None = None
) -> jax.Array:
    """Attend (equation 1) from each hypothesis to its visible cached positions: [B, W, H, K].

    In self-attention ``own``, the newest key and value, is separate from the cache: the cache is
    read before it is written, so XLA updates it in place. The last axis of the weights is the
    hypotheses: XLA's CPU backend computes such narrow matmuls three to five times as fast.

    The softmax is computed block by block, with a running maximum of the scores, a sum of
    exp(score - maximum) and a weighted sum of values. A block that a hypothesis does not attend to
    has weight 0 exactly, computed or skipped.
    """
    q_BHWK = q_BWHK.swapaxes(1, 2) * jnp.asarray(q_BWHK.shape[-1] ** -0.5, q_BWHK.dtype)
    B, H, W, _ = q_BHWK.shape
    if own is None:
        largest_BH1W = jnp.full((B, H, 1, W), MASKED)
        state = largest_BH1W, jnp.zeros((B, H, 1, W)), jnp.zeros((B, H, W, blocks[0][1].shape[3]))
    else:
        k_BHWK, v_BHWK = (x.swapaxes(1, 2).astype(jnp.float32) for x in own)
        largest_BH1W = (q_BHWK.astype(jnp.float32) * k_BHWK).sum(axis=-1)[:, :, None]
        state = largest_BH1W, jnp.ones((B, H, 1, W)), v_BHWK

    def add(state: Any, block: Block, mask_BHLW: jax.Array) -> Any:
        (before_BH1W, total_BH1W, out_BHWK), (k_BHLK, v_BHLK) = state, block
        scores_BHLW = jnp.einsum(
            "BHLK,BHWK->BHLW", k_BHLK, q_BHWK, preferred_element_type=jnp.float32
        )
        scores_BHLW = jnp.where(mask_BHLW, scores_BHLW, MASKED)
        largest_BH1W = jnp.maximum(before_BH1W, scores_BHLW.max(axis=2, keepdims=True))
        scale_BH1W = jnp.exp(before_BH1W - largest_BH1W)
        weights_BHLW = jnp.exp(scores_BHLW - largest_BH1W)
        added_BHWK = jnp.einsum(
            "BHLW,BHLK->BHWK",
            weights_BHLW.astype(v_BHLK.dtype),
            v_BHLK,
            preferred_element_type=jnp.float32,
        )
        total_BH1W = total_BH1W * scale_BH1W + weights_BHLW.sum(axis=2, keepdims=True)
        return largest_BH1W, total_BH1W, out_BHWK * scale_BH1W.swapaxes(2, 3) + added_BHWK

    start = 0
    for block in blocks:
        stop = start + block[0].shape[2]
        mask = mask_BHLW[:, :, start:stop]
        # The first block is never skipped: it rarely could be, and the divisor must not be 0.
        is_used = True if start == 0 else mask.any()
        state = jax.lax.cond(is_used, add, lambda state, *_: state, state, block, mask)
        start = stop
    _, total_BH1W, out_BHWK = state
    return (out_BHWK / total_BH1W.swapaxes(2, 3)).swapaxes(1, 2).astype(q_BWHK.dtype)
