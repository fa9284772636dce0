"""Hugging Face MarianMT folders: ``export_huggingface`` writes one, ``import_huggingface`` reads.

OPUS-MT models are such folders. Marian's own format is another: see ``marian``.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.config import (
    Config,
    DataConfig,
    DecodingConfig,
    ModelConfig,
    OptimizerConfig,
    TokenizerConfig,
)
from transformer_jax.errors import UserError
from transformer_jax.imported_vocabulary import with_vocabulary
from transformer_jax.interop.export import (
    check_epsilon,
    length_limits,
    search_notes,
    square_head_width,
    write_sentencepiece,
)
from transformer_jax.interop.vocabulary import TAG, Arrangement, SpecialIds, arrange
from transformer_jax.interop.weights import (
    HUGGING_FACE,
    Form,
    Weights,
    blank_weights,
    from_library,
    parameters,
    plain_weights,
    reordered,
    sines_first,
    to_library,
    with_position_tables,
)
from transformer_jax.model.layers import sinusoidal_positions
from transformer_jax.model.transformer import Transformer
from transformer_jax.special_ids import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from transformer_jax.tokenizer import Tokenizer

_NORM_EPSILON = 1e-5  # PyTorch's default; MarianMT has no setting for it
_POSITIONS = 1024  # the length of the table for sinusoids, which have no end here
# Added to the score of a token that must never be generated: e^-100 is less than any float32
# probability that counts.
_NEVER = np.float32(-100)
_TOP_K = 50  # what transformers takes where a folder that asks for sampling does not say
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu_new", "silu": "silu"}
_ACTIVATIONS_READ = {theirs: ours for ours, theirs in _ACTIVATIONS.items()}
_ACTIVATIONS_READ |= {"swish": "silu", "gelu_pytorch_tanh": "gelu"}
# Settings of transformers' search that nothing here is like, and the values that switch them off.
_NO_COUNTERPART: dict[str, Any] = {
    "early_stopping": False,
    "num_beam_groups": 1,
    "diversity_penalty": 0,
    "num_return_sequences": 1,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "min_p": 0,
    "top_h": 1,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "penalty_alpha": 0,
    "guidance_scale": 1,
    "renormalize_logits": False,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_decoder_ids": None,
    "begin_suppress_tokens": [],
    "sequence_bias": {},
    "force_words_ids": [],
    "constraints": [],
    "stop_strings": [],
    "max_time": None,
    "dola_layers": None,
    "watermarking_config": {},
}


class Imported(NamedTuple):
    """All that a work directory needs."""

    config: Config
    parameters: dict[str, Any]
    tokenizer: Tokenizer
    notes: list[str]


# Export


def export_huggingface(
    config: Config, model: Transformer, tokenizer: Tokenizer, folder: Path
) -> list[str]:
    """Write ``model`` into ``folder``, which exists; returns what cannot travel exactly, a line
    each.

    ``MarianMTModel.from_pretrained`` and ``MarianTokenizer.from_pretrained`` load it. Token ids
    stay what they are.
    """
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise UserError(
            "Exporting to Hugging Face's format needs the package: pip install safetensors "
            f"({error})."
        ) from None
    shape = config.model
    if shape.norm == "pre":
        raise UserError(
            "model.norm is 'pre'; expected 'post', the only norm that MarianMT has. Export to "
            "ctranslate2 instead."
        )
    notes = check_epsilon(shape, _NORM_EPSILON, "transformers") + search_notes(
        config,
        "transformers",
        stops="when no longer translation is likely to score better",
        long_lines="cuts them off with truncation=True, and may fail without",
    )
    weights = plain_weights(model, head_width=square_head_width(shape, "MarianMT"))
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
    tensors = to_library(weights, HUGGING_FACE, _others(shape))
    tensors = {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}
    # The metadata tells transformers that axes are in PyTorch's order.
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    generation = _generation_config(config, tokenizer)
    # What from_pretrained needs to pad and to start; search settings are in the other file alone.
    ids = {name: value for name, value in generation.items() if name.endswith("_id")}
    _write_json(folder / "config.json", _config(config, longest) | ids)
    _write_json(folder / "generation_config.json", generation)
    return notes + _write_tokenizer(config, tokenizer, folder)


def _others(shape: ModelConfig) -> dict[str, tuple[str, Form]]:
    """Names of what is outside the layers."""
    shared = shape.tie_embeddings == "all"
    target = "model.shared.weight" if shared else "model.decoder.embed_tokens.weight"
    return {
        "source_embedding.matrix": ("model.encoder.embed_tokens.weight", "same"),
        "source_embedding.position_matrix": ("model.encoder.embed_positions.weight", "same"),
        "target_embedding.matrix": (target, "same"),
        "target_embedding.position_matrix": ("model.decoder.embed_positions.weight", "same"),
        "softmax_matrix": ("lm_head.weight", "same"),
        "softmax_bias": ("final_logits_bias", "row"),
    }


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
        "activation_function": _ACTIVATIONS[shape.activation],
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
        "max_length": length_limits(config)[1] + 1,  # BOS counts there
        "min_new_tokens": decoding.min_length,
        "no_repeat_ngram_size": decoding.no_repeat_ngram,
        "bad_words_ids": [[token] for token in (PAD_ID, *suppressed)],
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "decoder_start_token_id": BOS_ID,
        "forced_eos_token_id": EOS_ID,
    }


def _write_tokenizer(config: Config, tokenizer: Tokenizer, folder: Path) -> list[str]:
    """Returns where MarianTokenizer differs from ours, a line each."""
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
    tags = [(i, token) for i, token in enumerate(source_tokens) if TAG.fullmatch(token)]
    differ = [token for i, token in tags if tokenizer.encode_source([token]) != [[i]]]
    if not differ:
        return []
    return [
        f"MarianTokenizer takes {', '.join(differ[:3])} off a line before it cuts it: no '▁' comes "
        "before it, as here."
    ]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# Import


def import_huggingface(folder: Path) -> Imported:
    """Read a MarianMT folder; ``UserError`` if something is missing, too much, or cannot be
    expressed here.

    Token ids are arranged anew, since ours are fixed for PAD, BOS, EOS and UNK; what the model
    computes stays the same.
    """
    theirs = _read_config(folder)
    sizes, (source, target), tokenizer = _read_vocabularies(folder, theirs)
    there = _model_config(theirs, sizes)
    shared = theirs["share_encoder_decoder_embeddings"]
    weights, positions = _read_weights(folder, there, shared=shared)
    for name, side in (
        ("source_embedding.matrix", source),
        ("target_embedding.matrix", target),
        ("softmax_matrix", target),
        ("softmax_bias", target),
    ):
        if name in weights:
            weights[name] = _rows(weights[name], side)
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
    searching = theirs | _read_json(folder / "generation_config.json", {})
    decoding = _decoding_config(searching, target, folder)
    longest = min(256, model.max_positions)
    config = Config(
        model=model,
        data=DataConfig(max_source_length=longest, max_target_length=longest),
        tokenizer=TokenizerConfig(vocab_size=len(target.tokens), joint=tokenizer.joint),
        # to go on gently from trained weights
        optimizer=OptimizerConfig(peak_learning_rate=1e-4, warmup_steps=1000),
        decoding=decoding,
    )
    return Imported(
        config, parameters(weights, model), tokenizer, _decoding_notes(searching, decoding)
    )


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
    }
    theirs, file = defaults | _read_json(path), repr(str(path))
    if theirs.get("model_type") != "marian":
        raise UserError(f"model_type in {file} is {theirs.get('model_type')!r}; expected 'marian'.")
    needed = ["d_model", "vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id"]
    for side in ("encoder", "decoder"):
        needed += [f"{side}_{what}" for what in ("layers", "attention_heads", "ffn_dim")]
    if missing := [name for name in needed if not isinstance(theirs.get(name), int)]:
        raise UserError(
            f"{file} lacks {', '.join(missing)}; expected the config.json of a whole MarianMT "
            "folder."
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


def _model_config(theirs: dict[str, Any], vocab_sizes: tuple[int, int]) -> ModelConfig:
    """Their model, with their vocabularies and all biases."""
    tied: Any = "none"
    if theirs["tie_word_embeddings"]:
        tied = "all" if theirs["share_encoder_decoder_embeddings"] else "target"
    activation: Any = _ACTIVATIONS_READ[theirs["activation_function"]]
    depth, decoder_depth = theirs["encoder_layers"], theirs["decoder_layers"]
    source_size, target_size = vocab_sizes
    return ModelConfig(
        vocab_size=target_size,
        source_vocab_size=None if source_size == target_size else source_size,
        d_model=theirs["d_model"],
        d_ff=theirs["encoder_ffn_dim"],
        num_heads=theirs["encoder_attention_heads"],
        num_layers=depth,
        num_decoder_layers=None if decoder_depth == depth else decoder_depth,
        dropout=theirs.get("dropout", 0.1),
        attention_dropout=theirs.get("attention_dropout", 0.0),
        feed_forward_dropout=theirs.get("activation_dropout", 0.0),
        norm_epsilon=_NORM_EPSILON,
        attention_bias=True,
        softmax_bias=True,
        activation=activation,
        tie_embeddings=tied,
    )


def _read_vocabularies(
    folder: Path, theirs: dict[str, Any]
) -> tuple[tuple[int, int], tuple[Arrangement, Arrangement], Tokenizer]:
    """How many source and target tokens there are, their places here, and the tokenizer."""
    settings = _read_json(folder / "tokenizer_config.json", {})
    files = [folder / "source.spm", folder / "target.spm"]
    models = {repr(str(file)): _read_bytes(file) for file in files}
    source_ids = target_ids = _read_vocabulary(folder / "vocab.json", theirs["vocab_size"])
    unk = settings.get("unk_token", "<unk>")
    unk = unk["content"] if isinstance(unk, dict) else unk
    if settings.get("separate_vocabs"):
        size = theirs.get("decoder_vocab_size", theirs["vocab_size"])
        target_ids = _read_vocabulary(folder / "target_vocab.json", size)
    special = {name: theirs[f"{name}_token_id"] for name in ("decoder_start", "pad", "eos")}
    tokens = {id_: token for token, id_ in target_ids.items()}
    for name, id_ in special.items():
        if id_ not in tokens:
            raise UserError(
                f"{name}_token_id in {str(folder / 'config.json')!r} is {id_}, which is no id of "
                "the vocabulary."
            )
    if unk not in source_ids or unk not in target_ids:
        raise UserError(
            f"The vocabulary in {str(folder)!r} has no {unk!r}; expected the token that unknown "
            "text becomes."
        )
    for id_ in (special["pad"], special["eos"]):
        if tokens[id_] not in source_ids:
            raise UserError(
                f"{str(folder / 'vocab.json')!r} lacks {tokens[id_]!r}, which target_vocab.json "
                "has."
            )
    pad, start, eos = (tokens[special[name]] for name in ("pad", "decoder_start", "eos"))
    source, target = (
        arrange(ids, SpecialIds(ids[pad], ids.get(start), ids[eos], ids[unk]))
        for ids in (source_ids, target_ids)
    )
    source_spm, target_spm = (
        with_vocabulary(model, side.tokens, name)
        for side, (name, model) in zip((source, target), models.items(), strict=True)
    )
    tokenizer = Tokenizer(source_spm, None if target_spm == source_spm else target_spm)
    return (len(source_ids), len(target_ids)), (source, target), tokenizer


def _read_vocabulary(path: Path, size: int) -> dict[str, int]:
    vocabulary = _read_json(path)
    if set(vocabulary.values()) != set(range(size)) or len(vocabulary) != size:
        raise UserError(
            f"{str(path)!r} has {len(vocabulary)} tokens; expected the ids 0 to {size - 1}, each "
            f"once: config.json says that there are {size}."
        )
    return vocabulary


def _rows(matrix: np.ndarray, arrangement: Arrangement) -> np.ndarray:
    """Rows in our order; those that are not there are zero."""
    return np.concatenate([matrix, np.zeros_like(matrix[:1])])[arrangement.rows_V]


def _read_weights(folder: Path, shape: ModelConfig, *, shared: bool) -> tuple[Weights, Any]:
    """Plain weights for a model of this shape, with dimensions in our order, and the kind of its
    positions. ``shared``: whether both sides have one embedding there.
    """
    tensors = _read_tensors(folder)
    others, like = _others(shape), blank_weights(shape)
    tables = [
        tensors.pop(theirs)
        for ours, (theirs, _) in others.items()
        if ours.endswith("position_matrix") and theirs in tensors
    ]
    tensors.setdefault("final_logits_bias", np.zeros((1, shape.vocab_size), np.float32))
    expected = to_library(like, HUGGING_FACE, others)
    _rename_tied(tensors, expected, shared=shared, tied=shape.tie_embeddings != "none")
    for what, names in (
        ("lack", sorted(expected.keys() - tensors)),
        ("have unknown", sorted(tensors.keys() - expected)),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(
                f"The weights in {str(folder)!r} {what} {', '.join(names[:3])}{more}; expected "
                "those that config.json describes."
            )
    for name, like_it in expected.items():
        if tensors[name].shape != like_it.shape:
            raise UserError(
                f"{name} in {str(folder)!r} has shape {tensors[name].shape}; expected "
                f"{like_it.shape}, as config.json describes."
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
    if safetensors.exists():
        try:
            from safetensors.flax import load_file
        except ImportError as error:
            raise UserError(
                f"Reading model.safetensors needs the package: pip install safetensors ({error})."
            ) from None
        try:
            tensors = load_file(safetensors)
        except Exception as error:  # its own type, which the package does not export everywhere
            raise UserError(f"{str(safetensors)!r} is damaged; fetch it again ({error}).") from None
    elif pickled.exists():
        try:
            import torch
        except ImportError as error:
            raise UserError(
                "Reading pytorch_model.bin needs PyTorch: pip install torch, or fetch "
                f"model.safetensors ({error})."
            ) from None
        try:
            read = torch.load(pickled, map_location="cpu", weights_only=True)
        except Exception as error:  # pickle's, zipfile's and its own
            raise UserError(f"{str(pickled)!r} cannot be read: {error}") from None
        tensors = {name: tensor.float().numpy() for name, tensor in read.items()}
    else:
        raise UserError(
            f"No weights in {str(folder)!r}; expected model.safetensors or pytorch_model.bin."
        )
    return {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}


def _rename_tied(tensors: Weights, expected: Weights, *, shared: bool, tied: bool) -> None:
    """Give a tied matrix the names that are expected: files may have it under any of its names, or
    under several.
    """
    names = ["model.decoder.embed_tokens.weight"]
    names += ["model.shared.weight", "model.encoder.embed_tokens.weight"] if shared else []
    names += ["lm_head.weight"] if tied else []
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
    if shape.tie_embeddings == "all" and not np.array_equal(tables[0], tables[1]):
        raise UserError(
            f"Encoder and decoder have different learned positions in {str(folder)!r}, but one "
            "embedding; here positions are part of an embedding, so it cannot be imported."
        )
    return "learned"


def _decoding_config(theirs: dict[str, Any], target: Arrangement, folder: Path) -> DecodingConfig:
    """Their search settings as ours; ``UserError`` for what decoding refuses."""
    settings = {name: value for name, value in theirs.items() if value is not None}
    rows = zip(target.tokens, target.rows_V, target.new_V, strict=True)
    token_of_row = {int(row): token for token, row, new in rows if row >= 0 and not new}
    # Decoding from PAD there: its row is BOS here, so what forbids PAD there forbids BOS here.
    banned = [ids[0] for ids in settings.get("bad_words_ids", []) if len(ids) == 1]
    banned += settings.get("suppress_tokens", [])
    suppress = dict.fromkeys(token_of_row[i] for i in banned if i in token_of_row)
    suppress.pop(target.tokens[PAD_ID], None)
    sampling: dict[str, Any] = {}
    if settings.get("do_sample"):
        sampling = {"method": "sample", "top_k": settings.get("top_k", _TOP_K)}
        sampling |= {name: settings[name] for name in ("temperature", "top_p") if name in settings}
    # the start counts there
    min_length = settings.get("min_new_tokens", max(settings.get("min_length", 0) - 1, 0))
    try:
        return DecodingConfig(
            beam_size=settings.get("num_beams", 1),
            length_penalty=float(max(settings.get("length_penalty", 1.0), 0)),
            length_offset=0.0,
            min_length=min_length,
            no_repeat_ngram=settings.get("no_repeat_ngram_size", 0),
            repetition_penalty=settings.get("repetition_penalty", 1.0),
            suppress=tuple(suppress),
            **sampling,
        )
    except UserError as error:
        files = [folder / name for name in ("generation_config.json", "config.json")]
        file = next(file for file in files if file.exists())
        raise UserError(
            f"{str(file)!r} asks for what decoding here refuses: {error} Change or remove it there."
        ) from None


def _decoding_notes(theirs: dict[str, Any], decoding: DecodingConfig) -> list[str]:
    """Where the search differs from theirs, a line each."""
    settings = {name: value for name, value in theirs.items() if value is not None}
    limits = [f"{n} {settings[n]}" for n in ("max_new_tokens", "max_length") if n in settings]
    notes = [
        f"{[*limits, 'no limit'][0]} there; here a translation has at most source length + "
        f"{decoding.max_extra_length} tokens (decoding.max_extra_length)."
    ]
    if any(len(ids) > 1 for ids in settings.get("bad_words_ids", [])):
        notes.append("bad_words_ids of several tokens are left out.")
    if (penalty := settings.get("length_penalty", 1.0)) < 0:
        notes.append(
            f"length_penalty is {penalty:g} there, 0 here, where nothing makes short translations "
            "better."
        )
    sampling = decoding.method == "sample"
    if decoding.repetition_penalty != 1 and (decoding.beam_size == 1 or sampling):
        notes.append("repetition_penalty works on logits there, on log-probabilities here.")
    if sampling and decoding.beam_size > 1:
        notes.append(
            f"num_beams {decoding.beam_size} with do_sample: here {decoding.beam_size} samples are "
            "drawn, each by itself."
        )
    left_out = [
        f"{name} {settings[name]}"
        for name, off in _NO_COUNTERPART.items()
        if settings.get(name, off) != off
    ]
    if left_out:
        notes.append(f"left out, since there is nothing like it here: {', '.join(left_out)}.")
    return notes


def _read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    if default is not None and not path.exists():
        return default
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
