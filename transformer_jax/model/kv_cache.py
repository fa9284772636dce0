"""Key/value cache (KV cache) of the decoder, and attention over it.

``_attend_to_blocks`` attends to all slots of a sentence under a mask. It skips blocks that no
sentence uses, because reading the cache dominates the cost of attention. Most GPUs use the kernels
in ``decode_kernel.py`` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from transformer_jax.model import decode_kernel
from transformer_jax.model.attention_kernel import MASKED
from transformer_jax.model.gpu import split_qkv

_NOT_WRITTEN = -1
_DOUBLING_ENDS = tuple(64 << i for i in range(20))


class CacheLayout(NamedTuple):
    """Layout of keys and values in the cache. The default is [B, H, L, K] in a single block.

    L counts slots: S, or T * W in a history.
    """

    history_block_ends: tuple[int, ...] = ()
    """End positions of the blocks. Blocks after position 64 are as long as all earlier blocks
    together, because skipping a block also takes time."""
    source_block_ends: tuple[int, ...] = ()
    key_axes: str = "BHLK"
    """Axes of keys, as in an einsum."""
    merges_heads: bool = False
    """Heads lie side by side, [B, 1, L, H * K]."""


_LAYOUTS = {
    # Matmuls are fastest without transposes.
    "cpu": CacheLayout((16, 32, 48, *_DOUBLING_ENDS), (32, *_DOUBLING_ENDS), key_axes="BHKL"),
    # XLA would pad a narrow last axis to 128.
    "tpu": CacheLayout(_DOUBLING_ENDS, _DOUBLING_ENDS, merges_heads=True),
    "gpu": CacheLayout(),
}
# Keys and values of consecutive positions.
Block = tuple[Array, Array]


@struct.dataclass
class DecoderCache:
    """Decoding state of W hypotheses for each of B sentences, each sentence at its own position.

    Self-attention keys and values never move: position t of beam w stays in slot t * W + w.
    Reordering beams changes only the small table ``ancestors_BWT``. For each beam and position, it
    gives the beam whose slot holds that position; a single beam needs no table. The beams of a
    sentence share its cross-attention keys and values.
    """

    history: tuple[tuple[Block, ...], ...]  # one per layer
    source: tuple[tuple[Block, ...], ...]
    source_mask_BS: Array  # True for real source tokens
    ancestors_BWT: Array  # int32; -1: not written
    position_B: Array  # int32: number of tokens processed so far
    layout: CacheLayout = struct.field(pytree_node=False)

    def reorder(self, parents_BW: Array) -> DecoderCache:
        """Let beam w continue beam ``parents_BW[b, w]``."""
        ancestors_BWT = jnp.take_along_axis(self.ancestors_BWT, parents_BW[:, :, None], axis=1)
        return replace(self, ancestors_BWT=ancestors_BWT)

    def replace_rows(self, rows_R: Array, new_cache: DecoderCache) -> DecoderCache:
        """Put the R new sentences of ``new_cache`` into rows ``rows_R``.

        Row indices equal to B are skipped. Only the source arrays of ``new_cache`` are used. The
        old history stays but is masked: no beam has an ancestor in it.
        """

        def set_rows(old: Any, new: Any) -> Any:
            return jax.tree.map(lambda x, y: x.at[rows_R].set(y, mode="drop"), old, new)

        return replace(
            self,
            source=set_rows(self.source, new_cache.source),
            source_mask_BS=set_rows(self.source_mask_BS, new_cache.source_mask_BS),
            ancestors_BWT=set_rows(self.ancestors_BWT, _NOT_WRITTEN),
            position_B=set_rows(self.position_B, 0),
        )

    def empty_like(self) -> DecoderCache:
        """Return an empty cache of the same capacity. Arrays can be abstract."""
        ancestors_BWT = jnp.full_like(self.ancestors_BWT, _NOT_WRITTEN)
        return replace(jax.tree.map(jnp.zeros_like, self), ancestors_BWT=ancestors_BWT)

    def layers(self) -> list[LayerAttention]:
        """Return each layer's attention over the cache in the next step."""
        batch, beam_size, T = self.ancestors_BWT.shape
        visible_BWTW = self.ancestors_BWT[..., None] == jnp.arange(beam_size)[None, None, None]
        if beam_size == 1:
            is_written_BT = jnp.arange(T)[None] < self.position_B[:, None]
            visible_BWTW = is_written_BT[:, None, :, None]
        visible_B1WL = visible_BWTW.reshape(batch, 1, beam_size, -1)
        return [
            LayerAttention(self, visible_B1WL, history, source)
            for history, source in zip(self.history, self.source)
        ]

    @jax.named_scope("cache")
    def write_newest(self, blocks: Sequence[Block], newest: Block) -> tuple[Block, ...]:
        """Write the newest keys and values, [B, W, H, K], into a layer's history.

        An infinite or NaN value makes its sentence invalid. It is written as 0, because times a
        weight of 0 it would be NaN for the next sentence in the row.
        """
        newest_keys = newest[0]
        newest_values = jnp.where(jnp.isfinite(newest[1]), newest[1], 0)
        beam_size = self.ancestors_BWT.shape[1]
        rows_B1 = jnp.arange(self.position_B.shape[0])[:, None]
        beams_1W = jnp.arange(beam_size, dtype=jnp.int32)[None]
        slots_BW = self.position_B[:, None] * beam_size + beams_1W
        full_slice = slice(None)
        new_blocks = []
        start = 0
        for k, v in blocks:
            length = v.shape[2]
            # slots of other blocks are out of bounds and dropped
            offsets_BW = jnp.where(slots_BW >= start, slots_BW - start, length)
            indices = rows_B1, full_slice, offsets_BW
            key_indices = (
                (rows_B1, full_slice, full_slice, offsets_BW)
                if self.layout.key_axes == "BHKL"
                else indices
            )
            k = k.at[key_indices].set(newest_keys, mode="drop")
            v = v.at[indices].set(newest_values, mode="drop")
            new_blocks.append((k, v))
            start += length
        return tuple(new_blocks)

    def append(self, layers: Sequence[LayerAttention]) -> DecoderCache:
        """Append the newest keys and values of each layer to the cache."""
        _, W, T = self.ancestors_BWT.shape
        ancestors_BWT = self.ancestors_BWT
        if W > 1:
            is_new_BT = jnp.arange(T)[None] == self.position_B[:, None]
            beams_1W1 = jnp.arange(W, dtype=jnp.int32)[None, :, None]
            ancestors_BWT = jnp.where(is_new_BT[:, None], beams_1W1, ancestors_BWT)
        return replace(
            self,
            # Written after all layers have read it, so XLA's CPU backend does not copy blocks.
            history=tuple(
                self.write_newest(layer.history, layer.newest) if layer.newest else layer.history
                for layer in layers
            ),
            ancestors_BWT=ancestors_BWT,
            position_B=jnp.minimum(self.position_B + 1, T),  # idle rows never overflow
        )


