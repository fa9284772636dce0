"""Import of Hugging Face MarianMT folders, such as OPUS-MT models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_jax import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    Tokenizer,
    TokenizerConfig,
    Transformer,
    UserError,
    sinusoidal_positions,
)
from transformer_jax.interop.huggingface import ACTIVATIONS, FIELDS, NORM_EPSILON, other_names
from transformer_jax.interop.huggingface_search import decoding_config
from transformer_jax.interop.vocabulary import Arrangement, arrange
from transformer_jax.interop.weights import (
    HUGGING_FACE,
    Weights,
    blank_weights,
    check_tensors,
    from_library,
    model_of,
    reordered,
    sines_first,
    to_library,
)

# Added to the score of a token that must never be generated: e^-100 is less than any float32
# probability that counts.
_NEVER = np.float32(-100)
_ACTIVATIONS_READ = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
_ACTIVATIONS_READ |= {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class Imported(NamedTuple):
    """All that a work directory needs."""

    config: Config
    model: Transformer
    tokenizer: Tokenizer
    notes: list[str]


def import_huggingface(folder: Path) -> Imported:
    """Read a MarianMT folder; ``UserError`` if something is missing, too much, or cannot be
    expressed here.

    Token ids are renumbered, since ours are fixed for PAD, BOS, EOS and UNK; what the model
    computes stays the same.
    """
    theirs = _read_config(folder)
    source, target, tokenizer = _read_vocabularies(folder, theirs)
    there = _model_config(theirs)
    weights, positions = _read_weights(folder, theirs, there)
    for name, side in (
        ("source_embedding.matrix", source),
        ("target_embedding.matrix", target),
        ("softmax_matrix", target),
        ("softmax_bias", target),
    ):
        if name in weights:
            zero_row = np.zeros_like(weights[name][:1])  # for rows that are not there
            weights[name] = np.concatenate([weights[name], zero_row])[side.rows_V]
    weights["softmax_bias"] += _NEVER * target.new_V
    biases = [x for name, x in weights.items() if "attention." in name and name.endswith("bias")]
    table_LD = weights.get("target_embedding.position_matrix")
    model = dataclasses.replace(
        there,
        vocab_size=len(target.tokens),
        source_vocab_size=None if tokenizer.joint else len(source.tokens),
        attention_bias=any(bias.any() for bias in biases),
        softmax_bias=bool(weights["softmax_bias"].any()),
        positions=positions,
        max_positions=there.max_positions if table_LD is None else len(table_LD),
    )
    generation = folder / "generation_config.json"
    decoding, notes = decoding_config(
        theirs | _read_json(generation, optional=True),
        target,
        generation if generation.exists() else folder / "config.json",
    )
    longest = min(256, model.max_positions)
    config = Config(
        model=model,
        data=DataConfig(max_source_length=longest, max_target_length=longest),
        tokenizer=TokenizerConfig(vocab_size=len(target.tokens), joint=tokenizer.joint),
        # to go on gently from trained weights
        optimizer=OptimizerConfig(peak_learning_rate=1e-4, warmup_steps=1000),
        decoding=decoding,
    )
    return Imported(config, model_of(weights, model), tokenizer, notes)


def _read_config(folder: Path) -> dict[str, Any]:
    """config.json with what older and newer files leave out; refuses what has no counterpart."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"{str(folder)!r} holds no config.json; expected a Hugging Face folder of a MarianMT "
            "model (not Marian's own model.npz). To fetch one: hf download "
            "Helsinki-NLP/opus-mt-en-de --local-dir opus-mt-en-de"
        )
    defaults = {
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        "scale_embedding": False,
        "max_position_embeddings": 1024,
        "activation_function": "gelu",
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
    }
    theirs, file = defaults | _read_json(path), repr(str(path))
    if theirs.get("model_type") != "marian":
        raise UserError(f"model_type in {file} is {theirs.get('model_type')!r}; expected 'marian'.")
    needed = {*FIELDS, "vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id"}
    missing = [n for n in needed - defaults.keys() if not isinstance(theirs.get(n), int)]
    if missing:
        raise UserError(
            f"{file} lacks {', '.join(sorted(missing))}; expected the config.json of a whole "
            "MarianMT folder."
        )
    required = {
        "scale_embedding": True,
        "normalize_before": False,
        "normalize_embedding": False,
        "add_final_layer_norm": False,
        "decoder_ffn_dim": theirs["encoder_ffn_dim"],
        "decoder_attention_heads": theirs["encoder_attention_heads"],
    }
    for name, expected in required.items():
        if theirs.get(name, expected) != expected:
            raise UserError(
                f"{name} in {file} is {theirs[name]!r}; models here have {expected!r}, so it "
                "cannot be imported."
            )
    if theirs["activation_function"] not in _ACTIVATIONS_READ:
        raise UserError(
            f"activation_function in {file} is {theirs['activation_function']!r}; expected one of "
            f"{', '.join(_ACTIVATIONS_READ)}."
        )
    return theirs


