"""Tokens that fine-tuning added to a pretrained model, in the files that transformers reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformer_jax.pretrained.config_file import read_config
from transformer_jax.pretrained.export_files import write_json
from transformer_jax.pretrained.files import PretrainedFiles
from transformer_jax.pretrained.tokenizer_files import PretrainedTokenizer
from transformer_jax.tokenization.tokenizer import Tokenizer

_LIST_NAMES = ("extra_special_tokens", "additional_special_tokens")


def describe_new_tokens(folder: Path, tokenizer: Tokenizer) -> None:
    """Add the new tokens of ``tokenizer`` to the original files of its model, in ``folder``, where
    tokenizer.json, if any, is the segmenter's own, which has them. Languages are in other files,
    too. Files that have all tokens do not change.
    """
    files = PretrainedFiles(folder)
    config = read_config(files)
    original = PretrainedTokenizer(files, config)
    vocabulary = tokenizer.target.vocabulary
    if len(vocabulary.tokens) != config.vocab_size:
        changes = {"vocab_size": len(vocabulary.tokens)}
        write_json(folder / "config.json", files["config.json"] | changes)
    known = original.languages().tokens
    new_codes = [code for code in tokenizer.languages.tokens if code not in known]
    is_listed = all(token in original.ids[-1] for token in tokenizer.languages.tokens.values())
    if is_listed and not new_codes:
        return
    tokens = [*tokenizer.languages.tokens.values()]
    fields = dict(original.settings)
    name = next((name for name in _LIST_NAMES if isinstance(fields.get(name), list)), "")
    if name or new_codes:
        listed = fields.get(name) or []
        new_tokens = [token for token in tokens if token not in listed]
        fields[name or _LIST_NAMES[1]] = [*listed, *new_tokens]
    if not is_listed:  # in this form, the list of all ids replaces those of other files
        decoder = dict(fields.get("added_tokens_decoder") or {})
        for number in sorted({*vocabulary.special, *vocabulary.languages, vocabulary.pad_id}):
            decoder.setdefault(str(number), _entry(vocabulary.tokens[number]))
        fields["added_tokens_decoder"] = decoder
    if original.kind == "M2M100Tokenizer":  # CTranslate2 names the other rows
        fields["num_madeup_words"] = vocabulary.tokens.count("")
    write_json(folder / "tokenizer_config.json", fields)


def _entry(token: str) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": token, "special": True, **flags}
