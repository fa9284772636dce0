"""What decoding remembers between steps: keys and values of the source and of each hypothesis."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from flax import struct

from transformer_jax.model.attention import MASKED

_NOT_WRITTEN = -1

# Reading the cache is most of what a step's attention costs, so it is kept in blocks, and blocks
# that no sentence uses are skipped. Skipping costs some operations too: blocks have this size
# (self-attention, cross-attention) up to position 64, and from there each is as long as all before
# it together. On a GPU every block would add a branch and kernels to each layer, which pays for
# large batches only: there the cache is one block.
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
class DecoderCache:
    """The state of W hypotheses of each of B sentences; every sentence has its own position.

    Self-attention keys and values stay where they were written: position t of beam w lives in slot
    t * W + w for good. When beams are reordered, only the small table ``ancestors_BWT`` moves: for
    each beam, the beam in whose slot each position of its history lives. Cross-attention keys and
    values are shared by a sentence's beams.
    """

    layers: tuple[LayerCache, ...]
    source_mask_BS: jax.Array  # True: a real source token
    ancestors_BWT: jax.Array  # int32; -1: nothing there yet
    position_B: jax.Array  # int32: the number of tokens already taken in
    # float32: cross-attention of the last step (last layer, mean over heads), if kept
    attention_BWS: jax.Array | None = None

    @property
    def beam_size(self) -> int:
        """W."""
        return self.ancestors_BWT.shape[1]

    @property
    def max_length(self) -> int:
        """T, the number of steps that fit."""
        return self.ancestors_BWT.shape[2]

    def reorder(self, parents_BW: jax.Array) -> DecoderCache:
        """Beam w continues what was beam ``parents_BW[b, w]``."""
        ancestors_BWT = jnp.take_along_axis(self.ancestors_BWT, parents_BW[:, :, None], axis=1)
        return dataclasses.replace(self, ancestors_BWT=ancestors_BWT)

    def replace_rows(self, rows_R: jax.Array, fresh: DecoderCache) -> DecoderCache:
        """Put the R sentences of ``fresh``, which have not begun, into rows ``rows_R``.

        A row number of B is skipped. Only what belongs to the source is read from ``fresh``. Old
        keys of self-attention stay, masked; old values become 0, as an infinite one times a weight
        of 0 would be NaN.
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
        return dataclasses.replace(
            self,
            layers=layers,
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

    def visible(self) -> jax.Array:
        """The slots of each beam's own history: bool [B, 1, T*W, W]; the 1 stands for the heads."""
        slots_W = jnp.arange(self.beam_size, dtype=jnp.int32)
        ancestors_BT1W = self.ancestors_BWT.swapaxes(1, 2)[:, :, None]
        visible_BTWW = ancestors_BT1W == slots_W[None, None, :, None]
        return visible_BTWW.reshape(len(visible_BTWW), 1, -1, self.beam_size)

    def append(
        self,
        keys_values: list[tuple[jax.Array, jax.Array]],
        attention_BWS: jax.Array | None,
    ) -> DecoderCache:
        """Add one position: each layer's new keys and values, [B, W, H, K]."""
        rows_B1 = jnp.arange(len(self.position_B))[:, None]
        beams_1W = jnp.arange(self.beam_size, dtype=jnp.int32)[None]
        slots_BW = self.position_B[:, None] * self.beam_size + beams_1W

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
        positions_1T = jnp.arange(self.max_length, dtype=jnp.int32)[None]
        is_new_B1T = (positions_1T == self.position_B[:, None])[:, None]
        return dataclasses.replace(
            self,
            layers=layers,
            ancestors_BWT=jnp.where(is_new_B1T, beams_1W[:, :, None], self.ancestors_BWT),
            position_B=self.position_B + 1,
            attention_BWS=attention_BWS,
        )


def empty_cache(
    cross: list[tuple[jax.Array, jax.Array]],
    source_mask_BS: jax.Array,
    *,
    beam_size: int,
    max_length: int,
    source_capacity: int = 0,
    keep_attention: bool = False,
) -> DecoderCache:
    """A cache for ``max_length`` steps over the memory; what later steps add is dropped silently.

    Args:
      cross: each layer's keys and values of the memory, [B, S, H, K].
      source_capacity: source positions to pad S to; results stay the same, on a CPU to the last
        bit.
    """
    batch, length = source_mask_BS.shape
    padding = max(0, source_capacity - length)
    whole = max_length, length + padding
    self_block, cross_block = _BLOCKS.get(jax.default_backend(), whole)

    def memory(x_BSHK: jax.Array) -> Blocks:
        x_BHSK = jnp.pad(x_BSHK.swapaxes(1, 2), ((0, 0), (0, 0), (0, padding), (0, 0)))
        return tuple(x_BHSK[:, :, i:j] for i, j in _ranges(length + padding, cross_block))

    def history(x_BSHK: jax.Array) -> Blocks:
        _, _, heads, width = x_BSHK.shape
        return tuple(
            jnp.zeros((batch, heads, (j - i) * beam_size, width), x_BSHK.dtype)
            for i, j in _ranges(max_length, self_block)
        )

    source_mask_BS = jnp.pad(source_mask_BS, ((0, 0), (0, padding)))
    return DecoderCache(
        layers=tuple(LayerCache(history(k), history(v), memory(k), memory(v)) for k, v in cross),
        source_mask_BS=source_mask_BS,
        ancestors_BWT=jnp.full((batch, beam_size, max_length), _NOT_WRITTEN, jnp.int32),
        position_B=jnp.zeros(batch, jnp.int32),
        attention_BWS=jnp.zeros((batch, beam_size, length + padding), jnp.float32)
        if keep_attention
        else None,
    )


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
    q_BHWK = _scaled(q_BWHK)

    def attend(k_BHLK: jax.Array, v_BHLK: jax.Array, mask_BHLW: jax.Array) -> _Partial:
        scores_BHLW = _scores(q_BHWK, k_BHLK, mask_BHLW)
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
    first, *others = zip(keys, values, _split(mask_BHLW, keys), strict=True)
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
    largest, totals, outs = zip(*parts, strict=True)
    largest_NBH1W = jnp.stack(largest)
    factors_NBH1W = jnp.exp(largest_NBH1W - largest_NBH1W.max(axis=0, keepdims=True))
    total_BH1W = (factors_NBH1W * jnp.stack(totals)).sum(axis=0)
    weighted = (x * factor.swapaxes(2, 3) for x, factor in zip(outs, factors_NBH1W, strict=True))
    out_BHWK = sum(weighted, jnp.zeros_like(out_BHWK))
    return (out_BHWK / total_BH1W.swapaxes(2, 3)).swapaxes(1, 2).astype(q_BWHK.dtype)


def mean_weights(q_BWHK: jax.Array, keys: Blocks, mask_BHLW: jax.Array) -> jax.Array:
    """The attention weights over all blocks, mean over the heads: float32 [B, W, L]."""
    q_BHWK = _scaled(q_BWHK)
    scores = [_scores(q_BHWK, *block) for block in zip(keys, _split(mask_BHLW, keys), strict=True)]
    return jax.nn.softmax(jnp.concatenate(scores, axis=2), axis=2).mean(axis=1).swapaxes(1, 2)


def _split(mask_BHLW: jax.Array, keys: Blocks) -> list[jax.Array]:
    ends = list(itertools.accumulate(k_BHLK.shape[2] for k_BHLK in keys))
    return jnp.split(mask_BHLW, ends[:-1], axis=2)


def _scaled(q_BWHK: jax.Array) -> jax.Array:
    return q_BWHK.swapaxes(1, 2) * jnp.asarray(q_BWHK.shape[-1] ** -0.5, q_BWHK.dtype)


def _scores(q_BHWK: jax.Array, k_BHLK: jax.Array, mask_BHLW: jax.Array) -> jax.Array:
    scores_BHLW = jnp.einsum("BHLK,BHWK->BHLW", k_BHLK, q_BHWK, preferred_element_type=jnp.float32)
    return jnp.where(mask_BHLW, scores_BHLW, MASKED)
