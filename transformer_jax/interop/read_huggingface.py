"""A Hugging Face MarianMT folder as a config, parameters and a tokenizer of ours."""

from __future__ import annotations

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
from transformer_jax.interop.huggingface import NORM_EPSILON
from transformer_jax.interop.huggingface_weights import read_tensors, weights_from
from transformer_jax.interop.vocabulary import Arrangement, SpecialIds, arrange, with_ids
from transformer_jax.interop.weights import Weights, parameters
from transformer_jax.tokenizer import Tokenizer

# Added to the score of a piece that must never be generated: e^-100 is less than any float32
# probability that counts.
_NEVER = np.float32(-100)
_TOP_K = 50  # what transformers takes where a folder that asks for sampling does not say
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
_ACTIVATIONS = {
    "relu": "relu",
    "swish": "silu",
    "silu": "silu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
}


class Imported(NamedTuple):
    """All that a work directory needs."""

    config: Config
    parameters: dict[str, Any]
    tokenizer: Tokenizer
    notes: list[str]


def read_marian(folder: Path) -> Imported:
    """Read a MarianMT folder; ``UserError`` if something is missing, too much, or cannot be
    expressed here.

    Piece ids are arranged anew, since ours are fixed for PAD, BOS, EOS and UNK; what the model
    computes stays the same.
    """
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{str(folder)!r} holds no config.json; expected a Hugging Face folder of a MarianMT model (not Marian's "
            "own model.npz). To fetch one: hf download Helsinki-NLP/opus-mt-en-de --local-dir opus-mt-en-de"
        )
    theirs = _read_json(folder / "config.json")
    _check(theirs, folder)
    vocab_sizes, (source, target), tokenizer = _vocabularies(folder, theirs)
    weights, positions = weights_from(read_tensors(folder), theirs, vocab_sizes, folder)
    tied = "none"
    if theirs["tie_word_embeddings"]:
        tied = "all" if theirs["share_encoder_decoder_embeddings"] else "target"
    weights = weights._replace(
        source_matrix_VD=_rows(weights.source_matrix_VD, source),
        target_matrix_VD=_rows(weights.target_matrix_VD, target),
        softmax_matrix_VD=_rows(weights.softmax_matrix_VD, target),
        softmax_bias_V=_rows(weights.softmax_bias_V, target) + _NEVER * target.new_V,
    )
    model = ModelConfig(
        vocab_size=len(target.pieces),
        source_vocab_size=None if tokenizer.joint else len(source.pieces),
        d_model=theirs["d_model"],
        d_ff=theirs["encoder_ffn_dim"],
        num_heads=theirs["encoder_attention_heads"],
        num_layers=theirs["encoder_layers"],
        num_decoder_layers=theirs["decoder_layers"]
        if theirs["decoder_layers"] != theirs["encoder_layers"]
        else None,
        dropout=theirs.get("dropout", 0.1),
        attention_dropout=theirs.get("attention_dropout", 0.0),
        feed_forward_dropout=theirs.get("activation_dropout", 0.0),
        norm_epsilon=NORM_EPSILON,
        attention_bias=_has_attention_bias(weights),
        activation=_ACTIVATIONS[theirs["activation_function"]],  # type: ignore[arg-type]
        positions=positions,  # type: ignore[arg-type]
        max_positions=1024
        if weights.source_positions_LD is None
        else len(weights.source_positions_LD),
        tie_embeddings=tied,  # type: ignore[arg-type]
        softmax_bias=bool(weights.softmax_bias_V.any()),
    )
    decoding, notes = _decoding(
        theirs | _read_json(folder / "generation_config.json", {}), target, folder
    )
    longest = min(256, model.max_positions)
    config = Config(
        model=model,
        data=DataConfig(max_source_length=longest, max_target_length=longest),
        tokenizer=TokenizerConfig(vocab_size=len(target.pieces), joint=tokenizer.joint),
        # to go on gently from trained weights
        optimizer=OptimizerConfig(peak_learning_rate=1e-4, warmup_steps=1000),
        decoding=decoding,
    )
    return Imported(config, parameters(weights, model), tokenizer, notes)


