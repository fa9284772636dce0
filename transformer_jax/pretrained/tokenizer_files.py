"""Tokenizers of pretrained models: token ids, and what stands around a line, are transformers'."""

from __future__ import annotations

import re
from typing import Any

from transformer_jax.errors import UserError, needs_extra, short_repr
from transformer_jax.pretrained.config_file import PretrainedConfig
from transformer_jax.pretrained.files import PretrainedFiles
from transformer_jax.tokenization.languages import Languages, Layout
from transformer_jax.tokenization.segmenters import (
    JsonSegmenter,
    Segmenter,
    SentencePieceSegmenter,
    read_sentencepiece,
)
from transformer_jax.tokenization.subword_model import SubwordModel
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.tokenization.vocabulary import Vocabulary

_SENTENCEPIECE_FILES = ("sentencepiece.bpe.model", "spiece.model")
_ENGLISH_CODES = ("eng_Latn", "en_XX", "en")
# Where these classes put languages, whatever the post-processor of tokenizer.json says.
_LAYOUTS: dict[str, Layout] = {
    "NllbTokenizer": "both",
    "M2M100Tokenizer": "both",
    "MBart50Tokenizer": "both",
    "MBartTokenizer": "start",
}
# These put EOS after a line and nothing before it.
_WITHOUT_AFFIXES = ("T5Tokenizer", "ByT5Tokenizer", "PegasusTokenizer", "MarianTokenizer")