@dataclass
class LayerAttention:
    """One layer's attention over its part of the cache in one step. Arrays are [B, W, H, K]."""

    cache: DecoderCache
    visible_B1WL: Array  # history slots visible to each hypothesis
    history: tuple[Block, ...]
    source: tuple[Block, ...]
    newest: Block | None = None  # newest keys and values, not yet in the history
    bias_BHT: Array | None = None  # added to self-attention's scores (RelativeBias.at_positions)

    def attend_to_history(self, *arrays_BWHK: Array) -> Array:
        """Attend from the newest tokens to the cached tokens and to themselves.

        One to three arrays hold queries, keys and values (``gpu.split_qkv``).
        """
        q_BWHK, k_BWHK, v_BWHK = (
            x[..., i * width : (i + 1) * width] for x, i, width in split_qkv(arrays_BWHK)
        )
        shape = *q_BWHK.shape[:2], self.history[0][1].shape[1], -1
        self.newest = newest = k_BWHK.reshape(shape), v_BWHK.reshape(shape)
        cache = self.cache

        mask_BHWL = self.visible_B1WL
        if self.bias_BHT is not None:
            # Softmax ignores a constant, so the newest token's own bias becomes 0.
            bias_BHT = self.bias_BHT - self.bias_BHT[:, :, -1:]
            bias_BH1L = jnp.repeat(bias_BHT, q_BWHK.shape[1], axis=2)[:, :, None]
            mask_BHWL = jnp.where(mask_BHWL, bias_BH1L, MASKED)

        def reference() -> Array:
            num_used = cache.position_B.max() * q_BWHK.shape[1]
            positions = _Positions(self.history, num_used, cache.layout.key_axes, mask_BHWL, newest)
            return _attend_to_blocks(q_BWHK, positions)

        def reference_step() -> Any:
            return reference(), *cache.write_newest(self.history, newest)

        def kernel_step() -> Any:
            [block] = self.history
            ancestors_BWT = cache.ancestors_BWT
            if ancestors_BWT.shape[1] == 1:
                ancestors_BWT = jnp.zeros_like(ancestors_BWT)
            return decode_kernel.attend_to_history(
                arrays_BWHK, block, ancestors_BWT, cache.position_B
            )

        if self.bias_BHT is not None or not decode_kernel.supports(q_BWHK, v_BWHK):
            return reference()
        out_BWHK, *history = jax.lax.platform_dependent(cuda=kernel_step, default=reference_step)
        self.history = tuple(history)
        self.newest = None  # already written
        return out_BWHK

    def attend_to_source(self, q_BWHK: Array) -> Array:
        """Attend from the newest tokens to the source."""
        mask_BS = self.cache.source_mask_BS
        key_axes = self.cache.layout.key_axes

        def reference() -> Array:
            num_used = jnp.where(mask_BS, jnp.arange(1, mask_BS.shape[1] + 1)[None], 0).max()
            positions = _Positions(self.source, num_used, key_axes, mask_BS[:, None, None])
            return _attend_to_blocks(q_BWHK, positions)

        def kernel() -> Array:
            return decode_kernel.attend_to_source(q_BWHK, self.source[0], mask_BS)

        if not decode_kernel.supports(q_BWHK, self.source[0][1]):
            return reference()
        return jax.lax.platform_dependent(cuda=kernel, default=reference)


