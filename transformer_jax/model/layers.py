"""Embedding, positions, feed-forward, residual, encoder and decoder layer (paper section 3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.model import norm_kernel
from transformer_jax.model.attention import MultiHeadAttention, Projection, check_rngs
from transformer_jax.model.dropout import (
    DropoutKey,
    Site,
    dropout,
    kept,
    scale_up,
    split_key,
)


def compute_dtype(config: ModelConfig) -> jnp.dtype:
    """Type of the matrix products; ``auto`` is float32 on a CPU and bfloat16 elsewhere."""
    if config.dtype == "auto":
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    return jnp.dtype(config.dtype)


def use_matmul_precision(config: ModelConfig) -> None:
    """Have this process multiply float32 matrices as the setting says; default: as JAX is set."""
    if config.matmul_precision != "default":
        jax.config.update("jax_default_matmul_precision", config.matmul_precision)


def sinusoidal_positions(length: int, d_model: int, *, layout: str = "interleaved") -> np.ndarray:
    """Sinusoidal position vectors, float32 [length, d_model] (section 3.5).

    ``interleaved``: PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos of the
    same, as in the paper. ``split``: all sines, then all cosines, with tensor2tensor's wavelengths
    10000^(i / (d_model / 2 - 1)).
    """
    half = d_model // 2
    exponents = np.arange(half) / (half if layout == "interleaved" else max(half - 1, 1))
    angles = np.arange(length)[:, None] * 10000.0 ** -exponents[None, :]
    waves = np.stack([np.sin(angles), np.cos(angles)], axis=2 if layout == "interleaved" else 1)
    return waves.reshape(length, d_model).astype(np.float32)


def segment_positions(segments_BL: jax.Array) -> jax.Array:
    """Positions within each segment, int32 [B, L]: 0 1 2 0 1 for segments 1 1 1 2 2."""
    index_1L = jnp.arange(segments_BL.shape[1], dtype=jnp.int32)[None]
    is_start_BL = jnp.pad(segments_BL[:, 1:] != segments_BL[:, :-1], ((0, 0), (1, 0)))
    return index_1L - jax.lax.cummax(jnp.where(is_start_BL, index_1L, 0), axis=1)


class Embedding(nnx.Module):
    """Token vectors times sqrt(d_model) plus positions (sections 3.4 and 3.5)."""

    def __init__(self, vocab_size: int, config: ModelConfig, *, rngs: nnx.Rngs):
        """Matrices are drawn from N(0, d_model^-1); that of the tokens is [V, D]."""
        self.matrix = embedding_matrix(vocab_size, config.d_model, rngs)
        self.position_matrix = (
            embedding_matrix(config.max_positions, config.d_model, rngs)
            if config.positions == "learned"
            else None
        )
        self.layout = config.positions
        self.dtype = compute_dtype(config)

    @jax.named_scope("embedding")
    def __call__(
        self, tokens_BL: jax.Array, positions_BL: jax.Array, *, num_positions: int
    ) -> jax.Array:
        """[B, L, D] for tokens at these positions (axis B may be 1).

        Args:
          num_positions: all positions but those of padding are below it.

        Raises:
          UserError: more positions than were learned.
        """
        d_model = self.matrix.shape[1]
        # An id outside the vocabulary gives NaN; checkify's index checks find it.
        vectors_BLD = self.matrix[...].at[tokens_BL].get(mode="fill", wrap_negative_indices=False)
        x_BLD = vectors_BLD * d_model**0.5
        if self.position_matrix is None:
            table_LD = jnp.asarray(sinusoidal_positions(num_positions, d_model, layout=self.layout))
        elif num_positions <= self.position_matrix.shape[0]:
            table_LD = self.position_matrix[...] * d_model**0.5
        else:
            raise UserError(
                f"A sequence has {num_positions} positions; expected at most "
                f"{self.position_matrix.shape[0]}: model.max_positions is "
                f"{self.position_matrix.shape[0]}, and learned positions end there."
            )
        # A packed row may end in more padding than any sentence is long: clipped, as NaN would
        # spread even where it is masked.
        return (x_BLD + jnp.take(table_LD, positions_BL, axis=0, mode="clip")).astype(self.dtype)


def embedding_matrix(rows: int, d_model: int, rngs: nnx.Rngs) -> nnx.Param:
    """A float32 parameter [rows, D] from N(0, d_model^-1)."""
    check_rngs(rngs)
    return nnx.Param(nnx.initializers.normal(d_model**-0.5)(rngs.params(), (rows, d_model)))


@jax.custom_jvp
def relu(x: jax.Array) -> jax.Array:
    """max(x, 0), with gradient 0 at 0; its derivative needs the output only, not x."""
    return jax.nn.relu(x)


@relu.defjvp
def _relu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # Stored: XLA would rather store x and work out the output in each product that reads it.
    y = jax.lax.optimization_barrier(relu(*primals))
    return y, jnp.where(y > 0, tangents[0], jnp.zeros((), y.dtype))


class FeedForward(nnx.Module):
    """max(0, x W_1 + b_1) W_2 + b_2 (equation 2)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Reads d_model, d_ff, activation and feed_forward_dropout."""
        D, F = config.d_model, config.d_ff
        projection = partial(Projection, use_bias=True, dtype=compute_dtype(config), rngs=rngs)
        self.inner = projection("BLD,DF->BLF", (D, F))
        self.output = projection("BLF,FD->BLD", (F, D))
        self.activation = config.activation  # its name in jax.nn
        self.dropout = config.feed_forward_dropout

    @jax.named_scope("feed_forward")
    def __call__(self, x_BLD: jax.Array, *, dropout_key: DropoutKey = None) -> jax.Array:
        """The same two-layer network at every position: [B, L, D]."""
        activation = relu if self.activation == "relu" else getattr(jax.nn, self.activation)
        hidden_BLF = activation(self.inner(x_BLD))
        return self.output(dropout(hidden_BLF, self.dropout, dropout_key))


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis, computed in float32, returned in the input's type."""

    def __init__(self, d_model: int, *, epsilon: float = 1e-6):
        """Scale starts at 1, bias at 0."""
        self.scale = nnx.Param(jnp.ones((d_model,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((d_model,), jnp.float32))
        self.epsilon = epsilon

    @jax.named_scope("norm")
    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """Mean 0 and variance 1 over D, then scale and bias."""
        normal = _normalised(x_BLD.astype(jnp.float32), self.epsilon)
        shape = (1,) * (x_BLD.ndim - 1) + (-1,)
        y = normal * self.scale[...].reshape(shape) + self.bias[...].reshape(shape)
        return y.astype(x_BLD.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _normalised(x_BLD: jax.Array, epsilon: float) -> jax.Array:
    """Mean 0 and variance 1 over D; its derivative stores the statistics and uses them again."""
    mean_BL1, inverse_BL1 = _statistics(x_BLD, epsilon)
    return (x_BLD - mean_BL1) * inverse_BL1


@_normalised.defjvp
def _normalised_jvp(
    epsilon: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    [x_BLD], [dx_BLD] = primals, tangents
    # Without the barrier XLA works them out anew in each kernel that needs them, and, where it
    # cannot, stores float32 arrays of x's shape.
    mean_BL1, inverse_BL1 = jax.lax.optimization_barrier(_statistics(x_BLD, epsilon))
    normal_BLD = (x_BLD - mean_BL1) * inverse_BL1
    along_BL1 = (dx_BLD * normal_BLD).mean(axis=-1, keepdims=True)
    across_BLD = dx_BLD - dx_BLD.mean(axis=-1, keepdims=True) - normal_BLD * along_BL1
    return normal_BLD, across_BLD * inverse_BL1


def _statistics(x_BLD: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """Mean and 1 / standard deviation over D."""
    mean_BL1 = x_BLD.mean(axis=-1, keepdims=True)
    variance_BL1 = jnp.square(x_BLD - mean_BL1).mean(axis=-1, keepdims=True)
    return mean_BL1, jax.lax.rsqrt(variance_BL1 + epsilon)


class Residual(nnx.Module):
    """LayerNorm(x + Dropout(Sublayer(x))) (section 5.4); pre-norm has the norm before the sublayer.

    A layer calls ``before`` on x, its sublayer on the result, and ``after`` on both.
    """

    def __init__(self, config: ModelConfig):
        """Reads d_model, norm, norm_epsilon and dropout."""
        self.norm = LayerNorm(config.d_model, epsilon=config.norm_epsilon)
        self.pre = config.norm == "pre"
        self.dropout = config.dropout

    def before(self, x_BLD: jax.Array) -> jax.Array:
        """What the sublayer takes in."""
        return self.norm(x_BLD) if self.pre else x_BLD

    @jax.named_scope("residual")
    def after(
        self, x_BLD: jax.Array, y_BLD: jax.Array, *, dropout_key: DropoutKey = None
    ) -> jax.Array:
        """x joined with what the sublayer gave."""
        if self.pre or not self.dropout or dropout_key is None or not norm_kernel.takes(x_BLD):
            x_BLD = x_BLD + dropout(y_BLD, self.dropout, dropout_key)
            return x_BLD if self.pre else self.norm(x_BLD)
        # In training on a GPU one kernel does all, from a mask.
        keep_BLD = kept(Site(x_BLD.shape, self.dropout), dropout_key)
        settings = scale_up(self.dropout), self.norm.epsilon
        return jax.lax.platform_dependent(
            *(x_BLD, y_BLD, keep_BLD, self.norm.scale[...], self.norm.bias[...]),
            cuda=lambda *arrays: norm_kernel.residual_norm(*arrays, *settings),
            default=lambda x, y, keep, *_: self.norm(x + dropout(y, self.dropout, keep)),
        )


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


class EncoderLayer(nnx.Module):
    """Self-attention, then feed-forward, each with residual and norm."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Layers share nothing."""
        self.self_attention = _attention(config, rngs)
        self.self_attention_residual = Residual(config)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.feed_forward_residual = Residual(config)

    def __call__(
        self,
        x_BSD: jax.Array,
        mask_BHSS: jax.Array,
        *,
        dropout_key: DropoutKey = None,
        weights: list[jax.Array] | None = None,
    ) -> jax.Array:
        """[B, S, D] to [B, S, D]; without a key nothing is dropped.

        The attention weights [B, H, S, S] are added to ``weights``, if given.
        """
        attention_key, residual_key, *keys = split_key(dropout_key, 4)
        y_BSD = self.self_attention_residual.before(x_BSD)
        y_BSD = self.self_attention(
            y_BSD, y_BSD, mask_BHSS, dropout_key=attention_key, weights=weights
        )
        x_BSD = self.self_attention_residual.after(x_BSD, y_BSD, dropout_key=residual_key)
        return _feed_forward(self, x_BSD, *keys)


class DecoderLayer(nnx.Module):
    """Causal self-attention, attention over the encoder's memory, feed-forward."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Layers share nothing."""
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
        dropout_key: DropoutKey = None,
        weights: list[jax.Array] | None = None,
    ) -> jax.Array:
        """[B, T, D] to [B, T, D]; without a key nothing is dropped.

        The weights of self-attention, then those of cross-attention, are added to ``weights``, if
        given.
        """
        self_key, cross_key, self_residual_key, cross_residual_key, *keys = split_key(
            dropout_key, 6
        )
        y_BTD = self.self_attention_residual.before(x_BTD)
        y_BTD = self.self_attention(
            y_BTD, y_BTD, self_mask_BHTT, dropout_key=self_key, weights=weights
        )
        x_BTD = self.self_attention_residual.after(x_BTD, y_BTD, dropout_key=self_residual_key)
        y_BTD = self.cross_attention(
            self.cross_attention_residual.before(x_BTD),
            memory_BSD,
            cross_mask_BHTS,
            dropout_key=cross_key,
            weights=weights,
        )
        x_BTD = self.cross_attention_residual.after(x_BTD, y_BTD, dropout_key=cross_residual_key)
        return _feed_forward(self, x_BTD, *keys)

    def step(
        self,
        x_BWD: jax.Array,
        attend_to_history: Callable[..., tuple[jax.Array, Any]],
        attend_to_source: Callable[[jax.Array], jax.Array],
    ) -> tuple[jax.Array, Any, jax.Array]:
        """One decoding step of W hypotheses, on keys and values of the steps before.

        Args:
          attend_to_history: given queries and the newest keys and values, what self-attention
            finds, and what the cache needs to go on; arrays are [B, W, H, K].
          attend_to_source: given queries, what cross-attention finds.

        Returns:
          The output [B, W, D]; what the cache needs; the queries of cross-attention [B, W, H, K].
        """
        y_BWD = self.self_attention_residual.before(x_BWD)
        own_BWHK = self.self_attention.keys_values(y_BWD)
        out_BWHK, written = attend_to_history(self.self_attention.query(y_BWD), own_BWHK)
        y_BWD = self.self_attention.output(out_BWHK)
        x_BWD = self.self_attention_residual.after(x_BWD, y_BWD)
        q_BWHK = self.cross_attention.query(self.cross_attention_residual.before(x_BWD))
        y_BWD = self.cross_attention.output(attend_to_source(q_BWHK))
        x_BWD = self.cross_attention_residual.after(x_BWD, y_BWD)
        return _feed_forward(self, x_BWD), written, q_BWHK


def _feed_forward(
    layer: EncoderLayer | DecoderLayer,
    x_BLD: jax.Array,
    inner_key: DropoutKey = None,
    residual_key: DropoutKey = None,
) -> jax.Array:
    y_BLD = layer.feed_forward(layer.feed_forward_residual.before(x_BLD), dropout_key=inner_key)
    return layer.feed_forward_residual.after(x_BLD, y_BLD, dropout_key=residual_key)
