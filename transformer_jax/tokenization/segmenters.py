"""Segmenters: text to pieces and back, with SentencePiece or with a tokenizer.json file.

A segmenter knows nothing of special tokens and languages (``Vocabulary``). Its file numbers its
pieces; a model can have other ids.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from transformer_jax.errors import UserError, needs_extra
from transformer_jax.tokenization.subword_sampling import BpeDropout, BpeDropoutSampler

_WORD = "▁?[^▁]+|▁"
_PREFERENCE = 0.1  # in nats; another old piece costs more


class SentencePieceSegmenter:
    """A SentencePiece model.

    Attributes:
      content: the contents of its file.
      ids: the id of each piece in the file, in order.
      symbols: pieces that can begin a line and that every segment of the line repeats.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.processor: Any = sentencepiece.SentencePieceProcessor(model_proto=content)
        proto = model_proto(content)
        self.ids = {piece.piece: number for number, piece in enumerate(proto.pieces)}
        self.symbols = [piece.piece for piece in proto.pieces if piece.type == piece.USER_DEFINED]
        # SentencePiece's ``decode`` removes the space added before a line, but not one after.
        self._has_space_suffix = proto.trainer_spec.treat_whitespace_as_suffix
        self._samplers: dict[BpeDropout, BpeDropoutSampler] = {}

    def __reduce__(self) -> tuple[type, tuple[bytes]]:
        return SentencePieceSegmenter, (self.content,)

    def encode(
        self, lines: Sequence[str], sampling: BpeDropout | None = None, seed: int = 0
    ) -> list[list[str]]:
        """Split each line into pieces, or draw a random segmentation of it. An unknown piece is the
        text that it stands for.
        """
        if sampling is None:
            return self.processor.encode(list(lines), out_type=str, num_threads=1)
        if sampling not in self._samplers:
            proto = model_proto(self.content)
            self._samplers[sampling] = BpeDropoutSampler(self.processor, proto, sampling.dropout)
        sampler = self._samplers[sampling]
        generator = random.Random(seed)
        return [sampler.sample(line, generator) for line in lines]

    def encode_as_ids(self, lines: Sequence[str]) -> list[list[int]]:
        """Split each line into pieces. Returns their own ids."""
        if len(lines) == 1:  # a batch call starts a thread, which takes time
            return [self.processor.encode(lines[0])]
        return self.processor.encode(list(lines), num_threads=1)

    def decode(self, pieces: Sequence[str]) -> str:
        """Join pieces into text. Pieces that the model does not have keep ▁ in place of a space, so
        it is replaced.
        """
        return self.processor.decode(list(pieces)).replace("▁", " ").strip()

    def decode_ids(self, own_ids: Sequence[int]) -> str:
        """Join the pieces with these own ids into text."""
        text: str = self.processor.decode(list(own_ids))
        return text.removesuffix(" ") if self._has_space_suffix else text

    @cached_property
    def _word_processor(self) -> Any:
        """The processor of ``words``, which are normalized and have their spaces."""
        proto = model_proto(self.content)
        proto.normalizer_spec.precompiled_charsmap = b""
        proto.normalizer_spec.add_dummy_prefix = False
        proto.normalizer_spec.remove_extra_whitespaces = False
        proto.trainer_spec.byte_fallback = False  # unknown text stays text
        for piece in proto.pieces:
            if piece.type == piece.BYTE:
                piece.type = piece.UNUSED
        return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())

    def words(self, line: str) -> list[str]:
        """Split a line into words, normalized and spelled as pieces are: ▁ is a space."""
        pattern = "[^▁]*▁|[^▁]+" if self._has_space_suffix else _WORD
        return re.findall(pattern, self.processor.normalize(line))

    def parts(self, word: str) -> list[str]:
        """Split a word, spelled as pieces are, into pieces. Unknown text becomes characters."""
        surfaces = self._word_processor.encode(word, out_type=str)
        return _known_parts(surfaces, self.ids.keys())

    def with_pieces(self, pieces: Sequence[str]) -> SentencePieceSegmenter:
        """Return a copy with ``pieces`` appended, which it prefers to their parts.

        Raises ``UserError`` for an algorithm other than BPE and unigram.
        """
        proto = model_proto(self.content)
        scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == piece.NORMAL}
        if proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM:
            new_scores = _unigram_scores(pieces, self.parts, scores)
        elif proto.trainer_spec.model_type == proto.trainer_spec.BPE:
            # Merges are made in the order of scores.
            first_score = min(scores.values()) - 1
            new_scores = [first_score - rank for rank in range(len(pieces))]
        else:
            raise _cannot_have_pieces("the SentencePiece model's algorithm is word or char")
        for piece, score in zip(pieces, new_scores):
            proto.pieces.add(piece=piece, score=score, type=proto.SentencePiece.NORMAL)
        return SentencePieceSegmenter(proto.SerializeToString())

    def with_symbols(self, symbols: Sequence[str]) -> SentencePieceSegmenter:
        """Return a copy with missing ``symbols`` appended as user-defined symbols."""
        proto = model_proto(self.content)
        pieces = {piece.piece: piece for piece in proto.pieces}
        for symbol in symbols:
            if symbol not in pieces:
                proto.pieces.add(piece=symbol, type=proto.SentencePiece.USER_DEFINED)
            elif pieces[symbol].type != proto.SentencePiece.USER_DEFINED:
                raise UserError(
                    f"tokenizer.user_defined_symbols contains {symbol!r}, which is already a "
                    "regular or special token in the vocabulary; choose another name."
                )
        return SentencePieceSegmenter(proto.SerializeToString())

    def with_padding(self) -> SentencePieceSegmenter:
        """Return a copy with PAD and EOS appended if it lacks them. Other ids stay.

        ``spm_train`` without ``--pad_id`` makes models without PAD.
        """
        proto = model_proto(self.content)
        if self.processor.pad_id() < 0:
            proto.pieces.add(piece=proto.trainer_spec.pad_piece, type=proto.SentencePiece.CONTROL)
        if self.processor.eos_id() < 0:
            proto.pieces.add(piece=proto.trainer_spec.eos_piece, type=proto.SentencePiece.CONTROL)
        if len(proto.pieces) == len(self.ids):
            return self
        return SentencePieceSegmenter(proto.SerializeToString())


