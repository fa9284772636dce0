"""One side's tokenizer: conversion between text in one language and token ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from transformer_jax.errors import UserError, short_repr
from transformer_jax.tokenization.segmenters import (
    JsonSegmenter,
    Segmenter,
    SentencePieceSegmenter,
    can_choose,
    make_segmenter,
)
from transformer_jax.tokenization.subword_sampling import BpeDropout, any_symbol_pattern
from transformer_jax.tokenization.vocabulary import Vocabulary

# The tag that can begin a line in multilingual Marian models.
_TAG = ">>.*?<<"
_TAG_TOKEN = re.compile(">>.*<<")


class SubwordModel:
    """A segmenter (text and pieces) and a vocabulary (pieces and ids) of one language or several.

    In models trained here, the vocabulary is the SentencePiece model's own. In MarianMT, a line can
    begin with a tag such as ``>>deu<<``, which is one token.

    Attributes:
      segmenter: a SentencePiece model or a tokenizer.json file.
      vocabulary: tokens, and the ids of special tokens.
      pad_id, bos_id, eos_id, unk_id: those of the vocabulary; the second and last can be None.
    """

    def __init__(
        self,
        segmenter: bytes | Segmenter,
        vocabulary: Vocabulary | None = None,
        *,
        languages: Sequence[str] = (),
    ) -> None:
        """``languages``: the tokens of languages in a SentencePiece model's own vocabulary."""
        if isinstance(segmenter, bytes):
            segmenter = make_segmenter(segmenter)
        self.segmenter = segmenter
        self.has_own_vocabulary = vocabulary is None
        if vocabulary is None:
            if isinstance(segmenter, JsonSegmenter):
                raise UserError(
                    "A tokenizer.json file needs a vocabulary, because it does not say which "
                    "tokens are PAD and EOS; expected Vocabulary(tokens, pad_id, eos_id, ...)."
                )
            vocabulary = Vocabulary.from_sentencepiece(segmenter, languages)
        self.vocabulary = vocabulary
        self.pad_id = vocabulary.pad_id
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.unk_id = vocabulary.unk_id
        # True if the segmenter's ids are those of the vocabulary.
        self._ids_agree = self.has_own_vocabulary or isinstance(segmenter, JsonSegmenter)
        has_tags = not self._ids_agree and any(map(_TAG_TOKEN.fullmatch, vocabulary.tokens))
        tag = f"(?:{_TAG})?" if has_tags else ""
        self._tag_pattern = re.compile(tag)
        self._leading_symbols = re.compile(
            rf"{tag}(?:\s*(?:{any_symbol_pattern(segmenter.symbols)}))*"
        )

    @property
    def model(self) -> bytes:
        """Contents of the segmenter's file."""
        return self.segmenter.content

    @property
    def eos_token(self) -> str:
        """The token with ``eos_id``."""
        return self.vocabulary.name(self.eos_id)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self.vocabulary.tokens)

    def encode(
        self, lines: Sequence[str], *, sampling: BpeDropout | None = None, seed: int = 0
    ) -> list[list[int]]:
        """Encode the text of each line as token ids, without BOS, EOS and languages
        (``Tokenizer.affixes``).

        With ``sampling``, draws a random segmentation of each line. The same ``lines`` and ``seed``
        give the same result.

        Raises ``UserError`` if ``lines`` is a single line.
        """
        if isinstance(lines, str):
            raise UserError(f"lines is {short_repr(lines)}; expected a list of lines.")
        if self._ids_agree and sampling is None:
            encoded = self.segmenter.encode_as_ids(lines)
            return [self.vocabulary.without_controls(ids) for ids in encoded]
        if isinstance(self.segmenter, JsonSegmenter):
            raise UserError(
                f"The training text is segmented with {sampling}; expected no subword sampling "
                "(tokenizer.bpe_dropout 0), because it needs a SentencePiece model and this model "
                "has a tokenizer.json file."
            )
        tags = [_prefix(self._tag_pattern, line) for line in lines]
        texts = [line[len(tag) :] for line, tag in zip(lines, tags)]
        encoded = []
        for tag, pieces in zip(tags, self.segmenter.encode(texts, sampling, seed)):
            ids = self.vocabulary.ids([tag, *pieces] if tag else pieces)
            encoded.append(self.vocabulary.without_controls(ids))
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        """Decode a sequence of token ids to text, skipping PAD, BOS, EOS, languages and other
        special tokens.
        """
        hidden_ids = self.vocabulary.hidden_ids
        visible_ids = [token for token in map(int, ids) if token not in hidden_ids]
        if self._ids_agree:
            text = self.segmenter.decode_ids(visible_ids)
        else:
            assert isinstance(self.segmenter, SentencePieceSegmenter)
            text = self.segmenter.decode(self.tokens(visible_ids))
        # byte tokens can decode to a newline, but a line must stay one line
        return text.replace("\n", " ")

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Convert ids to tokens as SentencePiece spells them: ▁ (U+2581) is a space."""
        return self.vocabulary.names(ids)

    def ids(self, tokens: Iterable[str]) -> list[int]:
        """Convert tokens to ids. Unknown tokens become UNK."""
        return self.vocabulary.ids(list(tokens))

    def suppressed_ids(self, tokens: Sequence[str]) -> list[int]:
        """Convert the tokens of ``decoding.suppress`` to ids.

        Raises ``UserError`` for a token that is not in the vocabulary.
        """
        for token in tokens:
            if token not in self.vocabulary.id_of:
                raise UserError(
                    f"decoding.suppress contains {token!r}; expected tokens in the target "
                    "vocabulary ('▁' is a space)."
                )
        return self.ids(tokens)

    def tag(self, line: str) -> str:
        """Return the leading symbols of a line (``split_tag``) with the spaces around them."""
        symbols = _prefix(self._leading_symbols, line)
        return line.removesuffix(line[len(symbols) :].lstrip()) if symbols else ""

    def split_tag(self, line: str) -> tuple[list[int], str]:
        """Split a line into the ids of its leading symbols and the remaining text.

        Leading symbols are a tag such as ``>>deu<<`` (imported models only), then any of
        ``tokenizer.user_defined_symbols``. Every segment of a long line repeats them.
        """
        symbols = _prefix(self._leading_symbols, line)
        return self.encode([symbols])[0], line[len(symbols) :]

    def with_symbols(self, symbols: Sequence[str]) -> SubwordModel:
        """Return a copy with missing ``symbols`` appended. Existing ids do not change.

        Raises ``UserError`` for a tokenizer.json file.
        """
        segmenter = self.segmenter.with_symbols(symbols)
        if self.has_own_vocabulary:
            return SubwordModel(segmenter, languages=self.tokens(self.vocabulary.languages))
        return SubwordModel(segmenter, self.vocabulary.with_tokens(symbols))

    def with_languages(self, tokens: Sequence[str], model: str) -> SubwordModel:
        """Return a copy with new tokens of languages. Existing ids do not change. ``model`` is the
        token of another language; "" in a model without languages.

        Raises ``UserError`` if a token exists.
        """
        segmenter = self.segmenter
        if self.has_own_vocabulary:
            old = self.tokens(self.vocabulary.languages)
            assert isinstance(segmenter, SentencePieceSegmenter)
            return SubwordModel(segmenter.with_symbols(tokens), languages=[*old, *tokens])
        vocabulary = self.vocabulary
        if isinstance(segmenter, SentencePieceSegmenter) and model in segmenter.ids:
            raise _needs_tokenizer_json("tokenizer.new_languages")
        for new_token in tokens:
            if new_token in vocabulary.id_of:
                raise UserError(
                    f"tokenizer.new_languages needs the token {new_token!r}, which exists in the "
                    "vocabulary; choose another code."
                )
            number = max(i for i, token in enumerate(vocabulary.tokens) if token) + 1
            if isinstance(segmenter, JsonSegmenter):
                segmenter = segmenter.with_language(new_token, model)
                number = segmenter.ids[new_token]
            vocabulary = vocabulary.with_language(new_token, number, vocabulary.id_of[model])
        return SubwordModel(segmenter, vocabulary)

    def with_pieces(self, pieces: Sequence[str]) -> SubwordModel:
        """Return a copy with new subwords, which are chosen where text has them. Existing ids do
        not change.

        Raises ``UserError`` if a piece exists or would never be chosen, and for a model whose
        subwords are bytes or whose ids of new subwords transformers would not know.
        """
        vocabulary = self.vocabulary
        existing = [piece for piece in pieces if piece in vocabulary.id_of]
        if existing:
            raise UserError(
                f"tokenizer.new_pieces has {short_repr(existing[0])}, which exists in the "
                "vocabulary; expected new subwords only."
            )
        if not self._ids_agree:
            # transformers numbers languages and sentinels after the pieces, and CTranslate2 expects
            # Marian's PAD at the end.
            raise _needs_tokenizer_json("tokenizer.new_pieces")
        segmenter = self.segmenter.with_pieces(pieces)
        unreachable = [piece for piece in pieces if not can_choose(segmenter, piece)]
        if unreachable:
            raise UserError(
                f"tokenizer.new_pieces has {short_repr(unreachable[0])}, which would never be "
                f"chosen (nor would {len(unreachable) - 1} others): the tokenizer normalizes it, "
                "or it is not the merge of two shorter subwords. Expected pieces as they are in "
                "the vocabulary (▁ is a space), and for BPE, their parts as well."
            )
        if self.has_own_vocabulary:
            return SubwordModel(segmenter, languages=self.tokens(self.vocabulary.languages))
        new_ids = {piece: segmenter.ids[piece] for piece in pieces}
        return SubwordModel(segmenter, vocabulary.with_ids(new_ids))

    def part_ids(self, piece: str) -> list[int]:
        """Return the ids of the subwords that a word, spelled as they are, is split into."""
        ids = []
        for part in self.segmenter.parts(piece):
            byte_tokens = [f"<0x{byte:02X}>" for byte in part.encode()]
            is_bytes = part not in self.vocabulary.id_of and byte_tokens[0] in self.vocabulary.id_of
            ids += self.ids(byte_tokens if is_bytes else [part])
        return ids


def _needs_tokenizer_json(setting: str) -> UserError:
    return UserError(
        f"{setting} needs a tokenizer.json file in the pretrained model; transformers writes it "
        "(not for M2M100 and Marian): AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)."
    )


def _prefix(pattern: re.Pattern[str], line: str) -> str:
    """Return what a pattern that also matches "" matches at the beginning of a line."""
    match = pattern.match(line)
    assert match is not None
    return match[0]
