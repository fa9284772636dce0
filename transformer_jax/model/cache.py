"""What decoding remembers between two steps: keys and values of what was already read and
written.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from transformer_jax.model.attention import MASKED

_NOT_WRITTEN = -1

# Reading the cache is most of what a step's attention costs: it comes in blocks, and those that no
# sentence has anything in are passed over. As even those cost some operations, the blocks of this
# size (self-attention's, cross-attention's) end at position 64; from there on each is as long as
# all before it together. On a GPU every block would be a branch and kernels of its own for each
# layer, which is worth it for large batches only: there all is one block.
_BLOCKS = {"cpu": (16, 32), "tpu": (64, 64)}
_EQUAL_BLOCKS = 64

# Keys or values of consecutive positions: each [B, H, S, K] with S of the block; of self-attention
# [B, H, T*W, K].
Blocks = tuple[jax.Array, ...]


@struct.dataclass
class DecoderCache:
    """The state of W hypotheses of each of B sentences; every sentence has a position of its own.

    Self-attention keys and values stay where they were written: position t of beam w lives in slot
    t * W + w for good. When beams are reordered, only the small table ``ancestors_BWT`` moves; it
    names, for each beam, the beam in whose slot each position of its history lives. Cross-attention
    keys and values are shared by a sentence's beams.
    """

    self_keys: tuple[Blocks, ...]  # one entry a layer
    self_values: tuple[Blocks, ...]  # likewise
    cross_keys: tuple[Blocks, ...]  # likewise
    cross_values: tuple[Blocks, ...]  # likewise
    source_mask_BS: jax.Array  # True: a real source token
    ancestors_BWT: jax.Array  # int32; -1: nothing there yet
    position_B: jax.Array  # int32: the number of tokens already taken in
    # float32: where the last step looked (last layer, mean over heads), if kept
    attention_BWS: jax.Array | None = None

    @property
    def beam_size(self) -> int:
        """W."""
        return self.ancestors_BWT.shape[1]

    @property
    def max_length(self) -> int:
        """T, the number of steps there is room for."""
        return self.ancestors_BWT.shape[2]

    def reorder(self, parents_BW: jax.Array) -> DecoderCache:
        """Beam w goes on from what was beam ``parents_BW[b, w]``."""
        ancestors_BWT = jnp.take_along_axis(self.ancestors_BWT, parents_BW[:, :, None], axis=1)
        return dataclasses.replace(self, ancestors_BWT=ancestors_BWT)

    def replace_rows(self, rows_R: jax.Array, fresh: DecoderCache) -> DecoderCache:
        """Sentences ``rows_R`` leave; those of ``fresh``, R sentences that have not begun, take
        their places. Where a row is B nothing happens.

        Of ``fresh`` only what belongs to the source is read. Old keys of self-attention stay, out
        of sight; old values become 0, so that not even one that was infinite (times a weight of 0)
        is felt.
        """
        cross = jax.tree.map(
            lambda old, new: old.at[rows_R].set(new, mode="drop"),
            (self.cross_keys, self.cross_values, self.source_mask_BS),
            (fresh.cross_keys, fresh.cross_values, fresh.source_mask_BS),
        )
        return dataclasses.replace(
            self,
            self_values=jax.tree.map(lambda x: x.at[rows_R].set(0, mode="drop"), self.self_values),
            cross_keys=cross[0],
            cross_values=cross[1],
            source_mask_BS=cross[2],
            ancestors_BWT=self.ancestors_BWT.at[rows_R].set(_NOT_WRITTEN, mode="drop"),
            position_B=self.position_B.at[rows_R].set(0, mode="drop"),
        )

    def cleared(self) -> DecoderCache:
        """The same room with nobody in it: what is left of keys and values is out of sight."""
        return dataclasses.replace(
            self,
            source_mask_BS=jnp.zeros_like(self.source_mask_BS),
            ancestors_BWT=jnp.full_like(self.ancestors_BWT, _NOT_WRITTEN),
            position_B=jnp.zeros_like(self.position_B),
        )

    def visible(self) -> jax.Array:
        """Which slots hold a beam's own history: bool [B, 1, T*W, W]; the 1 stands for the
        heads.
        """
        slots_W1 = jnp.arange(self.beam_size, dtype=jnp.int32)[:, None]
        visible_BTWW = self.ancestors_BWT.swapaxes(1, 2)[:, :, None] == slots_W1[None, None]
        return visible_BTWW.reshape(visible_BTWW.shape[0], 1, -1, self.beam_size)

    def append(
        self, keys: list[jax.Array], values: list[jax.Array], attention_BWS: jax.Array | None = None
    ) -> DecoderCache:
        """One more position: each layer's new keys and values, [B, W, H, K]."""
        rows_B1 = jnp.arange(self.position_B.shape[0])[:, None]
        slots_BW = (
            self.position_B[:, None] * self.beam_size
            + jnp.arange(self.beam_size, dtype=jnp.int32)[None]
        )

        def put(blocks: Blocks, new_BWHK: jax.Array) -> Blocks:
            written, start = [], 0
            for x_BHLK in blocks:
                length = x_BHLK.shape[2]
                # beyond the end: not written
                inside_BW = jnp.where(slots_BW >= start, slots_BW - start, length)
                written.append(
                    x_BHLK.at[rows_B1, :, inside_BW].set(new_BWHK.astype(x_BHLK.dtype), mode="drop")
                )
                start += length
            return tuple(written)

        here_B1T = (jnp.arange(self.max_length, dtype=jnp.int32)[None] == self.position_B[:, None])[
            :, None
        ]
        own_1W1 = jnp.arange(self.beam_size, dtype=jnp.int32)[None, :, None]
        return dataclasses.replace(
            self,
            self_keys=tuple(put(x, new) for x, new in zip(self.self_keys, keys, strict=True)),
            self_values=tuple(put(x, new) for x, new in zip(self.self_values, values, strict=True)),
            ancestors_BWT=jnp.where(here_B1T, own_1W1, self.ancestors_BWT),
            position_B=self.position_B + 1,
            attention_BWS=None if self.attention_BWS is None else attention_BWS,
        )


