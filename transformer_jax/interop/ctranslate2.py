"""A model as a folder that ``ctranslate2.Translator`` loads; every variant of ``ModelConfig`` can
be expressed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.config import Config
from transformer_jax.errors import UserError
from transformer_jax.interop.search_settings import length_limits, search_notes
from transformer_jax.interop.vocabulary import TAG, write_sentencepiece
from transformer_jax.interop.weights import (
    Attention,
    Layer,
    Linear,
    Norm,
    plain_weights,
    position_tables,
)
from transformer_jax.model.transformer import Transformer
from transformer_jax.special_ids import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from transformer_jax.tokenizer import Tokenizer

_POSITIONS = 2048  # the table's length for sinusoids, which have no end here


def export_ctranslate2(
    config: Config, model: Transformer, tokenizer: Tokenizer, folder: Path
) -> list[str]:
    """Write ``model`` in float32 into ``folder``, which exists; returns what cannot travel exactly,
    a line each.

    ``model.bin``, ``config.json`` and the vocabulary are what CTranslate2 reads. ``source.spm`` and
    ``target.spm`` turn text into pieces and back; ``generation_config.json`` has the keywords of
    ``translate_batch``, which the format has no place for.
    """
    try:
        from ctranslate2.specs import common_spec, transformer_spec
    except ImportError as error:
        raise UserError(
            f"Exporting to CTranslate2 needs its Python package: pip install ctranslate2 ({error})."
        ) from None
    shape = config.model
    weights = plain_weights(model)
    kinds = common_spec.Activation
    head_width = max(shape.head_width_k, shape.head_width_v)
    same: dict[str, Any] = {
        "pre_norm": shape.norm == "pre",
        "activation": {"relu": kinds.RELU, "gelu": kinds.GELUTanh, "silu": kinds.SWISH}[
            shape.activation
        ],
    }
    if head_width * shape.num_heads != shape.d_model:  # older versions do not know it
        same["head_dim"] = head_width
    spec = transformer_spec.TransformerSpec(
        transformer_spec.TransformerEncoderSpec(shape.num_layers, shape.num_heads, **same),
        transformer_spec.TransformerDecoderSpec(shape.decoder_layers, shape.num_heads, **same),
    )
    longest = max(_POSITIONS, *length_limits(config))
    source_LD, target_LD = position_tables(weights, shape, longest)
    spec.encoder.embeddings[0].weight = weights.source_matrix_VD
    spec.encoder.position_encodings.encodings = source_LD
    spec.decoder.embeddings.weight = weights.target_matrix_VD
    spec.decoder.position_encodings.encodings = target_LD
    spec.decoder.projection.weight = weights.softmax_matrix_VD
    if shape.softmax_bias:
        spec.decoder.projection.bias = weights.softmax_bias_V
    for stack, layers, norm in (
        (spec.encoder, weights.encoder, weights.encoder_norm),
        (spec.decoder, weights.decoder, weights.decoder_norm),
    ):
        if norm is not None:
            _set_norm(stack.layer_norm, norm)
        for layer_spec, layer in zip(stack.layer, layers, strict=True):
            _set_layer(layer_spec, layer)

    source_tokens, target_tokens = write_sentencepiece(tokenizer, folder)
    spec.register_source_vocabulary(source_tokens)
    spec.register_target_vocabulary(target_tokens)
    spec.config.bos_token = spec.config.decoder_start_token = target_tokens[BOS_ID]
    spec.config.eos_token, spec.config.unk_token = target_tokens[EOS_ID], target_tokens[UNK_ID]
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = shape.norm_epsilon
    spec.validate()
    spec.optimize(quantization="float32")
    spec.save(str(folder))

    suppressed = [
        PAD_ID,
        *tokenizer.require_target_ids(config.decoding.suppress, "decoding.suppress"),
    ]
    longest_source, longest_target = length_limits(config)
    settings = {
        "beam_size": config.decoding.beam_size,
        "length_penalty": config.decoding.length_penalty,
        "no_repeat_ngram_size": config.decoding.no_repeat_ngram,
        "max_input_length": longest_source,
        "min_decoding_length": config.decoding.min_length,
        "max_decoding_length": longest_target,
        "suppress_sequences": [[target_tokens[i]] for i in suppressed],
    }
    (folder / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    notes = [
        "translate_batch takes its settings as keywords: those of this run are in generation_config.json."
    ]
    if (tags := [piece for piece in source_tokens if TAG.fullmatch(piece)]) and tokenizer.imported:
        notes.append(
            f"source.spm cuts tags such as {tags[0]} apart: put the tag of a line before its pieces, "
            f"[{tags[0]!r}, *sp.encode(line, out_type=str)]."
        )
    return notes + search_notes(config, "CTranslate2")


def _set_layer(spec: Any, layer: Layer) -> None:
    attention = layer.self_attention
    _set_linear(
        spec.self_attention.linear[0],
        _side_by_side(attention.query, attention.key, attention.value),
    )
    _set_output(spec.self_attention, attention)
    if layer.cross_attention is not None:
        attention = layer.cross_attention
        _set_linear(spec.attention.linear[0], attention.query)
        _set_linear(spec.attention.linear[1], _side_by_side(attention.key, attention.value))
        _set_output(spec.attention, attention)
    _set_linear(spec.ffn.linear_0, layer.feed_forward.inner)
    _set_linear(spec.ffn.linear_1, layer.feed_forward.output)
    _set_norm(spec.ffn.layer_norm, layer.feed_forward.norm)


def _set_output(spec: Any, attention: Attention) -> None:
    _set_linear(spec.linear[-1], attention.output)
    _set_norm(spec.layer_norm, attention.norm)


def _side_by_side(*parts: Linear) -> Linear:
    kernels, biases = zip(*parts, strict=True)
    return Linear(np.concatenate(kernels, axis=1), np.concatenate(biases))


def _set_linear(spec: Any, linear: Linear) -> None:
    spec.weight = np.ascontiguousarray(linear.kernel_IO.T)
    if linear.bias_O.any():
        spec.bias = linear.bias_O


def _set_norm(spec: Any, norm: Norm) -> None:
    spec.gamma, spec.beta = norm.scale_D, norm.bias_D
