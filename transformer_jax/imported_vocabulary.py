"""Vocabularies of imported models: text is cut by SentencePiece, ids are those of a vocabulary of
other pieces, and a line may begin with a tag such as ``>>deu<<``.

MarianMT models are so: their vocabulary has pieces of both languages, where each SentencePiece
model knows one of them and has pieces that the vocabulary lacks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from transformer_jax.errors import UserError
from transformer_jax.special_ids import UNK_ID
from transformer_jax.subword_model import SubwordModel
from transformer_jax.subword_sampling import model_proto

# A SentencePiece model says so as its trainer_spec.model_prefix; its first trainer_spec.vocab_size
# pieces are the vocabulary, and text is cut into others, too.
_IMPORTED = "imported"

# What a line may begin with in multilingual models: the language to translate into.
_TAG = re.compile(r">>.*?<<")

_PROTO: Any = sentencepiece_model_pb2  # generated code, opaque to type checkers
_KINDS = _PROTO.ModelProto.SentencePiece
_IN_TEXT = (_KINDS.NORMAL, _KINDS.USER_DEFINED, _KINDS.BYTE)


class ImportedSubwordModel(SubwordModel):
    """What ``with_vocabulary`` made. A piece is looked up in the vocabulary by its text."""

    def __init__(self, model: bytes) -> None:
        super().__init__(model)
        self._size = model_proto(self._processor).trainer_spec.vocab_size
        ids = range(UNK_ID + 1, self._size)
        self._vocabulary = dict(zip(self.tokens(ids), ids, strict=True))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the four special ones included."""
        return self._size

    def encode(
        self, lines: Sequence[str], *, sampling: float = 0.0, seed: int = 0
    ) -> list[list[int]]:
        """As ``SubwordModel``; a tag that a line begins with is one token."""
        tags, texts = zip(*map(self._split_tag, lines), strict=True) if lines else ((), ())
        if sampling:
            sampled = super().encode(texts, sampling=sampling, seed=seed)
            encoded = [self._known(ids) for ids in sampled]
        else:
            get = self._vocabulary.get
            cut = self._processor.encode(list(texts), out_type=str, num_threads=1)
            encoded = [[get(piece, UNK_ID) for piece in pieces] for pieces in cut]
        return [tag + ids for tag, ids in zip(tags, encoded, strict=True)]

    def ids(self, tokens: Sequence[str]) -> list[int]:
        """Token ids; UNK_ID for what is no token of the vocabulary."""
        return self._known(super().ids(tokens))

    def split_leading_symbols(self, line: str) -> tuple[list[int], str]:
        """Ids of the tag and of the user-defined symbols after it, and the rest of the line."""
        tag, rest = self._split_tag(line)
        symbols, rest = super().split_leading_symbols(rest)
        return tag + symbols, rest

    def _split_tag(self, line: str) -> tuple[list[int], str]:
        tag = _TAG.match(line)
        return (self.ids([tag[0]]), line[tag.end() :]) if tag else ([], line)

    def _known(self, ids: list[int]) -> list[int]:
        return [token if token < self._size else UNK_ID for token in ids]


def subword_model(model: bytes) -> SubwordModel:
    """The model of either kind."""
    imported = _PROTO.ModelProto.FromString(model).trainer_spec.model_prefix == _IMPORTED
    return (ImportedSubwordModel if imported else SubwordModel)(model)


def with_vocabulary(model: bytes, tokens: Sequence[str], name: str) -> bytes:
    """The SentencePiece model ``model`` with ``tokens`` as its vocabulary; it cuts text as before.
    ``name`` is for messages.

    Tokens that it does not know are put in as unused: text is never cut into them, but they have
    their id and their text.
    """
    proto = _PROTO.ModelProto.FromString(model)
    old = {piece.piece: piece for piece in proto.pieces}
    trainer = proto.trainer_spec
    if trainer.model_type == trainer.BPE and any(token not in old for token in tokens[4:]):
        raise UserError(
            f"{name} is a BPE model that lacks tokens of the vocabulary; expected a unigram model, "
            "or one BPE model for both languages: merging would run over the added ones and cut "
            "text another way."
        )
    known = set(tokens)
    beyond = [p for p in old.values() if p.type in _IN_TEXT and p.piece not in known]
    del proto.pieces[:]
    for i, text in enumerate(tokens):
        if i <= UNK_ID:
            kind, score = (_KINDS.UNKNOWN if i == UNK_ID else _KINDS.CONTROL), 0.0
        elif text in old:
            kind, score = old[text].type, old[text].score
        else:
            kind, score = _KINDS.UNUSED, 0.0
        proto.pieces.add(piece=text, score=score, type=kind)
    proto.pieces.extend(beyond)
    trainer.pad_id, trainer.bos_id, trainer.eos_id, trainer.unk_id = range(4)
    trainer.pad_piece, trainer.bos_piece, trainer.eos_piece, trainer.unk_piece = tokens[:4]
    trainer.model_prefix, trainer.vocab_size = _IMPORTED, len(tokens)
    return proto.SerializeToString()