def empty_cache(
    cross: list[tuple[jax.Array, jax.Array]],
    source_mask_BS: jax.Array,
    *,
    beam_size: int,
    max_length: int,
    source_room: int = 0,
    keep_attention: bool = False,
) -> DecoderCache:
    """A cache with room for ``max_length`` steps, given each layer's projected memory: (keys,
    values), [B, S, H, K].

    What later steps would append is dropped without an error.

    ``source_room`` above S pads the memory to that many source positions; results stay the same, on
    a CPU to the last bit.
    """
    batch = source_mask_BS.shape[0]
    padding = max(0, source_room - source_mask_BS.shape[1])
    whole = max_length, source_mask_BS.shape[1] + padding
    history_block, memory_block = _BLOCKS.get(jax.default_backend(), whole)
    source_mask_BS = jnp.pad(source_mask_BS, ((0, 0), (0, padding)))

    def memory(projected_BSHK: jax.Array) -> Blocks:
        x_BHSK = jnp.pad(projected_BSHK.swapaxes(1, 2), ((0, 0), (0, 0), (0, padding), (0, 0)))
        return tuple(
            x_BHSK[:, :, start:stop] for start, stop in _ranges(x_BHSK.shape[2], memory_block)
        )

    def history(projected_BSHK: jax.Array) -> Blocks:
        _, _, heads, width = projected_BSHK.shape
        lengths = [stop - start for start, stop in _ranges(max_length, history_block)]
        return tuple(
            jnp.zeros((batch, heads, length * beam_size, width), projected_BSHK.dtype)
            for length in lengths
        )

    return DecoderCache(
        self_keys=tuple(history(k) for k, _ in cross),
        self_values=tuple(history(v) for _, v in cross),
        cross_keys=tuple(memory(k) for k, _ in cross),
        cross_values=tuple(memory(v) for _, v in cross),
        source_mask_BS=source_mask_BS,
        ancestors_BWT=jnp.full((batch, beam_size, max_length), _NOT_WRITTEN, jnp.int32),
        position_B=jnp.zeros(batch, jnp.int32),
        attention_BWS=jnp.zeros((batch, beam_size, source_mask_BS.shape[1]), jnp.float32)
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


def attend_to_blocks(
    q_BWHK: jax.Array,
    keys: Blocks,
    values: Blocks,
    mask_BHLW: jax.Array,
    *,
    own_BWHK: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Equation 1 for each hypothesis over what the cache has in its sight; [B, W, H, K].

    In self-attention ``own_BWHK``, the newest key and value, stand apart from the cache, so that it
    is read before it is
    written: XLA then updates it in place. Weights have the hypotheses last: XLA's CPU backend
    computes such narrow products three to five times as fast that way.

    A block of which a hypothesis sees nothing weighs exactly 0 for it, whether it is computed for
    others or not.
    """
    q_BHWK = _scaled(q_BWHK)
    shape_BH1W, shape_BHWK = (
        (*q_BHWK.shape[:2], 1, q_BHWK.shape[2]),
        (*q_BHWK.shape[:3], values[0].shape[3]),
    )

    def attend(
        k_BHLK: jax.Array, v_BHLK: jax.Array, mask_BHLW: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Largest score, sum of exp(score - largest), the values' sum with those weights."""
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

    def pass_over(*_: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        zeros = partial(jnp.zeros, dtype=jnp.float32)
        return jnp.full(shape_BH1W, MASKED, jnp.float32), zeros(shape_BH1W), zeros(shape_BHWK)

    terms = []
    if own_BWHK is not None:
        own_k_BHWK, own_v_BHWK = (x.swapaxes(1, 2).astype(jnp.float32) for x in own_BWHK)
        own_BH1W = (q_BHWK.astype(jnp.float32) * own_k_BHWK).sum(axis=-1)[:, :, None]
        terms.append((own_BH1W, jnp.ones_like(own_BH1W), own_v_BHWK))
    for number, block in enumerate(zip(keys, values, _split(mask_BHLW, keys), strict=True)):
        # Something is in the first block as a rule; and one term there must be, so that nothing is
        # divided by 0.
        terms.append(
            attend(*block)
            if number == 0
            else jax.lax.cond(block[2].any(), attend, pass_over, *block)
        )
    largest, weights, values_of_terms = zip(*terms, strict=True)
    largest_NBH1W = jnp.stack(largest)
    factors_NBH1W = jnp.exp(largest_NBH1W - largest_NBH1W.max(axis=0, keepdims=True))
    total_BH1W = (factors_NBH1W * jnp.stack(weights)).sum(axis=0)
    out_BHWK = jnp.zeros(shape_BHWK, jnp.float32)
    for factor_BH1W, values_BHWK in zip(factors_NBH1W, values_of_terms, strict=True):
        out_BHWK += factor_BH1W.swapaxes(2, 3) * values_BHWK
    return (out_BHWK / total_BH1W.swapaxes(2, 3)).swapaxes(1, 2).astype(q_BWHK.dtype)


def mean_weights(q_BWHK: jax.Array, keys: Blocks, mask_BHLW: jax.Array) -> jax.Array:
    """The weights of ``attend_to_blocks`` without ``own_BWHK``, float32, the mean over the heads:
    [B, W, L].
    """
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
