"""Export to Hugging Face's MarianMT format (not Marian's own), or a pretrained model's class."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from transformer_jax import Config, Tokenizer, Transformer, UserError
from transformer_jax.pretrained.export_files import (
    check_fields,
    check_head_widths,
    write_json,
    write_segmenters,
)
from transformer_jax.pretrained.families import ACTIVATIONS, FAMILIES
from transformer_jax.pretrained.folder import Pretrained
from transformer_jax.pretrained.marian import MarianFiles
from transformer_jax.pretrained.new_tokens import describe_new_tokens
from transformer_jax.pretrained.search_settings import length_limits, to_transformers
from transformer_jax.pretrained.weights import to_library, with_biases
from transformer_jax.tokenization.segmenters import JsonSegmenter

_POSITIONS = 1024  # length of the position table; our sinusoids have no maximum length


def export_huggingface(
    config: Config, model: Transformer, tokenizer: Tokenizer, folder: Path
) -> None:
    """Write ``model`` to the existing ``folder``.

    ``MarianMTModel.from_pretrained`` and ``MarianTokenizer.from_pretrained`` load it. Token ids are
    unchanged. Raises a ``UserError`` that names the field if the model differs from OPUS-MT in
    anything other than sizes, dropout and activation. A model that began as an import of a
    pretrained model goes back to that model's class, with its own token ids.
    """
    if tokenizer.pretrained:
        _export_pretrained(model, tokenizer, folder)
        return
    model_config = config.model
    check_fields(
        model_config,
        "MarianMT",
        tie_embeddings=("all",),
        norm=("post",),
        final_norm=(None, False),
        norm_type=("layer",),
        activation=("relu", "gelu", "gelu_tanh", "silu"),
        norm_epsilon=(1e-6, 1e-5),  # always 1e-5 there; outputs differ by a few 1e-6
        positions=("interleaved",),
    )
    check_head_widths(model_config, "MarianMT")
    _write_weights(to_library(with_biases(model), FAMILIES["marian"].weight_names), folder)
    generation = to_transformers(config, tokenizer)
    # from_pretrained needs the special token ids here; search settings go in the other file.
    ids = {name: value for name, value in generation.items() if name.endswith("_id")}
    write_json(folder / "config.json", _config(config) | ids)
    write_json(folder / "generation_config.json", generation)
    _write_tokenizer(config, tokenizer, folder)


def _export_pretrained(model: Transformer, tokenizer: Tokenizer, folder: Path) -> None:
    pretrained = unzip_pretrained(tokenizer, folder)
    if isinstance(pretrained.files, MarianFiles):
        raise UserError(
            "--format is 'huggingface', but the model came from Marian's own files; transformers "
            "has other positions. Expected: --format marian."
        )
    _write_weights(pretrained.to_tensors(model), folder)


def unzip_pretrained(tokenizer: Tokenizer, folder: Path) -> Pretrained:
    """Write the files of a pretrained model, apart from its weights, to ``folder``."""
    with zipfile.ZipFile(io.BytesIO(tokenizer.pretrained)) as archive:
        archive.extractall(folder)
    if isinstance(tokenizer.source.segmenter, JsonSegmenter):
        (folder / "tokenizer.json").write_bytes(tokenizer.source.model)
    if (folder / "config.json").exists():  # Marian's own files cannot have any
        describe_new_tokens(folder, tokenizer)
    return Pretrained(folder)


def _write_weights(tensors: dict[str, np.ndarray], folder: Path) -> None:
    # The metadata tells transformers that axes are in PyTorch order. safetensors' ``save_file``
    # would make the file unreadable for other users.
    content = save(tensors, metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(content)


def _config(config: Config) -> dict[str, Any]:
    model_config = config.model
    family = FAMILIES["marian"]
    fields = {foreign: getattr(model_config, name) for foreign, name in family.fields.items()}
    return {
        "model_type": "marian",
        "architectures": [family.name],
        "dtype": "float32",
        "vocab_size": model_config.vocab_size,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        **fields,
        "activation_function": next(
            x for x, y in ACTIVATIONS.items() if y == model_config.activation
        ),
        "decoder_layers": model_config.decoder_layers,
        "decoder_attention_heads": model_config.num_heads,
        "decoder_ffn_dim": model_config.d_ff,
        "max_position_embeddings": max(_POSITIONS, *length_limits(config)),
        "scale_embedding": True,
        "is_encoder_decoder": True,
    }


def _write_tokenizer(config: Config, tokenizer: Tokenizer, folder: Path) -> None:
    tokens, _ = write_segmenters(tokenizer, folder)
    write_json(folder / "vocab.json", {token: i for i, token in enumerate(tokens)})
    settings = {
        "tokenizer_class": "MarianTokenizer",
        "model_max_length": length_limits(config)[0],
        "pad_token": tokens[tokenizer.target.pad_id],
        "eos_token": tokens[tokenizer.target.eos_id],
    }
    if tokenizer.target.unk_id is not None:
        settings["unk_token"] = tokens[tokenizer.target.unk_id]
    write_json(folder / "tokenizer_config.json", settings)
