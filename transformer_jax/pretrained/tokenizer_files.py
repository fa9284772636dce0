"""Tokenizers of pretrained models: token ids, and what stands around a line, are transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformer_jax.errors import UserError, needs_extra, short_repr
from transformer_jax.pretrained.config_file import PretrainedConfig, SpecialIds, language_code
from transformer_jax.pretrained.families import Family
from transformer_jax.pretrained.files import read_json
from transformer_jax.tokenization.languages import Languages, Layout
from transformer_jax.tokenization.segmenters import (
    JsonSegmenter,
    SentencePieceSegmenter,
    read_segmenter,
)
from transformer_jax.tokenization.subword_model import SubwordModel
from transformer_jax.tokenization.vocabulary import Vocabulary

_SENTENCEPIECE = ("sentencepiece.bpe.model", "spiece.model")
_ENGLISH = ("eng_Latn", "en_XX", "en")
# Where these classes put languages, whatever the post-processor of tokenizer.json says.
_LAYOUTS: dict[str, Layout] = {
    "NllbTokenizer": "both",
    "M2M100Tokenizer": "both",
    "MBart50Tokenizer": "both",
    "MBartTokenizer": "start",
}
# These put EOS after a line and nothing before it.
_PLAIN = ("T5Tokenizer", "ByT5Tokenizer", "PegasusTokenizer", "MarianTokenizer")


class TokenizerFiles(NamedTuple):
    """What the files of a tokenizer say. Lists have one entry, or two for source and target."""

    kind: str
    """Name of the class in transformers, without Fast."""
    settings: dict[str, Any]
    """Fields of special_tokens_map.json and tokenizer_config.json."""
    segmenters: Sequence[SentencePieceSegmenter | JsonSegmenter]
    """Segmenters; two in Marian."""
    ids: list[dict[str, int]]
    """Ids of tokens; two if source and target have a vocabulary each (Marian)."""

    def text(self, name: str, default: str = "") -> str:
        """Return a special token, such as ``unk_token``."""
        return _text(self.settings.get(name) or default)

    @property
    def more_tokens(self) -> list[str]:
        """Special tokens beside the usual ones, such as languages."""
        names = ("additional_special_tokens", "extra_special_tokens")
        more: Any = next((self.settings[name] for name in names if self.settings.get(name)), [])
        return [_text(token) for token in (more.values() if isinstance(more, dict) else more)]

    @property
    def special_tokens(self) -> set[str]:
        """Tokens that transformers leaves out of the decoded text, except UNK."""
        tokens = {*self.more_tokens}
        for name in ("bos_token", "eos_token", "pad_token", "cls_token", "sep_token", "mask_token"):
            tokens.add(self.text(name))
        for token in (self.settings.get("added_tokens_decoder") or {}).values():
            if isinstance(token, dict) and token.get("special"):
                tokens.add(_text(token))
        return tokens - {"", self.text("unk_token", "<unk>")}


def read_tokenizer(folder: Path, config: PretrainedConfig) -> TokenizerFiles:
    """Read tokenizer.json or SentencePiece models, and the ids of tokens.

    Without tokenizer.json, ids come from vocab.json (Marian, M2M100) or from the order of the
    SentencePiece model (``Family.first_tokens``), followed by the tokens that other files add.
    """
    family = config.family
    if family.name == "MarianMTModel":  # the other files say nothing more
        segmenters = [_read_model(folder / name) for name in ("source.spm", "target.spm")]
        files = [folder / "vocab.json", folder / "target_vocab.json"]
        ids = [_read_ids(file) for file in files[: 1 + files[1].exists()]]
        return TokenizerFiles(family.tokenizer, {}, segmenters, ids)
    settings = _settings(folder)
    kind = _class_of(folder, config, settings)
    file = folder / "tokenizer.json"
    if file.exists() or kind == "ByT5Tokenizer":
        content = file.read_bytes() if file.exists() else _byte_tokenizer(settings)
        segmenter = JsonSegmenter(content)
        ids_of_file = {token: i for i, token in segmenter.tokens.items()}
        return TokenizerFiles(kind, settings, [segmenter], [ids_of_file])
    model, ids_of_model = _read_sentencepiece(folder, family, settings)
    return TokenizerFiles(kind, settings, [model], [ids_of_model])


def make_sides(
    files: TokenizerFiles, config: PretrainedConfig, special: SpecialIds
) -> list[SubwordModel]:
    """Make the source's and the target's tokenizer; one object if they share everything.

    Raises ``UserError`` if tokens have ids outside the embedding matrix.
    """
    sizes = [config.vocab_size]
    if len(files.ids) > 1:
        sizes = [int(config.fields["vocab_size"]), config.vocab_size]
    vocabularies = [
        _vocabulary(files, ids, size, config, special) for ids, size in zip(files.ids, sizes)
    ]
    if len(files.segmenters) == 1:
        return [SubwordModel(files.segmenters[0], vocabularies[0])]
    return [
        SubwordModel(files.segmenters[0], vocabularies[0]),
        SubwordModel(files.segmenters[1], vocabularies[-1]),
    ]


def _vocabulary(
    files: TokenizerFiles,
    ids: dict[str, int],
    size: int,
    config: PretrainedConfig,
    special: SpecialIds,
) -> Vocabulary:
    outside = [token for token, i in ids.items() if not 0 <= i < size]
    if outside:
        raise UserError(
            f"The tokenizer has {len(ids)} tokens, and {len(outside)} tokens with ids outside the "
            f"embedding matrix, such as {short_repr(outside[0])}; expected ids below {size}. Use "
            "the tokenizer that belongs to the weights, or in transformers, call "
            "model.resize_token_embeddings(len(tokenizer)) and save both."
        )
    tokens = [""] * size
    for token, i in ids.items():
        tokens[i] = token
    hidden = {ids[token] for token in files.special_tokens if token in ids}
    languages = {i for token, i in ids.items() if language_code(config.family.languages, token)}
    if isinstance(files.segmenters[0], JsonSegmenter):
        hidden |= files.segmenters[0].special_ids
    else:
        first = config.family.first_tokens or ()
        hidden |= {ids[token] for token in first if token in ids}
        hidden |= {i for token, i in ids.items() if token.lstrip("▁").startswith("<extra_id_")}
    if any(tokens[i].startswith("<2") for i in languages):  # transformers shows these
        hidden -= languages
    else:
        hidden |= languages
    unknown = ids.get(files.text("unk_token", "<unk>"))
    return Vocabulary(
        tuple(tokens),
        special.pad,
        special.eos,
        unknown,
        special.bos,
        tuple(sorted(hidden - {unknown})),
        tuple(sorted(languages)),
    )


def read_languages(
    folder: Path, files: TokenizerFiles, config: PretrainedConfig, special: SpecialIds
) -> Languages:
    """Return the tokens that transformers' tokenizer puts around a line.

    Raises ``UserError`` if they cannot be reproduced.
    """
    ids = files.ids[-1]
    token_of = {i: token for token, i in ids.items()}
    if special.eos not in token_of:
        raise UserError(
            f"The tokenizer has no token with the id {special.eos}, eos_token_id in config.json; "
            "expected EOS. Use the tokenizer that belongs to the weights."
        )
    forced = config.generation.get("forced_bos_token_id")
    forced = _text(token_of.get(forced, "")) if type(forced) is int else ""
    tokens = _language_tokens(files, config)
    tagged = any(token.startswith("<2") for token in tokens.values())
    if tokens and tagged:
        return Languages(tokens, layout="tag")
    layout = _LAYOUTS.get(files.kind)
    if layout == "both" and files.settings.get("legacy_behaviour"):
        layout = "after"
    if layout is None:
        return _from_post_processor(folder, files, special, tokens, forced)
    english = [tokens[code] for code in _ENGLISH if code in tokens]  # transformers' default
    default = [*english, *tokens.values(), ""][0]
    source = tokens.get(files.text("src_lang"), default)
    target = tokens.get(files.text("tgt_lang"), "") or forced
    return Languages(tokens, source, target, layout)


def _from_post_processor(
    folder: Path,
    files: TokenizerFiles,
    special: SpecialIds,
    tokens: dict[str, str],
    forced: str,
) -> Languages:
    """Return the languages of a tokenizer whose class leaves them to tokenizer.json."""
    token_of = {i: token for token, i in files.ids[0].items()}
    segmenter = files.segmenters[0]
    if files.kind in _PLAIN:
        before: list[int] = []
        after = [special.eos]
    elif isinstance(segmenter, JsonSegmenter):
        before, after = segmenter.added_around("a 1")
    else:
        raise UserError(
            f"The tokenizer in {str(folder)!r} is a {files.kind}; expected tokenizer.json for this "
            "class. transformers writes it: "
            "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)."
        )
    eos = token_of.get(special.eos)
    before_line = [token_of.get(i, str(i)) for i in before]
    after_line = [token_of.get(i, str(i)) for i in after]
    source = tokens.get(files.text("src_lang"), "")
    codes = {*tokens.values()}
    if after_line == [eos] and len(before_line) <= 1:
        first = before_line[0] if before_line else ""
        if not tokens and (forced in ("", first) or not first):
            return Languages({}, first, first or forced, forced=bool(forced) or not first)
        if first in codes:
            return Languages(tokens, source or first, forced)
    if not before_line and len(after_line) == 2 and after_line[0] == eos and after_line[1] in codes:
        starts = token_of.get(special.decoder_start) in codes
        layout: Layout = "start" if starts else "after"
        return Languages(tokens, source or after_line[1], forced, layout)
    around = [*before_line, *after_line]
    raise UserError(
        f"The tokenizer in {str(folder)!r} ({files.kind}) puts {around} around a line, and the "
        f"target begins with {forced!r}; expected the language, if the model has languages, or one "
        f"token before the line, and EOS ({eos!r}, eos_token_id) after it. "
        "Use the tokenizer class of the published model."
    )


def _language_tokens(files: TokenizerFiles, config: PretrainedConfig) -> dict[str, str]:
    """Return the tokens of languages by code, in the order of their ids. New languages of a
    fine-tuned model can have other codes; they are special tokens, too.
    """
    ids = files.ids[-1]
    tokens = {}
    has_codes = False
    more = {*files.more_tokens} if files.kind in _LAYOUTS else set[str]()
    for token in sorted(ids, key=ids.__getitem__):
        code = language_code(config.family.languages, token)
        has_codes = has_codes or bool(code)
        if not code and token in more and not token.startswith(("<", "[")):
            code = token.removeprefix("__").removesuffix("__")
        if code:
            tokens[code] = token
    return tokens if has_codes else {}


def _class_of(folder: Path, config: PretrainedConfig, settings: dict[str, Any]) -> str:
    """Return the name of the tokenizer's class in transformers, without Fast."""
    if settings.get("auto_map"):
        raise UserError(
            f"The tokenizer in {str(folder)!r} is code of its own (auto_map in "
            "tokenizer_config.json); expected a class of transformers. We run no code of models."
        )
    name = settings.get("tokenizer_class") or config.fields.get("tokenizer_class")
    if name is None:
        name = config.family.tokenizer
        # Older folders of mBART-50 and NLLB; their first input is EOS, not a language.
        if (
            name == "MBartTokenizer"
            and config.special_ids().decoder_start == config.special_ids().eos
        ):
            name = "MBart50Tokenizer"
    return str(name).removesuffix("Fast")


