"""Positions, feed-forward layer, residual with norm, encoder layer, decoder layer (paper sections
3.1, 3.3, 3.5).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import MultiHeadAttention, Projection, dropout

_ACTIVATIONS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "silu": jax.nn.silu}


def compute_dtype(config: ModelConfig) -> jnp.dtype:
    """Type of the matrix products: as configured, or by backend (float32 on CPU, bfloat16
    elsewhere).
    """
    if config.dtype == "auto":
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    return jnp.dtype(config.dtype)


def sinusoidal_positions(length: int, d_model: int, *, layout: str = "interleaved") -> np.ndarray:
    """Sinusoidal position vectors, float32 [length, d_model] (section 3.5).

    ``interleaved``: PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos of the
    same, as the paper has it. ``split``: all sines, then all cosines, with tensor2tensor's
    wavelengths 10000^(i / (d_model / 2 - 1)).
    """
    half = d_model // 2
    exponents = np.arange(half) / (half if layout == "interleaved" else max(half - 1, 1))
    angles = np.arange(length)[:, None] * 10000.0 ** -exponents[None, :]
    if layout == "split":
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
    return (
        np.stack([np.sin(angles), np.cos(angles)], axis=2)
        .reshape(length, d_model)
        .astype(np.float32)
    )


def segment_positions(segments_BL: jax.Array) -> jax.Array:
    """Position of each token within its own segment, int32 [B, L]: 0 1 2 0 1 for segments 1 1 1 2
    2.
    """
    index_L = jnp.arange(segments_BL.shape[1], dtype=jnp.int32)
    starts_BL = jnp.pad(segments_BL[:, 1:] != segments_BL[:, :-1], ((0, 0), (1, 0)))
    start_BL = jax.lax.cummax(jnp.where(starts_BL, index_L[None], 0), axis=1)
    return index_L[None] - start_BL


class FeedForward(nnx.Module):
    """max(0, x W_1 + b_1) W_2 + b_2 (equation 2)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Reads d_model, d_ff, activation and feed_forward_dropout."""
        dtype = compute_dtype(config)
        self.inner = Projection(
            "BLD,DF->BLF",
            (config.d_model, config.d_ff),
            inputs=1,
            use_bias=True,
            dtype=dtype,
            rngs=rngs,
        )
        self.output = Projection(
            "BLF,FD->BLD",
            (config.d_ff, config.d_model),
            inputs=1,
            use_bias=True,
            dtype=dtype,
            rngs=rngs,
        )
        self.activation = config.activation
        self.dropout = config.feed_forward_dropout

    def __call__(self, x_BLD: jax.Array, *, dropout_key: jax.Array | None = None) -> jax.Array:
        """The same two-layer network at every position; [B, L, D]."""
        return self.output(
            dropout(_ACTIVATIONS[self.activation](self.inner(x_BLD)), self.dropout, dropout_key)
        )


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis, computed in float32, returned in the input's type."""

    def __init__(self, d_model: int, *, epsilon: float = 1e-6):
        """Scale starts at 1, bias at 0."""
        self.scale = nnx.Param(jnp.ones((d_model,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((d_model,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """Mean 0 and variance 1 over D, then scale and bias."""
        x = x_BLD.astype(jnp.float32)
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = jnp.square(centred).mean(axis=-1, keepdims=True)
        shape = (1,) * (x.ndim - 1) + (-1,)
        normal = centred * jax.lax.rsqrt(variance + self.epsilon)
        return (normal * self.scale[...].reshape(shape) + self.bias[...].reshape(shape)).astype(
            x_BLD.dtype
        )


class Residual(nnx.Module):
    """LayerNorm(x + Dropout(Sublayer(x))) (section 5.4); pre-norm: x +
    Dropout(Sublayer(LayerNorm(x))).
    """

    def __init__(self, config: ModelConfig):
        """Reads d_model, norm, norm_epsilon and dropout."""
        self.norm = LayerNorm(config.d_model, epsilon=config.norm_epsilon)
        self.pre = config.norm == "pre"
        self.dropout = config.dropout

    def __call__(
        self,
        x_BLD: jax.Array,
        sublayer: Callable[[jax.Array], jax.Array],
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Run ``sublayer`` on x (or on its norm) and join the result to x."""
        if self.pre:
            return x_BLD + dropout(sublayer(self.norm(x_BLD)), self.dropout, dropout_key)
        return self.norm(x_BLD + dropout(sublayer(x_BLD), self.dropout, dropout_key))


def _attention(config: ModelConfig, rngs: nnx.Rngs) -> MultiHeadAttention:
    return MultiHeadAttention(
        config.d_model,
        config.num_heads,
        d_k=config.head_width_k,
        d_v=config.head_width_v,
        use_bias=config.attention_bias,
        dropout=config.attention_dropout,
        dtype=compute_dtype(config),
        rngs=rngs,
    )


def _keys(key: jax.Array | None, count: int) -> list[jax.Array | None]:
    return [None] * count if key is None else list(jax.random.split(key, count))


class EncoderLayer(nnx.Module):
    """Self-attention, then feed-forward, each with residual and norm."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Layers of one encoder share nothing."""
        self.self_attention = _attention(config, rngs)
        self.self_attention_residual = Residual(config)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.feed_forward_residual = Residual(config)

    def __call__(
        self, x_BSD: jax.Array, mask_BHSS: jax.Array, *, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """[B, S, D] to [B, S, D]; dropout acts only when a key is given."""
        key_a, key_b, key_c, key_d = _keys(dropout_key, 4)
        x_BSD = self.self_attention_residual(
            x_BSD,
            lambda y: self.self_attention(y, y, mask_BHSS, dropout_key=key_a),
            dropout_key=key_b,
        )
        return self.feed_forward_residual(
            x_BSD, lambda y: self.feed_forward(y, dropout_key=key_c), dropout_key=key_d
        )


class DecoderLayer(nnx.Module):
    """Causal self-attention, attention over the encoder's memory, feed-forward, each with residual
    and norm.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Layers of one decoder share nothing."""
        self.self_attention = _attention(config, rngs)
        self.self_attention_residual = Residual(config)
        self.cross_attention = _attention(config, rngs)
        self.cross_attention_residual = Residual(config)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.feed_forward_residual = Residual(config)

    def __call__(
        self,
        x_BTD: jax.Array,
        memory_BSD: jax.Array,
        self_mask_BHTT: jax.Array,
        cross_mask_BHTS: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """[B, T, D] to [B, T, D]; dropout acts only when a key is given."""
        keys = _keys(dropout_key, 6)
        return self.connect(
            x_BTD,
            lambda y: self.self_attention(y, y, self_mask_BHTT, dropout_key=keys[0]),
            lambda y: self.cross_attention(y, memory_BSD, cross_mask_BHTS, dropout_key=keys[1]),
            dropout_keys=keys[2:],
        )

    def connect(
        self,
        x_BTD: jax.Array,
        self_attention: Callable[[jax.Array], jax.Array],
        cross_attention: Callable[[jax.Array], jax.Array],
        *,
        dropout_keys: list[jax.Array | None] | None = None,
    ) -> jax.Array:
        """The layer with its two attentions given: over whole targets in training, over caches in
        decoding.
        """
        key_a, key_b, key_c, key_d = dropout_keys or _keys(None, 4)
        x_BTD = self.self_attention_residual(x_BTD, self_attention, dropout_key=key_a)
        x_BTD = self.cross_attention_residual(x_BTD, cross_attention, dropout_key=key_b)
        return self.feed_forward_residual(
            x_BTD, lambda y: self.feed_forward(y, dropout_key=key_c), dropout_key=key_d
        )
