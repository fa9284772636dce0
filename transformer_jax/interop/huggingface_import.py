"""Imports pretrained models from folders in transformers' format."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.flax import load_file

from transformer_jax import (
    Config,
    ModelConfig,
    OptimizerConfig,
    Tokenizer,
    TokenizerConfig,
    Transformer,
    UserError,
)
from transformer_jax.interop.families import MARIAN
from transformer_jax.interop.files import not_read, read_json
from transformer_jax.interop.huggingface import ACTIVATIONS, FIELDS, NORM_EPSILON
from transformer_jax.interop.pretrained import NEVER, Pretrained
from transformer_jax.interop.search_settings import IN_CONFIG, from_transformers
from transformer_jax.interop.weights import (
    Weights,
    blank_weights,
    check_tensors,
    from_library,
    model_of,
    reordered,
    sines_first,
    to_library,
)

_UNK = "<unk>"
_ACTIVATIONS_READ = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
_ACTIVATIONS_READ |= {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ALLOWED: dict[str, list[Any]] = {
    "model_type": ["marian"],
    "scale_embedding": [True],
    "share_encoder_decoder_embeddings": [True],
    "tie_word_embeddings": [True],
    "normalize_before": [False],
    "normalize_embedding": [False],
    "add_final_layer_norm": [False],
    "activation_function": list(_ACTIVATIONS_READ),
}
_TYPES: dict[str, Any] = dict.fromkeys(
    [*FIELDS, "vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id"], int | float
)
_TYPES["activation_function"] = str


def import_huggingface(
    folder: Path, *, lazy: bool = False, allow_pickle: bool = False
) -> tuple[Config, Transformer, Tokenizer]:
    """Load a pretrained model of a family in ``families.py`` or an OPUS-MT model (MarianMT).

    ``save_model`` writes the result as a model folder. Token ids are renumbered, because this
    package has fixed ids for PAD, BOS, EOS and UNK. The model computes the same function. If
    ``lazy``, parameters are read when they are saved, one at a time, except for OPUS-MT. With
    ``allow_pickle``, OPUS-MT models are also read from pytorch_model.bin, by PyTorch.

    Raises:
      UserError: a file, setting or tensor is missing, unexpected or unsupported.
    """
    if read_json(folder / "config.json").get("model_type") == "marian":
        return _import_marian(folder, allow_pickle)
    pretrained = Pretrained(folder)
    shape = pretrained.model_config()
    graph, _ = nnx.split(nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0))), nnx.Param)
    lazies = pretrained.parameters(shape)
    parameters = {path: x if lazy else jnp.asarray(x) for path, x in lazies.items()}
    model = nnx.merge(graph, nnx.traversals.unflatten_mapping(parameters))
    return pretrained.config(shape), model, pretrained.tokenizer()


def _import_marian(folder: Path, allow_pickle: bool) -> tuple[Config, Transformer, Tokenizer]:
    """Load an OPUS-MT model, which has one vocabulary, sinusoidal positions, and one matrix tied
    across both embeddings and the softmax.
    """
    theirs = _read_config(folder / "config.json")
    rows = _read_rows(folder / "vocab.json", theirs)
    tokenizer = Tokenizer.from_spm(folder / "source.spm", folder / "target.spm", list(rows))
    fields = {ours: theirs[name] for name, ours in FIELDS.items()}
    fields["num_decoder_layers"] = fields.pop("decoder_layers")
    fields["activation"] = _ACTIVATIONS_READ[theirs["activation_function"]]
    shape = ModelConfig(
        **fields,
        vocab_size=theirs["vocab_size"],
        norm_epsilon=NORM_EPSILON,
        attention_bias=True,
        softmax_bias=True,
    )
    weights = _read_weights(folder, shape, allow_pickle)
    ids = np.array(list(rows.values()))
    for name in ("target_embedding.matrix", "softmax_bias"):
        zero_row = np.zeros_like(weights[name][:1])  # for missing tokens (id -1)
        weights[name] = np.concatenate([weights[name], zero_row])[ids]
    weights["softmax_bias"] += NEVER * (ids < 0)
    shape = dataclasses.replace(shape, vocab_size=len(rows))

    file = folder / "generation_config.json"
    settings = read_json(file, missing_ok=True)
    if not settings:  # older versions of transformers write them to config.json
        file = folder / "config.json"
        settings = {name: x for name, x in theirs.items() if IN_CONFIG.search(name)}
    tokens = {row: token for token, row in list(rows.items())[1:]}  # PAD is never generated
    config = Config(
        model=shape,
        tokenizer=TokenizerConfig(vocab_size=len(rows)),
        # a low learning rate for fine-tuning
        optimizer=OptimizerConfig(peak_learning_rate=1e-4, warmup_steps=1000),
        decoding=from_transformers(settings, tokens, file),
    )
    return config, model_of(weights, shape), tokenizer


def _read_config(file: Path) -> dict[str, Any]:
    """Read config.json. Raises ``UserError`` for unsupported settings."""
    theirs = read_json(file, _TYPES)
    allowed = _ALLOWED | {
        "decoder_ffn_dim": [theirs["encoder_ffn_dim"]],
        "decoder_attention_heads": [theirs["encoder_attention_heads"]],
    }
    for name, values in allowed.items():
        if theirs.get(name, values[0]) not in values:
            raise UserError(
                f"{name} in {str(file)!r} is {theirs[name]!r}; expected "
                f"{' or '.join(map(repr, values))}. Only models with the architecture of "
                "OPUS-MT can be imported."
            )
    return theirs


def _read_rows(file: Path, theirs: dict[str, Any]) -> dict[str, int]:
    """Map tokens, in the order of our ids, to their ids in ``file`` (-1 if missing)."""
    ids = read_json(file, dict.fromkeys(read_json(file), int))
    size = theirs["vocab_size"]
    if len(ids) != size or sorted(ids.values()) != list(range(size)):
        raise UserError(
            f"{str(file)!r} has {len(ids)} tokens; expected every id from 0 to {size - 1} once, "
            f"because vocab_size in config.json is {size}."
        )
    token_of = dict(enumerate(sorted(ids, key=ids.__getitem__)))
    names = ("pad", "decoder_start", "eos")
    special = [token_of.get(theirs[f"{name}_token_id"], "") for name in names]
    pad, start, _ = special
    rows = {token: ids.get(token, -1) for token in (*special, _UNK)}
    if -1 in rows.values() or len(rows) != (3 if start == pad else 4):
        raise UserError(
            f"Special tokens in {str(file.parent)!r} are {dict(zip(names, special))}; "
            f"expected distinct tokens from vocab.json, other than {_UNK!r}. decoder_start may "
            "equal pad."
        )
    if start == pad:  # as in OPUS-MT: this row becomes our BOS; our PAD is new and never read
        rows = {f"<{pad}>": -1, "<s>": rows.pop(pad)} | rows
    return rows | {token: id_ for id_, token in token_of.items() if id_ not in rows.values()}


def _read_weights(folder: Path, shape: ModelConfig, allow_pickle: bool) -> Weights:
    """Read plain weights, with the d_model dimensions in our order."""
    tensors, kept = _read_tensors(folder, allow_pickle), MARIAN.names["target_embedding.matrix"]
    for alias in ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"):
        if f"{alias}.weight" in tensors:  # files store the tied matrix under any of these names
            tensors.setdefault(kept, tensors.pop(f"{alias}.weight"))
    if "final_logits_bias" in tensors:  # [1, V]
        tensors["final_logits_bias"] = tensors["final_logits_bias"].reshape(-1)
    for side in ("encoder", "decoder"):  # some files store the sinusoids
        tensors.pop(f"model.{side}.embed_positions.weight", None)
    like = blank_weights(shape)
    expected = to_library(like, MARIAN)
    check_tensors(tensors, expected, f"The weights in {str(folder)!r}")
    weights = from_library(tensors, like, MARIAN)
    # MarianMT's sinusoids are the paper's, with all sines first.
    return reordered(weights, np.argsort(sines_first(shape.d_model)))


def _read_tensors(folder: Path, allow_pickle: bool) -> Weights:
    file = folder / "model.safetensors"
    if not file.exists() and (folder / "pytorch_model.bin").exists():
        if not allow_pickle:
            raise UserError(
                f"{str(folder)!r} has pytorch_model.bin, a pickle, but no model.safetensors; "
                "download that file, or pass --allow-pickle if you trust this one."
            )
        file = folder / "pytorch_model.bin"
    try:
        if file.suffix == ".safetensors":
            tensors = load_file(file)
        else:
            import torch

            read = torch.load(file, map_location="cpu", weights_only=True)
            tensors = {name: tensor.float().numpy() for name, tensor in read.items()}
    except ModuleNotFoundError:
        raise UserError(
            f"Reading {file.name} requires PyTorch. Install it (pip install torch) or download "
            "model.safetensors."
        ) from None
    except Exception as error:  # many exception types, not all public
        raise not_read(file, error) from None
    return {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}
