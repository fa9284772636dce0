"""Reads tokenizers of pretrained models in transformers' format, and maps their ids to ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.errors import UserError, needs_extra, short_repr
from transformer_jax.pretrained.families import Family
from transformer_jax.pretrained.files import read_json
from transformer_jax.tokenization.rust_tokenizer import RustTokenizer
from transformer_jax.tokenization.tokenizer import read_sentencepiece

_SENTENCEPIECE = ("sentencepiece.bpe.model", "spiece.model")


class Rows(NamedTuple):
    """Order of the vocabulary: our ids in terms of theirs."""

    theirs: np.ndarray
    """Their id of each of our ids; -1: a token that they do not have."""
    tokens: list[str]
    """Our tokens."""
    start: str
    """The special token that is the decoder's first input (``ModelConfig.decoder_start``)."""

    @property
    def ours(self) -> np.ndarray:
        """Our id of each of their ids."""
        return np.argsort(self.theirs)[np.count_nonzero(self.theirs < 0) :]


def read_rows(
    family: Family, theirs: Mapping[str, Any], vocabulary: Mapping[str, int], size_name: str
) -> Rows:
    """Put PAD, BOS, EOS and UNK first, and keep the order of the other tokens.

    ``theirs`` is config.json; its ``size_name`` is the number of rows of the embedding matrix.
    """
    size = theirs.get(size_name) or theirs["vocab_size"]
    if type(size) is not int or not 4 <= size <= 2**20:  # more would take minutes
        raise UserError(
            f"{size_name} in config.json is {size}; expected the number of rows of the embedding "
            f"matrix, 4 to {2**20}. Use the config.json that belongs to the weights."
        )
    outside = [token for token, i in vocabulary.items() if not 0 <= i < size]
    if outside or (family.separate and len({*vocabulary.values()}) < size):
        such = f", such as {outside[0]!r}" if outside else ""
        raise UserError(
            f"The tokenizer has {len(vocabulary)} tokens, and {len(outside)} tokens with ids "
            f"outside the embedding matrix{such}; expected distinct ids below {size_name} in "
            f"config.json, {size}. Use the tokenizer that belongs to the weights, or in "
            "transformers, call model.resize_token_embeddings(len(tokenizer)) and save both."
        )
    ids = {name: theirs.get(f"{name}_token_id") for name in ("pad", "bos", "eos")}
    ids["unk"] = vocabulary.get("<unk>")
    starts_with_pad = family.separate or family.settings.get("positions") == "relative"
    start_id = theirs.get("decoder_start_token_id")
    if start_id is None:
        start_id = ids["pad"] if starts_with_pad else ids["eos"]
    wrong = UserError(
        f"Special tokens in config.json are {short_repr(ids | {'decoder_start': start_id})}; "
        f"expected distinct ids below {size} for pad_token_id, eos_token_id and "
        "decoder_start_token_id."
    )
    if not all(i is None or (type(i) is int and 0 <= i < size) for i in [start_id, *ids.values()]):
        raise wrong
    if start_id not in ids.values():  # a language code
        ids["bos"] = start_id
    elif list(ids.values()).count(ids["bos"]) > 1:
        ids["bos"] = None
    start = next(name for name in ("eos", "pad", "unk", "bos") if ids[name] == start_id)
    unused = sorted({*range(size)} - {*vocabulary.values()} - {*ids.values()})
    for name in ("bos", "unk"):
        if ids[name] is None:
            ids[name] = unused.pop() if unused else -1
    first = list(ids.values())
    known: Any = [i for i in first if i != -1]
    if len(set(known)) < len(known) or None in known:
        raise wrong
    order = np.concatenate([first, np.setdiff1d(np.arange(size), known)])
    token_of = {i: token for token, i in vocabulary.items()}
    return Rows(order, [token_of.get(i, f"<unused_{i}>") for i in order], start)


def read_tokenizer(folder: Path, family: Family) -> tuple[list[bytes], list[dict[str, int]]]:
    """Return the contents of tokenizer.json or of the SentencePiece models, and the tokens' ids.

    Both lists have one entry, or two for source and target (Marian). Without tokenizer.json, ids
    come from vocab.json (Marian, M2M100) or from the order of the SentencePiece model
    (``Family.first_tokens``), followed by the tokens that the other files add.
    """
    if family.name == "MarianMTModel":
        files = [folder / "vocab.json", folder / "target_vocab.json"]
        models = [read_sentencepiece(folder / name)[0] for name in ("source.spm", "target.spm")]
        return models, [_read_ids(file) for file in files[: 1 + files[1].exists()]]
    file, settings = folder / "tokenizer.json", _settings(folder)
    if file.exists():
        content = file.read_bytes()
    elif settings.get("tokenizer_class") == "ByT5Tokenizer":
        content = _byte_tokenizer(settings)
    else:
        content, ids = _read_sentencepiece(folder, family, settings)
        return [content], [ids]
    return [content], [RustTokenizer(content).ids]


def _settings(folder: Path) -> dict[str, Any]:
    names = ("special_tokens_map.json", "tokenizer_config.json")
    older, newer = (read_json(folder / name, missing_ok=True) for name in names)
    return older | {name: value for name, value in newer.items() if value is not None}


def _read_sentencepiece(
    folder: Path, family: Family, settings: dict[str, Any]
) -> tuple[bytes, dict[str, int]]:
    file = next((folder / name for name in _SENTENCEPIECE if (folder / name).exists()), None)
    if file is None or family.first_tokens is None:
        raise UserError(
            f"{str(folder)!r} has no tokenizer.json; expected that file or, except for BART, "
            f"{' or '.join(_SENTENCEPIECE)}. transformers writes it: "
            "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)."
        )
    content, its = read_sentencepiece(file)
    if (folder / "vocab.json").exists():
        ids = _read_ids(folder / "vocab.json")
    else:
        pieces = [its.id_to_piece(i) for i in range(family.num_skipped, len(its))]
        ids = {token: i for i, token in enumerate([*family.first_tokens, *pieces])}
        if not family.first_tokens and "▁<extra_id_0>" not in ids:  # mT5's model has them
            ids |= {
                f"<extra_id_{number}>": len(ids) + i
                for i, number in enumerate(reversed(range(settings.get("extra_ids", 100))))
            }
    added = settings.get("added_tokens_decoder") or {}
    ids |= {_text(token): int(i) for i, token in added.items()}
    more = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    for token in [*more, settings.get("mask_token")]:
        if token is not None:
            ids.setdefault(_text(token), len(ids))
    return content, ids


def _read_ids(file: Path) -> dict[str, int]:
    """Read a vocabulary with the id of each token."""
    return read_json(file, dict.fromkeys([*read_json(file), "<unk>"], int))


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _byte_tokenizer(settings: dict[str, Any]) -> bytes:
    """Return a tokenizer.json for ByT5, whose tokens are the bytes of UTF-8."""
    with needs_extra("pretrained"):
        from tokenizers import Tokenizer, decoders, models
    special = ["<pad>", "</s>", "<unk>"]
    sentinels = [f"<extra_id_{i}>" for i in range(settings.get("extra_ids") or 125)]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *sentinels]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([*special, *sentinels])
    return made.to_str().encode()
