"""Embedding, feed-forward network, encoder and decoder (paper section 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from transformer_jax.model.attention import MultiHeadAttention, Projection
from transformer_jax.model.dropout import DropoutKey, as_keys, dropout
from transformer_jax.model.gpu import runs_kernels
from transformer_jax.model.kv_cache import LayerAttention
from transformer_jax.model.matmul import activation_dtype, compute_dtype
from transformer_jax.model.norms import Norm, Residual
from transformer_jax.model.positions import added_positions, position_biases
from transformer_jax.settings.checks import PositiveInt, checked
from transformer_jax.settings.config import ModelConfig


class Embedding(nnx.Module):
    """Token embeddings times sqrt(d_model), plus positional encodings (sections 3.4 and 3.5)."""

    @checked
    def __init__(
        self,
        vocab_size: PositiveInt,
        config: ModelConfig,
        *,
        has_matrix: bool = True,
        rngs: nnx.Rngs,
    ):
        """Initialize the matrices from N(0, d_model^-1). The token matrix is [V, D].

        If ``has_matrix`` is False, calls must pass the token matrix of another embedding.
        """
        self.matrix = embedding_matrix(vocab_size, config.d_model, rngs) if has_matrix else None
        position_matrix = None
        if config.positions == "learned":
            num_positions = config.max_positions + config.position_offset
            position_matrix = embedding_matrix(num_positions, config.d_model, rngs)
        self.position_matrix = position_matrix
        self.norm = Norm(config) if config.embedding_norm else None
        self.config = config
        # Token id, outside the vocabulary, whose embedding is zero.
        self.zero_id: int | None = None

    @checked
    @jax.named_scope("embedding")
    def __call__(
        self,
        tokens_BL: Array,
        positions_BL: Array,
        *,
        num_positions: int,
        matrix_VD: Array | None = None,
    ) -> Array:
        """Embed tokens at these positions. Returns [B, L, D]. ``positions_BL`` may broadcast.

        Args:
          num_positions: exclusive upper bound for the positions of real tokens.
          matrix_VD: token embeddings to use instead of this module's matrix.

        Raises:
          UserError: there are more positions than learned embeddings.
        """
        config = self.config
        if matrix_VD is None:
            assert self.matrix is not None
            matrix_VD = self.matrix[...]
        # Token ids outside the vocabulary give NaN; checkify's index checks can find them.
        x_BLD = matrix_VD.at[tokens_BL].get(mode="fill", wrap_negative_indices=False)
        if self.zero_id is not None:
            x_BLD = jnp.where(tokens_BL[..., None] == self.zero_id, 0, x_BLD)
        if config.zero_decoder_start:
            x_BLD = jnp.where(tokens_BL[..., None] == config.decoder_start_id, 0, x_BLD)
        if config.embedding_scale != "none":
            x_BLD = x_BLD * config.d_model**0.5
        learned_LD = None if self.position_matrix is None else self.position_matrix[...]
        table_LD = added_positions(config, num_positions, learned_LD)
        if table_LD is not None:
            # Padding at the end of a packed row can be longer than any sentence. Its positions are
            # clipped, because NaN would spread even if masked.
            x_BLD += jnp.take(table_LD, positions_BL, axis=0, mode="clip")
        if self.norm is not None:
            x_BLD = self.norm(x_BLD)
        return x_BLD.astype(activation_dtype(config))


def embedding_matrix(size: int, d_model: int, rngs: nnx.Rngs) -> nnx.Param:
    """Create a float32 parameter [size, D] drawn from N(0, d_model^-1)."""
    initializer = nnx.initializers.normal(d_model**-0.5, jnp.float32)
    return nnx.Param(initializer(rngs.params(), (size, d_model)))


@jax.custom_jvp
def relu(x: Array) -> Array:
    """Return max(x, 0), with gradient 0 at 0. The backward pass needs only the output."""
    return jax.nn.relu(x)


@relu.defjvp
def _relu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # The barrier makes XLA store y instead of recomputing it from x in each matmul that uses it.
    y = jax.lax.optimization_barrier(relu(*primals))
    return y, jnp.where(y > 0, tangents[0], jnp.zeros((), y.dtype))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
    "swiglu": jax.nn.silu,
    "geglu": jax.nn.gelu,
}


class FeedForward(nnx.Module):
    """Feed-forward network max(0, x W_1 + b_1) W_2 + b_2 (equation 2), or another activation.

    swiglu is (silu(x W_gate) * x W_1) W_2 (Shazeer, 2020), with optional biases. In geglu, GELU
    replaces SiLU.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Build from d_model, d_ff, activation, feed_forward_bias and feed_forward_dropout."""
        D = config.d_model
        F = config.d_ff
        dtype = compute_dtype(config)
        projection = partial(Projection, use_bias=config.feed_forward_bias, dtype=dtype, rngs=rngs)
        self.inner = projection("BLD,DF->BLF", (D, F))
        self.output = projection("BLF,FD->BLD", (F, D))
        self.gate = projection("BLD,DF->BLF", (D, F)) if config.is_gated else None
        self.activation = config.activation
        self.dropout = config.feed_forward_dropout

    @checked
    @jax.named_scope("feed_forward")
    def __call__(self, x_BLD: Array, *, dropout_key: DropoutKey = None) -> Array:
        """Apply the network at every position. Returns [B, L, D]."""
        activation = ACTIVATIONS[self.activation]
        hidden_BLF = self.inner(x_BLD)
        if self.gate is None:
            hidden_BLF = activation(hidden_BLF)
        else:
            hidden_BLF *= activation(self.gate(x_BLD))
        return self.output(dropout(hidden_BLF, self.dropout, dropout_key))


class _Layer(nnx.Module):
    """Attention and feed-forward network, with residual connections."""

    has_memory = False

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Build attention, feed-forward network and residual connections from the config."""
        self.remat = config.remat
        self.self_attention = MultiHeadAttention.from_config(config, rngs=rngs)
        self.self_attention_residual = Residual(config)
        if self.has_memory:
            self.cross_attention = MultiHeadAttention.from_config(config, rngs=rngs)
            self.cross_attention_residual = Residual(config)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.feed_forward_residual = Residual(config)

    def _apply_feed_forward(self, x_BLD: Array, dropout_key: DropoutKey) -> Array:
        # nnx.tabulate cannot show calls that have a module as an argument.
        return self.feed_forward(x_BLD, dropout_key=dropout_key)


