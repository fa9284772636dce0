"""Export to CTranslate2: a folder for ``ctranslate2.Translator``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax import BOS_ID, EOS_ID, UNK_ID, Config, ModelConfig, Tokenizer, Transformer
from transformer_jax.interop.export import check_fields, write_sentencepiece
from transformer_jax.interop.search_settings import for_ctranslate2, length_limits
from transformer_jax.interop.weights import (
    Library,
    Weights,
    plain_weights,
    to_library,
    with_position_tables,
)
from transformer_jax.support import SPECIAL_IDS, needs_extra

_POSITIONS = 2048  # length of the position table; our sinusoids have no maximum length
_LIBRARY = Library(
    names={
        "source_embedding.matrix": "encoder/embeddings_0/weight",
        "source_embedding.position_matrix": "encoder/position_encodings/encodings",
        "target_embedding.matrix": "decoder/embeddings/weight",
        "target_embedding.position_matrix": "decoder/position_encodings/encodings",
        "softmax_matrix": "decoder/projection/weight",
        "softmax_bias": "decoder/projection/bias",
        "encoder.final_norm.scale": "encoder/layer_norm/gamma",
        "encoder.final_norm.bias": "encoder/layer_norm/beta",
        "decoder.final_norm.scale": "decoder/layer_norm/gamma",
        "decoder.final_norm.bias": "decoder/layer_norm/beta",
        "self_attention.query": "self_attention/linear_0/{}",
        "self_attention.key": "self_attention/linear_0/{}",
        "self_attention.value": "self_attention/linear_0/{}",
        "self_attention.output": "self_attention/linear_1/{}",
        "self_attention_residual": "self_attention/layer_norm/{}",
        "cross_attention.query": "attention/linear_0/{}",
        "cross_attention.key": "attention/linear_1/{}",
        "cross_attention.value": "attention/linear_1/{}",
        "cross_attention.output": "attention/linear_2/{}",
        "cross_attention_residual": "attention/layer_norm/{}",
        "feed_forward.inner": "ffn/linear_0/{}",
        "feed_forward.gate": "ffn/linear_0_noact/{}",
        "feed_forward.output": "ffn/linear_1/{}",
        "feed_forward_residual": "ffn/layer_norm/{}",
    },
    layer="{side}/layer_{number}/",
    norm=("gamma", "beta"),
)


def export_ctranslate2(
    config: Config, model: Transformer, tokenizer: Tokenizer, folder: Path
) -> None:
    """Write ``model`` to the existing ``folder``, in float32.

    CTranslate2 reads ``model.bin``, ``config.json`` and the vocabulary. ``source.spm`` and
    ``target.spm`` tokenize and detokenize. ``generation_config.json`` holds keyword arguments for
    ``translate_batch``, which the format itself cannot store.
    """
    check_fields(config.model, "This export", positions=("interleaved", "learned"))
    spec = _spec(config.model)
    weights = plain_weights(model)
    if config.model.is_gated:  # CTranslate2 applies the activation to the first matrix
        swap = {"inner": "gate", "gate": "inner"}
        weights = {re.sub("inner|gate", lambda m: swap[m[0]], n): x for n, x in weights.items()}
    longest = max(_POSITIONS, *length_limits(config))
    weights = with_position_tables(weights, config.model, longest)
    target_VD = weights["target_embedding.matrix"]  # also used for tied matrices
    weights = {"source_embedding.matrix": target_VD, "softmax_matrix": target_VD} | weights
    _fill(spec, to_library(weights, _LIBRARY))

    source_tokens, target_tokens = write_sentencepiece(tokenizer, folder)
    spec.register_source_vocabulary(source_tokens)
    spec.register_target_vocabulary(target_tokens)
    spec.config.bos_token = target_tokens[BOS_ID]
    spec.config.decoder_start_token = target_tokens[SPECIAL_IDS[config.model.decoder_start]]
    spec.config.eos_token, spec.config.unk_token = target_tokens[EOS_ID], target_tokens[UNK_ID]
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = config.model.norm_epsilon
    spec.validate()
    spec.optimize(quantization="float32")
    spec.save(str(folder))

    settings = for_ctranslate2(config, tokenizer)
    (folder / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _spec(shape: ModelConfig) -> Any:
    """Create a model without weights."""
    with needs_extra("interop"):
        from ctranslate2.specs import common_spec, transformer_spec
    names = {
        **{"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh"},
        **{"silu": "SWISH", "swiglu": "SWISH", "geglu": "GELUTanh"},
    }
    settings: dict[str, Any] = {
        "pre_norm": True,  # temporary, to create the final norm
        "no_final_norm": not shape.has_final_norm,
        "rms_norm": shape.norm_type == "rms",
        "activation": common_spec.Activation[names[shape.activation]],
        "ffn_glu": shape.is_gated,
    }
    encoder = transformer_spec.TransformerEncoderSpec(shape.num_layers, shape.num_heads, **settings)
    decoder = transformer_spec.TransformerDecoderSpec(
        shape.decoder_layers, shape.num_heads, **settings
    )
    for side in (encoder, decoder):
        side.pre_norm = shape.norm == "pre"
    return transformer_spec.TransformerSpec(encoder, decoder)


def _fill(spec: Any, tensors: Weights) -> None:
    """Set the attribute named by each path. All-zero biases are skipped."""
    for name, tensor in tensors.items():
        *path, leaf = name.split("/")
        if leaf == "bias" and not tensor.any():
            continue
        at = spec
        for part in path:
            stem, _, number = part.rpartition("_")
            at = getattr(at, part) if hasattr(at, part) else getattr(at, stem)[int(number)]
        setattr(at, leaf, np.ascontiguousarray(tensor))
