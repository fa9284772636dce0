"""Embedding, feed-forward network, encoder layer and decoder layer (paper section 3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.errors import UserError
from transformer_jax.model.attention import MultiHeadAttention, Projection
from transformer_jax.model.dropout import DropoutKey, as_keys, dropout
from transformer_jax.model.gpu import runs_kernels
from transformer_jax.model.kv_cache import LayerAttention
from transformer_jax.model.matmul import activation_dtype, compute_dtype
from transformer_jax.model.norms import Residual
from transformer_jax.model.positions import sinusoidal_positions
from transformer_jax.settings.checks import Positive, checked
from transformer_jax.settings.config import ModelConfig


class Embedding(nnx.Module):
    """Token embeddings times sqrt(d_model), plus positional encodings (sections 3.4 and 3.5)."""

    @checked
    def __init__(self, vocab_size: Positive, config: ModelConfig, *, rngs: nnx.Rngs):
        """Initialize the matrices from N(0, d_model^-1). The token matrix is [V, D]."""
        self.matrix = embedding_matrix(vocab_size, config.d_model, rngs)
        self.position_matrix = (
            embedding_matrix(config.max_positions, config.d_model, rngs)
            if config.positions == "learned"
            else None
        )
        self.dtype = activation_dtype(config)

    @checked
    @jax.named_scope("embedding")
    def __call__(
        self, tokens_BL: jax.Array, positions_BL: jax.Array, *, num_positions: int
    ) -> jax.Array:
        """Embed tokens at these positions. Returns [B, L, D]. ``positions_BL`` may broadcast.

        Args:
          num_positions: exclusive upper bound for the positions of real tokens.

        Raises:
          UserError: there are more positions than learned embeddings.
        """
        d_model = self.matrix.shape[1]
        # Token ids outside the vocabulary give NaN; checkify's index checks can find them.
        vectors_BLD = self.matrix[...].at[tokens_BL].get(mode="fill", wrap_negative_indices=False)
        x_BLD = vectors_BLD * d_model**0.5
        if self.position_matrix is None:
            table_LD = jnp.asarray(sinusoidal_positions(num_positions, d_model))
        elif num_positions <= self.position_matrix.shape[0]:
            table_LD = self.position_matrix[...] * d_model**0.5
        else:
            raise UserError(
                f"A sequence has {num_positions} positions; expected at most "
                f"{self.position_matrix.shape[0]}, the number of learned positions "
                "(model.max_positions)."
            )
        # Padding at the end of a packed row can be longer than any sentence. Its positions are
        # clipped, because NaN would spread even if masked.
        return (x_BLD + jnp.take(table_LD, positions_BL, axis=0, mode="clip")).astype(self.dtype)


def embedding_matrix(rows: int, d_model: int, rngs: nnx.Rngs) -> nnx.Param:
    """Create a float32 parameter [rows, D] drawn from N(0, d_model^-1)."""
    initializer = nnx.initializers.normal(d_model**-0.5, jnp.float32)
    return nnx.Param(initializer(rngs.params(), (rows, d_model)))


@jax.custom_jvp
def relu(x: jax.Array) -> jax.Array:
    """Return max(x, 0), with gradient 0 at 0. The backward pass needs only the output."""
    return jax.nn.relu(x)


@relu.defjvp
def _relu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # The barrier makes XLA store y instead of recomputing it from x in each matmul that uses it.
    y = jax.lax.optimization_barrier(relu(*primals))
    return y, jnp.where(y > 0, tangents[0], jnp.zeros((), y.dtype))


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
    "swiglu": jax.nn.silu,
}


class FeedForward(nnx.Module):
    """Feed-forward network max(0, x W_1 + b_1) W_2 + b_2 (equation 2), or another activation.

    swiglu is (silu(x W_gate) * x W_1) W_2 (Shazeer, 2020), with optional biases.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Build from d_model, d_ff, activation, feed_forward_bias and feed_forward_dropout."""
        D, F = config.d_model, config.d_ff
        dtype = compute_dtype(config)
        projection = partial(Projection, use_bias=config.feed_forward_bias, dtype=dtype, rngs=rngs)
        self.inner = projection("BLD,DF->BLF", (D, F))
        self.output = projection("BLF,FD->BLD", (F, D))
        gated = config.activation == "swiglu"
        self.gate = projection("BLD,DF->BLF", (D, F)) if gated else None
        self.activation = config.activation
        self.dropout = config.feed_forward_dropout

    @checked
    @jax.named_scope("feed_forward")
    def __call__(self, x_BLD: jax.Array, *, dropout_key: DropoutKey = None) -> jax.Array:
        """Apply the network at every position. Returns [B, L, D]."""
        activation, hidden_BLF = _ACTIVATIONS[self.activation], self.inner(x_BLD)
        if self.gate is None:
            hidden_BLF = activation(hidden_BLF)
        else:
            hidden_BLF *= activation(self.gate(x_BLD))
        return self.output(dropout(hidden_BLF, self.dropout, dropout_key))


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
    """Encoder layer: self-attention and feed-forward network, with residual connections."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Build attention, feed-forward network and residual connections from the config."""
        self.self_attention = _attention(config, rngs)
        self.self_attention_residual = Residual(config)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.feed_forward_residual = Residual(config)

    @checked
    def __call__(
        self,
        x_BSD: jax.Array,
        mask_BHSS: jax.Array,
        *,
        dropout_key: DropoutKey = None,
    ) -> jax.Array:
        """Apply the layer to [B, S, D]. ``dropout_key=None`` turns dropout off."""
        keys = as_keys(dropout_key)

        def attend(y_BSD: jax.Array) -> jax.Array:
            return self.self_attention(y_BSD, None, mask_BHSS, dropout_key=keys)

        x_BSD = self.self_attention_residual(x_BSD, attend, dropout_key=keys)
        feed_forward = partial(self.feed_forward, dropout_key=keys)
        return self.feed_forward_residual(x_BSD, feed_forward, dropout_key=keys)