def empty_cache(
    cross_keys_values: Sequence[tuple[Array, Array]],
    source_mask_BS: Array,
    *,
    beam_size: int,
    max_length: int,
    source_capacity: int = 0,
) -> DecoderCache:
    """Create an empty cache for ``max_length`` steps. Further steps are silently dropped.

    Args:
      cross_keys_values: cross-attention keys and values of each layer, [B, S, H, K].
      source_capacity: number of source positions to pad S to. Padding does not change results; on a
        CPU, they are bit-identical.
    """
    batch, length = source_mask_BS.shape
    layout = _LAYOUTS[jax.default_backend()]
    if isinstance(length, int):
        S = _rounded_up(max(length, source_capacity))
    else:  # a symbol of jax.export, which cannot be compared with the ends of blocks
        S = _rounded_up(length)
        layout = layout._replace(source_block_ends=())
    T = _rounded_up(max_length)
    if layout.merges_heads:
        cross_keys_values = jax.tree.map(
            lambda x: x.reshape(batch, length, 1, -1), cross_keys_values
        )

    def source_blocks(x_BSHK: Array) -> list[Array]:
        padding = (0, 0), (0, 0), (0, S - length), (0, 0)
        x_BHSK = jnp.pad(x_BSHK.swapaxes(1, 2), padding)
        return jnp.split(x_BHSK, [n for n in layout.source_block_ends if n < S], axis=2)

    def history_blocks(x_BSHK: Array) -> list[Array]:
        B, _, H, K = x_BSHK.shape
        slots_BHLK = jnp.zeros((B, H, T * beam_size, K), x_BSHK.dtype)
        return jnp.split(
            slots_BHLK, [n * beam_size for n in layout.history_block_ends if n < T], axis=2
        )

    def make_blocks(split: Callable[[Array], list[Array]]) -> tuple[tuple[Block, ...], ...]:
        layers = [zip(*map(split, layer)) for layer in cross_keys_values]
        return tuple(
            tuple((jnp.einsum(f"BHLK->{layout.key_axes}", k), v) for k, v in layer)
            for layer in layers
        )

    return DecoderCache(
        history=make_blocks(history_blocks),
        source=make_blocks(source_blocks),
        source_mask_BS=jnp.pad(source_mask_BS, ((0, 0), (0, S - length))),
        ancestors_BWT=jnp.full((batch, beam_size, T), _NOT_WRITTEN, jnp.int32),
        position_B=jnp.zeros(batch, jnp.int32),
        layout=layout,
    )


