"""Text to piece ids and back, by SentencePiece."""

from __future__ import annotations

import hashlib
import io
import os
import random
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TypeVar

import sentencepiece

from transformer_jax.config import TokenizerConfig
from transformer_jax.errors import UserError
from transformer_jax.special_ids import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from transformer_jax.subword_sampling import (
    SubwordSampler,
    any_of,
    model_proto,
    user_defined_symbols,
)

_T = TypeVar("_T")

# as its trainer_spec.model_prefix a SentencePiece model says it: ``Tokenizer`` tells what follows
IMPORTED = "imported"

_TAG = re.compile(r">>.*?<<")

_JOINT, _SOURCE, _TARGET = "tokenizer.model", "tokenizer.source.model", "tokenizer.target.model"


class Tokenizer:
    """One SentencePiece model for both languages, or one for each.

    Built from the bytes of the model files; ``target_model=None`` means that both languages share
    ``source_model``. Two models may have one vocabulary, each of them with the pieces of both
    languages, as in imported models.

    Of an imported model the first ``trainer_spec.vocab_size`` pieces are the vocabulary; text may
    be cut into others, too, which become UNK_ID. A line may begin with a tag like ``>>deu<<``,
    which is kept whole if it is a piece.
    """

    def __init__(self, source_model: bytes, target_model: bytes | None = None) -> None:
        self.source_model = source_model
        self.target_model = target_model
        self._source = _processor(source_model)
        self._target = self._source if target_model is None else _processor(target_model)

    @classmethod
    def train(cls, pairs: Iterable[tuple[str, str]], config: TokenizerConfig) -> Tokenizer:
        """Learn the vocabulary from sentence pairs, or load ``config.model`` (and
        ``target_model``), whose special pieces get the ids of this file.

        Reads ``pairs`` once and holds at most ``config.max_training_sentences`` lines (on each
        side, when separate). Raises ``UserError`` where the text is empty or does not support
        ``config.vocab_size`` pieces.
        """
        if config.model:
            given = {"tokenizer.model": config.model, "tokenizer.target_model": config.target_model}
            models = [
                _with_special_ids(_read_model(Path(file), field))
                for field, file in given.items()
                if file
            ]
            return cls(*models).with_symbols(config.user_defined_symbols)
        most = config.max_training_sentences
        sample = _evenly_spread(pairs, max(1, most // 2) if config.joint else most)
        if config.joint:
            return cls(
                _learn((line for pair in _drain(sample) for line in pair), config, "training text")
            )
        target_lines = deque(target for _, target in sample)
        source_model = _learn(
            (source for source, _ in _drain(sample)), config, "source side of the training text"
        )
        return cls(
            source_model, _learn(_drain(target_lines), config, "target side of the training text")
        )

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """The tokenizer that ``save`` wrote into ``directory``; ``UserError`` if it is absent or
        damaged.
        """
        directory = Path(directory)
        if (directory / _JOINT).exists():
            return cls(_read_model(directory / _JOINT))
        if (directory / _SOURCE).exists() and (directory / _TARGET).exists():
            return cls(_read_model(directory / _SOURCE), _read_model(directory / _TARGET))
        raise UserError(
            f"No tokenizer in {str(directory)!r}; expected {_JOINT}, or {_SOURCE} and {_TARGET}."
        )

    def with_symbols(self, symbols: Sequence[str]) -> Tokenizer:
        """This tokenizer, with those of ``symbols`` that it lacks as further pieces at the end; all
        others keep their ids.

        They are like ``TokenizerConfig.user_defined_symbols``: text is never cut through them.
        """
        grown = [
            None if model is None else _with_symbols(model, symbols)
            for model in (self.source_model, self.target_model)
        ]
        assert grown[0] is not None
        return Tokenizer(grown[0], grown[1])

    def save(self, directory: str | Path) -> None:
        """Write the model files; each of them appears whole or not at all."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        if self.target_model is None:
            files = {_JOINT: self.source_model}
        else:
            files = {_SOURCE: self.source_model, _TARGET: self.target_model}
        for name, model in files.items():
            temporary = directory / f".{name}.{os.getpid()}.tmp"
            with open(temporary, "wb") as file:
                file.write(model)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, directory / name)
        for name in {_JOINT, _SOURCE, _TARGET} - files.keys():
            (directory / name).unlink(missing_ok=True)

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[bytes, bytes | None]]:
        return Tokenizer, (self.source_model, self.target_model)

    @property
    def joint(self) -> bool:
        """Whether both languages share one vocabulary."""
        if self.target_model is None:
            return True
        ids = range(self.source_vocab_size)
        return len(ids) == self.target_vocab_size and self.source_tokens(ids) == self.target_tokens(
            ids
        )

    @property
    def imported(self) -> bool:
        """Whether the vocabulary is that of a model from elsewhere."""
        return _imported_size(self._source) is not None

    @property
    def source_vocab_size(self) -> int:
        """Number of source pieces, the four special ones included."""
        return _imported_size(self._source) or self._source.vocab_size()

    @property
    def target_vocab_size(self) -> int:
        """Number of target pieces, the four special ones included."""
        return _imported_size(self._target) or self._target.vocab_size()

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the model bytes."""
        digest = hashlib.sha256(self.source_model)
        if self.target_model is not None:
            digest.update(hashlib.sha256(self.target_model).digest())
        return digest.hexdigest()

    def encode_source(
        self, lines: Sequence[str], *, sampling: float = 0.0, seed: int = 0
    ) -> list[list[int]]:
        """Piece ids of each line, without BOS and EOS.

        ``sampling`` draws one segmentation of each line at random, as ``SubwordSampler`` tells.
        Same ``lines`` and ``seed``, same result.
        """
        return _encode(self._source, lines, sampling=sampling, seed=seed)

    def encode_target(
        self, lines: Sequence[str], *, sampling: float = 0.0, seed: int = 0
    ) -> list[list[int]]:
        """Like ``encode_source``, for the target language."""
        return _encode(self._target, lines, sampling=sampling, seed=seed)

    def source_tag(self, line: str) -> tuple[list[int], str]:
        """The pieces of what ``line`` begins with and all its parts need, and the rest of the line.

        That is a tag like ``>>deu<<`` of an imported model, and any of
        ``tokenizer.user_defined_symbols``.
        """
        tag, rest = _split_tag(self._source, line) if self.imported else ([], line)
        symbols = _symbols(self._source)
        found = symbols and symbols.match(rest)
        tag = _known(self._source, tag)
        return (
            (tag + self.encode_source([found[0]])[0], rest[found.end() :]) if found else (tag, rest)
        )

    def decode_source(self, ids: Iterable[int]) -> str:
        """Text of one sequence of source pieces; PAD, BOS and EOS are left out."""
        return _decode(self._source, ids)

    def decode_target(self, ids: Iterable[int]) -> str:
        """Text of one sequence of target pieces; PAD, BOS and EOS are left out."""
        return _decode(self._target, ids)

    def source_tokens(self, ids: Sequence[int]) -> list[str]:
        """Source pieces as SentencePiece writes them: a word's first one begins with ▁ (U+2581)."""
        return [self._source.id_to_piece(int(piece)) for piece in ids]

    def target_tokens(self, ids: Sequence[int]) -> list[str]:
        """Target pieces as SentencePiece writes them."""
        return [self._target.id_to_piece(int(piece)) for piece in ids]

    def target_ids(self, pieces: Sequence[str]) -> list[int]:
        """The ids of target pieces; UNK_ID for what is none."""
        return _known(self._target, [self._target.piece_to_id(piece) for piece in pieces])

    def require_target_ids(self, pieces: Sequence[str], field: str) -> list[int]:
        """``target_ids`` of what the config's ``field`` has; ``UserError`` for what is no piece."""
        ids = self.target_ids(pieces)
        for piece, number in zip(pieces, ids, strict=True):
            if number == UNK_ID and piece not in self.target_tokens([UNK_ID]):
                raise UserError(
                    f"{field} has {piece!r}; expected pieces of the target vocabulary ('▁' begins a word)."
                )
        return ids


def _encode(
    processor: sentencepiece.SentencePieceProcessor,
    lines: Sequence[str],
    *,
    sampling: float,
    seed: int,
) -> list[list[int]]:
    imported = _imported_size(processor) is not None
    if imported:
        tags, lines = (
            zip(*(_split_tag(processor, line) for line in lines), strict=True)
            if lines
            else ((), ())
        )
    else:
        tags = ([],) * len(lines)
    if sampling:
        sampler = _sampler(processor, sampling)
        generator = random.Random(seed)
        ids = [sampler.sample(line, generator) for line in lines]
    else:
        ids = processor.encode(list(lines), num_threads=1)
        if imported:
            ids = [
                _with_unused(processor, line, pieces) if UNK_ID in pieces else pieces
                for line, pieces in zip(lines, ids)
            ]
    return [_known(processor, tag + pieces) for tag, pieces in zip(tags, ids, strict=True)]


@lru_cache(maxsize=8)
def _imported_size(processor: sentencepiece.SentencePieceProcessor) -> int | None:
    """How many pieces the vocabulary of an imported model has; None for a model of our own."""
    trainer = model_proto(processor).trainer_spec
    return trainer.vocab_size if trainer.model_prefix == IMPORTED else None


def _known(processor: sentencepiece.SentencePieceProcessor, ids: list[int]) -> list[int]:
    """``ids`` with UNK_ID for pieces that text is cut into, but which are not in the vocabulary."""
    size = _imported_size(processor)
    return ids if size is None else [piece if piece < size else UNK_ID for piece in ids]


@lru_cache(maxsize=8)
def _symbols(processor: sentencepiece.SentencePieceProcessor) -> re.Pattern[str] | None:
    """One or more user-defined symbols, if the vocabulary has such."""
    symbols = user_defined_symbols(processor)
    return re.compile(rf"(?:\s*(?:{any_of(symbols)}))+") if symbols else None


def _split_tag(processor: sentencepiece.SentencePieceProcessor, line: str) -> tuple[list[int], str]:
    """The id of a tag that ``line`` begins with, if it does, and the rest of the line."""
    tag = _TAG.match(line)
    return ([processor.piece_to_id(tag[0])], line[tag.end() :]) if tag else ([], line)


def _with_unused(
    processor: sentencepiece.SentencePieceProcessor, line: str, ids: list[int]
) -> list[int]:
    """``ids`` of ``line`` where what is unknown to the model may be a piece of the vocabulary."""
    looked_up = [processor.piece_to_id(piece) for piece in processor.encode(line, out_type=str)]
    return [
        there if i == UNK_ID and processor.is_unused(there) else i
        for i, there in zip(ids, looked_up, strict=True)
    ]


@lru_cache(maxsize=4)
def _sampler(processor: sentencepiece.SentencePieceProcessor, sampling: float) -> SubwordSampler:
    return SubwordSampler(processor, sampling)


def _decode(processor: sentencepiece.SentencePieceProcessor, ids: Iterable[int]) -> str:
    pieces = [piece for piece in map(int, ids) if piece not in (PAD_ID, BOS_ID, EOS_ID)]
    # a byte piece may spell a newline; a line stays one line
    return processor.decode(pieces).replace("\n", " ")


def _processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    processor.load_from_serialized_proto(model)
    return processor


def _read_model(path: Path, field: str = "") -> bytes:
    """Bytes of a model file that loads."""
    said = f"{field} = {str(path)!r}" if field else f"Tokenizer file {str(path)!r}"
    if not path.is_file():
        raise UserError(f"{said} does not exist; expected a SentencePiece model file.")
    model = path.read_bytes()
    try:
        if not model:
            raise RuntimeError("the file is empty")
        _processor(model)
    except RuntimeError as error:
        raise UserError(
            f"{said} is not a SentencePiece model, or is damaged; restore or retrain it ({error})."
        ) from None
    return model


def _with_special_ids(model: bytes) -> bytes:
    """The model with PAD, BOS, EOS and UNK, which it may have elsewhere or not at all, first. It
    cuts text as before.
    """
    processor = _processor(model)
    if (processor.pad_id(), processor.bos_id(), processor.eos_id(), processor.unk_id()) == (
        PAD_ID,
        BOS_ID,
        EOS_ID,
        UNK_ID,
    ):
        return model
    proto = model_proto(processor)
    spec, pieces = proto.trainer_spec, {piece.piece: piece for piece in proto.pieces}
    new_piece = type(proto.pieces[0])
    names = (
        spec.pad_piece,
        spec.bos_piece,
        spec.eos_piece,
        processor.id_to_piece(processor.unk_id()),
    )
    special = [pieces.pop(name, new_piece(piece=name)) for name in names]
    for piece, kind in zip(special, (*[new_piece.CONTROL] * 3, new_piece.UNKNOWN), strict=True):
        piece.type = kind
    del proto.pieces[:]
    proto.pieces.extend([*special, *pieces.values()])
    spec.pad_id, spec.bos_id, spec.eos_id, spec.unk_id = PAD_ID, BOS_ID, EOS_ID, UNK_ID
    spec.unk_piece, spec.vocab_size = names[3], len(proto.pieces)
    return proto.SerializeToString()


def _with_symbols(model: bytes, symbols: Sequence[str]) -> bytes:
    processor = _processor(model)
    size, proto = _imported_size(processor) or processor.vocab_size(), model_proto(processor)
    new_piece = type(proto.pieces[0])
    known = {piece.piece: piece for piece in proto.pieces[:size]}
    missing = [symbol for symbol in symbols if symbol not in known]
    there = [known[symbol] for symbol in symbols if symbol in known]
    special = {piece.piece for piece in proto.pieces[: UNK_ID + 1]}
    for piece in there:
        if piece.piece in special or piece.type not in (
            new_piece.USER_DEFINED,
            new_piece.UNUSED,
            new_piece.CONTROL,
        ):
            raise UserError(
                f"tokenizer.user_defined_symbols has {piece.piece!r}, which the vocabulary has as an ordinary or a special "
                "piece; expected another name."
            )
    # another program put them between pieces
    never_in_text = [piece for piece in there if piece.type == new_piece.CONTROL]
    if not missing and not never_in_text:
        return model
    for piece in never_in_text:
        piece.type = new_piece.USER_DEFINED
    # of an imported model
    beyond = [piece for piece in proto.pieces[size:] if piece.piece not in missing]
    del proto.pieces[size:]
    proto.pieces.extend(new_piece(piece=symbol, type=new_piece.USER_DEFINED) for symbol in missing)
    proto.pieces.extend(beyond)
    proto.trainer_spec.vocab_size = size + len(missing)
    return proto.SerializeToString()


def _evenly_spread(pairs: Iterable[tuple[str, str]], most: int) -> deque[tuple[str, str]]:
    """Every k-th pair, k being the smallest power of 2 that leaves at most ``most``."""
    kept: list[tuple[str, str]] = []
    stride = 1
    for index, pair in enumerate(pairs):
        if index % stride:
            continue
        if len(kept) == most:
            kept = kept[::2]
            stride *= 2
            if index % stride:
                continue
        kept.append(pair)
    return deque(kept)


def _drain(items: deque[_T]) -> Iterator[_T]:
    # Letting lines go while SentencePiece reads them keeps one copy of the text in memory, not two.
    while items:
        yield items.popleft()


def _learn(lines: Iterator[str], config: TokenizerConfig, what: str) -> bytes:
    lines = (line for line in lines if line.strip())
    first = next(lines, None)
    if first is None:
        raise UserError(
            f"The {what} is empty; expected sentences to train the tokenizer on: check data.train."
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=chain([first], lines),
            model_writer=model,
            model_type=config.algorithm,
            vocab_size=config.vocab_size,
            character_coverage=config.character_coverage,
            byte_fallback=config.byte_fallback,
            normalization_rule_name=config.normalization,
            remove_extra_whitespaces=config.normalization != "identity",
            user_defined_symbols=list(config.user_defined_symbols),
            pad_id=PAD_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            unk_id=UNK_ID,
            num_threads=16,  # a unigram model depends on it, so it must not depend on the machine
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(_explain(str(error), config, what)) from None
    return model.getvalue()


def _explain(message: str, config: TokenizerConfig, what: str) -> str:
    """SentencePiece's complaint in terms of our settings."""
    size = f"tokenizer.vocab_size is {config.vocab_size}; expected"
    if found := re.search(r"Vocabulary size too high .* value <= (\d+)", message):
        return f"{size} at most {found[1]}: the {what} supports no more pieces. Lower it, or train on more text."
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return (
            f"{size} at least {found[1]}, one piece for each character of the {what}. "
            "Raise it, or lower tokenizer.character_coverage."
        )
    if "sentences_.empty" in message or "all_chars_count" in message:
        return f"The {what} has no line that SentencePiece can use (up to 4,192 bytes of text); check data.train."
    return f"SentencePiece cannot be trained on the {what}: {message}"
