"""What decoding remembers between steps: keys and values of the source and of each hypothesis.

Two files know how keys and values are kept and attended to: ``blocked_cache.py`` on CPUs and TPUs,
``prefix_cache.py`` on GPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from transformer_jax.model.blocked_cache import BlockedAttention, BlockedKeysValues
from transformer_jax.model.prefix_cache import PrefixAttention, PrefixKeysValues

_NOT_WRITTEN = -1


@struct.dataclass
class DecoderCache:
    """The state of W hypotheses of each of B sentences; every sentence has its own position.

    Self-attention keys and values stay where they were written: position t of beam w has a slot of
    its own for good. When beams are reordered, only the small table ``ancestors_BWT`` moves: for
    each beam, the beam in whose slot each position of its history lives. Cross-attention keys and
    values are shared by a sentence's beams.
    """

    keys_values: Any  # BlockedKeysValues or PrefixKeysValues
    source_mask_BS: jax.Array  # True: a real source token
    ancestors_BWT: jax.Array  # int32; -1: nothing there yet
    position_B: jax.Array  # int32: the number of tokens already taken in

    @property
    def beam_size(self) -> int:
        """W."""
        return self.ancestors_BWT.shape[1]

    @property
    def max_length(self) -> int:
        """T, the number of steps that fit."""
        return self.ancestors_BWT.shape[2]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of positions that a step may be limited to, ascending; the last one is all."""
        return self.keys_values.lengths(max(self.max_length, self.source_mask_BS.shape[1]))

    @property
    def needed_B(self) -> jax.Array:
        """How many positions each sentence's next step must attend to, source and target alike."""
        positions_1S = jnp.arange(1, self.source_mask_BS.shape[1] + 1, dtype=jnp.int32)[None]
        of_source_B = jnp.where(self.source_mask_BS, positions_1S, 0).max(axis=1)
        return jnp.maximum(of_source_B, self.position_B + 1)

    def attention(self, length: int | None = None) -> BlockedAttention | PrefixAttention:
        """The attention of the next step, over the first ``length`` positions (None: over all)."""
        state = self.source_mask_BS, self.ancestors_BWT, self.position_B
        return self.keys_values.attention(*state, length=length)

    def reorder(self, parents_BW: jax.Array) -> DecoderCache:
        """Beam w continues what was beam ``parents_BW[b, w]``."""
        ancestors_BWT = jnp.take_along_axis(self.ancestors_BWT, parents_BW[:, :, None], axis=1)
        return dataclasses.replace(self, ancestors_BWT=ancestors_BWT)

    def replace_rows(self, rows_R: jax.Array, fresh: DecoderCache) -> DecoderCache:
        """Put the R sentences of ``fresh``, which have not begun, into rows ``rows_R``.

        A row number of B is skipped. Only what belongs to the source is read from ``fresh``. Old
        keys and values of self-attention are never seen again.
        """
        return dataclasses.replace(
            self,
            keys_values=self.keys_values.replace_rows(rows_R, fresh.keys_values),
            source_mask_BS=self.source_mask_BS.at[rows_R].set(fresh.source_mask_BS, mode="drop"),
            ancestors_BWT=self.ancestors_BWT.at[rows_R].set(_NOT_WRITTEN, mode="drop"),
            position_B=self.position_B.at[rows_R].set(0, mode="drop"),
        )

    def cleared(self) -> DecoderCache:
        """An empty cache of the same capacity; old keys and values stay, masked."""
        return dataclasses.replace(
            self,
            source_mask_BS=jnp.zeros_like(self.source_mask_BS),
            ancestors_BWT=jnp.full_like(self.ancestors_BWT, _NOT_WRITTEN),
            position_B=jnp.zeros_like(self.position_B),
        )

    def append(self, written: Sequence[Any]) -> DecoderCache:
        """Add one position; ``written`` is each layer's second result of ``to_history``."""
        beams_1W1 = jnp.arange(self.beam_size, dtype=jnp.int32)[None, :, None]
        positions_1T = jnp.arange(self.max_length, dtype=jnp.int32)[None]
        is_new_B1T = (positions_1T == self.position_B[:, None])[:, None]
        return dataclasses.replace(
            self,
            keys_values=self.keys_values.append(written, self.position_B),
            ancestors_BWT=jnp.where(is_new_B1T, beams_1W1, self.ancestors_BWT),
            position_B=self.position_B + 1,
        )


def empty_cache(
    cross: list[tuple[jax.Array, jax.Array]],
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
    padding = max(0, source_capacity - length)
    padded = [
        tuple(jnp.pad(x_BSHK, ((0, 0), (0, padding), (0, 0), (0, 0))) for x_BSHK in of_layer)
        for of_layer in cross
    ]
    kept: Any = PrefixKeysValues if jax.default_backend() == "gpu" else BlockedKeysValues
    return DecoderCache(
        keys_values=kept.empty(padded, beam_size=beam_size, max_length=max_length),
        source_mask_BS=jnp.pad(source_mask_BS, ((0, 0), (0, padding))),
        ancestors_BWT=jnp.full((batch, beam_size, max_length), _NOT_WRITTEN, jnp.int32),
        position_B=jnp.zeros(batch, jnp.int32),
    )
