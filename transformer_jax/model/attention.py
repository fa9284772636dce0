"""Masks, scaled dot-product attention and multi-head attention (paper section 3.2).

Shapes ride in names. The key, for the whole package:

    B batch    S source length    T target length    L any length
    D d_model  H heads            K head width (d_k or d_v)    F d_ff
    V vocabulary    W beam width    N layers
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.errors import UserError

# The score of a forbidden position. Finite, so that a row with nothing to attend to (padding) gives
# no NaN.
MASKED = -1e30


def attention_mask(
    query_segments_BT: jax.Array, key_segments_BS: jax.Array, *, causal: bool = False
) -> jax.Array:
    """Which key each query may look at: one of its own segment and, if causal, not later than
    itself.

    Args:
      query_segments_BT: int; 0 marks padding, equal numbers belong together (one sentence, or one
        of a packed row).
      key_segments_BS: likewise for the keys. With ``causal``, S = T.

    Returns:
      bool [B, 1, T, S], True where attention is allowed. The 1 stands for the heads.
    """
    same_BTS = (query_segments_BT[:, :, None] == key_segments_BS[:, None, :]) & (
        key_segments_BS[:, None, :] > 0
    )
    if causal:
        length = same_BTS.shape[-1]
        same_BTS &= jnp.tril(jnp.ones((length, length), bool))[None]
    return same_BTS[:, None]


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Set a share ``rate`` of the elements to zero and scale the rest so that the mean stays;
    ``key=None`` does nothing.

    16 random bits decide over an element, half of what a float32 Bernoulli draw costs. The rate is
    exact to 2^-16. The halves of the words go to the halves of the last axis: on a TPU neighbours
    would cost a sixth of a training step.
    """
    if key is None or rate == 0.0:
        return x
    threshold = round(rate * 65536)
    *leading, last = x.shape
    words = jax.random.bits(key, (*leading, -(-last // 2)), jnp.uint32)
    bits = jnp.concatenate([words.astype(jnp.uint16), (words >> 16).astype(jnp.uint16)], axis=-1)[
        ..., :last
    ]
    return jnp.where(
        bits >= threshold,
        x * jnp.asarray(65536 / (65536 - threshold), x.dtype),
        jnp.zeros((), x.dtype),
    )


def dot_product_attention(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    mask_BHTS: jax.Array,
    *,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """softmax(q k^T / sqrt(d_k)) v (equation 1), softmax in float32.

    Args:
      mask_BHTS: bool, True where attention is allowed; axes B, H, T may be 1.

    Returns:
      [B, T, H, K] with K the width of the values.
    """
    q_BTHK = q_BTHK * jnp.asarray(q_BTHK.shape[-1] ** -0.5, q_BTHK.dtype)
    scores_BHTS = jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK, preferred_element_type=jnp.float32)
    weights_BHTS = jax.nn.softmax(jnp.where(mask_BHTS, scores_BHTS, MASKED), axis=-1)
    weights_BHTS = dropout(weights_BHTS.astype(v_BSHK.dtype), dropout_rate, dropout_key)
    return jnp.einsum("BHTS,BSHK->BTHK", weights_BHTS, v_BSHK)


class Projection(nnx.Module):
    """A matrix product over named axes with Xavier-uniform weights in float32, computed in
    ``dtype``, and an optional bias.
    """

    def __init__(
        self,
        equation: str,
        shape: tuple[int, ...],
        *,
        inputs: int,
        use_bias: bool = False,
        dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """``shape`` is the kernel's; its first ``inputs`` axes are contracted by ``equation``, the
        others remain.
        """
        init = nnx.initializers.variance_scaling(
            1.0,
            "fan_avg",
            "uniform",
            in_axis=tuple(range(inputs)),
            out_axis=tuple(range(inputs, len(shape))),
        )
        self.equation = equation
        self.dtype = dtype
        self.kernel = nnx.Param(init(rngs.params(), shape, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(shape[inputs:], jnp.float32)) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """``equation`` applied to x and the kernel, plus the bias."""
        y = jnp.einsum(self.equation, x.astype(self.dtype), self.kernel[...].astype(self.dtype))
        if self.bias is not None:
            bias = self.bias[...].astype(self.dtype)
            y = y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
        return y


class MultiHeadAttention(nnx.Module):
    """Several attentions side by side on projected queries, keys and values (section 3.2.2)."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        d_k: int | None = None,
        d_v: int | None = None,
        use_bias: bool = False,
        dropout: float = 0.0,
        dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """``d_k`` and ``d_v`` default to ``d_model / num_heads``; ``dropout`` acts on the attention
        weights.
        """
        if d_model % num_heads and not (d_k and d_v):
            raise UserError(
                f"d_model is {d_model}; expected a multiple of num_heads = {num_heads}, or explicit d_k and d_v."
            )
        d_k, d_v = d_k or d_model // num_heads, d_v or d_model // num_heads
        projection = partial(Projection, use_bias=use_bias, dtype=dtype, rngs=rngs)
        self.query = projection("BLD,DHK->BLHK", (d_model, num_heads, d_k), inputs=1)
        self.key = projection("BLD,DHK->BLHK", (d_model, num_heads, d_k), inputs=1)
        self.value = projection("BLD,DHK->BLHK", (d_model, num_heads, d_v), inputs=1)
        self.output = projection("BLHK,HKD->BLD", (num_heads, d_v, d_model), inputs=2)
        self.dropout = dropout

    def __call__(
        self,
        query_BTD: jax.Array,
        memory_BSD: jax.Array,
        mask_BHTS: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Let each query position gather from the memory; self-attention passes one array twice.

        Args:
          mask_BHTS: bool, True where attention is allowed (see ``attention_mask``).

        Returns:
          [B, T, D].
        """
        k_BSHK, v_BSHK = self.keys_values(memory_BSD)
        out_BTHK = dot_product_attention(
            self.query(query_BTD),
            k_BSHK,
            v_BSHK,
            mask_BHTS,
            dropout_rate=self.dropout,
            dropout_key=dropout_key,
        )
        return self.output(out_BTHK)

    def keys_values(self, memory_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The memory's projected keys and values, both [B, S, H, K], for a cache."""
        return self.key(memory_BSD), self.value(memory_BSD)
