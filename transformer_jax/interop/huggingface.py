"""Export to Hugging Face's MarianMT format, which is not Marian's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax import (
    EOS_ID,
    PAD_ID,
    UNK_ID,
    Config,
    ModelConfig,
    Tokenizer,
    Transformer,
    UserError,
    needs_extra,
)
from transformer_jax.interop.export import check_fields, write_sentencepiece
from transformer_jax.interop.search_settings import for_transformers, length_limits, search_notes
from transformer_jax.interop.weights import (
    HUGGING_FACE,
    plain_weights,
    reordered,
    sines_first,
    to_library,
    with_position_tables,
)

NORM_EPSILON = 1e-5  # PyTorch's default; MarianMT has no setting for it
_POSITIONS = 1024  # the length of the table for sinusoids, which have no end here
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}
FIELDS = {  # of config.json, as the ModelConfig has them; both sides have one width and head count
    "d_model": "d_model",
    "encoder_layers": "num_layers",
    "decoder_layers": "decoder_layers",
    "encoder_attention_heads": "num_heads",
    "decoder_attention_heads": "num_heads",
    "encoder_ffn_dim": "d_ff",
    "decoder_ffn_dim": "d_ff",
    "activation_function": "activation",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "feed_forward_dropout",
}


def export_huggingface(
    config: Config, model: Transformer, tokenizer: Tokenizer, folder: Path
) -> list[str]:
    """Write ``model`` into ``folder``, which exists; returns what cannot travel exactly, a line
    each.

    ``MarianMTModel.from_pretrained`` and ``MarianTokenizer.from_pretrained`` load it. Token ids
    stay what they are.
    """
    with needs_extra("interop"):
        from safetensors.numpy import save_file
    shape = config.model
    check_fields(
        shape,
        "MarianMT",
        norm=("post",),
        final_norm=(None, False),
        norm_type=("layer",),
        activation=tuple(ACTIVATIONS),
        positions=("interleaved", "split", "learned"),
        encoder_window=(None,),
    )
    if shape.norm_epsilon > NORM_EPSILON:  # where it is less, outputs differ by a few 1e-6
        raise UserError(
            f"model.norm_epsilon is {shape.norm_epsilon:g}; expected at most 1e-05: MarianMT "
            "always adds 1e-05. Export to ctranslate2 instead."
        )
    notes = search_notes(config, "transformers")
    weights = plain_weights(model)
    longest = max(_POSITIONS, *length_limits(config))
    if shape.positions == "interleaved":  # MarianMT's own table from here on
        weights = reordered(weights, sines_first(shape.d_model))
    else:
        weights = with_position_tables(weights, shape, longest)
        longest = len(weights["target_embedding.position_matrix"])
        notes.append(
            f"model.positions is {shape.positions!r}: from_pretrained reads the tables from "
            "model.safetensors, but save_pretrained of transformers leaves them out: copy them "
            "again after fine-tuning there."
        )
    tensors = to_library(weights, HUGGING_FACE, other_names(shape))
    tensors["final_logits_bias"] = tensors["final_logits_bias"][None]  # [1, V]
    if shape.tie_embeddings == "embeddings":  # it ties all three or none
        for side in ("encoder", "decoder"):
            tensors[f"model.{side}.embed_tokens.weight"] = tensors["model.shared.weight"]
    tensors = {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}
    # The metadata tells transformers that axes are in PyTorch's order.
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    generation = for_transformers(config, tokenizer)
    # What from_pretrained needs to pad and to start; search settings are in the other file alone.
    ids = {name: value for name, value in generation.items() if name.endswith("_id")}
    _write_json(folder / "config.json", _config(config, longest) | ids)
    _write_json(folder / "generation_config.json", generation)
    _write_tokenizer(config, tokenizer, folder)
    return notes


def other_names(shape: ModelConfig) -> dict[str, str]:
    """Names of what is outside the layers."""
    shared = shape.shares_embeddings
    target = "model.shared.weight" if shared else "model.decoder.embed_tokens.weight"
    return {
        "source_embedding.matrix": "model.encoder.embed_tokens.weight",
        "source_embedding.position_matrix": "model.encoder.embed_positions.weight",
        "target_embedding.matrix": target,
        "target_embedding.position_matrix": "model.decoder.embed_positions.weight",
        "softmax_matrix": "lm_head.weight",
        "softmax_bias": "final_logits_bias",
    }


def _config(config: Config, positions: int) -> dict[str, Any]:
    shape = config.model
    fields = {theirs: getattr(shape, ours) for theirs, ours in FIELDS.items()}
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "dtype": "float32",
        "vocab_size": shape.source_vocab_size or shape.vocab_size,
        "decoder_vocab_size": shape.vocab_size,
        "share_encoder_decoder_embeddings": shape.shares_embeddings,
        "tie_word_embeddings": shape.ties_softmax,
        **fields,
        "activation_function": ACTIVATIONS[shape.activation],
        "max_position_embeddings": positions,
        "scale_embedding": True,
        "is_encoder_decoder": True,
    }


def _write_tokenizer(config: Config, tokenizer: Tokenizer, folder: Path) -> None:
    source_tokens, target_tokens = write_sentencepiece(tokenizer, folder)
    separate = source_tokens != target_tokens
    _write_json(folder / "vocab.json", {token: i for i, token in enumerate(source_tokens)})
    if separate:
        target = {token: i for i, token in enumerate(target_tokens)}
        _write_json(folder / "target_vocab.json", target)
    settings = {
        "tokenizer_class": "MarianTokenizer",
        "model_max_length": length_limits(config)[0],
        "pad_token": target_tokens[PAD_ID],
        "eos_token": target_tokens[EOS_ID],
        "unk_token": target_tokens[UNK_ID],
        "separate_vocabs": separate,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