def _settings(folder: Path) -> dict[str, Any]:
    names = ("special_tokens_map.json", "tokenizer_config.json")
    older, newer = (read_json(folder / name, missing_ok=True) for name in names)
    return older | {name: value for name, value in newer.items() if value is not None}


def _read_model(file: Path) -> SentencePieceSegmenter:
    if not file.exists():
        raise UserError(
            f"{str(file.parent)!r} has no {file.name}; expected the tokenizer's SentencePiece "
            "models beside config.json. Download the folder again: hf download NAME --local-dir "
            "FOLDER"
        )
    segmenter = read_segmenter(file)
    assert isinstance(segmenter, SentencePieceSegmenter)
    return segmenter


def _read_sentencepiece(
    folder: Path, family: Family, settings: dict[str, Any]
) -> tuple[SentencePieceSegmenter, dict[str, int]]:
    file = next((folder / name for name in _SENTENCEPIECE if (folder / name).exists()), None)
    if file is None or family.first_tokens is None:
        raise UserError(
            f"{str(folder)!r} has no tokenizer.json; expected that file or, except for BART, "
            f"{' or '.join(_SENTENCEPIECE)}. transformers writes it: "
            "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)."
        )
    segmenter = _read_model(file)
    if (folder / "vocab.json").exists():
        ids = _read_ids(folder / "vocab.json")
    else:
        pieces = segmenter.pieces[family.num_skipped :]
        ids = {token: i for i, token in enumerate([*family.first_tokens, *pieces])}
        if not family.first_tokens and "▁<extra_id_0>" not in ids:  # mT5's model has them
            for number in reversed(range(settings.get("extra_ids", 100))):
                ids[f"<extra_id_{number}>"] = len(ids)
    added_file = folder / "added_tokens.json"
    if added_file.exists():
        ids |= read_json(added_file, dict.fromkeys(read_json(added_file), int))
    added = settings.get("added_tokens_decoder") or {}
    ids |= {_text(token): int(i) for i, token in added.items()}
    more = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    for token in [*more, settings.get("mask_token")]:
        if token is not None:
            ids.setdefault(_text(token), len(ids))
    return segmenter, ids


def _read_ids(file: Path) -> dict[str, int]:
    """Read a vocabulary with the id of each token."""
    ids = read_json(file, dict.fromkeys([*read_json(file), "<unk>"], int))
    for token in ids:
        if not token.isascii() and any("\ud800" <= character <= "\udfff" for character in token):
            raise UserError(
                f"{str(file)!r} has the token {short_repr(token)}, which is not valid Unicode "
                "(a lone surrogate); expected text. Download it again."
            )
    return ids


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
