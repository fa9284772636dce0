"""A model in Marian's own format: ``model.npz`` with its settings inside, vocabularies, and a ready
decoder config.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.config import Config
from transformer_jax.errors import UserError
from transformer_jax.interop.search_settings import length_limits, search_notes
from transformer_jax.interop.vocabulary import write_sentencepiece
from transformer_jax.interop.weights import (
    Attention,
    Layer,
    Linear,
    Norm,
    check_epsilon,
    plain_weights,
    position_tables,
    square_head_width,
)
from transformer_jax.model.transformer import Transformer
from transformer_jax.special_ids import BOS_ID
from transformer_jax.tokenizer import Tokenizer

_NORM_EPSILON = 1e-9  # fixed in Marian's layerNorm
_POSITIONS = 2048
_LENGTH_FACTOR = 3  # Marian's default


def export_marian(
    config: Config, model: Transformer, tokenizer: Tokenizer, folder: Path
) -> list[str]:
    """Write ``model`` into ``folder``, which exists; returns what cannot travel exactly, a line
    each.

    ``marian-decoder -c decoder.yml`` reads text and writes text. ``*.vocab.yml`` hold the piece ids
    for other tools.

    Marian starts a translation from a zero vector where ours starts from the embedding of BOS. The
    copy is exact all the
    same: that embedding is taken off every target embedding, which shifts all scores of a step
    alike, and given back by the biases of the first layer, the only one that sees embeddings.
    """
    shape = config.model
    _check(config, tokenizer)
    if config.decoding.suppress or config.decoding.min_length or config.decoding.no_repeat_ngram:
        left_out = [
            "decoding.suppress, min_length and no_repeat_ngram are left out: marian-decoder has none of them."
        ]
    else:
        left_out = []
    notes = (
        left_out
        + check_epsilon(shape, _NORM_EPSILON, "Marian")
        + search_notes(config, "Marian", limit=f"{_LENGTH_FACTOR} times the source length")
    )
    weights = plain_weights(model, head_width=square_head_width(shape, "Marian"))
    start_D = weights.target_matrix_VD[BOS_ID]
    shift_D = start_D * np.float32(shape.d_model**0.5)
    shared = weights.source_matrix_VD is weights.target_matrix_VD
    tensors = dict(
        _stack("decoder", (_with_shift(weights.decoder[0], shift_D), *weights.decoder[1:]))
    )
    first = _with_shift(weights.encoder[0], shift_D) if shared else weights.encoder[0]
    tensors |= _stack("encoder", (first, *weights.encoder[1:]))
    if shared:
        tensors["Wemb"] = weights.target_matrix_VD - start_D
    else:
        tensors["encoder_Wemb"], tensors["decoder_Wemb"] = (
            weights.source_matrix_VD,
            weights.target_matrix_VD - start_D,
        )
    if weights.softmax_matrix_VD is not weights.target_matrix_VD:
        tensors["decoder_ff_logit_out_W"] = weights.softmax_matrix_VD.T
    tensors["decoder_ff_logit_out_b"] = weights.softmax_bias_V[None]
    # Marian computes this table itself; converters that would take other wavelengths find it here.
    tensors["Wpos"] = position_tables(weights, shape, max(_POSITIONS, *length_limits(config)))[0]
    settings = "".join(
        f"{key}: {json.dumps(value)}\n" for key, value in _model_settings(config).items()
    )
    tensors["special:model.yml"] = np.frombuffer(settings.encode() + b"\0", np.int8)
    files: dict[str, Any] = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    np.savez(folder / "model.npz", **files)

    for name, pieces in zip(
        ("source", "target"), write_sentencepiece(tokenizer, folder), strict=True
    ):
        lines = (
            f"{json.dumps(piece, ensure_ascii=False)}: {i}\n" for i, piece in enumerate(pieces)
        )
        (folder / f"{name}.vocab.yml").write_text("".join(lines), encoding="utf-8")
    decoder = "".join(
        f"{key}: {json.dumps(value)}\n" for key, value in _decoder_settings(config).items()
    )
    (folder / "decoder.yml").write_text(decoder)
    return notes


def _check(config: Config, tokenizer: Tokenizer) -> None:
    """``UserError`` for what Marian's program cannot compute."""
    shape = config.model
    elsewhere = "Export to ctranslate2 or safetensors instead."
    if shape.norm == "pre":
        raise UserError(
            "model.norm is 'pre'; expected 'post': Marian starts a translation from a zero vector, not from the embedding of "
            "BOS, and a norm before the first layer leaves no bias that could make up for it. Export to ctranslate2 instead."
        )
    if shape.positions != "split":
        raise UserError(
            f"model.positions is {shape.positions!r}; expected 'split': Marian's sinusoids have the wavelengths "
            "10000^(i / (d_model / 2 - 1)), the paper's 10000^(2i / d_model), and its learned positions work in training "
            f"only (its decoder takes the first one at each step). {elsewhere}"
        )
    if shape.activation == "gelu":
        raise UserError(
            "model.activation is 'gelu'; expected 'relu' or 'silu': Marian's gelu is x sigmoid(1.702 x), another function. "
            + elsewhere
        )
    if tokenizer.imported:
        raise UserError(
            "The vocabulary is that of an imported model; expected one that training made: marian-decoder cuts text by "
            f"source.spm alone, which may have pieces that the model lacks, and which keeps no tags like >>deu<<. {elsewhere}"
        )