class DecoderLayer(nnx.Module):
    """Decoder layer: causal self-attention, cross-attention and feed-forward network."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Build attention, feed-forward network and residual connections from the config."""
        self.self_attention = _attention(config, rngs)
        self.self_attention_residual = Residual(config)
        self.cross_attention = _attention(config, rngs)
        self.cross_attention_residual = Residual(config)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.feed_forward_residual = Residual(config)

    @checked
    def __call__(
        self,
        x_BTD: jax.Array,
        memory_BSD: jax.Array | None,
        self_mask_BHTT: jax.Array | None,
        cross_mask_BHTS: jax.Array | None,
        *,
        dropout_key: DropoutKey = None,
        cache: LayerAttention | None = None,
    ) -> jax.Array:
        """Apply the layer to [B, T, D]. ``dropout_key=None`` turns dropout off.

        With a ``cache``, runs one decoding step with T hypotheses for each sentence. The KV cache
        replaces memory and masks.
        """
        keys = as_keys(dropout_key)

        def attend(y_BTD: jax.Array) -> jax.Array:
            attention = self.self_attention
            if cache is None:
                return attention(y_BTD, None, self_mask_BHTT, dropout_key=keys)
            arrays = attention.project(y_BTD, packed=runs_kernels())
            return attention.output(cache.to_history(*arrays))

        def attend_to_memory(y_BTD: jax.Array) -> jax.Array:
            attention = self.cross_attention
            if cache is None:
                return attention(y_BTD, memory_BSD, cross_mask_BHTS, dropout_key=keys)
            return attention.output(cache.to_source(attention.query(y_BTD)))

        x_BTD = self.self_attention_residual(x_BTD, attend, dropout_key=keys)
        x_BTD = self.cross_attention_residual(x_BTD, attend_to_memory, dropout_key=keys)
        feed_forward = partial(self.feed_forward, dropout_key=keys)
        return self.feed_forward_residual(x_BTD, feed_forward, dropout_key=keys)