def _model_config(theirs: dict[str, Any]) -> ModelConfig:
    """Their model, with their vocabularies and all biases."""
    fields = {ours: theirs[name] for name, ours in FIELDS.items()}
    decoder_layers = fields.pop("decoder_layers")
    fields["activation"] = _ACTIVATIONS_READ[theirs["activation_function"]]
    ties = {(True, True): "all", (True, False): "embeddings", (False, True): "target"}
    tied = theirs["share_encoder_decoder_embeddings"], theirs["tie_word_embeddings"]
    source_size, target_size = theirs["vocab_size"], theirs["decoder_vocab_size"]
    return ModelConfig(
        **fields,
        vocab_size=target_size,
        source_vocab_size=None if source_size == target_size else source_size,
        num_decoder_layers=None if decoder_layers == fields["num_layers"] else decoder_layers,
        norm_epsilon=NORM_EPSILON,
        attention_bias=True,
        softmax_bias=True,
        tie_embeddings=ties.get(tied, "none"),  # type: ignore[arg-type]
    )


def _read_vocabularies(
    folder: Path, theirs: dict[str, Any]
) -> tuple[Arrangement, Arrangement, Tokenizer]:
    """The places of source and target tokens here, and the tokenizer.

    Sets ``decoder_vocab_size``, which means something with two vocabularies only.
    """
    settings = _read_json(folder / "tokenizer_config.json", optional=True)
    source_ids = target_ids = _read_vocabulary(folder / "vocab.json", theirs["vocab_size"])
    if settings.get("separate_vocabs"):
        size = theirs.get("decoder_vocab_size", theirs["vocab_size"])
        target_ids = _read_vocabulary(folder / "target_vocab.json", size)
    theirs["decoder_vocab_size"] = len(target_ids)
    unk = settings.get("unk_token", "<unk>")
    special = {"unk": unk["content"] if isinstance(unk, dict) else unk}
    tokens = {id_: token for token, id_ in target_ids.items()}
    for use, name in (
        ("pad", "pad_token_id"),
        ("eos", "eos_token_id"),
        ("start", "decoder_start_token_id"),
    ):
        if theirs[name] not in tokens:
            raise UserError(
                f"{name} in {str(folder / 'config.json')!r} is {theirs[name]}, which is no id of "
                "the vocabulary."
            )
        special[use] = tokens[theirs[name]]
    for use in ("pad", "eos", "unk"):
        if special[use] not in source_ids or special[use] not in target_ids:
            raise UserError(
                f"The vocabulary in {str(folder)!r} lacks {special[use]!r}; expected the tokens of "
                "padding, the end of a sentence and unknown text, on both sides."
            )
    source, target = arrange(source_ids, **special), arrange(target_ids, **special)
    tokenizer = Tokenizer.with_vocabularies(
        (folder / "source.spm", source.tokens), (folder / "target.spm", target.tokens)
    )
    return source, target, tokenizer


def _read_vocabulary(path: Path, size: int) -> dict[str, int]:
    vocabulary = _read_json(path)
    if set(vocabulary.values()) != set(range(size)) or len(vocabulary) != size:
        raise UserError(
            f"{str(path)!r} has {len(vocabulary)} tokens; expected the ids 0 to {size - 1}, each "
            f"once: config.json says that there are {size}."
        )
    return vocabulary


