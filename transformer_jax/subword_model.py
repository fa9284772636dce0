"""One SentencePiece model: lines of a language to token ids and back."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence

import sentencepiece

from transformer_jax.errors import UserError
from transformer_jax.special_ids import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from transformer_jax.subword_sampling import (
    SubwordSampler,
    any_of,
    model_proto,
    user_defined_symbols,
)


class SubwordModel:
    """A SentencePiece model whose pieces are the vocabulary, with PAD, BOS, EOS and UNK first."""

    def __init__(self, model: bytes) -> None:
        self._processor = sentencepiece.SentencePieceProcessor()
        self._processor.load_from_serialized_proto(model)
        self._vocabulary: dict[str, int] = {}  # where it is not the pieces
        self._sampler: SubwordSampler | None = None
        symbols = user_defined_symbols(self._processor)
        self._symbols = re.compile(rf"(?:\s*(?:{any_of(symbols)}))+") if symbols else None

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the four special ones included."""
        return self._processor.vocab_size()

    def encode(
        self, lines: Sequence[str], *, sampling: float = 0.0, seed: int = 0
    ) -> list[list[int]]:
        """Token ids of each line, without BOS and EOS; with ``sampling`` a random segmentation."""
        if not sampling:
            return self._processor.encode(list(lines), num_threads=1)
        if self._sampler is None or self._sampler.strength != sampling:
            self._sampler = SubwordSampler(self._processor, sampling, unknown_ids=self._vocabulary)
        generator = random.Random(seed)
        return [self._sampler.sample(line, generator) for line in lines]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of one sequence; PAD, BOS and EOS are left out."""
        shown = [token for token in map(int, ids) if token not in (PAD_ID, BOS_ID, EOS_ID)]
        # a byte piece may spell a newline; a line stays one line
        return self._processor.decode(shown).replace("\n", " ")

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Tokens as SentencePiece writes them."""
        return [self._processor.id_to_piece(int(token)) for token in ids]

    def ids(self, tokens: Sequence[str]) -> list[int]:
        """Token ids; UNK_ID for what is no token."""
        return [self._processor.piece_to_id(token) for token in tokens]

    def split_leading_symbols(self, line: str) -> tuple[list[int], str]:
        """Ids of the user-defined symbols that ``line`` begins with, and the rest of the line."""
        found = self._symbols and self._symbols.match(line)
        return (self.encode([found[0]])[0], line[found.end() :]) if found else ([], line)


def with_special_ids(model: bytes) -> bytes:
    """A model with PAD, BOS, EOS and UNK, which it may have elsewhere or not at all, first; it cuts
    text as before.
    """
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = processor.pad_id(), processor.bos_id(), processor.eos_id(), processor.unk_id()
    if ids == (PAD_ID, BOS_ID, EOS_ID, UNK_ID):
        return model
    proto = model_proto(processor)
    spec, pieces = proto.trainer_spec, {piece.piece: piece for piece in proto.pieces}
    kinds = type(proto.pieces[0])
    unknown = processor.id_to_piece(processor.unk_id())
    special = [
        pieces.pop(name, kinds(piece=name))
        for name in (spec.pad_piece, spec.bos_piece, spec.eos_piece, unknown)
    ]
    for piece, kind in zip(special, (*[kinds.CONTROL] * 3, kinds.UNKNOWN), strict=True):
        piece.type = kind
    del proto.pieces[:]
    proto.pieces.extend([*special, *pieces.values()])
    spec.pad_id, spec.bos_id, spec.eos_id, spec.unk_id = PAD_ID, BOS_ID, EOS_ID, UNK_ID
    spec.unk_piece, spec.vocab_size = unknown, len(proto.pieces)
    return proto.SerializeToString()


def with_symbols(model: bytes, symbols: Sequence[str], vocab_size: int) -> bytes:
    """A model with those of ``symbols`` that it lacks after its first ``vocab_size`` pieces, as
    user-defined ones.
    """
    proto = model_proto(sentencepiece.SentencePieceProcessor(model_proto=model))
    kinds = type(proto.pieces[0])
    vocabulary, beyond = proto.pieces[:vocab_size], proto.pieces[vocab_size:]
    special = {piece.piece for piece in vocabulary[: UNK_ID + 1]}
    there = [piece for piece in vocabulary if piece.piece in symbols]
    for piece in there:
        if piece.piece in special or piece.type not in (
            kinds.USER_DEFINED,
            kinds.UNUSED,
            kinds.CONTROL,
        ):
            raise UserError(
                f"tokenizer.user_defined_symbols has {piece.piece!r}, which the vocabulary has as "
                "an ordinary or a special token; expected another name."
            )
    known = {piece.piece for piece in there}
    missing = [symbol for symbol in symbols if symbol not in known]
    # another program put them between tokens
    never_in_text = [piece for piece in there if piece.type == kinds.CONTROL]
    if not missing and not never_in_text:
        return model
    for piece in never_in_text:
        piece.type = kinds.USER_DEFINED
    beyond = [piece for piece in beyond if piece.piece not in missing]
    del proto.pieces[vocab_size:]
    proto.pieces.extend(kinds(piece=symbol, type=kinds.USER_DEFINED) for symbol in missing)
    proto.pieces.extend(beyond)
    proto.trainer_spec.vocab_size = vocab_size + len(missing)
    return proto.SerializeToString()
