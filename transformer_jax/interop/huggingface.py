"""A model as a Hugging Face MarianMT folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.config import Config
from transformer_jax.errors import UserError
from transformer_jax.interop.huggingface_weights import tensors_of
from transformer_jax.interop.search_settings import length_limits, search_notes
from transformer_jax.interop.vocabulary import TAG, write_sentencepiece
from transformer_jax.interop.weights import (
    check_epsilon,
    plain_weights,
    position_tables,
    reordered,
    sines_first,
    square_head_width,
)
from transformer_jax.model.transformer import Transformer
from transformer_jax.special_ids import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from transformer_jax.tokenizer import Tokenizer

NORM_EPSILON = 1e-5  # PyTorch's default; MarianMT has no setting for it
_POSITIONS = 1024  # the table's length for sinusoids, which have no end here


def export_safetensors(
    config: Config, model: Transformer, tokenizer: Tokenizer, folder: Path
) -> list[str]:
    """Write ``model`` into ``folder``, which exists; returns what cannot travel exactly, a line
    each.

    ``MarianMTModel.from_pretrained`` and ``MarianTokenizer.from_pretrained`` load it. Piece ids
    stay what they are.
    """
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise UserError(
            f"Exporting to safetensors needs that package: pip install safetensors ({error})."
        ) from None
    shape = config.model
    if shape.norm == "pre":
        raise UserError(
            "model.norm is 'pre'; MarianMT has the paper's post-norm only. Export to ctranslate2 instead."
        )
    long_lines = "cuts them off with truncation=True, and may fail without"
    notes = check_epsilon(shape, NORM_EPSILON, "transformers") + search_notes(
        config, "transformers", long_lines=long_lines
    )
    weights = plain_weights(model, head_width=square_head_width(shape, "MarianMT"))
    longest = (
        max(_POSITIONS, *length_limits(config))
        if shape.positions != "learned"
        else shape.max_positions
    )
    if shape.positions == "interleaved":
        # MarianMT's own table from here on
        weights = reordered(weights, sines_first(shape.d_model))
    tensors = dict(tensors_of(weights))
    if shape.positions != "interleaved":
        for side, table_LD in zip(
            ("encoder", "decoder"), position_tables(weights, shape, longest), strict=True
        ):
            tensors[f"model.{side}.embed_positions.weight"] = table_LD
        notes.append(
            f"model.positions is {shape.positions!r}: the tables stand in model.safetensors, where from_pretrained reads them, "
            "but save_pretrained of transformers leaves them out: copy them again after fine-tuning there."
        )
    # The metadata tells transformers that axes are in PyTorch's order.
    tensors = {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    generation = _generation_config(config, tokenizer)
    # What from_pretrained needs to pad and to start; all that concerns the search stands in the
    # other file alone.
    _write_json(
        folder / "config.json",
        _config(config, longest) | {k: v for k, v in generation.items() if k.endswith("_id")},
    )
    _write_json(folder / "generation_config.json", generation)
    return notes + _write_tokenizer(config, tokenizer, folder)


def _config(config: Config, positions: int) -> dict[str, Any]:
    shape = config.model
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "dtype": "float32",
        "vocab_size": shape.source_vocab_size or shape.vocab_size,
        "decoder_vocab_size": shape.vocab_size,
        "share_encoder_decoder_embeddings": shape.tie_embeddings == "all",
        "tie_word_embeddings": shape.tie_embeddings != "none",
        "d_model": shape.d_model,
        "encoder_layers": shape.num_layers,
        "decoder_layers": shape.decoder_layers,
        "encoder_attention_heads": shape.num_heads,
        "decoder_attention_heads": shape.num_heads,
        "encoder_ffn_dim": shape.d_ff,
        "decoder_ffn_dim": shape.d_ff,
        "activation_function": {"relu": "relu", "gelu": "gelu_new", "silu": "silu"}[
            shape.activation
        ],
        "dropout": shape.dropout,
        "attention_dropout": shape.attention_dropout,
        "activation_dropout": shape.feed_forward_dropout,
        "max_position_embeddings": positions,
        "scale_embedding": True,
        "is_encoder_decoder": True,
    }


def _generation_config(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    decoding = config.decoding
    suppressed = tokenizer.require_target_ids(decoding.suppress, "decoding.suppress")
    return {
        "num_beams": decoding.beam_size,
        "length_penalty": decoding.length_penalty,
        # the symbol that decoding starts from counts there
        "max_length": length_limits(config)[1] + 1,
        "min_new_tokens": decoding.min_length,
        "no_repeat_ngram_size": decoding.no_repeat_ngram,
        "bad_words_ids": [[piece] for piece in (PAD_ID, *suppressed)],
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "decoder_start_token_id": BOS_ID,
        "forced_eos_token_id": EOS_ID,
    }


def _write_tokenizer(config: Config, tokenizer: Tokenizer, folder: Path) -> list[str]:
    """Returns what MarianTokenizer does otherwise, a line each."""
    source_tokens, target_tokens = write_sentencepiece(tokenizer, folder)
    pad, eos, unk = (target_tokens[i] for i in (PAD_ID, EOS_ID, UNK_ID))
    settings = {
        "tokenizer_class": "MarianTokenizer",
        "model_max_length": length_limits(config)[0],
        "pad_token": pad,
        "eos_token": eos,
        "unk_token": unk,
        "separate_vocabs": source_tokens != target_tokens,
    }
    _write_json(folder / "vocab.json", {piece: i for i, piece in enumerate(source_tokens)})
    if settings["separate_vocabs"]:
        _write_json(
            folder / "target_vocab.json", {piece: i for i, piece in enumerate(target_tokens)}
        )
    _write_json(folder / "tokenizer_config.json", settings)
    tags = [(i, piece) for i, piece in enumerate(source_tokens) if TAG.fullmatch(piece)]
    cut_here = [piece for i, piece in tags if tokenizer.encode_source([piece]) != [[i]]]
    if not cut_here:
        return []
    return [
        f"MarianTokenizer takes {', '.join(cut_here[:3])} off a line before it cuts it: no '▁' comes before it, as here."
    ]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
