"""Vocabularies: ours for other libraries, and another library's with our special ids (which of its
rows each of our pieces takes, and SentencePiece models whose own ids are those of the
vocabulary).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sentencepiece import sentencepiece_model_pb2

from transformer_jax.errors import UserError
from transformer_jax.tokenizer import IMPORTED, Tokenizer

# at the start of a line in multilingual models: the language to translate into
TAG = re.compile(r">>.*<<")

_PROTO: Any = sentencepiece_model_pb2  # generated code, opaque to type checkers
_KINDS = _PROTO.ModelProto.SentencePiece
_IN_TEXT = (_KINDS.NORMAL, _KINDS.USER_DEFINED, _KINDS.BYTE)


class SpecialIds(NamedTuple):
    """Ids in the other vocabulary. ``start`` is what the decoder begins with; None for a vocabulary
    of sources only.
    """

    pad: int
    start: int | None
    eos: int
    unk: int


class Arrangement(NamedTuple):
    """What stands where in our vocabulary."""

    pieces: list[str]
    """By our ids: PAD, BOS, EOS, UNK, the other pieces in their old order."""
    rows_V: np.ndarray
    """int: the row of the other vocabulary that each of our rows is a copy of; -1: a row that is
    not there.
    """
    new_V: np.ndarray
    """bool: rows that the other model does not have, which must never receive probability."""


def write_sentencepiece(tokenizer: Tokenizer, folder: Path) -> tuple[list[str], list[str]]:
    """Write source.spm and target.spm into ``folder``; returns the source and the target pieces, by
    their ids.
    """
    (folder / "source.spm").write_bytes(tokenizer.source_model)
    (folder / "target.spm").write_bytes(tokenizer.target_model or tokenizer.source_model)
    source, target = range(tokenizer.source_vocab_size), range(tokenizer.target_vocab_size)
    return tokenizer.source_tokens(source), tokenizer.target_tokens(target)


def arrange(vocabulary: Mapping[str, int], special: SpecialIds) -> Arrangement:
    """Place the pieces of ``vocabulary``."""
    pieces_there = {i: piece for piece, i in vocabulary.items()}
    start = special.start
    own_start = start not in (None, special.pad, special.eos, special.unk)
    # MarianMT decodes from PAD: that row is our BOS then, and our PAD a new one, which nothing ever
    # reads.
    own_pad = special.pad not in (start, special.eos, special.unk)
    rows = [
        special.pad if own_pad else -1,
        -1 if start is None else start,
        special.eos,
        special.unk,
    ]
    new = [not own_pad, start in (None, special.eos, special.unk), False, False]
    pad = (
        _unused_name("<pad>", vocabulary)
        if special.pad in (special.eos, special.unk)
        else pieces_there[special.pad]
    )
    bos = (
        pieces_there[start] if own_start and start is not None else _unused_name("<s>", vocabulary)
    )
    pieces = [pad, bos, pieces_there[special.eos], pieces_there[special.unk]]
    others = [i for i in sorted(pieces_there) if i not in rows]
    pieces += [pieces_there[i] for i in others]
    return Arrangement(pieces, np.array(rows + others), np.array(new + [False] * len(others)))


def with_ids(model: bytes, pieces: Sequence[str], name: str) -> bytes:
    """The SentencePiece model ``model`` as an imported one (see ``Tokenizer``) with ``pieces`` as
    its vocabulary; it cuts text as before. ``name`` is for messages.

    Pieces that it does not know are put in as unused: text is never cut into them, but they have
    their id and their text.
    """
    proto = _parse(model, name)
    old = {piece.piece: piece for piece in proto.pieces}
    if proto.trainer_spec.model_type == proto.trainer_spec.BPE and any(
        piece not in old for piece in pieces[4:]
    ):
        raise UserError(
            f"{name} is a BPE model that lacks pieces of the vocabulary; expected a unigram model, or one BPE model for both "
            "languages: merging would run over the added pieces and cut text another way."
        )
    known = set(pieces)
    only_there = [
        piece for piece in old.values() if piece.type in _IN_TEXT and piece.piece not in known
    ]
    del proto.pieces[:]
    for i, text in enumerate(pieces):
        if i < 4:
            kind, score = (_KINDS.UNKNOWN if i == 3 else _KINDS.CONTROL), 0.0
        elif text in old:
            kind, score = old[text].type, old[text].score
        else:
            kind, score = _KINDS.UNUSED, 0.0
        proto.pieces.add(piece=text, score=score, type=kind)
    proto.pieces.extend(only_there)
    trainer = proto.trainer_spec
    trainer.pad_id, trainer.bos_id, trainer.eos_id, trainer.unk_id = range(4)
    trainer.pad_piece, trainer.bos_piece, trainer.eos_piece, trainer.unk_piece = pieces[:4]
    trainer.model_prefix, trainer.vocab_size = IMPORTED, len(pieces)
    return proto.SerializeToString()


def _parse(model: bytes, name: str) -> Any:
    try:
        proto = _PROTO.ModelProto.FromString(model)
    except Exception as error:  # protobuf's own type, of which there are several
        raise UserError(
            f"{name} is not a SentencePiece model, or is damaged; fetch it again ({error})."
        ) from None
    if not proto.pieces:
        raise UserError(f"{name} is a SentencePiece model without pieces; fetch it again.")
    return proto


def _unused_name(wanted: str, taken: Mapping[str, int]) -> str:
    while wanted in taken:
        wanted = f"<{wanted}>"
    return wanted
