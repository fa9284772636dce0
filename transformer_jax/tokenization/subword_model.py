"""One side's tokenizer: conversion between text in one language and token ids."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import sentencepiece

from transformer_jax.errors import UserError, short_repr
from transformer_jax.tokenization.rust_tokenizer import RustTokenizer
from transformer_jax.tokenization.special_ids import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from transformer_jax.tokenization.subword_sampling import (
    SubwordSampler,
    any_of,
    model_proto,
    symbols_of,
)

# In multilingual models, a line can begin with a tag for the target language.
_TAG = re.compile("(?:>>.*?<<)?")
_IS_TAG = re.compile(">>.*<<")


class SubwordModel:
    """A SentencePiece model. Its pieces are the vocabulary, with PAD, BOS, EOS and UNK first.

    Pretrained models have a separate ``vocabulary``, which gives each piece its id, and can have a
    tokenizer.json file in place of a SentencePiece model. In MarianMT, a line can begin with a tag
    such as ``>>deu<<``, which is one token. In many-to-many models, the first token of every line
    is its language.

    Attributes:
      tagged: True if ``first`` is a tag for the language of the target, encoded as text.
      first: the token that ``encode`` puts before every line by default, or "".
      languages: the tokens of languages, by code.
      first_tokens: all tokens that can begin a line.
    """

    def __init__(
        self,
        model: bytes,
        vocabulary: Sequence[str] = (),
        first: str = "",
        languages: Mapping[str, str] = MappingProxyType({}),
        *,
        tagged: bool = False,
    ) -> None:
        self.model, self.first, self.languages = model, first, languages
        self.tagged = tagged
        self._foreign = bool(vocabulary)
        self.pad_id = PAD_ID
        self.bos_id = BOS_ID
        self.eos_id = EOS_ID
        self.unk_id = UNK_ID
        self._processor: Any
        if model.startswith(b"{"):
            self._processor, symbols, self._ends_words = RustTokenizer(model), [], False
            self._tokens = vocabulary
        else:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            proto = model_proto(model)
            self._tokens = vocabulary or [piece.piece for piece in proto.pieces]
            # SentencePiece's ``decode`` removes the space added before a line, but not one after.
            self._ends_words = proto.trainer_spec.treat_whitespace_as_suffix
            symbols = symbols_of(proto)
        self._ids = {token: i for i, token in enumerate(self._tokens)}
        self.first_tokens = {first, *languages.values()} - {""}
        self._hidden = {PAD_ID, BOS_ID, EOS_ID, *self.ids(self.first_tokens)}
        self._sampler: SubwordSampler | None = None
        can_have_tags = self._foreign and not (first or languages or self.is_json)
        self._has_text_tags = can_have_tags and any(map(_IS_TAG.fullmatch, self._tokens))
        tag = _TAG.pattern if self._has_text_tags else ""
        self._leading = re.compile(rf"{tag}(?:\s*(?:{any_of(symbols)}))*")

    @property
    def is_json(self) -> bool:
        """True for a tokenizer.json file, False for a SentencePiece model."""
        return isinstance(self._processor, RustTokenizer)

    def first_token(self, language: str = "", field: str = "target_language") -> str:
        """Return the token that begins every line in this language ("": the default), or "".

        Raises ``UserError``, which names ``field``, for an unknown language, and for "" if the
        model has languages but no default (except tags, which the text can have).
        """
        missing = self.languages and not (language or self.first or self.tagged)
        if missing or (language and language not in self.languages):
            none = "none, because the model has no language codes or was imported for one pair"
            known = ", ".join(self.languages) or none
            raise UserError(f"{field} is {short_repr(language)}; expected one of: {known}.")
        return self.languages[language] if language else self.first

    def first_ids(self, language: str = "", field: str = "target_language") -> list[int]:
        """Return the id of ``first_token``, or an empty list. A tag is encoded as text."""
        token = self.first_token(language, field)
        if self.tagged:
            return self.encode([token], first=())[0]
        return self.ids([token] if token else [])

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including the four special tokens."""
        return len(self._tokens)

    def encode(
        self,
        lines: Sequence[str],
        *,
        first: Sequence[int] | None = None,
        sampling: float = 0.0,
        seed: int = 0,
    ) -> list[list[int]]:
        """Encode each line as token ids, without BOS and EOS.

        ``first`` are the ids to put before every line (None: ``first_ids()``).

        If ``sampling`` is positive, draws a random segmentation of each line with this BPE-dropout
        probability. The same ``lines`` and ``seed`` give the same result.

        Raises ``UserError`` if ``lines`` is a single line.
        """
        if isinstance(lines, str):
            raise UserError(f"lines is {short_repr(lines)}; expected a list of lines.")
        if not sampling and not self._foreign:
            if len(lines) == 1:  # a batch call starts a thread, which takes time
                return [self._processor.encode(lines[0])]
            return self._processor.encode(list(lines), num_threads=1)
        first_ids = self.first_ids() if first is None else list(first)
        tags = [list(filter(None, _TAG.findall(line)[: self._has_text_tags])) for line in lines]
        texts = [line[len("".join(tag)) :] for tag, line in zip(tags, lines)]
        if sampling:
            if self.is_json:
                raise UserError(
                    f"tokenizer.sampling is {sampling}; expected 0, because BPE-dropout needs a "
                    "SentencePiece model and this model has a tokenizer.json file."
                )
            if self._sampler is None or self._sampler.dropout != sampling:
                self._sampler = SubwordSampler(self._processor, sampling)
            generator = random.Random(seed)
            cut = [self._sampler.sample(text, generator) for text in texts]
        else:
            cut = self._processor.encode(texts, out_type=str, num_threads=1)
        # A word such as </s> is not a special token.
        return [
            first_ids + [max(UNK_ID, token) for token in self.ids(tag + pieces)]
            for tag, pieces in zip(tags, cut)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode a sequence of token ids to text, skipping PAD, BOS, EOS and languages."""
        shown = [token for token in map(int, ids) if token not in self._hidden]
        text: str = self._processor.decode(self.tokens(shown) if self._foreign else shown)
        if self._foreign:  # tokens unknown to the model keep ▁ in place of a space
            text = text.replace("▁", " ").strip()
        elif self._ends_words:
            text = text.removesuffix(" ")
        # byte tokens can decode to a newline, but a line must stay one line
        return text.replace("\n", " ")

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Convert ids to tokens as SentencePiece spells them: ▁ (U+2581) is a space."""
        return [self._tokens[token] for token in ids]

    def ids(self, tokens: Iterable[str]) -> list[int]:
        """Convert tokens to ids. Unknown tokens become UNK_ID."""
        return [self._ids.get(token, UNK_ID) for token in tokens]

    def suppressed_ids(self, tokens: Sequence[str]) -> list[int]:
        """Convert the tokens of ``decoding.suppress`` to ids.

        Raises ``UserError`` for a token that is not in the vocabulary.
        """
        for token in tokens:
            if token not in self._ids:
                raise UserError(
                    f"decoding.suppress contains {token!r}; expected tokens in the target "
                    "vocabulary ('▁' is a space)."
                )
        return self.ids(tokens)

    def split_tag(self, line: str, first: Sequence[int] | None = None) -> tuple[list[int], str]:
        """Split a line into ``first`` with the ids of its leading symbols, and the remaining text.

        Leading symbols are a tag such as ``>>deu<<`` (imported models only), then any of
        ``tokenizer.user_defined_symbols``. Every segment of a long line repeats them.
        """
        found = self._leading.match(line)
        assert found is not None  # the match may be empty
        return self.encode([found[0]], first=first)[0], line[found.end() :]


def with_symbols(model: bytes, symbols: Sequence[str]) -> bytes:
    """Return a model with missing ``symbols`` appended as user-defined symbols."""
    proto = model_proto(model)
    pieces = {piece.piece: piece for piece in proto.pieces}
    for symbol in symbols:
        if symbol not in pieces:
            proto.pieces.add(piece=symbol, type=proto.SentencePiece.USER_DEFINED)
        elif pieces[symbol].type != proto.SentencePiece.USER_DEFINED:
            raise UserError(
                f"tokenizer.user_defined_symbols contains {symbol!r}, which is already a "
                "regular or special token in the vocabulary; choose another name."
            )
    return proto.SerializeToString()
