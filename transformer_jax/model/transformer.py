"""The complete Transformer (paper section 3.1), for training and decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import ArrayLike

from transformer_jax.devices.sharding import map_named, parameter_name
from transformer_jax.errors import UserError
from transformer_jax.model.attention import Projection, attention_mask
from transformer_jax.model.dropout import DropoutKey, as_keys, dropout
from transformer_jax.model.gpu import runs_kernels
from transformer_jax.model.kv_cache import DecoderCache, LayerAttention, empty_cache
from transformer_jax.model.layers import Decoder, Embedding, Encoder, embedding_matrix
from transformer_jax.model.matmul import (
    compute_dtype,
    einsum,
    is_mixed,
    is_quantized,
    output_major,
    quantize,
)
from transformer_jax.model.positions import segment_positions
from transformer_jax.settings.checks import check_sizes, checked
from transformer_jax.settings.config import ModelConfig

M = TypeVar("M", bound=nnx.Module)

_LOGITS = "BTD,VD->BTV"


class AttentionWeights(NamedTuple):
    """Attention weights, one float32 array per layer. Padding rows are 0; other rows sum to 1."""

    encoder: tuple[Array, ...]  # [B, H, S, S] each
    decoder: tuple[Array, ...]  # [B, H, T, T] each: self-attention
    cross: tuple[Array, ...]  # [B, H, T, S] each: cross-attention


class Transformer(nnx.Module):
    """The encoder-decoder Transformer.

    Training calls the module or ``hidden``; decoding calls ``encode``, ``start_cache`` and
    ``decode_step``. Modules hold only parameters; dropout keys are passed at call time.

    Attributes:
      softmax_scale: scales [V] of an int8 ``softmax_matrix`` (``with_cast_weights``).
    """

    softmax_scale: nnx.Param[Array] | None = None

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Initialize the parameters with ``rngs``."""
        self.config = config
        self.target_embedding = Embedding(config.vocab_size, config, rngs=rngs)
        shared = config.shares_embeddings
        self.source_embedding = (
            None
            if shared and config.share_positions
            else Embedding(
                config.source_vocab_size or config.vocab_size,
                config,
                has_matrix=not shared,
                rngs=rngs,
            )
        )
        self.encoder = Encoder(config, rngs=rngs)
        self.decoder = Decoder(config, rngs=rngs)
        self.softmax_matrix = (
            None
            if config.ties_softmax
            else embedding_matrix(config.vocab_size, config.d_model, rngs)
        )
        self.softmax_bias = (
            nnx.Param(jnp.zeros((config.vocab_size,), jnp.float32)) if config.softmax_bias else None
        )

    @property
    def output_matrix_VD(self) -> Array:
        """Softmax matrix, float32 [V, D]; the target embedding matrix if tied."""
        matrix = self.softmax_matrix
        return self._target_matrix_VD if matrix is None else matrix[...]

    @property
    def _target_matrix_VD(self) -> Array:
        matrix = self.target_embedding.matrix
        assert matrix is not None
        return matrix[...]

    @property
    def output_bias_V(self) -> Array | None:
        """Softmax biases, float32 [V], or None."""
        return None if self.softmax_bias is None else self.softmax_bias[...]

    def __call__(
        self,
        source_BS: Array,
        target_BT: Array,
        **options: Any,
    ) -> Array:
        """Compute each target token's logits from the source and earlier tokens, float32 [B, T, V].

        Takes the same arguments as ``hidden``.
        """
        return self.logits(self.hidden(source_BS, target_BT, **options))

    @checked
    def hidden(
        self,
        source_BS: Array,
        target_BT: Array,
        *,
        source_segments_BS: Array | None = None,
        target_segments_BT: Array | None = None,
        dropout_key: DropoutKey = None,
    ) -> Array:
        """Compute the decoder output [B, T, D] for ``logits`` or a loss that includes the softmax.

        Args:
          source_BS: token ids, padded with ``config.pad_id`` at the end.
          target_BT: token ids to predict, including EOS. This method shifts them right for teacher
            forcing (section 3.1).
          source_segments_BS, target_segments_BT: segment ids of packed rows; 0 is padding. Pass
            both or neither. None: one sentence per row.
          dropout_key: None turns dropout off.
        """
        if (source_segments_BS is None) != (target_segments_BT is None):
            raise UserError(
                "Only one of source_segments_BS and target_segments_BT is given; expected both, "
                "or neither for one sentence per row."
            )
        keys = as_keys(dropout_key)
        memory_BSD = self.encode(source_BS, source_segments_BS, dropout_key=keys)
        segments_BT = self._segments(target_BT, target_segments_BT)
        positions_BT = segment_positions(segments_BT)
        start_id = self.config.decoder_start_id
        inputs_BT = jnp.where(positions_BT == 0, start_id, _shift_right(target_BT))
        x_BTD = self._embed(
            self.target_embedding,
            inputs_BT,
            positions_BT,
            packed=target_segments_BT is not None,
            keys=keys,
        )
        if not self.config.train_decoder_start:
            is_start_BT1 = (positions_BT == 0)[..., None]
            x_BTD = jnp.where(is_start_BT1, jax.lax.stop_gradient(x_BTD), x_BTD)
        return self.decoder(
            x_BTD,
            memory_BSD,
            attention_mask(segments_BT, segments_BT, causal=True),
            attention_mask(segments_BT, self._segments(source_BS, source_segments_BS)),
            dropout_key=keys,
        )

    @checked
    def attention_weights(self, source_BS: Array, target_BT: Array) -> AttentionWeights:
        """Compute attention weights of all layers and heads, one sentence per row, without dropout.

        Under ``jit``, layers and heads that are not used are not computed. Takes the same arguments
        as ``hidden``.
        """
        model = nnx.clone(self)
        model.set_attributes(sow_weights=True, remat=False)
        _, sown = nnx.capture(Transformer.hidden, nnx.Intermediate)(model, source_BS, target_BT)

        def stack_weights(stack: str, attention: str, queries_BL: Array) -> tuple[Array, ...]:
            is_query_B1L1 = (queries_BL != self.config.pad_id)[:, None, :, None]
            layers = [layer[attention] for _, layer in sorted(sown[stack]["layers"].items())]
            return tuple(layer["weights"][0] * is_query_B1L1 for layer in layers)

        return AttentionWeights(
            stack_weights("encoder", "self_attention", source_BS),
            stack_weights("decoder", "self_attention", target_BT),
            stack_weights("decoder", "cross_attention", target_BT),
        )

    def cross_attention(self, source_BS: Array, target_BT: Array, layer: int | None) -> Array:
        """Compute a decoder layer's cross-attention weights [B, T, S], averaged over heads. None:
        the first head of ``alignment_layer``, if it is set, or the last layer.
        """
        cross = self.attention_weights(source_BS, target_BT).cross
        alignment_layer = self.config.alignment_layer
        if layer is None and alignment_layer is not None:
            return cross[alignment_layer][:, 0]
        return cross[-1 if layer is None else layer].mean(axis=1)

    def hidden_and_alignment(
        self, *args: Any, with_alignment: bool, **options: Any
    ) -> tuple[Array, Any]:
        """Compute ``hidden`` and, if ``with_alignment``, the weights [B, T, S] of the first
        cross-attention head of ``alignment_layer``.
        """
        layer_index = self.config.alignment_layer
        if layer_index is None or not with_alignment:
            return self.hidden(*args, **options), None
        model = nnx.clone(self)
        layer = model.decoder.layers[layer_index]
        layer.remat = False
        layer.cross_attention.sow_weights = True
        hidden_BTD, sown = nnx.capture(model.hidden, nnx.Intermediate)(*args, **options)
        [layer] = sown["decoder"]["layers"].values()
        return hidden_BTD, layer["cross_attention"]["weights"][0][:, 0]

    @checked
    def encode(
        self,
        source_BS: Array,
        segments_BS: Array | None = None,
        *,
        dropout_key: DropoutKey = None,
    ) -> Array:
        """Encode padded source token ids as ``memory_BSD``."""
        keys = as_keys(dropout_key)
        packed = segments_BS is not None
        segments_BS = self._segments(source_BS, segments_BS)
        positions_BS = segment_positions(segments_BS)
        x_BSD = self._embed(
            self.source_embedding or self.target_embedding,
            source_BS,
            positions_BS,
            packed=packed,
            keys=keys,
        )
        mask_BHSS = attention_mask(segments_BS, segments_BS)
        return self.encoder(x_BSD, mask_BHSS, dropout_key=keys)

    def _segments(self, tokens_BL: Array, segments_BL: Array | None) -> Array:
        if segments_BL is not None:
            return segments_BL
        return (tokens_BL != self.config.pad_id).astype(jnp.int32)

    def _embed(
        self,
        embedding: Embedding,
        tokens_BL: Array,
        positions_BL: Array,
        *,
        packed: bool,
        keys: DropoutKey,
    ) -> Array:
        num_positions = tokens_BL.shape[1]
        # A packed row can be longer than any sentence in it.
        if packed and isinstance(num_positions, int):
            num_positions = min(num_positions, self.config.position_limit)
        x_BLD = embedding(
            tokens_BL,
            positions_BL,
            num_positions=num_positions,
            matrix_VD=self._target_matrix_VD if embedding.matrix is None else None,
        )
        return dropout(x_BLD, self.config.dropout, keys)

    @checked
    @jax.named_scope("logits")
    def logits(self, hidden_BTD: Array) -> Array:
        """Compute logits of the next token, float32 [B, T, V]."""
        dtype = compute_dtype(self.config)
        matrix_VD = self.output_matrix_VD
        check_sizes({"softmax_matrix_VD": matrix_VD, "hidden_BTD": hidden_BTD})
        scale_V = None if self.softmax_scale is None else self.softmax_scale[...]
        if scale_V is None:
            matrix_VD = matrix_VD.astype(dtype)
        logits_BTV = einsum(
            _LOGITS, hidden_BTD, matrix_VD, dtype=dtype, result=jnp.float32, scale=scale_V
        )
        bias_V = self.output_bias_V
        return logits_BTV if bias_V is None else logits_BTV + bias_V[None, None]

    @checked
    def start_cache(
        self,
        memory_BSD: Array,
        source_mask_BS: Array,
        *,
        beam_size: int,
        max_length: int,
        source_capacity: int = 0,
    ) -> DecoderCache:
        """Create a KV cache with the source's cross-attention keys and values and an empty history.

        Args:
          source_mask_BS: bool, True for real source tokens.
          max_length: capacity in steps. Further steps are silently dropped.
          source_capacity: number of source positions to pad S to.
        """
        return empty_cache(
            self.cross_keys_values(memory_BSD),
            source_mask_BS,
            beam_size=beam_size,
            max_length=max_length,
            source_capacity=source_capacity,
        )

    def cross_keys_values(self, memory_BSD: Array) -> list[tuple[Array, Array]]:
        """Compute each decoder layer's cross-attention keys and values, both [B, S, H, K]."""
        return [layer.cross_attention.keys_values(memory_BSD) for layer in self.decoder.layers]

    @checked
    def decode_step(self, tokens_BW: Array, cache: DecoderCache) -> tuple[Array, DecoderCache]:
        """Run one decoding step on the last token of each hypothesis (at first
        ``decoder_start_id``).

        Returns:
          Logits of the next token, float32 [B, W, V], and the new cache.
        """
        layers = cache.layers()
        return self.next_logits(tokens_BW, layers), cache.append(layers)

    def next_logits(self, tokens_BW: Array, layers: Sequence[LayerAttention]) -> Array:
        """Compute the logits of ``decode_step``. ``layers`` collect the new keys and values."""
        cache = layers[0].cache
        shape = cache.ancestors_BWT.shape[:2]
        assert tokens_BW.shape == shape, f"tokens_BW is {tokens_BW.shape}; the cache is for {shape}"
        # A finished sentence can run past the end of the cache; its positions are clipped.
        num_positions = min(cache.ancestors_BWT.shape[2], self.config.position_limit)
        x_BWD = self.target_embedding(
            tokens_BW, cache.position_B[:, None], num_positions=num_positions
        )
        hidden_BWD = self.decoder(x_BWD, None, None, None, caches=layers)
        if jax.default_backend() == "tpu":  # XLA would copy logits in rows of W hypotheses
            hidden_BWD = hidden_BWD.reshape(1, -1, hidden_BWD.shape[2])
        return self.logits(hidden_BWD).reshape(*tokens_BW.shape, -1)