def _check(theirs: dict[str, Any], folder: Path) -> None:
    """Fill in what older and newer files leave out, and refuse what has no counterpart here."""
    defaults = {
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        "scale_embedding": False,
        "max_position_embeddings": 1024,
        "activation_function": "gelu",
    }
    for name, value in defaults.items():
        theirs.setdefault(name, value)
    file = f"{str(folder / 'config.json')!r}"
    if theirs.get("model_type") != "marian":
        raise UserError(f"model_type in {file} is {theirs.get('model_type')!r}; expected 'marian'.")
    needed = ("d_model", "vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")
    sizes = (
        f"{side}_{what}"
        for side in ("encoder", "decoder")
        for what in ("layers", "attention_heads", "ffn_dim")
    )
    if missing := [name for name in (*needed, *sizes) if not isinstance(theirs.get(name), int)]:
        raise UserError(
            f"{file} lacks {', '.join(missing)}; expected the config.json of a whole MarianMT folder."
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
                f"{name} in {file} is {theirs[name]!r}; models here have {expected!r}, so it cannot be imported."
            )
    if theirs["activation_function"] not in _ACTIVATIONS:
        raise UserError(
            f"activation_function in {file} is {theirs['activation_function']!r}; expected one of {', '.join(_ACTIVATIONS)}."
        )


def _vocabularies(
    folder: Path, theirs: dict[str, Any]
) -> tuple[tuple[int, int], tuple[Arrangement, Arrangement], Tokenizer]:
    """How many source and target pieces there are, what becomes of them here, and the tokenizer."""
    settings = _read_json(folder / "tokenizer_config.json", {})
    files = [folder / "source.spm", folder / "target.spm"]
    models = {repr(str(file)): _read_bytes(file) for file in files}
    vocabulary = _vocabulary(folder / "vocab.json", theirs["vocab_size"])
    unk = settings.get("unk_token", "<unk>")
    unk = unk["content"] if isinstance(unk, dict) else unk
    if settings.get("separate_vocabs"):
        both = (
            vocabulary,
            _vocabulary(
                folder / "target_vocab.json", theirs.get("decoder_vocab_size", theirs["vocab_size"])
            ),
        )
    else:
        both = vocabulary, vocabulary
    start, pad, eos = (theirs[f"{name}_token_id"] for name in ("decoder_start", "pad", "eos"))
    for name, id_ in (
        ("decoder_start_token_id", start),
        ("pad_token_id", pad),
        ("eos_token_id", eos),
    ):
        if id_ not in both[1].values():
            raise UserError(
                f"{name} in {str(folder / 'config.json')!r} is {id_}, which is no id of the vocabulary."
            )
    if not all(unk in vocabulary for vocabulary in both):
        raise UserError(
            f"The vocabulary in {str(folder)!r} has no {unk!r}; expected the piece that unknown text becomes."
        )
    special = SpecialIds(pad, start, eos, both[1][unk])
    if both[0] is both[1]:
        target = source = arrange(vocabulary, special)
    else:
        names = {id_: piece for piece, id_ in both[1].items()}
        absent = [names[i] for i in (pad, eos) if names[i] not in both[0]]
        if absent:
            raise UserError(
                f"{str(folder / 'vocab.json')!r} lacks {absent[0]!r}, which target_vocab.json has."
            )
        there = both[0]
        at_source = SpecialIds(
            there[names[pad]], there.get(names[start]), there[names[eos]], there[unk]
        )
        source, target = arrange(there, at_source), arrange(both[1], special)
    source_spm, target_spm = (
        with_ids(model, side.pieces, name)
        for side, (name, model) in zip((source, target), models.items(), strict=True)
    )
    tokenizer = (
        Tokenizer(source_spm) if source_spm == target_spm else Tokenizer(source_spm, target_spm)
    )
    return (len(both[0]), len(both[1])), (source, target), tokenizer


