"""A SentencePiece model: conversion between text in one language and token ids."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence

import sentencepiece

from transformer_jax.errors import UserError, short_repr
from transformer_jax.tokenization.special_ids import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from transformer_jax.tokenization.subword_sampling import (
    SubwordSampler,
    any_of,
    model_proto,
    symbols_of,
)

# In multilingual models, a line can begin with a tag for the target language.
_TAG = re.compile("(?:>>.*?<<)?")


class SubwordModel:
    """A SentencePiece model. Its pieces are the vocabulary, with PAD, BOS, EOS and UNK first.

    With a separate ``vocabulary``, as in MarianMT, each piece gets its id from that vocabulary. A
    line can then begin with a tag such as ``>>deu<<``, which is one token.
    """

    def __init__(self, model: bytes, vocabulary: Sequence[str] = ()) -> None:
        self.model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._foreign = bool(vocabulary)
        proto = model_proto(model)
        self._tokens = vocabulary or [piece.piece for piece in proto.pieces]
        self._ids = {token: i for i, token in enumerate(self._tokens)}
        self._sampler: SubwordSampler | None = None
        # SentencePiece's ``decode`` removes the space added before a line, but not one after it.
        self._ends_words = proto.trainer_spec.treat_whitespace_as_suffix
        symbols = symbols_of(proto)
        tag = _TAG.pattern if self._foreign else ""
        self._leading = re.compile(tag + (rf"(?:\s*(?:{any_of(symbols)}))*" if symbols else ""))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including the four special tokens."""
        return len(self._tokens)

    def encode(
        self, lines: Sequence[str], *, sampling: float = 0.0, seed: int = 0
    ) -> list[list[int]]:
        """Encode each line as token ids, without BOS and EOS.

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
        tags = [_TAG.findall(line)[0] if self._foreign else "" for line in lines]
        texts = [line[len(tag) :] for tag, line in zip(tags, lines)]
        if sampling:
            if self._sampler is None or self._sampler.dropout != sampling:
                self._sampler = SubwordSampler(self._processor, sampling)
            generator = random.Random(seed)
            cut = [self._sampler.sample(text, generator) for text in texts]
        else:
            cut = self._processor.encode(texts, out_type=str, num_threads=1)
        # A word such as </s> is not a special token.
        return [
            [max(UNK_ID, token) for token in self.ids([tag, *pieces] if tag else pieces)]
            for tag, pieces in zip(tags, cut)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode a sequence of token ids to text, skipping PAD, BOS and EOS."""
        shown = [token for token in map(int, ids) if token not in (PAD_ID, BOS_ID, EOS_ID)]
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

    def require_ids(self, tokens: Sequence[str], field: str) -> list[int]:
        """Convert the tokens in a config field to ids.

        Raises ``UserError``, which names ``field``, for a token that is not in the vocabulary.
        """
        for token in tokens:
            if token not in self._ids:
                raise UserError(
                    f"{field} contains {token!r}; expected tokens in the target vocabulary ('▁' "
                    "is a space)."
                )
        return self.ids(tokens)

    def split_tag(self, line: str) -> tuple[list[int], str]:
        """Split a line into the ids of its leading symbols and the remaining text.

        Leading symbols are a tag such as ``>>deu<<`` (imported models only), then any of
        ``tokenizer.user_defined_symbols``. Every segment of a long line repeats them.
        """
        found = self._leading.match(line)
        assert found is not None  # the match may be empty
        return self.encode([found[0]])[0], line[found.end() :]


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