class AbstractModel(NamedTuple):
    """A model without parameter values. ``nnx.merge(graph, parameters)`` adds parameters."""

    graph: Any  # nnx graph definition
    parameters: Any  # nested dict of shapes and types


@lru_cache(maxsize=32)
def abstract_model(config: ModelConfig) -> AbstractModel:
    """Build the abstract model for a config. Cached, because it takes as long as tracing a step."""
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    graph, parameters = nnx.split(model, nnx.Param)
    return AbstractModel(graph, nnx.to_pure_dict(parameters))


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by name, such as ``decoder.layers.0.feed_forward.inner.
    kernel``. docs/own_models.md lists names and axes.
    """
    leaves, _ = jax.tree.flatten_with_path(abstract_model(config).parameters)
    return {parameter_name(path): leaf.shape for path, leaf in leaves}


def model_from_arrays(config: ModelConfig, arrays: Mapping[str, ArrayLike]) -> Transformer:
    """Build a model from arrays by parameter name, for example weights of your own PyTorch model.

    Raises ``UserError`` unless the names and shapes are those of ``parameter_shapes(config)``.
    """
    shapes = parameter_shapes(config)
    missing = sorted(shapes.keys() - arrays.keys())
    unknown = sorted(arrays.keys() - shapes.keys())
    if missing or unknown:
        raise UserError(
            f"The arrays lack {len(missing)} parameters of the model "
            f"({', '.join(missing[:3]) or 'none'}) and have {len(unknown)} others "
            f"({', '.join(unknown[:3]) or 'none'}); expected the names of "
            "parameter_shapes(config). Rename arrays, or change the config."
        )
    for name, shape in shapes.items():
        array = np.asarray(arrays[name])
        if array.shape != shape or not jnp.issubdtype(array.dtype, jnp.floating):
            raise UserError(
                f"{name} is {array.dtype} with shape {list(array.shape)}; expected floating point "
                f"with shape {list(shape)}. A linear layer of PyTorch stores [out, in]: transpose "
                "its weight, then reshape it."
            )
    graph, parameters = abstract_model(config)
    values = map_named(lambda name, _: jnp.array(arrays[name], jnp.float32), parameters)
    return nnx.merge(graph, values)


def with_cast_weights(model: M, weights: str = "auto") -> M:
    """Copy a model (or an ensemble) for a decoding loop, with its matrices rounded in advance.

    By default to ``compute_dtype``: outputs are bit-identical, but without this copy, XLA on a GPU
    would cast every matrix in each step. With ``weights`` of int8, to integers (``quantize``).
    """
    model = nnx.clone(model)
    modules = [module for _, module in nnx.iter_modules(model)]
    for module in modules:
        if isinstance(module, Projection):
            if is_quantized(weights):
                kernel, scale = quantize(module.einsum_str, module.kernel[...], weights)
                module.kernel = nnx.Param(kernel)
                module.scale = nnx.Param(scale)
            else:
                for parameter in (module.kernel, module.bias):
                    if parameter is not None:
                        parameter.set_value(parameter[...].astype(module.dtype))
            if is_quantized(weights) or is_mixed(module.dtype):
                module.einsum_str, kernel = output_major(module.einsum_str, module.kernel[...])
                module.kernel.set_value(kernel)
    for module in modules:
        if isinstance(module, Transformer):
            if runs_kernels():  # the decoding kernel reads merged projections
                for layer in module.decoder.layers:
                    layer.self_attention.merge_projections()
            matrix_VD = module.output_matrix_VD
            if is_quantized(weights):
                matrix_VD, scale_V = quantize(_LOGITS, matrix_VD, weights)
                module.softmax_scale = nnx.Param(scale_V)
            else:
                matrix_VD = matrix_VD.astype(compute_dtype(module.config))
            module.softmax_matrix = nnx.data(nnx.Param(matrix_VD))
    return model


def _shift_right(x_BL: Array) -> Array:
    return jnp.pad(x_BL[:, :-1], ((0, 0), (1, 0)))
