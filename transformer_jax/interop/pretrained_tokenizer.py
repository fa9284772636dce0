"""Reads the tokenizers of pretrained models in transformers' format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sentencepiece

from transformer_jax import UserError
from transformer_jax.interop.families import Family
from transformer_jax.interop.files import read_json
from transformer_jax.support import RustTokenizer, needs_extra

_SENTENCEPIECE = ("sentencepiece.bpe.model", "spiece.model")


def read_tokenizer(folder: Path, family: Family) -> tuple[bytes, dict[str, int]]:
    """Return the content of tokenizer.json or of the SentencePiece model, and the tokens' ids.

    Without tokenizer.json, ids come from vocab.json (M2M100) or from the order of the SentencePiece
    model (``Family.first_tokens``), followed by the tokens that the other files add.
    """
    file, settings = folder / "tokenizer.json", _settings(folder)
    if file.exists():
        content = file.read_bytes()
    elif settings.get("tokenizer_class") == "ByT5Tokenizer":
        content = _byte_tokenizer(settings)
    else:
        return _read_sentencepiece(folder, family, settings)
    return content, RustTokenizer(content).ids


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
    content = file.read_bytes()
    if (folder / "vocab.json").exists():
        ids: dict[str, Any] = read_json(folder / "vocab.json")
        ids = read_json(folder / "vocab.json", dict.fromkeys(ids, int))
    else:
        try:
            its = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise UserError(
                f"{str(file)!r} is not a SentencePiece model or is corrupt ({error}); download it "
                "again."
            ) from None
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
