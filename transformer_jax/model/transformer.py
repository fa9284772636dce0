"""Embeddings, encoder, decoder and the whole Transformer (paper sections 3.1 and 3.4), with its one-step decoding."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx, struct

from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import MASKED, attention_mask, dropout
from transformer_jax.model.layers import (
    DecoderLayer,
    EncoderLayer,
    LayerNorm,
    compute_dtype,
    segment_positions,
    sinusoidal_positions,
)
from transformer_jax.tokenizer import BOS_ID, PAD_ID


class Embedding(nnx.Module):
    """Token vectors times sqrt(d_model) plus positions (sections 3.4 and 3.5); the matrix may double as softmax weights."""

    def __init__(self, vocab_size: int, config: ModelConfig, *, rngs: nnx.Rngs):
        """The matrix, [V, D], is drawn from N(0, d_model^-1)."""
        scale = config.d_model**-0.5
        self.matrix = nnx.Param(scale * jax.random.normal(rngs.params(), (vocab_size, config.d_model), jnp.float32))
        learned = config.positions == "learned"
        self.position_matrix = (
            nnx.Param(scale * jax.random.normal(rngs.params(), (config.max_positions, config.d_model), jnp.float32))
            if learned
            else None
        )
        self.layout = config.positions
        self.dtype = compute_dtype(config)

    def __call__(self, tokens_BL: jax.Array, positions_BL: jax.Array, *, num_positions: int) -> jax.Array:
        """[B, L, D] for tokens standing at ``positions_BL`` (axis B may be 1), all of them below ``num_positions``."""
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
        return (x_BLD + jnp.take(table_LD, positions_BL, axis=0)).astype(self.dtype)


class Encoder(nnx.Module):
    """A stack of N encoder layers."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Pre-norm stacks end in one more norm."""
        self.layers = nnx.List([EncoderLayer(config, rngs=rngs) for _ in range(config.num_layers)])
        self.final_norm = LayerNorm(config.d_model) if config.norm == "pre" else None
        self.remat = config.remat

    def __call__(self, x_BSD: jax.Array, mask_BHSS: jax.Array, *, dropout_key: jax.Array | None = None) -> jax.Array:
        """[B, S, D] to [B, S, D]."""
        for i, layer in enumerate(self.layers):
            run = partial(layer, dropout_key=_fold(dropout_key, i))
            x_BSD = (jax.checkpoint(run) if self.remat else run)(x_BSD, mask_BHSS)
        return x_BSD if self.final_norm is None else self.final_norm(x_BSD)


class Decoder(nnx.Module):
    """A stack of N decoder layers."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Pre-norm stacks end in one more norm."""
        self.layers = nnx.List([DecoderLayer(config, rngs=rngs) for _ in range(config.decoder_layers)])
        self.final_norm = LayerNorm(config.d_model) if config.norm == "pre" else None
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
            x_BTD = (jax.checkpoint(run) if self.remat else run)(x_BTD, memory_BSD, self_mask_BHTT, cross_mask_BHTS)
        return x_BTD if self.final_norm is None else self.final_norm(x_BTD)


@struct.dataclass
class DecoderCache:
    """What decoding one more token needs; W hypotheses of each sentence share its cross-attention.

    Self-attention keys and values stay where they were written: position t of beam w lives in slot t * W + w for good.
    When beams are reordered, only the small table ``ancestors_BWT`` moves; it names, for each beam, the beam in whose
    slot each earlier position of its history lives.
    """

    self_keys: tuple[jax.Array, ...]  # one a layer, [B, H, T*W, K]
    self_values: tuple[jax.Array, ...]  # likewise
    cross_keys: tuple[jax.Array, ...]  # one a layer, [B, H, S, K]
    cross_values: tuple[jax.Array, ...]  # likewise
    source_mask_BS: jax.Array  # True: a real source token
    ancestors_BWT: jax.Array  # int32
    position: jax.Array  # int32 scalar: the number of tokens already taken in

    def reorder(self, parents_BW: jax.Array) -> DecoderCache:
        """Beam w goes on from what was beam ``parents_BW[b, w]``."""
        ancestors_BWT = jnp.take_along_axis(self.ancestors_BWT, parents_BW[:, :, None], axis=1)
        return dataclasses.replace(self, ancestors_BWT=ancestors_BWT)


