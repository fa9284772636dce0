"""Positional encodings (paper section 3.5), relative bias, and positions in packed rows."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal, assert_never

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from transformer_jax.errors import UserError
from transformer_jax.settings.checks import Count, PositiveInt, checked
from transformer_jax.settings.config import ModelConfig


@checked
def sinusoidal_positions(
    length: Count,
    d_model: PositiveInt,
    layout: Literal["interleaved", "tensor2tensor"] = "interleaved",
) -> np.ndarray:
    """Return sinusoidal positional encodings, float32 [length, d_model] (section 3.5).

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), and PE(pos, 2i + 1) is the cosine of the same
    angle. In tensor2tensor, PE(pos, i) = sin(pos / 10000^(i / (d_model / 2 - 1))) for i < d_model /
    2, then the cosines. Raises ``UserError`` if d_model is odd.
    """
    if d_model % 2:
        raise UserError(
            f"d_model is {d_model}; expected an even number, because each sine has a cosine."
        )
    is_interleaved = layout == "interleaved"
    half = d_model // 2
    frequencies = 10000.0 ** -(np.arange(half) / (half if is_interleaved else max(1, half - 1)))
    angles = np.arange(length)[:, None] * frequencies[None]
    sines_and_cosines = np.stack([np.sin(angles), np.cos(angles)], axis=2 if is_interleaved else 1)
    return sines_and_cosines.reshape(length, d_model).astype(np.float32)


def upper_bound(length: Any, limit: int = 2**16) -> int:
    """Return ``length`` or, if it is a symbol of ``jax.export``, a bound from its constraints.

    Raises ``UserError`` if the constraints do not limit a symbol to ``limit``.
    """
    if isinstance(length, int):
        return length
    for bound in [1 << bits for bits in range(limit.bit_length())] + [limit]:
        with suppress(jax.errors.InconclusiveDimensionOperation):
            if length <= bound:
                return bound
    raise UserError(
        f"The length {length} has no upper bound, but the table of positions needs one; expected a "
        f"constraint, such as jax.export.symbolic_shape(..., constraints=['{length} <= {limit}'])."
    )


def added_positions(config: ModelConfig, length: int, learned_LD: Array | None) -> Array | None:
    """Return the positional encodings of the first ``length`` positions (or of more), which are
    added to embeddings. None: the scheme ``config.positions`` adds none.

    ``learned_LD`` is the matrix of learned positions. Raises ``UserError`` if it is too short.
    """
    offset = config.position_offset
    match config.positions:
        case "interleaved" | "tensor2tensor":
            table_length = upper_bound(length) + offset
            table_LD = sinusoidal_positions(table_length, config.d_model, config.positions)
            return jnp.asarray(table_LD[offset:])
        case "learned":
            if upper_bound(length, config.max_positions) > config.max_positions:
                raise UserError(
                    f"A sequence has {length} positions; expected at most {config.max_positions}, "
                    "the number of learned positions (model.max_positions)."
                )
            assert learned_LD is not None
            learned_LD = learned_LD[offset:]
            if config.embedding_scale == "all":
                learned_LD = learned_LD * config.d_model**0.5
            return learned_LD
        case "relative":  # see ``position_biases``
            return None
    assert_never(config.positions)


def position_biases(
    config: ModelConfig, num_layers: int, *, bidirectional: bool, rngs: nnx.Rngs
) -> nnx.List[RelativeBias]:
    """Create the position biases of self-attention in a stack of layers: none, one for all layers,
    or one for each layer.
    """
    count = 0
    if config.positions == "relative":
        count = num_layers if config.relative_bias == "layer" else 1
    return nnx.List(
        RelativeBias(config, bidirectional=bidirectional, rngs=rngs) for _ in range(count)
    )


class RelativeBias(nnx.Module):
    """Bias that T5 adds to the scores of self-attention (Raffel et al., 2020, section 2.1).

    Each head has one bias for each bucket of distances from the query to the key. Short distances
    have half of the buckets, one each. Longer distances share the other half, whose widths grow
    exponentially up to ``relative_distance``. In the encoder, each direction has half of all
    buckets.
    """

    def __init__(self, config: ModelConfig, *, bidirectional: bool, rngs: nnx.Rngs):
        """Initialize the biases [buckets, H] from N(0, d_model^-1)."""
        initializer = nnx.initializers.normal(config.d_model**-0.5, jnp.float32)
        shape = config.relative_buckets, config.num_heads
        self.table = nnx.Param(initializer(rngs.params(), shape))
        self.bidirectional = bidirectional
        self.max_distance = config.relative_distance

    def between_all(self, length: int) -> Array:
        """Return the biases of a row of tokens, float32 [1, H, L, L]: queries, then keys."""
        bound = upper_bound(length)
        biases_DH = self._biases_between(1 - bound, bound)
        index_L = np.arange(length) if isinstance(length, int) else jnp.arange(length)
        distances_LL = index_L[None] - index_L[:, None] + bound - 1
        return biases_DH[distances_LL].transpose(2, 0, 1)[None]

    def at_positions(self, position_B: Array, length: int) -> Array:
        """Return the biases of ``length`` keys, for one query at each position: [B, H, L].

        Later keys, which are masked, get the bias of distance 0.
        """
        biases_DH = self._biases_between(1 - length, 1)
        distances_BL = jnp.arange(length)[None] - position_B[:, None] + length - 1
        return jnp.take(biases_DH, distances_BL, axis=0, mode="clip").swapaxes(1, 2)

    def _biases_between(self, first: int, stop: int) -> Array:
        """Return the biases [D, H] of D distances: key minus query, from ``first`` on."""
        distances_D = np.arange(first, stop)
        buckets_D = np.zeros_like(distances_D)
        count = self.table.shape[0]
        if self.bidirectional:
            count //= 2
            buckets_D += count * (distances_D > 0)
            distances_D = abs(distances_D)
        else:
            distances_D = np.maximum(-distances_D, 0)
        exact = count // 2
        far_D = np.maximum(distances_D, exact).astype(np.float32) / np.float32(exact)
        steps_D = np.log(far_D) / np.float32(np.log(self.max_distance / exact)) * (count - exact)
        far_D = np.minimum(exact + steps_D.astype(np.int64), count - 1)
        return self.table[...][buckets_D + np.where(distances_D < exact, distances_D, far_D)]


@checked
def segment_positions(segments_BL: Array) -> Array:
    """Return positions within each segment, int32 [B, L]. Segments 1 1 1 2 2 give 0 1 2 0 1."""
    index_1L = jnp.arange(segments_BL.shape[1], dtype=jnp.int32)[None]
    is_start_BL = jnp.pad(segments_BL[:, 1:] != segments_BL[:, :-1], ((0, 0), (1, 0)))
    return index_1L - jax.lax.cummax(jnp.where(is_start_BL, index_1L, 0), axis=1)
