"""Checks and files shared by the exports."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.settings.config import ModelConfig
from transformer_jax.tokenization.segmenters import JsonSegmenter
from transformer_jax.tokenization.tokenizer import Tokenizer

# Settings of any value: sizes, biases, token ids, and what only training or our own precision uses.
_ANY_VALUE = {
    *("vocab_size", "source_vocab_size", "d_model", "d_ff", "num_heads", "d_k", "d_v"),
    *("num_layers", "num_decoder_layers", "max_positions", "share_positions"),
    *("dropout", "attention_dropout", "feed_forward_dropout", "remat", "dtype"),
    *("norm_epsilon", "norm_bias", "attention_bias", "feed_forward_bias", "softmax_bias"),
    *("pad_id", "eos_id", "decoder_start_id", "train_decoder_start", "alignment_layer"),
    *("relative_buckets", "relative_distance", "relative_bias"),
}


def check_fields(shape: ModelConfig, library: str, **allowed: Collection[object]) -> None:
    """Raise ``UserError`` for a field whose value ``library`` does not support. Fields that are
    neither in ``allowed`` nor sizes and the like must have the paper's value, so an export never
    ignores a field that it does not know.
    """
    if shape.positions != "learned":
        allowed = {"embedding_scale": ("all", "tokens")} | allowed
    for field in dataclasses.fields(shape):
        if field.name in _ANY_VALUE and field.name not in allowed:
            continue
        value = getattr(shape, field.name)
        values = allowed.get(field.name, (field.default,))
        if value not in values:
            raise UserError(
                f"model.{field.name} is {value!r}; expected {' or '.join(map(repr, values))}. "
                f"{library} supports no other value."
            )


def check_head_widths(shape: ModelConfig, library: str) -> None:
    """Raise ``UserError`` unless heads have the paper's width."""
    for name, width in (("d_k", shape.head_width_k), ("d_v", shape.head_width_v)):
        if width * shape.num_heads != shape.d_model:
            raise UserError(
                f"model.{name} is {width}; expected model.d_model / model.num_heads = "
                f"{shape.d_model} / {shape.num_heads}. {library} requires this size."
            )


def write_segmenters(tokenizer: Tokenizer, folder: Path) -> tuple[list[str], list[str]]:
    """Write source.spm and target.spm, or tokenizer.json, to ``folder``. Returns the source and
    target tokens in id order.
    """
    source = tokenizer.source
    target = tokenizer.target
    if isinstance(source.segmenter, JsonSegmenter):  # one file for both
        (folder / "tokenizer.json").write_bytes(source.model)
    else:
        (folder / "source.spm").write_bytes(source.model)
        (folder / "target.spm").write_bytes(target.model)
    return source.tokens(range(source.vocab_size)), target.tokens(range(target.vocab_size))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an indented JSON object, in UTF-8."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