class JsonSegmenter:
    """A tokenizer.json file of a pretrained model, read by the ``tokenizers`` library.

    Its ids are those of the model. Added tokens that are written in the text, such as
    ``<extra_id_0>``, are tokens. It has no ``symbols``.

    Attributes:
      content: the contents of the file.
      ids: the id of each token.
    """

    symbols: Sequence[str] = ()

    def __init__(self, content: bytes) -> None:
        self.content = content
        with needs_extra("pretrained"):
            import tokenizers
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises Exception itself
            raise UserError(
                f"tokenizer.json is corrupt or too new ({error}); download it again or upgrade "
                "the tokenizers package."
            ) from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.ids: dict[str, int] = self._tokenizer.get_vocab()
        byte_of_id = {self.ids.get(f"<0x{byte:02X}>"): byte for byte in range(256)}
        # ByT5, where the tokens of a text are its bytes.
        are_bytes = {*self.ids.values()} == byte_of_id.keys() | self.special_ids
        self._byte_of_id = byte_of_id if are_bytes else {}

    def __reduce__(self) -> tuple[type, tuple[bytes]]:
        return JsonSegmenter, (self.content,)

    @property
    def special_ids(self) -> set[int]:
        """Ids of the tokens that transformers calls special."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {i for i, token in added.items() if token.special}

    def with_language(self, new_token: str, model: str) -> JsonSegmenter:
        """Return a copy with a new token that is added as another language, ``model``, is."""
        import tokenizers

        added = self._tokenizer.get_added_tokens_decoder().values()
        flags = next((token for token in added if token.content == model), None)
        addition = tokenizers.AddedToken(
            new_token, special=flags is None or flags.special, normalized=False
        )
        tokenizer = tokenizers.Tokenizer.from_buffer(self.content)
        tokenizer.add_tokens([addition])
        return JsonSegmenter(tokenizer.to_str().encode())

    def words(self, line: str) -> list[str]:
        """Split a line into words, normalized and spelled as pieces are: ▁ is a space."""
        if self._tokenizer.normalizer is not None:
            line = self._tokenizer.normalizer.normalize_str(line)
        words = [line]
        if self._tokenizer.pre_tokenizer is not None:
            words = [word for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(line)]
        return [part for word in words for part in re.findall(_WORD, word)]

    def parts(self, word: str) -> list[str]:
        """Split a word, spelled as pieces are, into pieces. Unknown text becomes characters."""
        spans = dict.fromkeys(token.offsets for token in self._tokenizer.model.tokenize(word))
        content = word.encode()  # which the offsets count
        surfaces = [content[start:end].decode() for start, end in spans]
        return _known_parts(surfaces, self.ids.keys())

    def with_pieces(self, pieces: Sequence[str]) -> JsonSegmenter:
        """Return a copy with ``pieces`` after all tokens, which it prefers to their parts.

        Raises ``UserError`` if tokens are bytes, or for an algorithm other than BPE and unigram.
        """
        content = json.loads(self.content)
        model = content["model"]
        is_bpe = model["type"] == "BPE"
        if "ByteLevel" in json.dumps(content["pre_tokenizer"]) or self._byte_of_id:
            raise _cannot_have_pieces("the model's tokens are bytes")
        if not is_bpe and model["type"] != "Unigram":
            raise _cannot_have_pieces(f"the algorithm of tokenizer.json is {model['type']}")
        if is_bpe and model.get("byte_fallback"):
            raise _cannot_have_pieces("BPE in tokenizer.json splits unknown text into bytes")
        first_id = max(self.ids.values()) + 1
        vocabulary = model["vocab"]
        # Tokens that the file adds have to be in its vocabulary: the library numbers those that are
        # not, such as languages, after the new pieces.
        if is_bpe:
            vocabulary |= self.ids
            vocabulary |= {piece: first_id + rank for rank, piece in enumerate(pieces)}
            merges = [
                (piece[:end], piece[end:]) for piece in pieces for end in range(1, len(piece))
            ]
            is_text = any(isinstance(merge, str) for merge in model["merges"])
            for pair in merges:
                if pair[0] in vocabulary and pair[1] in vocabulary:
                    model["merges"].append(" ".join(pair) if is_text else pair)
        else:
            scores = _unigram_scores(pieces, self.parts, dict(vocabulary))
            tokens = {i: token for token, i in self.ids.items()}
            for i in range(len(vocabulary), first_id):
                vocabulary.append([tokens.get(i, f"<unused_{i}>"), 0.0])
            vocabulary.extend(zip(pieces, scores))
        return JsonSegmenter(json.dumps(content, ensure_ascii=False).encode())

    def with_symbols(self, symbols: Sequence[str]) -> JsonSegmenter:
        """Raise ``UserError``: transformers would not know the symbols."""
        raise UserError(
            f"tokenizer.user_defined_symbols contains {symbols[0]!r}; expected none, because "
            "this model has a tokenizer.json file."
        )

    def affix_ids(self, line: str) -> tuple[list[int], list[int]]:
        """Return the ids that the file's post-processor puts before and after a line."""
        without_special = self._tokenizer.encode(line, add_special_tokens=False).ids
        with_special = self._tokenizer.encode(line, add_special_tokens=True).ids
        for start in range(len(with_special) - len(without_special) + 1):
            if with_special[start : start + len(without_special)] == without_special:
                return with_special[:start], with_special[start + len(without_special) :]
        raise UserError(
            "The post-processor of tokenizer.json changes the tokens of a line; expected one that "
            "only adds tokens before and after the line."
        )

    def encode_as_ids(self, lines: Sequence[str]) -> list[list[int]]:
        """Split each line into tokens, without special tokens. Returns their ids."""
        encodings = self._tokenizer.encode_batch(list(lines), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode_ids(self, own_ids: Sequence[int]) -> str:
        """Join the tokens with these ids into text, without special tokens and invalid bytes."""
        if self._byte_of_id:
            text = bytes(self._byte_of_id[i] for i in own_ids if i in self._byte_of_id)
            return text.decode(errors="ignore").strip()
        return self._tokenizer.decode(list(own_ids)).replace("▁", " ").strip()


Segmenter: TypeAlias = SentencePieceSegmenter | JsonSegmenter


def can_choose(segmenter: Segmenter, piece: str) -> bool:
    """Return True if a text with this piece can be split into it: merges of the segmenter lead to
    it, and normalization leaves it as it is.
    """
    normalized = "".join(segmenter.words(piece)).replace("▁", "")
    return normalized == piece.replace("▁", "") and segmenter.parts(piece) == [piece]


def _known_parts(surfaces: Iterable[str], known_pieces: Set[str]) -> list[str]:
    """Split surfaces that are not pieces into characters."""
    parts = list[str]()
    for surface in surfaces:
        parts.extend([surface] if surface in known_pieces else surface)
    return parts


def _unigram_scores(
    pieces: Sequence[str], parts: Callable[[str], list[str]], scores: Mapping[str, float]
) -> list[float]:
    """Return scores with which a unigram model prefers new pieces to their ``parts``.

    A piece has the score of its parts and more. Its score stays within those of the old pieces,
    whose lowest determines the score of unknown text. More parts are worth more, so a piece wins
    against others inside it. Of two with equally many parts, the earlier one has the higher score.
    """
    lowest = min(scores.values())
    highest = max(scores.values())
    unknown = lowest - 10  # as in SentencePiece and tokenizers
    new_scores = []
    for rank, piece in enumerate(pieces):
        piece_parts = parts(piece)
        score = sum(scores.get(part, unknown) for part in piece_parts)
        preference = len(piece_parts) - 1 + (1 - rank / len(pieces)) / 2
        new_scores.append(min(highest, max(lowest, score) + _PREFERENCE * preference))
    return new_scores


def _cannot_have_pieces(reason: str) -> UserError:
    return UserError(
        f"tokenizer.new_pieces cannot be added, because {reason}; expected a model with subwords "
        "of characters (BPE or unigram)."
    )


def model_proto(model: bytes) -> Any:
    """Parse a model file into a protocol buffer: ``pieces``, ``trainer_spec`` and other fields."""
    proto: Any = sentencepiece_model_pb2  # generated code, opaque to type checkers
    return proto.ModelProto.FromString(model)


def make_segmenter(content: bytes) -> Segmenter:
    """Make the segmenter for the contents of a SentencePiece model or a tokenizer.json file."""
    if content.lstrip().startswith(b"{"):
        return JsonSegmenter(content)
    return SentencePieceSegmenter(content)


def read_segmenter(path: Path) -> Segmenter:
    """Read a SentencePiece model or a tokenizer.json file. Raises ``UserError`` if corrupt."""
    return JsonSegmenter(path.read_bytes()) if path.suffix == ".json" else read_sentencepiece(path)


def read_sentencepiece(path: Path) -> SentencePieceSegmenter:
    """Read a SentencePiece model. Raises ``UserError`` if corrupt."""
    content = path.read_bytes()
    try:
        if not content:
            raise RuntimeError("the file is empty")
        return SentencePieceSegmenter(content)
    except RuntimeError as error:
        raise UserError(
            f"{str(path)!r} is not a SentencePiece model or is corrupt ({error}); restore it, "
            "download it again or retrain it."
        ) from None