def _rounded_up(length: Any) -> Any:
    return -(-length // decode_kernel.POSITIONS_PER_BLOCK) * decode_kernel.POSITIONS_PER_BLOCK


class _Positions(NamedTuple):
    """Cached positions that the queries of a step attend to."""

    blocks: Sequence[Block]
    num_used: Array
    """No slot from this one on is visible to any hypothesis."""
    key_axes: str
    """Axes of keys: on TPUs, transposing a block outside its branch would copy it."""
    mask_BHWL: Array
    """bool, or a float32 bias of the scores that is MASKED at invisible positions."""
    newest: Block | None = None
    """Self-attention: the newest keys and values, which are not in the cache yet. The cache is read
    before it is written, so XLA can update it in place."""


@jax.named_scope("dot_product_attention")
def _attend_to_blocks(q_BWHK: Array, positions: _Positions) -> Array:
    """Attend (equation 1) to each hypothesis's visible positions. Returns [B, W, H, K]."""
    scale = jnp.asarray(q_BWHK.shape[3] ** -0.5, q_BWHK.dtype)
    q_BWHK = q_BWHK * scale
    has_merged_heads = positions.blocks[0][1].shape[1] != q_BWHK.shape[2]
    if has_merged_heads:
        return _attend_to_merged_heads(q_BWHK, positions)
    return _attend(q_BWHK.swapaxes(1, 2), positions)


def _attend_to_merged_heads(q_BWHK: Array, positions: _Positions) -> Array:
    """Attend with scaled queries to blocks whose heads lie side by side, as one wide head.

    Each head of a hypothesis attends like a hypothesis of its own: its wide query has zeros in
    place of all other heads, and only the head's own part of the result is used. For heads a and b,

        query  aaa bbb  becomes  aaa ___   and   ___ bbb
        result                   AAA xxx   and   xxx BBB  becomes  AAA BBB
    """
    B, W, H, _ = q_BWHK.shape

    def mask_other_heads(x_BWHK: Array) -> Array:
        width = x_BWHK.shape[3]
        is_own_HK = jnp.arange(width)[None] * H // width == jnp.arange(H)[:, None]
        return jnp.where(is_own_HK[None, None], x_BWHK, 0)

    q_BHWK = mask_other_heads(q_BWHK.reshape(B, W, 1, -1)).reshape(B, 1, W * H, -1)
    if positions.newest:
        k_BWHK, v_BWHK = (jnp.repeat(x, H, axis=1) for x in positions.newest)
        mask_BHWL = positions.mask_BHWL
        mask_BHWL = jnp.broadcast_to(mask_BHWL, (B, H, *mask_BHWL.shape[2:]))
        mask_BHWL = mask_BHWL.swapaxes(1, 2).reshape(B, 1, W * H, -1)
        positions = positions._replace(newest=(k_BWHK, v_BWHK), mask_BHWL=mask_BHWL)
    out_BWHK = _attend(q_BHWK, positions).reshape(B, W, H, -1)
    return mask_other_heads(out_BWHK).sum(axis=2).reshape(B, W, H, -1)


def _attend(q_BHWK: Array, positions: _Positions) -> Array:
    """Attend with scaled queries. Returns [B, W, H, K].

    The softmax is computed block by block, with a running maximum of the scores, a sum of exp(score
    - maximum) and a weighted sum of values. A block that a hypothesis does not attend to has a
    weight of exactly 0, whether it is computed or skipped.
    """
    B, H, W, _ = q_BHWK.shape
    blocks, num_used, key_axes, mask_BHWL, newest = positions
    if newest is None:
        zeros_BHWK = jnp.zeros((B, H, W, blocks[0][1].shape[3]), jnp.float32)
        zeros_BHW1 = zeros_BHWK[..., :1]
        state = zeros_BHW1 + MASKED, zeros_BHW1, zeros_BHWK
    else:
        k_BHWK, v_BHWK = (x.swapaxes(1, 2).astype(jnp.float32) for x in newest)
        largest_BHW1 = (q_BHWK.astype(jnp.float32) * k_BHWK).sum(axis=-1, keepdims=True)
        state = largest_BHW1, jnp.ones_like(largest_BHW1), v_BHWK

    ends = list(accumulate(block[1].shape[2] for block in blocks))

    def add_blocks(state: Any, index: int) -> Any:
        """Add a block, and the later ones up to the last that is used."""
        block = blocks[index]
        stop = ends[index]
        mask = mask_BHWL[..., stop - block[1].shape[2] : stop]
        state = _add_block(state, q_BHWK, block, key_axes, mask)
        if stop == ends[-1]:
            return state
        return jax.lax.cond(
            num_used > stop, lambda state: add_blocks(state, index + 1), lambda state: state, state
        )

    # The first block is never skipped: it is almost always used, and the divisor must not be 0.
    _, total_BHW1, out_BHWK = add_blocks(state, 0)
    return (out_BHWK / total_BHW1).swapaxes(1, 2).astype(q_BHWK.dtype)


def _add_block(
    state: tuple[Array, Array, Array],
    q_BHWK: Array,
    block: Block,
    key_axes: str,
    mask_BHWL: Array,
) -> tuple[Array, Array, Array]:
    """Add a block to the running maximum of the scores, sum of exp(score - maximum) and weighted
    sum of values.
    """
    old_largest_BHW1, total_BHW1, out_BHWK = state
    keys, v_BHLK = block
    matmul = partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores_BHWL = matmul(f"BHWK,{key_axes}->BHWL", q_BHWK, keys)
    if mask_BHWL.dtype != bool:
        scores_BHWL += mask_BHWL
    scores_BHWL = jnp.where(_as_bool(mask_BHWL), scores_BHWL, MASKED)
    largest_BHW1 = jnp.maximum(old_largest_BHW1, _largest(scores_BHWL))
    scale_BHW1 = jnp.exp(old_largest_BHW1 - largest_BHW1)
    weights_BHWL = jnp.exp(scores_BHWL - largest_BHW1)
    added_BHWK = matmul("BHWL,BHLK->BHWK", weights_BHWL.astype(v_BHLK.dtype), v_BHLK)
    total_BHW1 = total_BHW1 * scale_BHW1 + weights_BHWL.sum(axis=3, keepdims=True)
    return largest_BHW1, total_BHW1, out_BHWK * scale_BHW1 + added_BHWK


def _largest(scores_BHWL: Array) -> Array:
    """Return the maxima over L, [B, H, W, 1]. On a CPU, first of L / 32 arrays element by element:
    XLA's loop over more than 32 numbers is slow.
    """
    L = scores_BHWL.shape[3]
    if jax.default_backend() == "cpu" and L % 32 == 0:
        scores_BHWL = reduce(jnp.maximum, jnp.split(scores_BHWL, L // 32, axis=3))
    return scores_BHWL.max(axis=3, keepdims=True)


def _as_bool(mask: Array) -> Array:
    return mask if mask.dtype == bool else mask > MASKED / 2