def _vocabulary(path: Path, size: int) -> dict[str, int]:
    vocabulary = _read_json(path)
    if set(vocabulary.values()) != set(range(size)) or len(vocabulary) != size:
        raise UserError(
            f"{str(path)!r} has {len(vocabulary)} pieces; expected the ids 0 to {size - 1}, each once: config.json says "
            f"that there are {size}."
        )
    return vocabulary


def _rows(matrix: np.ndarray, arrangement: Arrangement) -> np.ndarray:
    """Rows in our order; those that are not there are zero."""
    zero = np.zeros_like(matrix[:1])
    return np.concatenate([matrix, zero])[arrangement.rows_V]


def _has_attention_bias(weights: Weights) -> bool:
    attentions = [
        a for layer in weights.encoder + weights.decoder for a in layer[:2] if a is not None
    ]
    return any(linear.bias_O.any() for a in attentions for linear in a[:4])  # type: ignore[union-attr]


def _decoding(
    theirs: dict[str, Any], target: Arrangement, folder: Path
) -> tuple[DecodingConfig, list[str]]:
    """Their search settings as ours, and what differs."""
    rows = zip(target.pieces, target.rows_V, target.new_V, strict=True)
    piece_of_row = {int(row): piece for piece, row, new in rows if row >= 0 and not new}
    settings = {name: value for name, value in theirs.items() if value is not None}
    # Decoding from PAD there: its row is BOS here, so what forbids PAD there forbids BOS here.
    words = settings.get("bad_words_ids", [])
    banned = [ids[0] for ids in words if len(ids) == 1] + settings.get("suppress_tokens", [])
    never = target.pieces[0]
    suppress = dict.fromkeys(piece_of_row[i] for i in banned if i in piece_of_row)
    beam_size, penalty = settings.get("num_beams", 1), settings.get("length_penalty", 1.0)
    repetition = settings.get("repetition_penalty", 1.0)
    sampling: dict[str, Any] = {}
    if settings.get("do_sample"):
        sampling = {"method": "sample", "top_k": settings.get("top_k", _TOP_K)}
        sampling |= {name: settings[name] for name in ("temperature", "top_p") if name in settings}
    try:
        config = DecodingConfig(
            beam_size=beam_size,
            length_penalty=float(max(penalty, 0)),
            length_offset=0.0,
            # the start counts there
            min_length=settings.get("min_new_tokens", max(settings.get("min_length", 0) - 1, 0)),
            no_repeat_ngram=settings.get("no_repeat_ngram_size", 0),
            repetition_penalty=repetition,
            suppress=tuple(piece for piece in suppress if piece != never),
            **sampling,
        )
    except UserError as error:
        file = next(
            file
            for name in ("generation_config.json", "config.json")
            if (file := folder / name).exists()
        )
        raise UserError(
            f"{str(file)!r} asks for what decoding here refuses: {error} Change or remove it there."
        ) from None
    limit = next(
        (
            f"{name} {settings[name]}"
            for name in ("max_new_tokens", "max_length")
            if name in settings
        ),
        "no limit",
    )
    notes = [
        f"{limit} there; here a translation has at most source length + {config.max_extra_length} pieces "
        "(decoding.max_extra_length)."
    ]
    if any(len(ids) > 1 for ids in words):
        notes.append("bad_words_ids of several pieces are left out.")
    if penalty < 0:
        notes.append(
            f"length_penalty is {penalty:g} there, 0 here, where nothing makes short translations better."
        )
    if repetition != 1 and (beam_size == 1 or sampling):
        notes.append("repetition_penalty works on logits there, on log-probabilities here.")
    if sampling and beam_size > 1:
        notes.append(
            f"num_beams {beam_size} with do_sample: here {beam_size} samples are drawn, each by itself."
        )
    left_out = [
        f"{name} {settings[name]}"
        for name, off in _NO_COUNTERPART.items()
        if settings.get(name, off) != off
    ]
    if left_out:
        notes.append(f"left out, since there is nothing like it here: {', '.join(left_out)}.")
    return config, notes


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
