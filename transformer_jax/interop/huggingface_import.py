"""Import of Hugging Face MarianMT folders, such as OPUS-MT models."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    needs_extra,
    sinusoidal_positions,
)
from transformer_jax.interop.huggingface import ACTIVATIONS, FIELDS, NORM_EPSILON, other_names
from transformer_jax.interop.search_settings import SEARCH_SETTINGS, from_transformers
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


def import_huggingface(folder: Path) -> tuple[Config, Transformer, Tokenizer]:
    """Read a MarianMT folder: of an OPUS-MT model, or one that ``export_huggingface`` wrote.
    ``save_model`` makes a work directory of what it returns.

    Token ids are renumbered, since ours are fixed for PAD, BOS, EOS and UNK; what the model
    computes stays the same.

    Raises:
      UserError: something is missing, too much, or cannot be expressed here.
    """
    theirs = _read_config(folder)
    source_ids, target_ids, special = _read_vocabularies(folder, theirs)
    source_rows, target_rows = _rows(source_ids, **special), _rows(target_ids, **special)
    tokenizer = Tokenizer.with_vocabularies(
        (folder / "source.spm", list(source_rows)), (folder / "target.spm", list(target_rows))
    )
    there, weights = _read_weights(folder, theirs, len(source_ids), len(target_ids))
    for name, rows in (
        ("source_embedding.matrix", source_rows),
        ("target_embedding.matrix", target_rows),
        ("softmax_matrix", target_rows),
        ("softmax_bias", target_rows),
    ):
        if name in weights:
            zero_row = np.zeros_like(weights[name][:1])  # for rows that are not there: -1
            weights[name] = np.concatenate([weights[name], zero_row])[list(rows.values())]
    weights["softmax_bias"] += _NEVER * (np.array(list(target_rows.values())) < 0)
    biases = [x for name, x in weights.items() if "attention." in name and name.endswith("bias")]
    shape = dataclasses.replace(
        there,
        vocab_size=len(target_rows),
        source_vocab_size=None if tokenizer.joint else len(source_rows),
        attention_bias=any(bias.any() for bias in biases),
        softmax_bias=bool(weights["softmax_bias"].any()),
    )
    file = folder / "generation_config.json"
    settings = _read_json(file, optional=True)
    if not settings:  # older folders
        file = folder / "config.json"
        settings = {name: theirs[name] for name in SEARCH_SETTINGS & theirs.keys()}
    tokens = {row: token for token, row in target_rows.items() if token != special["pad"]}
    decoding = from_transformers(settings, tokens, file)
    longest = min(256, shape.max_positions)
    config = Config(
        model=shape,
        data=DataConfig(max_source_length=longest, max_target_length=longest),
        tokenizer=TokenizerConfig(vocab_size=len(target_rows), joint=tokenizer.joint),
        # to go on gently from trained weights
        optimizer=OptimizerConfig(peak_learning_rate=1e-4, warmup_steps=1000),
        decoding=decoding,
    )
    return config, model_of(weights, shape), tokenizer


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
    needed = {*FIELDS, "vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id"}
    missing = [n for n in needed - defaults.keys() if not isinstance(theirs.get(n), int)]
    if missing:
        raise UserError(
            f"{file} lacks {', '.join(sorted(missing))}; expected the config.json of a whole "
            "MarianMT folder."
        )
    required = {
        "model_type": "marian",
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
                f"{name} in {file} is {theirs[name]!r}; expected {expected!r}, as models here "
                "have it."
            )
    if theirs["activation_function"] not in _ACTIVATIONS_READ:
        raise UserError(
            f"activation_function in {file} is {theirs['activation_function']!r}; expected one of "
            f"{', '.join(_ACTIVATIONS_READ)}."
        )
    return theirs


def _read_vocabularies(
    folder: Path, theirs: dict[str, Any]
) -> tuple[dict[str, int], dict[str, int], dict[str, str]]:
    """Ids of source and target tokens, and the special tokens: pad, start, eos, unk."""
    settings = _read_json(folder / "tokenizer_config.json", optional=True)
    source_ids = target_ids = _read_vocabulary(folder / "vocab.json", theirs["vocab_size"])
    if settings.get("separate_vocabs"):
        size = theirs.get("decoder_vocab_size", theirs["vocab_size"])
        target_ids = _read_vocabulary(folder / "target_vocab.json", size)
    tokens = {id_: token for token, id_ in target_ids.items()}
    unk = settings.get("unk_token", "<unk>")
    special = {"unk": unk["content"] if isinstance(unk, dict) else unk}
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
    distinct = {special["pad"], special["eos"], special["unk"]}
    known = distinct & source_ids.keys() & target_ids.keys()
    if len(known) < 3 or special["start"] in (special["eos"], special["unk"]):
        raise UserError(
            f"Special tokens in {str(folder)!r} are {special}; expected pad, eos and unk to be "
            "different tokens of both vocabularies, and start to be pad or another token."
        )
    return source_ids, target_ids, special


def _rows(
    vocabulary: dict[str, int], *, pad: str, start: str, eos: str, unk: str
) -> dict[str, int]:
    """Our tokens, by our ids, and their rows there; -1: there is none.

    MarianMT decodes from PAD: that row becomes our BOS, and our PAD is new. Nothing ever reads it.
    """
    rows = {pad: vocabulary[pad], start: vocabulary.get(start, -1)}
    if start == pad:
        rows = {
            _unused_name("<pad>", vocabulary): -1,
            _unused_name("<s>", vocabulary): vocabulary[pad],
        }
    rows |= {eos: vocabulary[eos], unk: vocabulary[unk]}
    special = {pad, start, eos, unk}
    others = sorted(vocabulary.keys() - special, key=vocabulary.__getitem__)
    return rows | {token: vocabulary[token] for token in others}


def _unused_name(wanted: str, taken: Mapping[str, int]) -> str:
    while wanted in taken:
        wanted = f"<{wanted}>"
    return wanted


def _read_vocabulary(path: Path, size: int) -> dict[str, int]:
    vocabulary = _read_json(path)
    if set(vocabulary.values()) != set(range(size)) or len(vocabulary) != size:
        raise UserError(
            f"{str(path)!r} has {len(vocabulary)} tokens; expected the ids 0 to {size - 1}, each "
            f"once: config.json says that there are {size}."
        )
    return vocabulary


def _read_weights(
    folder: Path, theirs: dict[str, Any], source_size: int, target_size: int
) -> tuple[ModelConfig, Weights]:
    """Their model, with their vocabularies and all biases, and its plain weights, with dimensions
    in our order.
    """
    tensors = _read_tensors(folder)
    fields = {ours: theirs[name] for name, ours in FIELDS.items()}
    fields["num_decoder_layers"] = fields.pop("decoder_layers")
    fields["activation"] = _ACTIVATIONS_READ[theirs["activation_function"]]
    ties = {(True, True): "all", (True, False): "embeddings", (False, True): "target"}
    tied = theirs["share_encoder_decoder_embeddings"], theirs["tie_word_embeddings"]
    shape = ModelConfig(
        **fields,
        **_take_positions(tensors, theirs),
        vocab_size=target_size,
        source_vocab_size=None if source_size == target_size else source_size,
        norm_epsilon=NORM_EPSILON,
        attention_bias=True,
        softmax_bias=True,
        tie_embeddings=ties.get(tied, "none"),  # type: ignore[arg-type]
    )
    others, like = other_names(shape), blank_weights(shape)
    expected = to_library(like, HUGGING_FACE, others)
    bias_1V = tensors.get("final_logits_bias", np.zeros((1, target_size), np.float32))
    tensors["final_logits_bias"] = bias_1V.reshape(-1)
    kept = others["target_embedding.matrix"]
    aliases = {"model.shared.weight", "model.decoder.embed_tokens.weight"} - {kept}
    aliases |= {"model.encoder.embed_tokens.weight"} if shape.shares_embeddings else set()
    aliases |= {"lm_head.weight"} if shape.ties_softmax else set()
    for alias in aliases & tensors.keys():  # files have a tied matrix under any of its names
        tensors.setdefault(kept, tensors.pop(alias))
    check_tensors(
        tensors, expected, f"The weights in {str(folder)!r}", "those that config.json describes"
    )
    weights = from_library(tensors, like, HUGGING_FACE, others)
    if (
        shape.positions == "interleaved"
    ):  # MarianMT's sinusoids are the paper's with all sines first
        weights = reordered(weights, np.argsort(sines_first(shape.d_model)))
    return shape, weights


def _take_positions(tensors: Weights, theirs: dict[str, Any]) -> dict[str, Any]:
    """Fields of the ModelConfig. Takes tables that are sinusoids, MarianMT's or tensor2tensor's,
    out of ``tensors``: others are learned.
    """
    source, target = (f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder"))
    tables = [tensors[name] for name in (source, target) if name in tensors]
    length, d_model = len(tables[0]) if tables else 1, theirs["d_model"]
    sinusoids = {
        "interleaved": sinusoidal_positions(length, d_model)[:, sines_first(d_model)],
        "split": sinusoidal_positions(length, d_model, layout="split"),
    }
    for kind, table_LD in sinusoids.items():
        if all(t.shape == table_LD.shape and np.allclose(t, table_LD, atol=1e-3) for t in tables):
            tensors.pop(source, None)
            tensors.pop(target, None)
            return {"positions": kind}
    if theirs["share_encoder_decoder_embeddings"] and np.array_equal(tables[0], tables[-1]):
        tensors.pop(source, None)  # here positions are part of an embedding
    return {"positions": "learned", "max_positions": length}


def _read_tensors(folder: Path) -> Weights:
    safetensors, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    file = safetensors if safetensors.exists() else pickled
    if not file.exists():
        raise UserError(
            f"No weights in {str(folder)!r}; expected model.safetensors or pytorch_model.bin."
        )
    try:
        if file == safetensors:
            with needs_extra("interop"):
                from safetensors.flax import load_file
            tensors = load_file(file)
        else:
            import torch

            read = torch.load(file, map_location="cpu", weights_only=True)
            tensors = {name: tensor.float().numpy() for name, tensor in read.items()}
    except UserError:
        raise
    except ModuleNotFoundError:
        raise UserError(
            f"Reading {file.name} needs PyTorch. Install it with: pip install torch. Or fetch "
            "model.safetensors."
        ) from None
    except Exception as error:  # many types, which the packages do not export everywhere
        raise UserError(
            f"{str(file)!r} cannot be read or is damaged; fetch it again ({error})."
        ) from None
    return {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}


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