class EncoderLayer(_Layer):
    """Encoder layer: self-attention and feed-forward network, with residual connections."""

    @checked
    def __call__(
        self,
        x_BSD: Array,
        mask_BHSS: Array,
        *,
        bias_BHLL: Array | None = None,
        dropout_key: DropoutKey = None,
    ) -> Array:
        """Apply the layer to [B, S, D]. ``dropout_key=None`` turns dropout off.

        ``bias_BHLL`` is added to the scores of self-attention; axis B can be 1.
        """
        keys = as_keys(dropout_key)

        def attend(y_BSD: Array, dropout_key: DropoutKey) -> Array:
            attention = self.self_attention
            return attention(y_BSD, None, mask_BHSS, bias_BHLL, dropout_key=dropout_key)

        x_BSD = self.self_attention_residual(x_BSD, attend, dropout_key=keys)
        return self.feed_forward_residual(x_BSD, self._apply_feed_forward, dropout_key=keys)


class DecoderLayer(_Layer):
    """Decoder layer: causal self-attention, cross-attention and feed-forward network."""

    has_memory = True

    @checked
    def __call__(
        self,
        x_BTD: Array,
        memory_BSD: Array | None,
        self_mask_BHTT: Array | None,
        cross_mask_BHTS: Array | None,
        *,
        bias_BHLL: Array | None = None,
        dropout_key: DropoutKey = None,
        cache: LayerAttention | None = None,
    ) -> Array:
        """Apply the layer to [B, T, D]. ``dropout_key=None`` turns dropout off.

        ``bias_BHLL`` is added to the scores of self-attention; axis B can be 1. With a ``cache``,
        runs one decoding step with T hypotheses for each sentence. The KV cache replaces memory,
        masks and bias.
        """
        keys = as_keys(dropout_key)

        def attend(y_BTD: Array, dropout_key: DropoutKey) -> Array:
            attention = self.self_attention
            if cache is None:
                return attention(y_BTD, None, self_mask_BHTT, bias_BHLL, dropout_key=dropout_key)
            arrays = attention.project(y_BTD, merged=runs_kernels())
            return attention.output(cache.attend_to_history(*arrays))

        def attend_to_memory(y_BTD: Array, dropout_key: DropoutKey) -> Array:
            attention = self.cross_attention
            if cache is None:
                return attention(y_BTD, memory_BSD, cross_mask_BHTS, dropout_key=dropout_key)
            return attention.output(cache.attend_to_source(attention.queries(y_BTD)))

        x_BTD = self.self_attention_residual(x_BTD, attend, dropout_key=keys)
        x_BTD = self.cross_attention_residual(x_BTD, attend_to_memory, dropout_key=keys)
        return self.feed_forward_residual(x_BTD, self._apply_feed_forward, dropout_key=keys)


class _Stack(nnx.Module):
    """Stack of N layers with an optional final norm."""

    layer: type[Any]

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Build the config's number of layers and the optional final norm."""
        is_decoder = self.layer.has_memory
        num_layers = config.decoder_layers if is_decoder else config.num_layers
        self.layers = nnx.List([self.layer(config, rngs=rngs) for _ in range(num_layers)])
        self.final_norm = Norm(config) if config.has_final_norm else None
        self.output_scale = config.d_model**-0.5 if config.output_scale and is_decoder else 1.0
        self.relative_biases = position_biases(
            config, num_layers, bidirectional=not is_decoder, rngs=rngs
        )

    @checked
    def __call__(
        self,
        x_BLD: Array,
        *context: Array | None,
        dropout_key: DropoutKey = None,
        caches: Sequence[LayerAttention] | None = None,
    ) -> Array:
        """Apply all layers to [B, L, D]. Every layer gets the same ``context``."""
        keys = as_keys(dropout_key)
        if caches is None:
            biases = [bias.between_all(x_BLD.shape[1]) for bias in self.relative_biases]
        else:
            cache = caches[0].cache
            capacity = cache.ancestors_BWT.shape[2]
            biases = [
                bias.at_positions(cache.position_B, capacity) for bias in self.relative_biases
            ]
        for i, layer in enumerate(self.layers):
            bias = biases[min(i, len(biases) - 1)] if biases else None
            if caches is not None:
                caches[i].bias_BHT = bias
                x_BLD = layer(x_BLD, *context, cache=caches[i])
            else:
                apply_layer = partial(layer, bias_BHLL=bias, dropout_key=keys)
                x_BLD = (jax.checkpoint(apply_layer) if layer.remat else apply_layer)(
                    x_BLD, *context
                )
        if self.final_norm is not None:
            x_BLD = self.final_norm(x_BLD)
        return x_BLD if self.output_scale == 1 else x_BLD * self.output_scale


class Encoder(_Stack):
    """Stack of encoder layers: ``encoder(x_BSD, mask_BHSS)``."""

    layer = EncoderLayer


class Decoder(_Stack):
    """Stack of decoder layers: ``decoder(x_BTD, memory_BSD, self_mask_BHTT, cross_mask_BHTS)``."""

    layer = DecoderLayer
