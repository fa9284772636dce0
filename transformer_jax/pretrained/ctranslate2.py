"""Export to CTranslate2: which models it can run, and a folder for ``ctranslate2.Translator``."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.errors import UserError, needs_extra
from transformer_jax.model.positions import sinusoidal_positions
from transformer_jax.model.transformer import Transformer
from transformer_jax.pretrained.export_files import check_fields, write_json, write_segmenters
from transformer_jax.pretrained.search_settings import length_limits, to_ctranslate2
from transformer_jax.pretrained.weights import WeightNames, Weights, to_library, with_biases
from transformer_jax.settings.config import Config, ModelConfig
from transformer_jax.tokenization.segmenters import JsonSegmenter
from transformer_jax.tokenization.tokenizer import Tokenizer

_ACTIVATIONS = {
    # name here: name in CTranslate2. In a gated layer, that of the gate.
    "relu": "RELU",
    "gelu": "GELU",
    "gelu_tanh": "GELUTanh",
    "geglu": "GELUTanh",
    "silu": "SWISH",
    "swiglu": "SWISH",
}
_SUPPORTED: dict[str, Collection[object]] = {
    # Values of the settings that change a model's layers; see check_fields for all others.
    "norm": ("post", "pre"),
    "final_norm": (None, True, False),
    "norm_type": ("layer", "rms"),
    "activation": tuple(_ACTIVATIONS),
    "positions": ("interleaved", "tensor2tensor", "learned", "relative"),
    "position_offset": range(2**31),  # any: the table of positions begins there
    "attention_scale": (True, False),
    "embedding_scale": ("all", "tokens", "none"),
    "embedding_norm": (False, True),
    "output_scale": (False, True),
    "zero_decoder_start": (False, True),
    "tie_embeddings": ("all", "embeddings", "target", "none"),
}
_POSITIONS = 2048  # length of the position table; our sinusoids have no maximum length
_LIBRARY = WeightNames(
    names={
        "source_embedding.matrix": "encoder/embeddings_0/weight",
        "source_embedding.position_matrix": "encoder/position_encodings/encodings",
        "target_embedding.matrix": "decoder/embeddings/weight",
        "target_embedding.position_matrix": "decoder/position_encodings/encodings",
        "softmax_matrix": "decoder/projection/weight",
        "softmax_bias": "decoder/projection/bias",
        "source_embedding.norm.scale": "encoder/layernorm_embedding/gamma",
        "source_embedding.norm.bias": "encoder/layernorm_embedding/beta",
        "target_embedding.norm.scale": "decoder/layernorm_embedding/gamma",
        "target_embedding.norm.bias": "decoder/layernorm_embedding/beta",
        "final_norm": "{side}/layer_norm/{}",
        "relative_bias": "self_attention/relative_attention_bias",
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
        "feed_forward.gate": "ffn/linear_0/{}",  # the matrix with the activation
        "feed_forward.output": "ffn/linear_1/{}",
        "feed_forward_residual": "ffn/layer_norm/{}",
    },
    layer="{side}/layer_{number}/",
    norm=("gamma", "beta"),
)


def check_ctranslate2(config: ModelConfig) -> None:
    """Raise a ``UserError`` that names the first setting with which CTranslate2 cannot run a model,
    or CTranslate2 itself if it is not installed.
    """
    check_fields(config, "CTranslate2", **_SUPPORTED)
    if config.head_width_k != config.head_width_v:
        raise UserError(
            f"model.d_v is {config.head_width_v}; expected {config.head_width_k}, as model.d_k. "
            "CTranslate2 supports no other value."
        )
    with needs_extra("export"):
        import ctranslate2  # noqa: F401


def export_ctranslate2(
    config: Config,
    model: Transformer,
    tokenizer: Tokenizer,
    folder: Path,
    weights_type: str = "float32",
) -> None:
    """Write ``model`` to the existing ``folder``, with weights of this type.

    CTranslate2 reads ``model.bin``, ``config.json`` and the vocabulary. ``source.spm`` and
    ``target.spm``, or ``tokenizer.json``, tokenize and detokenize. ``generation_config.json`` holds
    keyword arguments for ``translate_batch``, which the format itself cannot store.
    """
    check_ctranslate2(config.model)
    spec = _spec(config.model)
    weights = _with_shared(with_biases(model), config)
    library = _LIBRARY
    if config.model.is_gated:
        names = {**library.names, "feed_forward.inner": "ffn/linear_0_noact/{}"}
        library = library._replace(names=names)
    _fill(spec, to_library(weights, library))

    source_tokens, target_tokens = write_segmenters(tokenizer, folder)
    spec.register_source_vocabulary(source_tokens)
    spec.register_target_vocabulary(target_tokens)
    target = tokenizer.target
    start = config.model.decoder_start_id
    spec.config.bos_token = target_tokens[start if target.bos_id is None else target.bos_id]
    spec.config.decoder_start_token = target_tokens[start]
    spec.config.eos_token = target_tokens[target.eos_id]
    if target.unk_id is not None:
        spec.config.unk_token = target_tokens[target.unk_id]
    spec.config.add_source_eos = adds_source_eos(tokenizer)
    spec.config.layer_norm_epsilon = config.model.norm_epsilon
    spec.validate()
    spec.optimize(quantization=weights_type)
    spec.save(str(folder))

    write_json(folder / "generation_config.json", to_ctranslate2(config, tokenizer))


def adds_source_eos(tokenizer: Tokenizer) -> bool:
    """Check if CTranslate2 adds EOS to the sources of an exported model.

    It does if they come from a SentencePiece model, which does not. tokenizer.json files add EOS,
    and so do transformers' tokenizers for models with languages around a source, as CTranslate2's
    converter expects.
    """
    languages = tokenizer.languages
    has_languages = bool(languages.tokens or languages.source) and not languages.places.in_text
    return not (has_languages or isinstance(tokenizer.source.segmenter, JsonSegmenter))


def _with_shared(weights: Weights, config: Config) -> Weights:
    """Add copies of what parts of the model share, and the tables of positions: CTranslate2 reads
    each under its own name.
    """
    shape = config.model
    originals = {
        "softmax_matrix": "target_embedding.matrix",
        "source_embedding.matrix": "target_embedding.matrix",
        "source_embedding.norm.scale": "target_embedding.norm.scale",
        "source_embedding.norm.bias": "target_embedding.norm.bias",
    }
    for side, num_layers in (("encoder", shape.num_layers), ("decoder", shape.decoder_layers)):
        for number in range(1, num_layers):
            first = f"{side}.relative_biases.0.table"
            originals[f"{side}.relative_biases.{number}.table"] = first
    copies = {
        name: weights[original]
        for name, original in originals.items()
        if name not in weights and original in weights
    }
    return weights | copies | _position_tables(weights, config)


def _position_tables(weights: Weights, config: Config) -> Weights:
    """Return the positions that are added to the embeddings of source and target, from the first
    token's on.
    """
    shape = config.model
    source = "source_embedding.position_matrix"
    target = "target_embedding.position_matrix"
    tables: Weights = {}
    match shape.positions:
        case "interleaved" | "tensor2tensor" as layout:
            length = position_table_length(config) + shape.position_offset
            table = sinusoidal_positions(length, shape.d_model, layout)
            tables = {source: table, target: table}
        case "learned":
            tables = {source: weights.get(source, weights[target]), target: weights[target]}
    return {name: table[shape.position_offset :] for name, table in tables.items()}


def position_table_length(config: Config) -> int:
    """Return the number of positions in the table of sinusoids: enough for the longest lines."""
    return max(_POSITIONS, *length_limits(config))


def _spec(shape: ModelConfig) -> Any:
    """Create a model without weights."""
    with needs_extra("export"):  # imports PyTorch, if that is installed
        from ctranslate2.specs import common_spec, transformer_spec

    settings: dict[str, Any] = {
        "pre_norm": True,  # temporary, to create the final norm
        "no_final_norm": not shape.has_final_norm,
        "rms_norm": shape.norm_type == "rms",
        "activation": common_spec.Activation[_ACTIVATIONS[shape.activation]],
        "ffn_glu": shape.is_gated,
        "layernorm_embedding": shape.embedding_norm,
        "relative_attention_bias": shape.positions == "relative",
    }
    encoder = transformer_spec.TransformerEncoderSpec(shape.num_layers, shape.num_heads, **settings)
    has_alignment_head = shape.alignment_layer is not None
    decoder = transformer_spec.TransformerDecoderSpec(
        shape.decoder_layers,
        shape.num_heads,
        alignment_layer=shape.alignment_layer if has_alignment_head else -1,
        alignment_heads=int(has_alignment_head),  # 0: the mean over all heads
        **settings,
    )
    decoder.start_from_zero_embedding = shape.zero_decoder_start
    if shape.output_scale:
        decoder.scale_outputs = shape.d_model**-0.5
    for side in (encoder, decoder):
        side.pre_norm = shape.norm == "pre"
        side.scale_embeddings = shape.embedding_scale != "none"
        for layer in side.layer:
            if shape.positions == "relative":
                distance = np.int32(shape.relative_distance)
                layer.self_attention.relative_attention_max_distance = distance
            attentions = [layer.self_attention]
            if side is decoder:
                attentions.append(layer.attention)
            for attention in attentions:
                attention.queries_scale = shape.head_width_k**-0.5 if shape.attention_scale else 1.0
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