def _with_shift(layer: Layer, shift_D: np.ndarray) -> Layer:
    """The first layer for inputs from which ``shift_D`` was taken: projections see it in their
    biases, the residual too.
    """

    def reads(linear: Linear) -> Linear:
        return Linear(linear.kernel_IO, linear.bias_O + shift_D @ linear.kernel_IO)

    a = layer.self_attention
    output = Linear(a.output.kernel_IO, a.output.bias_O + shift_D)
    return layer._replace(
        self_attention=Attention(reads(a.query), reads(a.key), reads(a.value), output, a.norm)
    )


def _stack(side: str, layers: tuple[Layer, ...]) -> Iterator[tuple[str, np.ndarray]]:
    for i, layer in enumerate(layers, 1):
        prefix = f"{side}_l{i}_"
        yield from _attention(prefix + "self", layer.self_attention)
        if layer.cross_attention is not None:
            yield from _attention(prefix + "context", layer.cross_attention)
        yield from _linear(prefix + "ffn", "1", layer.feed_forward.inner)
        yield from _linear(prefix + "ffn", "2", layer.feed_forward.output)
        yield from _norm(prefix + "ffn_ffn", layer.feed_forward.norm)


def _attention(name: str, attention: Attention) -> Iterator[tuple[str, np.ndarray]]:
    for part, linear in zip("qkvo", attention[:4], strict=True):
        yield from _linear(name, part, linear)
    yield from _norm(f"{name}_Wo", attention.norm)


def _linear(name: str, part: str, linear: Linear) -> Iterator[tuple[str, np.ndarray]]:
    yield f"{name}_W{part}", linear.kernel_IO
    yield f"{name}_b{part}", linear.bias_O[None]


def _norm(name: str, norm: Norm) -> Iterator[tuple[str, np.ndarray]]:
    yield f"{name}_ln_scale", norm.scale_D[None]
    yield f"{name}_ln_bias", norm.bias_D[None]


def _model_settings(config: Config) -> dict[str, Any]:
    shape = config.model
    return {
        "type": "transformer",
        "dim-vocabs": [shape.source_vocab_size or shape.vocab_size, shape.vocab_size],
        "dim-emb": shape.d_model,
        "tied-embeddings": shape.tie_embeddings == "target",
        "tied-embeddings-src": False,
        "tied-embeddings-all": shape.tie_embeddings == "all",
        "enc-depth": shape.num_layers,
        "dec-depth": shape.decoder_layers,
        "transformer-heads": shape.num_heads,
        "transformer-dim-ffn": shape.d_ff,
        "transformer-decoder-dim-ffn": 0,
        "transformer-ffn-depth": 2,
        "transformer-decoder-ffn-depth": 0,
        "transformer-ffn-activation": {"relu": "relu", "silu": "swish"}[shape.activation],
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