class PretrainedTokenizer:
    """A tokenizer as the files of a pretrained model have it.

    Without tokenizer.json, ids come from vocab.json (Marian, M2M100) or from the order of the
    SentencePiece model (``Family.leading_tokens``), followed by the tokens that other files add.

    Attributes:
      kind: name of the class in transformers, without Fast.
      settings: fields of tokenizer_config.json and, if it has no ``added_tokens_decoder``, of
        special_tokens_map.json, which come first.
      segmenters: one, or two for source and target (Marian).
      ids: ids of tokens; two if source and target have a vocabulary each (Marian).
    """

    def __init__(self, files: PretrainedFiles, config: PretrainedConfig):
        self.folder = files.folder
        self.config = config
        self.kind = config.family.tokenizer
        self.settings: dict[str, Any] = {}
        self.segmenters: list[Segmenter]
        if self.kind == "MarianTokenizer":  # the other files say nothing more
            self.segmenters = [self._read_sentencepiece_file(name) for name in files.segmenters]
            self.ids = files.vocabularies
            return
        fields = dict(files["tokenizer_config.json"])
        if "added_tokens_decoder" not in fields:  # otherwise transformers ignores the older file
            fields |= files["special_tokens_map.json"]
        self.settings = {name: value for name, value in fields.items() if value is not None}
        self.kind = self._class_name()
        file = self.folder / "tokenizer.json"
        if file.exists() or self.kind == "ByT5Tokenizer":
            content = file.read_bytes() if file.exists() else self._byte_tokenizer()
            segmenter = JsonSegmenter(content)
            self.segmenters = [segmenter]
            self.ids = [segmenter.ids]
        else:
            model = self._sentencepiece()
            self.segmenters = [model]
            self.ids = [self._sentencepiece_ids(files, model)]

    def _special_token(self, name: str, default: str = "") -> str:
        """Return a special token, such as ``unk_token``."""
        return _text(self.settings.get(name) or default)

    @property
    def _more_tokens(self) -> list[str]:
        """Special tokens beside the usual ones, such as languages."""
        names = ("additional_special_tokens", "extra_special_tokens")
        additional: Any = next(
            (self.settings[name] for name in names if self.settings.get(name)), []
        )
        return [
            _text(token)
            for token in (additional.values() if isinstance(additional, dict) else additional)
        ]

    @property
    def _special_tokens(self) -> set[str]:
        """Tokens that transformers leaves out of the decoded text, except UNK."""
        tokens = {*self._more_tokens}
        for name in ("bos_token", "eos_token", "pad_token", "cls_token", "sep_token", "mask_token"):
            tokens.add(self._special_token(name))
        for token in (self.settings.get("added_tokens_decoder") or {}).values():
            if isinstance(token, dict) and token.get("special"):
                tokens.add(_text(token))
        return tokens - {"", self._special_token("unk_token", "<unk>")}

    def build(self, languages: Languages, original_files: bytes = b"") -> Tokenizer:
        """Make the tokenizer. ``original_files`` are those of an export (``Tokenizer.pretrained``).

        Raises ``UserError`` if tokens have ids outside the embedding matrix.
        """
        sizes = [self.config.vocab_size]
        if len(self.ids) > 1:
            sizes = [int(self.config.fields["vocab_size"]), self.config.vocab_size]
        vocabularies = [self._vocabulary(ids, size) for ids, size in zip(self.ids, sizes)]
        vocabularies_of_sides = [vocabularies[0], vocabularies[-1]]
        sides = [
            SubwordModel(segmenter, vocabulary)
            for segmenter, vocabulary in zip(self.segmenters, vocabularies_of_sides)
        ]
        return Tokenizer(sides[0], sides[-1], languages=languages, pretrained=original_files)

    def _vocabulary(self, ids: dict[str, int], size: int) -> Vocabulary:
        out_of_range = [token for token, i in ids.items() if not 0 <= i < size]
        if out_of_range:
            raise UserError(
                f"The tokenizer has {len(ids)} tokens, and {len(out_of_range)} tokens with ids "
                f"outside the embedding matrix, such as {short_repr(out_of_range[0])}; expected "
                f"ids below {size}. Use the tokenizer that belongs to the weights, or in "
                "transformers, call model.resize_token_embeddings(len(tokenizer)) and save both."
            )
        tokens = [""] * size
        for token, i in ids.items():
            tokens[i] = token
        special_token_ids = {ids[token] for token in self._special_tokens if token in ids}
        languages = {i for token, i in ids.items() if self._language_code(token)}
        if isinstance(self.segmenters[0], JsonSegmenter):
            special_token_ids |= self.segmenters[0].special_ids
        else:
            leading_tokens = self.config.family.leading_tokens or ()
            special_token_ids |= {ids[token] for token in leading_tokens if token in ids}
            special_token_ids |= {
                i for token, i in ids.items() if token.lstrip("▁").startswith("<extra_id_")
            }
        if any(tokens[i].startswith("<2") for i in languages):  # transformers shows these
            special_token_ids -= languages
        else:
            special_token_ids |= languages
        unknown = ids.get(self._special_token("unk_token", "<unk>"))
        return Vocabulary(
            tuple(tokens),
            self.config.special.pad,
            self.config.special.eos,
            unknown,
            self.config.special.bos,
            tuple(sorted(special_token_ids - {unknown})),
            tuple(sorted(languages)),
        )

    def languages(self) -> Languages:
        """Return the tokens that transformers' tokenizer puts around a line.

        Raises ``UserError`` if they cannot be reproduced.
        """
        ids = self.ids[-1]
        tokens_by_id = {i: token for token, i in ids.items()}
        eos_id = self.config.special.eos
        if eos_id not in tokens_by_id:
            raise UserError(
                f"The tokenizer has no token with the id {eos_id}, eos_token_id in config.json; "
                "expected EOS. Use the tokenizer that belongs to the weights."
            )
        forced = self.config.generation.get("forced_bos_token_id")
        forced = _text(tokens_by_id.get(forced, "")) if type(forced) is int else ""
        tokens = self._language_tokens()
        if any(token.startswith("<2") for token in tokens.values()):
            return Languages(tokens, layout="tag")
        layout = _LAYOUTS.get(self.kind)
        if layout == "both" and self.settings.get("legacy_behaviour"):
            layout = "after"
        if layout is None:
            return self._languages_from_post_processor(tokens, forced)
        # The default of transformers.
        english_tokens = [tokens[code] for code in _ENGLISH_CODES if code in tokens]
        default = [*english_tokens, *tokens.values(), ""][0]
        source = tokens.get(self._special_token("src_lang"), default)
        target = tokens.get(self._special_token("tgt_lang"), "") or forced
        return Languages(tokens, source, target, layout)

    def _languages_from_post_processor(self, tokens: dict[str, str], forced: str) -> Languages:
        """Return the languages of a tokenizer whose class leaves them to tokenizer.json."""
        tokens_by_id = {i: token for token, i in self.ids[0].items()}
        segmenter = self.segmenters[0]
        if self.kind in _WITHOUT_AFFIXES:
            before: list[int] = []
            after = [self.config.special.eos]
        elif isinstance(segmenter, JsonSegmenter):
            before, after = segmenter.affix_ids("a 1")
        else:
            raise UserError(
                f"The tokenizer in {str(self.folder)!r} is a {self.kind}; expected tokenizer.json "
                "for this class. transformers writes it: "
                "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)."
            )
        eos = tokens_by_id.get(self.config.special.eos)
        before_line = [tokens_by_id.get(i, str(i)) for i in before]
        after_line = [tokens_by_id.get(i, str(i)) for i in after]
        source = tokens.get(self._special_token("src_lang"), "")
        codes = {*tokens.values()}
        if after_line == [eos] and len(before_line) <= 1:
            leading_token = before_line[0] if before_line else ""
            if not tokens and (forced in ("", leading_token) or not leading_token):
                return Languages(
                    {},
                    leading_token,
                    leading_token or forced,
                    forced=bool(forced) or not leading_token,
                )
            if leading_token in codes:
                return Languages(tokens, source or leading_token, forced)
        is_after = len(after_line) == 2 and after_line[0] == eos and after_line[1] in codes
        if is_after and not before_line:
            starts = tokens_by_id.get(self.config.special.decoder_start) in codes
            layout: Layout = "start" if starts else "after"
            return Languages(tokens, source or after_line[1], forced, layout)
        line_affixes = [*before_line, *after_line]
        raise UserError(
            f"The tokenizer in {str(self.folder)!r} ({self.kind}) puts {line_affixes} around a "
            f"line, and the target begins with {forced!r}; expected the language, if the model has "
            f"languages, or one token before the line, and EOS ({eos!r}, eos_token_id) after it. "
            "Use the tokenizer class of the published model."
        )

    def _language_tokens(self) -> dict[str, str]:
        """Return the tokens of languages by code, in the order of their ids. New languages of a
        fine-tuned model can have other codes; they are special tokens, too.
        """
        ids = self.ids[-1]
        tokens = {}
        has_codes = False
        additional = {*self._more_tokens} if self.kind in _LAYOUTS else set[str]()
        for token in sorted(ids, key=ids.__getitem__):
            code = self._language_code(token)
            has_codes = has_codes or bool(code)
            if not code and token in additional and not token.startswith(("<", "[")):
                code = token.removeprefix("__").removesuffix("__")
            if code:
                tokens[code] = token
        return tokens if has_codes else {}

    def _language_code(self, token: str) -> str:
        """Return the language code of a token that matches ``Family.languages``, or ""."""
        match = re.fullmatch(self.config.family.languages, token)
        return match[match.lastindex or 0] if match else ""

    def _class_name(self) -> str:
        """Return the name of the tokenizer's class in transformers, without Fast."""
        if self.settings.get("auto_map"):
            raise UserError(
                f"The tokenizer in {str(self.folder)!r} is code of its own (auto_map in "
                "tokenizer_config.json); expected a class of transformers. We run no code of "
                "models."
            )
        name = self.settings.get("tokenizer_class") or self.config.fields.get("tokenizer_class")
        if name is None:
            name = self.config.family.tokenizer
            # Older folders of mBART-50 and NLLB; their first input is EOS, not a language.
            special_ids = self.config.special
            if name == "MBartTokenizer" and special_ids.decoder_start == special_ids.eos:
                name = "MBart50Tokenizer"
        return str(name).removesuffix("Fast")

    def _read_sentencepiece_file(self, name: str) -> SentencePieceSegmenter:
        file = self.folder / name
        if not file.exists():
            raise UserError(
                f"{str(self.folder)!r} has no {name}; expected the tokenizer's SentencePiece "
                "models beside config.json. Download the folder again: hf download NAME "
                "--local-dir FOLDER"
            )
        return read_sentencepiece(file)

    def _sentencepiece(self) -> SentencePieceSegmenter:
        for name in _SENTENCEPIECE_FILES:
            if (self.folder / name).exists() and self.config.family.leading_tokens is not None:
                return self._read_sentencepiece_file(name)
        raise UserError(
            f"{str(self.folder)!r} has no tokenizer.json; expected that file or, except for BART, "
            f"{' or '.join(_SENTENCEPIECE_FILES)}. transformers writes it: "
            "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)."
        )

    def _sentencepiece_ids(
        self, files: PretrainedFiles, segmenter: SentencePieceSegmenter
    ) -> dict[str, int]:
        """Return the ids that transformers gives to the tokens of a SentencePiece model."""
        family = self.config.family
        if (self.folder / "vocab.json").exists():
            ids = files.read_vocabulary("vocab.json")
        else:
            pieces = [*segmenter.ids][family.num_replaced_pieces :]
            ids = {token: i for i, token in enumerate([*(family.leading_tokens or ()), *pieces])}
            if not family.leading_tokens and "▁<extra_id_0>" not in ids:  # mT5's model has them
                for number in reversed(range(self.settings.get("extra_ids", 100))):
                    ids[f"<extra_id_{number}>"] = len(ids)
        added = files["added_tokens.json"]
        files.check("added_tokens.json", dict.fromkeys(added, int))
        ids |= added
        for number, token in (self.settings.get("added_tokens_decoder") or {}).items():
            ids[_text(token)] = int(number)
        for token in [*self._more_tokens, self._special_token("mask_token")]:
            if token:
                ids.setdefault(token, len(ids))
        return ids

    def _byte_tokenizer(self) -> bytes:
        """Return a tokenizer.json for ByT5, whose tokens are the bytes of UTF-8."""
        with needs_extra("pretrained"):
            from tokenizers import Tokenizer, decoders, models
        special_tokens = ["<pad>", "</s>", "<unk>"]
        sentinel_tokens = [f"<extra_id_{i}>" for i in range(self.settings.get("extra_ids") or 125)]
        tokens = [*special_tokens, *(f"<0x{byte:02X}>" for byte in range(256)), *sentinel_tokens]
        vocabulary = {token: i for i, token in enumerate(tokens)}
        byte_tokenizer = Tokenizer(
            models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
        )
        byte_tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        byte_tokenizer.add_special_tokens([*special_tokens, *sentinel_tokens])
        return byte_tokenizer.to_str().encode()


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
