"""Export to Marian: ``model.npz`` with its settings inside, vocabularies, and a decoder config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.config import Config
from transformer_jax.errors import UserError
from transformer_jax.interop.export import (
    check_epsilon,
    check_fields,
    length_limits,
    search_notes,
    square_head_width,
    write_sentencepiece,
)
from transformer_jax.interop.weights import (
    MARIAN,
    Form,
    Weights,
    plain_weights,
    to_library,
    with_position_tables,
)
from transformer_jax.model.transformer import Transformer
from transformer_jax.special_ids import BOS_ID
from transformer_jax.tokenizer import Tokenizer

_NORM_EPSILON = 1e-9  # fixed in Marian's layerNorm
_POSITIONS = 2048
_LENGTH_FACTOR = 3  # Marian's default
_ACTIVATIONS = {"relu": "relu", "silu": "swish"}  # its gelu is x sigmoid(1.702 x)


def export_marian(
    config: Config, model: Transformer, tokenizer: Tokenizer, folder: Path
) -> list[str]:
    """Write ``model`` into ``folder``, which exists; returns what cannot travel exactly, a line
    each.

    ``marian-decoder -c decoder.yml`` reads text and writes text. ``*.vocab.yml`` hold the token ids
    for other tools.
    """
    _check(config, tokenizer)
    decoding = config.decoding
    notes = check_epsilon(config.model, _NORM_EPSILON, "Marian") + search_notes(
        config,
        "Marian",
        stops=f"once {decoding.beam_size} translations are finished, each narrowing the beam",
        limit=f"{_LENGTH_FACTOR} times the source length",
    )
    if decoding.suppress or decoding.min_length or decoding.no_repeat_ngram:
        notes.append(
            "decoding.suppress, min_length and no_repeat_ngram are left out: marian-decoder has "
            "none of them."
        )
    tensors: dict[str, Any] = _tensors(config, model)
    settings = _yaml(_model_settings(config)).encode() + b"\0"
    tensors["special:model.yml"] = np.frombuffer(settings, np.int8)
    np.savez(folder / "model.npz", **tensors)
    vocabularies = write_sentencepiece(tokenizer, folder)
    for name, tokens in zip(("source", "target"), vocabularies, strict=True):
        lines = (f"{json.dumps(t, ensure_ascii=False)}: {i}\n" for i, t in enumerate(tokens))
        (folder / f"{name}.vocab.yml").write_text("".join(lines), encoding="utf-8")
    (folder / "decoder.yml").write_text(_yaml(_decoder_settings(config)))
    return notes


def _check(config: Config, tokenizer: Tokenizer) -> None:
    """``UserError`` for what Marian's program cannot compute."""
    # Pre-norm: Marian starts a translation from a zero vector, not from the embedding of BOS, and a
    # norm before the first layer leaves no bias that could make up for it. Positions: the paper's
    # sinusoids have other wavelengths, and its decoder takes the first learned one at each step.
    check_fields(
        config.model,
        "Marian",
        norm=("post",),
        final_norm=(None, False),
        norm_type=("layer",),
        activation=tuple(_ACTIVATIONS),
        positions=("split",),
        encoder_window=(None,),
    )
    if tokenizer.imported:
        raise UserError(
            "The vocabulary is that of an imported model; expected one that training made: "
            "marian-decoder cuts text by source.spm alone, which may have pieces that the model "
            "lacks, and which keeps no tags like >>deu<<. Export to "
            "ctranslate2 instead."
        )


def _tensors(config: Config, model: Transformer) -> Weights:
    """The arrays of model.npz.

    Marian starts a translation from a zero vector where ours starts from the embedding of BOS. The
    copy is exact all the same: that embedding is taken off every target embedding, which shifts all
    scores of a step alike, and given back by the biases of the first layer, the only one that sees
    embeddings.
    """
    shape = config.model
    weights = plain_weights(model, head_width=square_head_width(shape, "Marian"))
    # Marian computes this table itself; converters that would take other wavelengths find it here.
    weights = with_position_tables(weights, shape, max(_POSITIONS, *length_limits(config)))
    del weights["source_embedding.position_matrix"]
    shared = shape.shares_embeddings
    target_VD = weights["target_embedding.matrix"]
    start_D = target_VD[BOS_ID]
    shift_D = start_D * np.float32(shape.d_model**0.5)
    for side in ("encoder", "decoder") if shared else ("decoder",):
        attention = f"{side}.layers.0.self_attention"
        for part in ("query", "key", "value"):
            kernel_DO = weights[f"{attention}.{part}.kernel"]
            weights[f"{attention}.{part}.bias"] += shift_D @ kernel_DO
        weights[f"{attention}.output.bias"] += shift_D
    weights["target_embedding.matrix"] = target_VD - start_D
    others: dict[str, tuple[str, Form]] = {
        "source_embedding.matrix": ("encoder_Wemb", "same"),
        "target_embedding.matrix": ("Wemb" if shared else "decoder_Wemb", "same"),
        "target_embedding.position_matrix": ("Wpos", "same"),
        "softmax_matrix": ("decoder_ff_logit_out_W", "transposed"),
        "softmax_bias": ("decoder_ff_logit_out_b", "row"),
    }
    tensors = to_library(weights, MARIAN, others)
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def _model_settings(config: Config) -> dict[str, Any]:
    shape = config.model
    return {
        "type": "transformer",
        "dim-vocabs": [shape.source_vocab_size or shape.vocab_size, shape.vocab_size],
        "dim-emb": shape.d_model,
        "tied-embeddings": shape.tie_embeddings == "target",
        "tied-embeddings-src": shape.tie_embeddings == "embeddings",
        "tied-embeddings-all": shape.tie_embeddings == "all",
        "enc-depth": shape.num_layers,
        "dec-depth": shape.decoder_layers,
        "transformer-heads": shape.num_heads,
        "transformer-dim-ffn": shape.d_ff,
        "transformer-decoder-dim-ffn": 0,
        "transformer-ffn-depth": 2,
        "transformer-decoder-ffn-depth": 0,
        "transformer-ffn-activation": _ACTIVATIONS[shape.activation],
        "transformer-preprocess": "",
        "transformer-postprocess": "dan",
        "transformer-postprocess-emb": "d",
        "transformer-postprocess-top": "",
        "transformer-decoder-autoreg": "self-attention",
        "transformer-no-projection": False,
        "transformer-tied-layers": [],
        "transformer-train-position-embeddings": False,
        "transformer-guided-alignment-layer": "last",
        "output-omit-bias": False,
        "input-types": ["sequence", "sequence"],
        "version": "v1.12.0",
    }


def _decoder_settings(config: Config) -> dict[str, Any]:
    longest_source, _ = length_limits(config)
    return {
        "relative-paths": True,
        "models": ["model.npz"],
        "vocabs": ["source.spm", "target.spm"],
        "beam-size": config.decoding.beam_size,
        "normalize": config.decoding.length_penalty,
        "word-penalty": 0.0,
        "allow-unk": True,
        "max-length": longest_source,
        "max-length-crop": True,
        "max-length-factor": _LENGTH_FACTOR,
    }


def _yaml(settings: dict[str, Any]) -> str:
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())
