"""The key/value cache (KV cache) of the decoder, and attention over it.

On CPUs and TPUs, ``_attend_to_blocks`` attends to all slots of a sentence under a mask. It skips
blocks that no sentence uses, as reading the cache dominates the cost of attention. On GPUs, where
memory access and kernel launches take the most time, ``_attend_to_gathered`` reads the history of
each hypothesis, over a number of positions chosen before the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental.layout import Layout, with_layout_constraint

from transformer_jax.model.attention import MASKED

_NOT_WRITTEN = -1
# Numbers of positions are multiples of this. On a GPU, one thread sums up to 16 values; for 32 or
# more, XLA launches a block of 1,024 threads, most of them idle.
_MULTIPLE = 16
# End positions of the blocks (self-attention, cross-attention). From position 64 on, each block is
# as long as all earlier blocks together, because skipping a block also takes time. A GPU has one
# block.
_LONG = [64 << i for i in range(20)]
_ENDS = {
    "cpu": ([16, 32, 48, *_LONG], [32, *_LONG]),
    "tpu": (_LONG, _LONG),
    "gpu": ([], []),
}
# On a GPU, a step may attend to fewer positions: ``_SHORTEST``, twice as many, and so on, up to the
# fraction ``_MOST`` of the capacity. Each length is compiled separately.
_SHORTEST = 32
_MOST = 3 / 4

# Keys and values of consecutive positions, [B, H, L, K] each; on a GPU one array [B, H, L, J] with
# J = d_k + d_v. L counts slots: S, or T * W in a history.
Block = tuple[jax.Array, ...]


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
    gathers: bool = struct.field(pytree_node=False)  # on a GPU: use ``_attend_to_gathered``

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of positions that a step may attend to, ascending; the last is the capacity."""
        capacity = max(self.ancestors_BWT.shape[2], self.source_mask_BS.shape[1])
        shorter, length = [], _SHORTEST
        while self.gathers and length <= capacity * _MOST:
            shorter.append(length)
            length *= 2
        return (*shorter, capacity)

    @property
    def needed_B(self) -> jax.Array:
        """Number of source and target positions that each sentence's next step needs."""
        positions_1S = jnp.arange(1, self.source_mask_BS.shape[1] + 1, dtype=jnp.int32)[None]
        of_source_B = jnp.where(self.source_mask_BS, positions_1S, 0).max(axis=1)
        return jnp.maximum(of_source_B, self.position_B + 1)

    def reorder(self, parents_BW: jax.Array) -> DecoderCache:
        """Make beam w continue beam ``parents_BW[b, w]``."""
        ancestors_BWT = jnp.take_along_axis(self.ancestors_BWT, parents_BW[:, :, None], axis=1)
        return dataclasses.replace(self, ancestors_BWT=ancestors_BWT)

    def replace_rows(self, rows_R: jax.Array, fresh: DecoderCache) -> DecoderCache:
        """Put the R new sentences of ``fresh`` into rows ``rows_R``.

        A row number equal to B is skipped. Only the source arrays of ``fresh`` are read. Old
        self-attention keys and values stay, masked. In blocks, old values become 0: an infinite
        value times a weight of 0 would be NaN.
        """

        def put(old: Any, new: Any) -> Any:
            return jax.tree.map(lambda x, y: x.at[rows_R].set(y, mode="drop"), old, new)

        history = self.history
        if not self.gathers:
            history = tuple(tuple((k, put(v, 0)) for k, v in layer) for layer in history)
        return dataclasses.replace(
            self,
            history=history,
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

    @property
    def _grown_BWT(self) -> jax.Array:
        """``ancestors_BWT``, extended by the position of the next step."""
        _, W, T = self.ancestors_BWT.shape
        is_new_BT = jnp.arange(T)[None] == self.position_B[:, None]
        beams_1W1 = jnp.arange(W, dtype=jnp.int32)[None, :, None]
        return jnp.where(is_new_BT[:, None], beams_1W1, self.ancestors_BWT)

    def layers(self, length: int | None = None) -> list[LayerAttention]:
        """Return each layer's attention in the next step; ``length`` limits the positions."""
        seen: tuple[jax.Array, ...]
        batch, beam_size, _ = self.ancestors_BWT.shape
        if self.gathers:
            ancestors_BWT = jnp.maximum(self._grown_BWT[:, :, :length], 0)
            positions_1T = jnp.arange(ancestors_BWT.shape[2], dtype=jnp.int32)[None]
            slots_BWT = positions_1T[:, None] * beam_size + ancestors_BWT
            is_written_BT = positions_1T <= self.position_B[:, None]
            seen = slots_BWT, is_written_BT, self.source_mask_BS[:, :length]
        else:
            ancestors_BT1W = self.ancestors_BWT.swapaxes(1, 2)[:, :, None]
            visible_BTWW = ancestors_BT1W == jnp.arange(beam_size)[None, None, :, None]
            visible_B1LW = visible_BTWW.reshape(batch, 1, -1, beam_size)
            seen = visible_B1LW, self.source_mask_BS[:, None, :, None]
        return [
            LayerAttention(self, seen, *each)
            for each in zip(self.history, self.source, strict=True)
        ]

    def append(self, layers: Sequence[LayerAttention]) -> DecoderCache:
        """Append one position to each layer: the newest keys and values."""
        # Written after all layers have read, so that XLA's CPU backend copies no block.
        return dataclasses.replace(
            self,
            history=tuple(
                layer.history
                if self.gathers
                else _written(layer.history, layer.own, self.position_B)
                for layer in layers
            ),
            ancestors_BWT=self._grown_BWT,
            position_B=self.position_B + 1,
        )


@dataclasses.dataclass
class LayerAttention:
    """Attention of one layer over its part of the cache in one step; arrays are [B, W, H, K]."""

    cache: DecoderCache
    seen: tuple[jax.Array, ...]  # visible slots of history and source
    history: tuple[Block, ...]
    source: tuple[Block, ...]
    own: Block = ()

    def to_history(self, q_BWHK: jax.Array, k_BWHK: jax.Array, v_BWHK: jax.Array) -> jax.Array:
        """Attend from the newest tokens to the cached tokens and to themselves."""
        self.own = _block(k_BWHK, v_BWHK, joined=self.cache.gathers)
        if not self.cache.gathers:
            return _attend_to_blocks(q_BWHK, self.history, self.seen[0], self.own)
        self.history = _written(self.history, self.own, self.cache.position_B)
        [[history_BHLJ]], (slots_BWT, is_written_BT, _) = self.history, self.seen
        B, H, *_ = history_BHLJ.shape
        own = jnp.arange(B)[:, None, None, None], jnp.arange(H)[None, None, :, None]
        kv_BWHTJ = history_BHLJ.at[*own, slots_BWT[:, :, None]].get(
            mode="promise_in_bounds", wrap_negative_indices=False
        )
        return _attend_to_gathered(q_BWHK, kv_BWHTJ, is_written_BT)

    def to_source(self, q_BWHK: jax.Array) -> jax.Array:
        """Attend from the newest tokens to the source."""
        mask = self.seen[-1]
        if not self.cache.gathers:
            return _attend_to_blocks(q_BWHK, self.source, mask)
        [[source_BHSJ]] = self.source
        return _attend_to_gathered(q_BWHK, source_BHSJ[:, None, :, : mask.shape[1]], mask)


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
    S, T = (-(-n // _MULTIPLE) * _MULTIPLE for n in (max(length, source_capacity), max_length))
    ends_T, ends_S = _ENDS[jax.default_backend()]
    gathers = jax.default_backend() == "gpu"

    def of_source(x_BSHK: jax.Array) -> list[jax.Array]:
        padding = (0, 0), (0, 0), (0, S - length), (0, 0)
        x_BHSK = jnp.pad(x_BSHK.swapaxes(1, 2), padding)
        return jnp.split(x_BHSK, [n for n in ends_S if n < S], axis=2)

    def of_history(x_BSHK: jax.Array) -> list[jax.Array]:
        B, _, H, K = x_BSHK.shape
        slots_BHLK = jnp.zeros((B, H, T * beam_size, K), x_BSHK.dtype)
        return jnp.split(slots_BHLK, [n * beam_size for n in ends_T if n < T], axis=2)

    arrays = [_block(*layer, joined=gathers) for layer in cross]
    return DecoderCache(
        history=tuple(tuple(zip(*map(of_history, layer), strict=True)) for layer in arrays),
        source=tuple(tuple(zip(*map(of_source, layer), strict=True)) for layer in arrays),
        source_mask_BS=jnp.pad(source_mask_BS, ((0, 0), (0, S - length))),
        ancestors_BWT=jnp.full((batch, beam_size, T), _NOT_WRITTEN, jnp.int32),
        position_B=jnp.zeros(batch, jnp.int32),
        max_length=max_length,
        gathers=gathers,
    )


def _block(keys: jax.Array, values: jax.Array, *, joined: bool) -> Block:
    return (jnp.concatenate([keys, values], axis=-1),) if joined else (keys, values)


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
        pairs = zip(block, own, strict=True)
        written.append(tuple(old.at[at].set(new, mode="drop") for old, new in pairs))
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
    exp(score - maximum) and a weighted sum of values. A block that a hypothesis does not see has
    weight 0 exactly, computed or skipped.
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


def _attend_to_gathered(q_BWHK: jax.Array, kv_BWHLJ: jax.Array, mask_BL: jax.Array) -> jax.Array:
    """Attend (equation 1) from each hypothesis, [B, W, H, K]; axis W of ``kv_BWHLJ`` may be 1.

    XLA compiles four kernels: scores, softmax, and the weighted sum in two. Matmuls are written as
    sums, which XLA fuses with the gather, so that no gathered array is written to memory. Einsums
    would be separate kernels. Masked entries may be infinite. The barriers prevent a single fused
    kernel, which takes twice as long.
    """
    d_k, mask_BWHL = q_BWHK.shape[-1], mask_BL[:, None, None]
    k_BWHLK, v_BWHLK = kv_BWHLJ[..., :d_k], kv_BWHLJ[..., d_k:]
    scaled_BWHK = (q_BWHK * jnp.asarray(d_k**-0.5, q_BWHK.dtype)).astype(jnp.float32)
    scores_BWHL = _row_major(scaled_BWHK[:, :, :, None] * k_BWHLK.astype(jnp.float32)).sum(axis=-1)
    scores_BWHL = jax.lax.optimization_barrier(scores_BWHL)
    weights_BWHL = jax.nn.softmax(jnp.where(mask_BWHL, scores_BWHL, MASKED), axis=-1)
    v_BWHLK = jnp.where(mask_BWHL[..., None], v_BWHLK, 0).astype(jnp.float32)
    weighted_BWHLK = _row_major(jax.lax.optimization_barrier(weights_BWHL)[..., None] * v_BWHLK)
    *shape_BWH, length, d_v = weighted_BWHLK.shape
    parts = weighted_BWHLK.reshape(*shape_BWH, length // _MULTIPLE, _MULTIPLE, d_v).sum(axis=4)
    return jax.lax.optimization_barrier(parts).sum(axis=3).astype(q_BWHK.dtype)


def _row_major(x: jax.Array) -> jax.Array:
    """Keep ``x`` row-major, as in the cache. Otherwise XLA would transpose the whole cache to make
    the terms of a sum contiguous.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
