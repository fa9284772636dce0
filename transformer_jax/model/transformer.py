"""Embeddings, encoder, decoder and the whole Transformer (paper sections 3.1 and 3.4), with its
one-step decoding.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import Projection, attention_mask, dropout
from transformer_jax.model.cache import DecoderCache, attend_to_blocks, empty_cache, mean_weights
from transformer_jax.model.layers import (
    DecoderLayer,
    EncoderLayer,
    LayerNorm,
    compute_dtype,
    segment_positions,
    sinusoidal_positions,
)
from transformer_jax.special_ids import BOS_ID, PAD_ID


class Embedding(nnx.Module):
    """Token vectors times sqrt(d_model) plus positions (sections 3.4 and 3.5); the matrix may
    double as softmax weights.
    """

    def __init__(self, vocab_size: int, config: ModelConfig, *, rngs: nnx.Rngs):
        """The matrix, [V, D], is drawn from N(0, d_model^-1)."""
        scale = config.d_model**-0.5
        self.matrix = nnx.Param(
            scale * jax.random.normal(rngs.params(), (vocab_size, config.d_model), jnp.float32)
        )
        learned = config.positions == "learned"
        self.position_matrix = (
            nnx.Param(
                scale
                * jax.random.normal(
                    rngs.params(), (config.max_positions, config.d_model), jnp.float32
                )
            )
            if learned
            else None
        )
        self.layout = config.positions
        self.dtype = compute_dtype(config)

    def __call__(
        self, tokens_BL: jax.Array, positions_BL: jax.Array, *, num_positions: int
    ) -> jax.Array:
        """[B, L, D] for tokens standing at ``positions_BL`` (axis B may be 1), below
        ``num_positions`` for all but padding.
        """
        d_model = self.matrix.shape[1]
        x_BLD = jnp.take(self.matrix[...], tokens_BL, axis=0) * d_model**0.5
        if self.position_matrix is not None:
            if num_positions > self.position_matrix.shape[0]:
                raise ValueError(
                    f"A sequence of {num_positions} positions, but model.max_positions is {self.position_matrix.shape[0]}; "
                    "learned positions cannot go beyond it."
                )
            table_LD = self.position_matrix[...] * d_model**0.5
        else:
            table_LD = jnp.asarray(sinusoidal_positions(num_positions, d_model, layout=self.layout))
        # The padding of a packed row may be a longer run than any sentence: clipped, as even masked
        # it must not be NaN.
        return (x_BLD + jnp.take(table_LD, positions_BL, axis=0, mode="clip")).astype(self.dtype)


class Encoder(nnx.Module):
    """A stack of N encoder layers."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Pre-norm stacks end in one more norm."""
        self.layers = nnx.List([EncoderLayer(config, rngs=rngs) for _ in range(config.num_layers)])
        self.final_norm = (
            LayerNorm(config.d_model, epsilon=config.norm_epsilon) if config.norm == "pre" else None
        )
        self.remat = config.remat

    def __call__(
        self, x_BSD: jax.Array, mask_BHSS: jax.Array, *, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """[B, S, D] to [B, S, D]."""
        for i, layer in enumerate(self.layers):
            run = partial(layer, dropout_key=_fold(dropout_key, i))
            x_BSD = (jax.checkpoint(run) if self.remat else run)(x_BSD, mask_BHSS)
        return x_BSD if self.final_norm is None else self.final_norm(x_BSD)


class Decoder(nnx.Module):
    """A stack of N decoder layers."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Pre-norm stacks end in one more norm."""
        self.layers = nnx.List(
            [DecoderLayer(config, rngs=rngs) for _ in range(config.decoder_layers)]
        )
        self.final_norm = (
            LayerNorm(config.d_model, epsilon=config.norm_epsilon) if config.norm == "pre" else None
        )
        self.remat = config.remat

    def __call__(
        self,
        x_BTD: jax.Array,
        memory_BSD: jax.Array,
        self_mask_BHTT: jax.Array,
        cross_mask_BHTS: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """[B, T, D] to [B, T, D]."""
        for i, layer in enumerate(self.layers):
            run = partial(layer, dropout_key=_fold(dropout_key, i))
            x_BTD = (jax.checkpoint(run) if self.remat else run)(
                x_BTD, memory_BSD, self_mask_BHTT, cross_mask_BHTS
            )
        return x_BTD if self.final_norm is None else self.final_norm(x_BTD)


class Transformer(nnx.Module):
    """The encoder-decoder Transformer. Training calls the module; decoding uses encode,
    start_cache, decode_step.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Modules hold parameters only; randomness (dropout keys) is given at call time."""
        self.config = config
        self.target_embedding = Embedding(config.vocab_size, config, rngs=rngs)
        self.source_embedding = (
            None
            if config.tie_embeddings == "all"
            else Embedding(config.source_vocab_size or config.vocab_size, config, rngs=rngs)
        )
        self.encoder = Encoder(config, rngs=rngs)
        self.decoder = Decoder(config, rngs=rngs)
        self.softmax_matrix = (
            nnx.Param(
                config.d_model**-0.5
                * jax.random.normal(rngs.params(), (config.vocab_size, config.d_model), jnp.float32)
            )
            if config.tie_embeddings == "none"
            else None
        )
        self.softmax_bias = (
            nnx.Param(jnp.zeros((config.vocab_size,), jnp.float32)) if config.softmax_bias else None
        )

    @property
    def output_matrix_VD(self) -> jax.Array:
        """The softmax weights, float32 [V, D]: the target embedding's own matrix unless untied."""
        return (
            self.target_embedding.matrix[...]
            if self.softmax_matrix is None
            else self.softmax_matrix[...]
        )

    @property
    def output_bias_V(self) -> jax.Array | None:
        """The softmax biases, float32 [V], if there are any."""
        return None if self.softmax_bias is None else self.softmax_bias[...]

    def __call__(
        self,
        source_BS: jax.Array,
        target_BT: jax.Array,
        *,
        source_segments_BS: jax.Array | None = None,
        target_segments_BT: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Float32 logits [B, T, V] that predict each target token from the source and the tokens
        before it.
        """
        hidden_BTD = self.hidden(
            source_BS,
            target_BT,
            source_segments_BS=source_segments_BS,
            target_segments_BT=target_segments_BT,
            dropout_key=dropout_key,
        )
        return self.logits(hidden_BTD)

    def hidden(
        self,
        source_BS: jax.Array,
        target_BT: jax.Array,
        *,
        source_segments_BS: jax.Array | None = None,
        target_segments_BT: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The decoder's last layer [B, T, D]: what ``logits`` or a loss with its own softmax takes.

        Args:
          source_BS: tokens, padded with PAD_ID at the end.
          target_BT: the tokens to be predicted, end symbol included; shifted right here (section
            3.1).
          source_segments_BS, target_segments_BT: numbers that tell packed sentences of a row apart,
            0 for padding; None: one sentence a row.
          dropout_key: without a key nothing is dropped.
        """
        key_encoder, key_decoder = (
            (None, None) if dropout_key is None else tuple(jax.random.split(dropout_key))
        )
        memory_BSD = self.encode(source_BS, source_segments_BS, dropout_key=key_encoder)
        source_segments_BS = _segments(source_BS, source_segments_BS)
        target_packed = target_segments_BT is not None
        target_segments_BT = _segments(target_BT, target_segments_BT)
        positions_BT = segment_positions(target_segments_BT)
        before_BT = jnp.pad(target_BT[:, :-1], ((0, 0), (1, 0)))
        inputs_BT = jnp.where(positions_BT == 0, BOS_ID, before_BT)
        x_BTD = self.target_embedding(
            inputs_BT, positions_BT, num_positions=self._num_positions(target_BT, target_packed)
        )
        x_BTD = dropout(x_BTD, self.config.dropout, _fold(key_decoder, 1000))
        return self.decoder(
            x_BTD,
            memory_BSD,
            attention_mask(target_segments_BT, target_segments_BT, causal=True),
            attention_mask(target_segments_BT, source_segments_BS),
            dropout_key=key_decoder,
        )

    def encode(
        self,
        source_BS: jax.Array,
        segments_BS: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The encoder's output for padded source tokens: ``memory_BSD``."""
        num_positions = self._num_positions(source_BS, segments_BS is not None)
        segments_BS = _segments(source_BS, segments_BS)
        embedding = (
            self.target_embedding if self.source_embedding is None else self.source_embedding
        )
        x_BSD = embedding(source_BS, segment_positions(segments_BS), num_positions=num_positions)
        x_BSD = dropout(x_BSD, self.config.dropout, _fold(dropout_key, 1000))
        return self.encoder(
            x_BSD, attention_mask(segments_BS, segments_BS), dropout_key=dropout_key
        )

    def logits(self, hidden_BTD: jax.Array) -> jax.Array:
        """Scores of the next token, float32 [B, T, V], before the softmax."""
        matrix_VD = self.output_matrix_VD.astype(hidden_BTD.dtype)
        logits_BTV = jnp.einsum(
            "BTD,VD->BTV", hidden_BTD, matrix_VD, preferred_element_type=jnp.float32
        )
        return (
            logits_BTV
            if self.softmax_bias is None
            else logits_BTV + self.softmax_bias[...][None, None]
        )

    def _num_positions(self, tokens_BL: jax.Array, packed: bool) -> int:
        """Bound of the positions in rows of this length; a packed row may be longer than any
        sentence in it.
        """
        length = tokens_BL.shape[1]
        return (
            min(length, self.config.max_positions)
            if packed and self.config.positions == "learned"
            else length
        )

    def start_cache(
        self,
        memory_BSD: jax.Array,
        source_mask_BS: jax.Array,
        *,
        beam_size: int,
        max_length: int,
        source_room: int = 0,
        keep_attention: bool = False,
    ) -> DecoderCache:
        """An empty cache for at most ``max_length`` decoder steps; cross-attention is projected
        here, once a sentence.

        Later steps are not remembered, and nothing says so: a search needs as much room as its own
        ``max_length``.

        ``source_room`` above S gives a cache of that source length. With ``keep_attention`` each
        step leaves its cross-attention weights in ``cache.attention_BWS``.
        """
        cross = [layer.cross_attention.keys_values(memory_BSD) for layer in self.decoder.layers]
        return empty_cache(
            cross,
            source_mask_BS,
            beam_size=beam_size,
            max_length=max_length,
            source_room=source_room,
            keep_attention=keep_attention,
        )

    def decode_step(
        self, tokens_BW: jax.Array, cache: DecoderCache
    ) -> tuple[jax.Array, DecoderCache]:
        """Take in each hypothesis' last token (BOS_ID first) and score the next: float32 [B, W, V],
        and the new cache.
        """
        hidden_BWD, cache = self.decode_hidden(tokens_BW, cache)
        return self.logits(hidden_BWD), cache

    def decode_hidden(
        self, tokens_BW: jax.Array, cache: DecoderCache
    ) -> tuple[jax.Array, DecoderCache]:
        """``decode_step`` before the softmax layer: the decoder's output [B, W, D] for the last
        tokens, and the new cache.
        """
        visible_B1LW = cache.visible()
        source_B1S1 = cache.source_mask_BS[:, None, :, None]
        # A finished sentence may run on beyond the end; it must stay finite.
        positions_B1 = jnp.minimum(cache.position_B, cache.max_length - 1)[:, None]
        x_BWD = self.target_embedding(tokens_BW, positions_B1, num_positions=cache.max_length)
        keys, values, attention_BWS = [], [], None
        for i, layer in enumerate(self.decoder.layers):

            def self_attention(
                y_BWD: jax.Array, i: int = i, layer: DecoderLayer = layer
            ) -> jax.Array:
                own_k_BWHK, own_v_BWHK = layer.self_attention.keys_values(y_BWD)
                keys.append(own_k_BWHK)
                values.append(own_v_BWHK)
                out_BWHK = attend_to_blocks(
                    layer.self_attention.query(y_BWD),
                    cache.self_keys[i],
                    cache.self_values[i],
                    visible_B1LW,
                    own_BWHK=(own_k_BWHK, own_v_BWHK),
                )
                return layer.self_attention.output(out_BWHK)

            def cross_attention(
                y_BWD: jax.Array, i: int = i, layer: DecoderLayer = layer
            ) -> jax.Array:
                nonlocal attention_BWS
                q_BWHK = layer.cross_attention.query(y_BWD)
                if cache.attention_BWS is not None:  # that of the last layer stays
                    attention_BWS = mean_weights(q_BWHK, cache.cross_keys[i], source_B1S1)
                out_BWHK = attend_to_blocks(
                    q_BWHK, cache.cross_keys[i], cache.cross_values[i], source_B1S1
                )
                return layer.cross_attention.output(out_BWHK)

            x_BWD = layer.connect(x_BWD, self_attention, cross_attention)
        if self.decoder.final_norm is not None:
            x_BWD = self.decoder.final_norm(x_BWD)
        return x_BWD, cache.append(keys, values, attention_BWS)


def with_cast_weights(model: Transformer) -> Transformer:
    """The same model for a loop of steps: matrices stand in the type that they are multiplied in
    (``compute_dtype``).

    Outputs are the same to the last bit. On a GPU, XLA would convert every matrix anew in each
    step.
    """
    model = nnx.clone(model)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Projection):
            for parameter in (module.kernel, module.bias):
                if parameter is not None:
                    parameter.set_value(parameter[...].astype(module.dtype))
    model.softmax_matrix = nnx.data(
        nnx.Param(model.output_matrix_VD.astype(compute_dtype(model.config)))
    )
    return model


def _segments(tokens_BL: jax.Array, segments_BL: jax.Array | None) -> jax.Array:
    return (tokens_BL != PAD_ID).astype(jnp.int32) if segments_BL is None else segments_BL


def _fold(key: jax.Array | None, number: int) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, number)