class Transformer(nnx.Module):
    """The encoder-decoder Transformer. Training calls the module; decoding uses encode, start_cache, decode_step."""

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
            nnx.Param(config.d_model**-0.5 * jax.random.normal(rngs.params(), (config.vocab_size, config.d_model), jnp.float32))
            if config.tie_embeddings == "none"
            else None
        )

    @property
    def output_matrix_VD(self) -> jax.Array:
        """The softmax weights, float32 [V, D]: the target embedding's own matrix unless untied."""
        return self.target_embedding.matrix[...] if self.softmax_matrix is None else self.softmax_matrix[...]

    def __call__(
        self,
        source_BS: jax.Array,
        target_BT: jax.Array,
        *,
        source_segments_BS: jax.Array | None = None,
        target_segments_BT: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Float32 logits [B, T, V] that predict each target token from the source and the tokens before it."""
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
          source_BS: pieces, padded with PAD_ID at the end.
          target_BT: the pieces to be predicted, end symbol included; shifted right here (section 3.1).
          source_segments_BS, target_segments_BT: numbers that tell packed sentences of a row apart, 0 for padding;
            None: one sentence a row.
          dropout_key: without a key nothing is dropped.
        """
        key_encoder, key_decoder = (None, None) if dropout_key is None else tuple(jax.random.split(dropout_key))
        memory_BSD = self.encode(source_BS, source_segments_BS, dropout_key=key_encoder)
        source_segments_BS = _segments(source_BS, source_segments_BS)
        target_packed = target_segments_BT is not None
        target_segments_BT = _segments(target_BT, target_segments_BT)
        positions_BT = segment_positions(target_segments_BT)
        before_BT = jnp.pad(target_BT[:, :-1], ((0, 0), (1, 0)))
        inputs_BT = jnp.where(positions_BT == 0, BOS_ID, before_BT)
        x_BTD = self.target_embedding(inputs_BT, positions_BT, num_positions=self._num_positions(target_BT, target_packed))
        x_BTD = dropout(x_BTD, self.config.dropout, _fold(key_decoder, 1000))
        return self.decoder(
            x_BTD,
            memory_BSD,
            attention_mask(target_segments_BT, target_segments_BT, causal=True),
            attention_mask(target_segments_BT, source_segments_BS),
            dropout_key=key_decoder,
        )

    def encode(
        self, source_BS: jax.Array, segments_BS: jax.Array | None = None, *, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """The encoder's output for padded source pieces: ``memory_BSD``."""
        num_positions = self._num_positions(source_BS, segments_BS is not None)
        segments_BS = _segments(source_BS, segments_BS)
        embedding = self.target_embedding if self.source_embedding is None else self.source_embedding
        x_BSD = embedding(source_BS, segment_positions(segments_BS), num_positions=num_positions)
        x_BSD = dropout(x_BSD, self.config.dropout, _fold(dropout_key, 1000))
        return self.encoder(x_BSD, attention_mask(segments_BS, segments_BS), dropout_key=dropout_key)

    def logits(self, hidden_BTD: jax.Array) -> jax.Array:
        """Scores of the next token, float32 [B, T, V], before the softmax."""
        matrix_VD = self.output_matrix_VD.astype(hidden_BTD.dtype)
        return jnp.einsum("BTD,VD->BTV", hidden_BTD, matrix_VD, preferred_element_type=jnp.float32)

    def _num_positions(self, tokens_BL: jax.Array, packed: bool) -> int:
        """Bound of the positions in rows of this length; a packed row may be longer than any sentence in it."""
        length = tokens_BL.shape[1]
        return min(length, self.config.max_positions) if packed and self.config.positions == "learned" else length

    def start_cache(self, memory_BSD: jax.Array, source_mask_BS: jax.Array, *, beam_size: int, max_length: int) -> DecoderCache:
        """An empty cache for at most ``max_length`` decoder steps; cross-attention is projected here, once a sentence."""
        config, (batch, _, _) = self.config, memory_BSD.shape
        layers = list(self.decoder.layers)
        slots = (batch, config.num_heads, max_length * beam_size)
        cross = [layer.cross_attention.keys_values(memory_BSD) for layer in layers]
        ancestors_BWT = jnp.broadcast_to(jnp.arange(beam_size, dtype=jnp.int32)[None, :, None], (batch, beam_size, max_length))
        return DecoderCache(
            self_keys=tuple(jnp.zeros((*slots, config.head_width_k), memory_BSD.dtype) for _ in layers),
            self_values=tuple(jnp.zeros((*slots, config.head_width_v), memory_BSD.dtype) for _ in layers),
            cross_keys=tuple(k.swapaxes(1, 2) for k, _ in cross),
            cross_values=tuple(v.swapaxes(1, 2) for _, v in cross),
            source_mask_BS=source_mask_BS,
            ancestors_BWT=ancestors_BWT,
            position=jnp.zeros((), jnp.int32),
        )

    def decode_step(self, tokens_BW: jax.Array, cache: DecoderCache) -> tuple[jax.Array, DecoderCache]:
        """Take in each hypothesis' last token (BOS_ID first) and score the next: float32 [B, W, V], and the new cache."""
        beam_size, max_length = cache.ancestors_BWT.shape[1:]
        here = cache.position
        # This token of beam w goes to slot here * W + w, and w is from now on its own ancestor at this position.
        beams_W = jnp.arange(beam_size, dtype=jnp.int32)
        own_BW1 = jnp.broadcast_to(beams_W[None, :, None], (*tokens_BW.shape, 1))
        ancestors_BWT = jax.lax.dynamic_update_slice_in_dim(cache.ancestors_BWT, own_BW1, here, axis=2)
        written_T = jnp.arange(max_length, dtype=jnp.int32) <= here
        visible_BWTW = (ancestors_BWT[..., None] == beams_W[None, None, None]) & written_T[None, None, :, None]
        visible_B1WL = visible_BWTW.reshape(*tokens_BW.shape, -1)[:, None]
        source_B11S = cache.source_mask_BS[:, None, None]

        positions = jnp.broadcast_to(here, (1, 1))
        x_BWD = self.target_embedding(tokens_BW, positions, num_positions=max_length)
        self_keys, self_values = list(cache.self_keys), list(cache.self_values)
        for i, layer in enumerate(self.decoder.layers):

            def self_attention(y_BWD: jax.Array, i: int = i, layer: DecoderLayer = layer) -> jax.Array:
                k_BWHK, v_BWHK = layer.self_attention.keys_values(y_BWD)
                put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=here * beam_size, axis=2)
                self_keys[i] = put(self_keys[i], k_BWHK.swapaxes(1, 2))
                self_values[i] = put(self_values[i], v_BWHK.swapaxes(1, 2))
                q_BWHK = layer.self_attention.query(y_BWD)
                out_BWHK = _attend_to_cache(q_BWHK, self_keys[i], self_values[i], visible_B1WL)
                return layer.self_attention.output(out_BWHK)

            def cross_attention(y_BWD: jax.Array, i: int = i, layer: DecoderLayer = layer) -> jax.Array:
                q_BWHK = layer.cross_attention.query(y_BWD)
                out_BWHK = _attend_to_cache(q_BWHK, cache.cross_keys[i], cache.cross_values[i], source_B11S)
                return layer.cross_attention.output(out_BWHK)

            x_BWD = layer.connect(x_BWD, self_attention, cross_attention)
        if self.decoder.final_norm is not None:
            x_BWD = self.decoder.final_norm(x_BWD)
        cache = dataclasses.replace(
            cache,
            self_keys=tuple(self_keys),
            self_values=tuple(self_values),
            ancestors_BWT=ancestors_BWT,
            position=here + 1,
        )
        return self.logits(x_BWD), cache


def _attend_to_cache(q_BWHK: jax.Array, k_BHLK: jax.Array, v_BHLK: jax.Array, mask_BHWL: jax.Array) -> jax.Array:
    """Equation 1 for the W hypotheses of each sentence over cached keys and values that they share; [B, W, H, K]."""
    q_BWHK = q_BWHK * jnp.asarray(q_BWHK.shape[-1] ** -0.5, q_BWHK.dtype)
    scores_BHWL = jnp.einsum("BWHK,BHLK->BHWL", q_BWHK, k_BHLK, preferred_element_type=jnp.float32)
    weights_BHWL = jax.nn.softmax(jnp.where(mask_BHWL, scores_BHWL, MASKED), axis=-1)
    return jnp.einsum("BHWL,BHLK->BWHK", weights_BHWL.astype(v_BHLK.dtype), v_BHLK)


def _segments(tokens_BL: jax.Array, segments_BL: jax.Array | None) -> jax.Array:
    return (tokens_BL != PAD_ID).astype(jnp.int32) if segments_BL is None else segments_BL


def _fold(key: jax.Array | None, number: int) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, number)
