"""Segmenters: text to pieces and back, with SentencePiece or with a tokenizer.json file.

A segmenter knows nothing of special tokens, languages or the ids of a model (``Vocabulary``).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from transformer_jax.errors import UserError, needs_extra
from transformer_jax.tokenization.subword_sampling import SubwordSampler, SubwordSampling


class Segmenter(Protocol):
    """Text to pieces and back. ``own_ids`` are the ids of pieces in the segmenter's own file."""

    content: bytes
    """Contents of the file."""
    symbols: Sequence[str]
    """Pieces that can begin a line and that every segment of the line repeats."""

    @property
    def tokens(self) -> dict[int, str]:
        """Pieces by their own ids."""

    def encode(self, lines: Sequence[str]) -> list[list[str]]:
        """Split each line into pieces."""

    def encode_as_ids(self, lines: Sequence[str]) -> list[list[int]]:
        """Split each line into pieces. Returns their own ids."""

    def decode(self, pieces: Sequence[str]) -> str:
        """Join pieces into text."""

    def decode_ids(self, own_ids: Sequence[int]) -> str:
        """Join the pieces with these own ids into text."""


class SentencePieceSegmenter:
    """A SentencePiece model."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.processor: Any = sentencepiece.SentencePieceProcessor(model_proto=content)
        proto = model_proto(content)
        self.pieces = [piece.piece for piece in proto.pieces]
        self.symbols = [piece.piece for piece in proto.pieces if piece.type == piece.USER_DEFINED]
        # SentencePiece's ``decode`` removes the space added before a line, but not one after.
        self._has_space_suffix = proto.trainer_spec.treat_whitespace_as_suffix
        self._samplers: dict[SubwordSampling, SubwordSampler] = {}

    def __reduce__(self) -> tuple[type, tuple[bytes]]:
        return SentencePieceSegmenter, (self.content,)

    @property
    def tokens(self) -> dict[int, str]:
        """Pieces by their own ids."""
        return dict(enumerate(self.pieces))

    def encode(self, lines: Sequence[str]) -> list[list[str]]:
        """Split each line into pieces. An unknown piece is the text that it stands for."""
        return self.processor.encode(list(lines), out_type=str, num_threads=1)

    def encode_as_ids(self, lines: Sequence[str]) -> list[list[int]]:
        """Split each line into pieces. Returns their own ids."""
        if len(lines) == 1:  # a batch call starts a thread, which takes time
            return [self.processor.encode(lines[0])]
        return self.processor.encode(list(lines), num_threads=1)

    def sample(self, lines: Sequence[str], sampling: SubwordSampling, seed: int) -> list[list[str]]:
        """Draw a random segmentation of each line."""
        if sampling not in self._samplers:
            proto = model_proto(self.content)
            self._samplers[sampling] = sampling.sampler(self.processor, proto)
        sampler = self._samplers[sampling]
        generator = random.Random(seed)
        return [sampler.sample(line, generator) for line in lines]

    def decode(self, pieces: Sequence[str]) -> str:
        """Join pieces into text. Pieces that the model does not have keep ▁ in place of a space, so
        it is replaced.
        """
        return self.processor.decode(list(pieces)).replace("▁", " ").strip()

    def decode_ids(self, own_ids: Sequence[int]) -> str:
        """Join the pieces with these own ids into text."""
        text: str = self.processor.decode(list(own_ids))
        return text.removesuffix(" ") if self._has_space_suffix else text

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
        if len(proto.pieces) == len(self.pieces):
            return self
        return SentencePieceSegmenter(proto.SerializeToString())


class JsonSegmenter:
    """A tokenizer.json file of a pretrained model, read by the ``tokenizers`` library.

    Added tokens that are written in the text, such as ``<extra_id_0>``, are tokens.
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
        # ``Encoding.tokens`` would be the text of unknown tokens, and spaces beside added ones.
        self._tokens = {i: token for token, i in self._tokenizer.get_vocab().items()}
        byte_of = {f"<0x{byte:02X}>": byte for byte in range(256)}
        bytes_of = {i: byte_of[token] for i, token in self._tokens.items() if token in byte_of}
        non_byte_ids = self._tokens.keys() - bytes_of.keys() - self.special_ids
        # ByT5, where the tokens of a text are its bytes.
        self._byte_of_id = {} if non_byte_ids else bytes_of

    def __reduce__(self) -> tuple[type, tuple[bytes]]:
        return JsonSegmenter, (self.content,)

    @property
    def tokens(self) -> dict[int, str]:
        """Tokens by their ids in the file."""
        return self._tokens

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

    def encode(self, lines: Sequence[str]) -> list[list[str]]:
        """Split each line into tokens, without special tokens."""
        return [[self._tokens[i] for i in ids] for ids in self.encode_as_ids(lines)]

    def encode_as_ids(self, lines: Sequence[str]) -> list[list[int]]:
        """Split each line into tokens, without special tokens. Returns their ids."""
        encodings = self._tokenizer.encode_batch(list(lines), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, pieces: Sequence[str]) -> str:
        """Join tokens into text, without special tokens."""
        ids = [self._tokenizer.token_to_id(token) for token in pieces]
        return self.decode_ids([i for i in ids if i is not None])

    def decode_ids(self, own_ids: Sequence[int]) -> str:
        """Join the tokens with these ids into text, without special tokens and invalid bytes."""
        if self._byte_of_id:
            text = bytes(self._byte_of_id[i] for i in own_ids if i in self._byte_of_id)
            return text.decode(errors="ignore").strip()
        return self._tokenizer.decode(list(own_ids)).replace("▁", " ").strip()


def model_proto(model: bytes) -> Any:
    """Parse a model file into a protocol buffer: ``pieces``, ``trainer_spec`` and other fields."""
    proto: Any = sentencepiece_model_pb2  # generated code, opaque to type checkers
    return proto.ModelProto.FromString(model)


def make_segmenter(content: bytes) -> SentencePieceSegmenter | JsonSegmenter:
    """Make the segmenter for the contents of a SentencePiece model or a tokenizer.json file."""
    if content.lstrip().startswith(b"{"):
        return JsonSegmenter(content)
    return SentencePieceSegmenter(content)


def read_segmenter(path: Path) -> SentencePieceSegmenter | JsonSegmenter:
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
