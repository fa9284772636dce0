"""The key/value cache: keys and values kept between decoding steps, and attention over them.

Two functions attend. On CPUs and TPUs ``_attend_to_blocks`` sees all slots of a sentence under a
mask and skips blocks that no sentence uses, as reading the cache is most of a step's attention. On
GPUs, which wait for memory and for launches, ``_attend_to_gathered`` reads each hypothesis's own
history, over a number of positions that is chosen before the step.
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
# Numbers of positions are multiples of this. On a GPU, so few values are added up by one thread,
# others next to it; for 32 or more XLA starts a block of 1,024 threads, most of which wait.
_MULTIPLE = 16
# Positions where blocks end (self-attention, cross-attention). From position 64 on each block is as
# long as all before it together, as skipping costs some operations too. A GPU has one block.
_LONG = [64 << i for i in range(20)]
_ENDS = {
    "cpu": ([16, 32, 48, *_LONG], [32, *_LONG]),
    "tpu": (_LONG, _LONG),
    "gpu": ([], []),
}
# Positions that a step on a GPU may be limited to: so many, twice as many, and so on. Each is
# compiled on its own, and left out if the whole is not much longer.
_SHORTEST = 32
_MOST = 3 / 4

# Consecutive positions: keys and values, [B, H, L, K] each; on a GPU one array [B, H, L, J] with
# J = d_k + d_v. L counts slots: S, or T * W in a history.
Block = tuple[jax.Array, ...]


@struct.dataclass
class DecoderCache:
    """The state of W hypotheses of each of B sentences; every sentence has its own position.

    Self-attention keys and values stay where they were written: position t of beam w has slot
    t * W + w for good. When beams are reordered, only the small table ``ancestors_BWT`` moves: for
    each beam, the beam in whose slot each position of its history lives. Cross-attention keys and
    values are shared by a sentence's beams.
    """

    history: tuple[tuple[Block, ...], ...]  # of each layer
    source: tuple[tuple[Block, ...], ...]
    source_mask_BS: jax.Array  # True: a real source token
    ancestors_BWT: jax.Array  # int32; -1: nothing there yet
    position_B: jax.Array  # int32: the number of tokens already taken in
    max_length: int = struct.field(pytree_node=False)  # the number of steps that fit, at most T
    gathers: bool = struct.field(pytree_node=False)  # each hypothesis its own history, on a GPU

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of positions that a step may be limited to, ascending; the last one is all."""
        capacity = max(self.ancestors_BWT.shape[2], self.source_mask_BS.shape[1])
        shorter, length = [], _SHORTEST
        while self.gathers and length <= capacity * _MOST:
            shorter.append(length)
            length *= 2
        return (*shorter, capacity)

    @property
    def needed_B(self) -> jax.Array:
        """How many positions each sentence's next step must attend to, source and target alike."""
        positions_1S = jnp.arange(1, self.source_mask_BS.shape[1] + 1, dtype=jnp.int32)[None]
        of_source_B = jnp.where(self.source_mask_BS, positions_1S, 0).max(axis=1)
        return jnp.maximum(of_source_B, self.position_B + 1)

    def reorder(self, parents_BW: jax.Array) -> DecoderCache:
        """Beam w continues what was beam ``parents_BW[b, w]``."""
        ancestors_BWT = jnp.take_along_axis(self.ancestors_BWT, parents_BW[:, :, None], axis=1)
        return dataclasses.replace(self, ancestors_BWT=ancestors_BWT)

    def replace_rows(self, rows_R: jax.Array, fresh: DecoderCache) -> DecoderCache:
        """Put the R sentences of ``fresh``, which have not begun, into rows ``rows_R``.

        A row number of B is skipped. Only what belongs to the source is read from ``fresh``. Old
        keys and values of self-attention stay, masked; but in blocks values become 0, as an
        infinite one times a weight of 0 would be NaN.
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
        """An empty cache of the same capacity; old keys and values stay, masked."""
        return dataclasses.replace(
            self,
            source_mask_BS=jnp.zeros_like(self.source_mask_BS),
            ancestors_BWT=jnp.full_like(self.ancestors_BWT, _NOT_WRITTEN),
            position_B=jnp.zeros_like(self.position_B),
        )

    @property
    def _grown_BWT(self) -> jax.Array:
        """``ancestors_BWT`` with the position of the next step."""
        _, W, T = self.ancestors_BWT.shape
        is_new_BT = jnp.arange(T)[None] == self.position_B[:, None]
        beams_1W1 = jnp.arange(W, dtype=jnp.int32)[None, :, None]
        return jnp.where(is_new_BT[:, None], beams_1W1, self.ancestors_BWT)

    def layers(self, length: int | None = None) -> list[LayerAttention]:
        """Each layer's attention in the next step, over the first ``length`` positions (None: over
        all).
        """
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
        """Add one position: each layer's newest keys and values."""
        # Written when all layers have read: then XLA's CPU backend copies no block.
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
    """A layer's attention over its part of the cache in one step; arrays are [B, W, H, K]."""

    cache: DecoderCache
    seen: tuple[jax.Array, ...]  # which slots of the history and of the source
    history: tuple[Block, ...]
    source: tuple[Block, ...]
    own: Block = ()

    def to_history(self, q_BWHK: jax.Array, k_BWHK: jax.Array, v_BWHK: jax.Array) -> jax.Array:
        """Self-attention, given the newest tokens' queries, keys and values."""
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
        """Cross-attention."""
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
    """A cache for ``max_length`` steps over the memory; what later steps add is dropped silently.

    Args:
      cross: each layer's keys and values of the memory, [B, S, H, K].
      source_capacity: source positions to pad S to; results stay the same, on a CPU to the last
        bit.
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
    """A history with the newest keys and values, [B, W, H, K], at these positions."""
    beam_size = own[0].shape[1]
    rows_B1 = jnp.arange(len(position_B))[:, None]
    slots_BW = position_B[:, None] * beam_size + jnp.arange(beam_size, dtype=jnp.int32)[None]
    written, start = [], 0
    for block in blocks:
        length = block[0].shape[2]
        # slots of other blocks lie outside and are dropped
        inside_BW = jnp.where(slots_BW >= start, slots_BW - start, length)
        at = rows_B1, slice(None), inside_BW
        pairs = zip(block, own, strict=True)
        written.append(tuple(old.at[at].set(new, mode="drop") for old, new in pairs))
        start += length
    return tuple(written)


def _attend_to_blocks(
    q_BWHK: jax.Array, blocks: Sequence[Block], mask_BHLW: jax.Array, own: Block | None = None
) -> jax.Array:
    """Equation 1 for each hypothesis over the cached positions it can see: [B, W, H, K].

    In self-attention ``own``, the newest key and value, come apart from the cache: as the cache is
    read before it is written, XLA updates it in place. Weights have the hypotheses last: XLA's CPU
    backend computes such narrow products three to five times as fast that way.

    The softmax is computed block by block: the largest score so far, and the sums of
    exp(score - largest) and of values with those weights. A block that a hypothesis does not see
    weighs exactly 0 for it, computed or skipped.
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
        # The first is never skipped: it seldom could be, and something must be divided by.
        is_used = True if start == 0 else mask.any()
        state = jax.lax.cond(is_used, add, lambda state, *_: state, state, block, mask)
        start = stop
    _, total_BH1W, out_BHWK = state
    return (out_BHWK / total_BH1W.swapaxes(2, 3)).swapaxes(1, 2).astype(q_BWHK.dtype)


def _attend_to_gathered(q_BWHK: jax.Array, kv_BWHLJ: jax.Array, mask_BL: jax.Array) -> jax.Array:
    """Equation 1 for each hypothesis, [B, W, H, K]; axis W of keys and values may be 1.

    Four kernels: scores, softmax, and the weighted sum in two. Products are written out as sums,
    which XLA joins with the gathering, so that nothing gathered is written to memory; einsums would
    be kernels of their own. What is masked may be infinite. The barriers keep XLA from a single
    kernel, which takes twice as long as these.
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
    """``x``, with K next to each other as in the cache. XLA would have a sum's terms next to each
    other, and transpose the whole cache for that.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