def _read_weights(folder: Path, theirs: dict[str, Any], shape: ModelConfig) -> tuple[Weights, Any]:
    """Plain weights for a model of this shape, with dimensions in our order, and the kind of its
    positions.
    """
    tensors = _read_tensors(folder)
    others, like = other_names(shape), blank_weights(shape)
    position_names = [f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")]
    tables = [tensors.pop(name) for name in position_names if name in tensors]
    tensors.setdefault("final_logits_bias", np.zeros((1, shape.vocab_size), np.float32))
    expected = to_library(like, HUGGING_FACE, others)
    tied = ["model.decoder.embed_tokens.weight"]
    if theirs["share_encoder_decoder_embeddings"]:
        tied += ["model.shared.weight", "model.encoder.embed_tokens.weight"]
    if theirs["tie_word_embeddings"]:
        tied += ["lm_head.weight"]
    _rename_tied(tensors, tied, expected)
    check_tensors(
        tensors, expected, f"The weights in {str(folder)!r}", "those that config.json describes"
    )
    weights = from_library(tensors, like, HUGGING_FACE, others)
    positions = _positions(tables, shape, folder)
    if positions == "interleaved":  # MarianMT's sinusoids are the paper's with all sines first
        weights = reordered(weights, np.argsort(sines_first(shape.d_model)))
    if positions == "learned":
        weights["source_embedding.position_matrix"] = tables[0]
        weights["target_embedding.position_matrix"] = tables[1]
    return weights, positions


def _read_tensors(folder: Path) -> Weights:
    safetensors, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    file = safetensors if safetensors.exists() else pickled
    if not file.exists():
        raise UserError(
            f"No weights in {str(folder)!r}; expected model.safetensors or pytorch_model.bin."
        )
    try:
        if file == safetensors:
            from safetensors.flax import load_file

            tensors = load_file(file)
        else:
            import torch

            read = torch.load(file, map_location="cpu", weights_only=True)
            tensors = {name: tensor.float().numpy() for name, tensor in read.items()}
    except ImportError as error:
        packages = "safetensors" if file == safetensors else "torch, or fetch model.safetensors"
        raise UserError(f"Reading {file.name} needs pip install {packages} ({error}).") from None
    except Exception as error:  # many types, which the packages do not export everywhere
        raise UserError(
            f"{str(file)!r} cannot be read or is damaged; fetch it again ({error})."
        ) from None
    return {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}


def _rename_tied(tensors: Weights, names: list[str], expected: Weights) -> None:
    """Give a tied matrix those of its ``names`` that are expected: files may have it under any of
    them, or under several.
    """
    found = [name for name in names if name in tensors]
    if not found:
        return
    matrix = tensors[found[0]]
    for name in found:
        if np.array_equal(tensors[name], matrix):
            del tensors[name]
    for name in expected.keys() & set(names):
        tensors.setdefault(name, matrix)


def _positions(tables: list[np.ndarray], shape: ModelConfig, folder: Path) -> str:
    """Which positions the tables hold: sinusoids, ours or the model's own, or anything else, which
    is learned.
    """
    if not tables:
        return "interleaved"
    length, d_model = len(tables[0]), shape.d_model
    interleaved_LD = sinusoidal_positions(length, d_model)[:, sines_first(d_model)]
    split_LD = sinusoidal_positions(length, d_model, layout="split")
    for kind, table_LD in (("interleaved", interleaved_LD), ("split", split_LD)):
        if all(t.shape == table_LD.shape and np.allclose(t, table_LD, atol=1e-3) for t in tables):
            return kind
    if len(tables) != 2 or any(t.shape != (length, d_model) for t in tables):
        raise UserError(
            f"The position tables in {str(folder)!r} are not two of width {d_model}; expected one "
            "for each side."
        )
    if shape.shares_embeddings and not np.array_equal(tables[0], tables[1]):
        raise UserError(
            f"Encoder and decoder have different learned positions in {str(folder)!r}, but one "
            "embedding; here positions are part of an embedding, so it cannot be imported."
        )
    return "learned"


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        content = json.loads(_read_bytes(path))
    except ValueError as error:
        raise UserError(
            f"{str(path)!r} is not JSON, or is damaged; fetch it again ({error})."
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"{str(path)!r} holds {type(content).__name__}; expected a JSON object.")
    return content


def _read_bytes(path: Path) -> bytes:
    if not path.is_file():
        raise UserError(
            f"{str(path)!r} does not exist; expected a whole Hugging Face MarianMT folder."
        )
    return path.read_bytes()
