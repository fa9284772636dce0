"""What decoding remembers between two steps: keys and values of what was already read and written."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from transformer_jax.model.attention import MASKED

_NOT_WRITTEN = -1

# On a CPU reading the cache is what attention costs; there it comes in blocks of so many positions, and those that no
# sentence has reached are passed over. Elsewhere a branch costs more than reading.
_CPU_BLOCK = 16

Blocks = tuple[jax.Array, ...]  # keys or values of consecutive positions, each [B, H, T*W, K] with T of the block


@struct.dataclass
class DecoderCache:
    """The state of W hypotheses of each of B sentences; every sentence has a position of its own.

    Self-attention keys and values stay where they were written: position t of beam w lives in slot t * W + w for good.
    When beams are reordered, only the small table ``ancestors_BWT`` moves; it names, for each beam, the beam in whose
    slot each position of its history lives. Cross-attention keys and values are shared by a sentence's beams.
    """

    self_keys: tuple[Blocks, ...]  # one entry a layer
    self_values: tuple[Blocks, ...]  # likewise
    cross_keys: tuple[jax.Array, ...]  # one a layer, [B, H, S, K]
    cross_values: tuple[jax.Array, ...]  # likewise
    source_mask_BS: jax.Array  # True: a real source token
    ancestors_BWT: jax.Array  # int32; -1: nothing there yet
    position_B: jax.Array  # int32: the number of tokens already taken in
    attention_BWS: jax.Array | None = None  # float32: where the last step looked (last layer, mean over heads), if kept

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
        """Sentences ``rows_R`` leave; those of ``fresh``, R sentences that have not begun, take their places.

        Of ``fresh`` only what belongs to the source is read. Old keys of self-attention stay, out of sight; old values become
        0, so that not even one that was infinite (times a weight of 0) is felt.
        """
        cross = jax.tree.map(
            lambda old, new: old.at[rows_R].set(new),
            (self.cross_keys, self.cross_values, self.source_mask_BS),
            (fresh.cross_keys, fresh.cross_values, fresh.source_mask_BS),
        )
        return dataclasses.replace(
            self,
            self_values=jax.tree.map(lambda x: x.at[rows_R].set(0), self.self_values),
            cross_keys=cross[0],
            cross_values=cross[1],
            source_mask_BS=cross[2],
            ancestors_BWT=self.ancestors_BWT.at[rows_R].set(_NOT_WRITTEN),
            position_B=self.position_B.at[rows_R].set(0),
        )

    def visible(self) -> jax.Array:
        """Which slots hold a beam's own history: bool [B, 1, T*W, W]; the 1 stands for the heads."""
        slots_W1 = jnp.arange(self.beam_size, dtype=jnp.int32)[:, None]
        visible_BTWW = self.ancestors_BWT.swapaxes(1, 2)[:, :, None] == slots_W1[None, None]
        return visible_BTWW.reshape(visible_BTWW.shape[0], 1, -1, self.beam_size)

    def append(self, keys: list[jax.Array], values: list[jax.Array], attention_BWS: jax.Array | None = None) -> DecoderCache:
        """One more position: each layer's new keys and values, [B, W, H, K]."""
        rows_B1 = jnp.arange(self.position_B.shape[0])[:, None]
        slots_BW = self.position_B[:, None] * self.beam_size + jnp.arange(self.beam_size, dtype=jnp.int32)[None]

        def put(blocks: Blocks, new_BWHK: jax.Array) -> Blocks:
            written, start = [], 0
            for x_BHLK in blocks:
                length = x_BHLK.shape[2]
                inside_BW = jnp.where(slots_BW >= start, slots_BW - start, length)  # beyond the end: not written
                written.append(x_BHLK.at[rows_B1, :, inside_BW].set(new_BWHK.astype(x_BHLK.dtype), mode="drop"))
                start += length
            return tuple(written)

        here_B1T = (jnp.arange(self.max_length, dtype=jnp.int32)[None] == self.position_B[:, None])[:, None]
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
    keep_attention: bool = False,
) -> DecoderCache:
    """A cache with room for ``max_length`` steps, given each layer's projected memory: (keys, values), [B, S, H, K]."""
    batch, source_length = source_mask_BS.shape
    block = _CPU_BLOCK if jax.default_backend() == "cpu" else max(max_length, 1)

    def blocks(projected_BSHK: jax.Array) -> Blocks:
        _, _, heads, width = projected_BSHK.shape
        lengths = [min(block, max_length - start) for start in range(0, max_length, block)]
        return tuple(jnp.zeros((batch, heads, length * beam_size, width), projected_BSHK.dtype) for length in lengths)

    return DecoderCache(
        self_keys=tuple(blocks(k) for k, _ in cross),
        self_values=tuple(blocks(v) for _, v in cross),
        cross_keys=tuple(k.swapaxes(1, 2) for k, _ in cross),
        cross_values=tuple(v.swapaxes(1, 2) for _, v in cross),
        source_mask_BS=source_mask_BS,
        ancestors_BWT=jnp.full((batch, beam_size, max_length), _NOT_WRITTEN, jnp.int32),
        position_B=jnp.zeros(batch, jnp.int32),
        attention_BWS=jnp.zeros((batch, beam_size, source_length), jnp.float32) if keep_attention else None,
    )


def attend_to_history(
    q_BWHK: jax.Array,
    keys: Blocks,
    values: Blocks,
    mask_BHLW: jax.Array,
    *,
    own_k_BWHK: jax.Array,
    own_v_BWHK: jax.Array,
) -> jax.Array:
    """Equation 1 for each hypothesis over its slots of the cache and over its own newest key and value; [B, W, H, K].

    The newest ones stand apart, so that the cache is read before it is written: XLA then updates it in place. Weights
    have the hypotheses last: XLA's CPU backend computes such narrow products three to five times as fast that way.
    """
    q_BHWK = q_BWHK.swapaxes(1, 2) * jnp.asarray(q_BWHK.shape[-1] ** -0.5, q_BWHK.dtype)

    def attend(k_BHLK: jax.Array, v_BHLK: jax.Array, mask_BHLW: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Largest score, sum of exp(score - largest), the values' sum with those weights."""
        scores_BHLW = jnp.einsum("BHLK,BHWK->BHLW", k_BHLK, q_BHWK, preferred_element_type=jnp.float32)
        scores_BHLW = jnp.where(mask_BHLW, scores_BHLW, MASKED)
        largest_BH1W = scores_BHLW.max(axis=2, keepdims=True)
        weights_BHLW = jnp.exp(scores_BHLW - largest_BH1W)
        out_BHWK = jnp.einsum("BHLW,BHLK->BHWK", weights_BHLW.astype(v_BHLK.dtype), v_BHLK, preferred_element_type=jnp.float32)
        return largest_BH1W, weights_BHLW.sum(axis=2, keepdims=True), out_BHWK

    # A block of which a hypothesis sees nothing weighs exactly 0 for it, whether it is computed for others or not.
    own_k_BHWK, own_v_BHWK = own_k_BWHK.swapaxes(1, 2), own_v_BWHK.swapaxes(1, 2).astype(jnp.float32)
    own_BH1W = (q_BHWK.astype(jnp.float32) * own_k_BHWK.astype(jnp.float32)).sum(axis=-1)[:, :, None]
    terms = [(own_BH1W, jnp.ones_like(own_BH1W), own_v_BHWK)]
    start = 0
    for k_BHLK, v_BHLK in zip(keys, values, strict=True):
        block = k_BHLK, v_BHLK, mask_BHLW[:, :, start : start + k_BHLK.shape[2]]
        start += k_BHLK.shape[2]
        if len(keys) == 1:
            terms.append(attend(*block))
        else:
            nothing = jnp.full_like(own_BH1W, MASKED), jnp.zeros_like(own_BH1W), jnp.zeros_like(own_v_BHWK)
            terms.append(jax.lax.cond(block[2].any(), attend, lambda *_, nothing=nothing: nothing, *block))
    largest_BH1W = jnp.stack([largest for largest, _, _ in terms]).max(axis=0)
    factors = [jnp.exp(largest - largest_BH1W) for largest, _, _ in terms]
    total_BH1W, out_BHWK = jnp.zeros_like(own_BH1W), jnp.zeros_like(own_v_BHWK)
    for factor_BH1W, (_, weight_BH1W, values_BHWK) in zip(factors, terms, strict=True):
        total_BH1W += factor_BH1W * weight_BH1W
        out_BHWK += factor_BH1W.swapaxes(2, 3) * values_BHWK
    return (out_BHWK / total_BH1W.swapaxes(2, 3)).swapaxes(1, 2).astype(q_BWHK.dtype)


def attend_to_memory(
    q_BWHK: jax.Array, k_BHSK: jax.Array, v_BHSK: jax.Array, mask_BHSW: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Equation 1 for the hypotheses of each sentence over its cached memory: [B, W, H, K], and the weights [B, H, S, W]."""
    q_BHWK = q_BWHK.swapaxes(1, 2) * jnp.asarray(q_BWHK.shape[-1] ** -0.5, q_BWHK.dtype)
    scores_BHSW = jnp.einsum("BHSK,BHWK->BHSW", k_BHSK, q_BHWK, preferred_element_type=jnp.float32)
    weights_BHSW = jax.nn.softmax(jnp.where(mask_BHSW, scores_BHSW, MASKED), axis=2)
    out_BHWK = jnp.einsum("BHSW,BHSK->BHWK", weights_BHSW.astype(v_BHSK.dtype), v_BHSK)
    return out_BHWK.swapaxes(1, 2), weights_BHSW
