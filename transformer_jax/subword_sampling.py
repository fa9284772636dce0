"""Random segmentations for subword regularisation: BPE-dropout and unigram sampling, drawn by a
seed.

SentencePiece samples too, but mixes random salt of each process into its generator (seen in 0.2.3):
no seed brings a segmentation back. Here the model's pieces and scores come from SentencePiece, the
draws from ``random.Random``. Words are segmented one by one, which loses nothing: no piece of our
models reaches over a space.
"""

from __future__ import annotations

import heapq
import math
import random
import re
from bisect import bisect
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from transformer_jax.errors import UserError

_SPACE = "\u2581"
_CACHED_WORDS = 2**15


def user_defined_symbols(processor: sentencepiece.SentencePieceProcessor) -> dict[str, int]:
    """The pieces that text is never cut through, as they stand in it, and their ids."""
    pieces = model_proto(processor).pieces
    return {piece.piece: i for i, piece in enumerate(pieces) if piece.type == piece.USER_DEFINED}


def any_of(symbols: Iterable[str]) -> str:
    """A regular expression for one of the symbols, the longest where several fit."""
    return "|".join(map(re.escape, sorted(symbols, key=len, reverse=True)))


def model_proto(processor: sentencepiece.SentencePieceProcessor) -> Any:
    """The model as the message that its file holds: ``pieces``, ``trainer_spec`` and others."""
    proto: Any = sentencepiece_model_pb2  # generated code, opaque to type checkers
    return proto.ModelProto.FromString(processor.serialized_model_proto())


class SubwordSampler:
    """Draws segmentations of lines from one SentencePiece model.

    ``strength``: the merge dropout p of a BPE model (Provilkov et al., 2020), or the smoothing
    alpha of a unigram model, whose segmentations have probability P(pieces)^alpha / Z (Kudo, 2018).
    ``unknown_ids``: ids of characters that the model lacks.
    """

    def __init__(
        self,
        processor: sentencepiece.SentencePieceProcessor,
        strength: float,
        *,
        unknown_ids: Mapping[str, int],
    ) -> None:
        model = model_proto(processor)
        trainer = model.trainer_spec
        if trainer.model_type not in (trainer.BPE, trainer.UNIGRAM):
            raise UserError(
                "tokenizer.sampling needs a BPE or unigram model; set it to 0 for this "
                "tokenizer.model."
            )
        self._processor = processor
        self.strength = strength
        self._ids: dict[str, int] = {}
        self._scores: dict[str, float] = {}
        self._bytes: dict[int, int] = {}
        self._unknown_ids = unknown_ids
        for i, piece in enumerate(model.pieces):
            if piece.type == piece.NORMAL:
                self._ids[piece.piece], self._scores[piece.piece] = i, piece.score
            elif piece.type == piece.BYTE:
                self._bytes[int(piece.piece[1:-1], 16)] = i
        self._longest = max(map(len, self._ids))
        self._unknown_id = processor.unk_id()
        self._unknown_score = min(self._scores.values()) - 10  # as in SentencePiece
        self._split_words = not any(_SPACE in piece[1:] for piece in self._ids)
        self._symbols = user_defined_symbols(processor)
        self._symbol = re.compile(f"({any_of(self._symbols)})") if self._symbols else None
        self._bpe = trainer.model_type == trainer.BPE
        self._merged = lru_cache(_CACHED_WORDS)(lambda word: self._merge(word, None))
        self._lattice = lru_cache(_CACHED_WORDS)(self._make_lattice)

    def sample(self, line: str, generator: random.Random) -> list[int]:
        """Piece ids of one segmentation of ``line``."""
        text = self._processor.normalize(line)
        ids: list[int] = []
        for part in [text] if self._symbol is None else self._symbol.split(text):
            ids += [self._symbols[part]] if part in self._symbols else self._sample(part, generator)
        return ids

    def _sample(self, text: str, generator: random.Random) -> list[int]:
        if not text:
            return []
        pattern = f"{_SPACE}?[^{_SPACE}]+|{_SPACE}"
        words = re.findall(pattern, text) if self._split_words else [text]
        draw = self._sample_bpe if self._bpe else self._sample_unigram
        return [piece for word in words for piece in draw(word, generator)]

    def _sample_bpe(self, word: str, generator: random.Random) -> tuple[int, ...]:
        # The merges up to the first one dropped are geometrically distributed; often that is all of
        # them.
        first_drop = self._merges_before_drop(generator)
        plain = self._merged(word)
        return (
            plain.ids
            if first_drop >= plain.merges
            else self._merge(word, generator, first_drop).ids
        )

    def _merges_before_drop(self, generator: random.Random) -> int:
        return int(math.log(1.0 - generator.random()) / math.log1p(-self.strength))

    def _merge(self, word: str, generator: random.Random | None, until_drop: int = 0) -> _Merged:
        """Byte-pair encoding of a word: the best pair first; with a generator, merges drop out."""
        n = len(word)
        end = list(range(1, n + 1))  # of the part that begins here
        begin = list(range(-1, n))  # of the part that ends here
        agenda: list[tuple[float, int, int, int]] = []
        merges = 0

        def propose(left: int, middle: int, right: int) -> None:
            score = self._scores.get(word[left:right])
            if score is not None:
                heapq.heappush(agenda, (-score, left, middle, right))

        for i in range(n - 1):
            propose(i, i + 1, i + 2)
        while agenda:
            _, left, middle, right = heapq.heappop(agenda)
            if end[left] != middle or end[middle] != right:
                continue  # a part of it has been merged elsewhere
            if generator is not None:
                if until_drop == 0:
                    until_drop = self._merges_before_drop(generator)
                    continue
                until_drop -= 1
            merges += 1
            end[left], begin[right], end[middle] = right, left, 0
            if left:
                propose(begin[left], left, right)
            if right < n:
                propose(left, right, end[right])
        parts = []
        start = 0
        while start < n:
            parts.append(word[start : end[start]])
            start = end[start]
        return _Merged(self._to_ids(parts), merges)

    def _sample_unigram(self, word: str, generator: random.Random) -> tuple[int, ...]:
        lattice = self._lattice(word)
        parts = []
        position = len(word)
        while position:  # backwards: each last piece by the weight of all paths that end in it
            starts, cumulative = lattice[position]
            start = starts[
                min(bisect(cumulative, generator.random() * cumulative[-1]), len(starts) - 1)
            ]
            parts.append(word[start:position])
            position = start
        return self._to_ids(reversed(parts))

    def _make_lattice(self, word: str) -> list[tuple[list[int], list[float]]]:
        """For each position, where the pieces that end there begin, and their cumulative
        weights.
        """
        log_totals = [0.0]  # log of the summed weights of all paths to each position
        lattice: list[tuple[list[int], list[float]]] = [([], [])]
        for position in range(1, len(word) + 1):
            starts, logs = [], []
            for start in range(max(0, position - self._longest), position):
                score = self._scores.get(word[start:position])
                if score is None and position - start == 1:
                    score = self._unknown_score
                if score is not None:
                    starts.append(start)
                    logs.append(log_totals[start] + self.strength * score)
            largest = max(logs)
            cumulative = list(accumulate(math.exp(log - largest) for log in logs))
            log_totals.append(largest + math.log(cumulative[-1]))
            lattice.append((starts, cumulative))
        return lattice

    def _to_ids(self, parts: Iterable[str]) -> tuple[int, ...]:
        ids: list[int] = []
        for part in parts:
            if part in self._ids:
                ids.append(self._ids[part])
            elif self._bytes:
                ids += (self._bytes[byte] for byte in part.encode())
            elif part in self._unknown_ids:
                ids.append(self._unknown_ids[part])
            # unknown characters in a row are one unknown piece
            elif not ids or ids[-1] != self._unknown_id:
                ids.append(self._unknown_id)
        return tuple(ids)


class _Merged(NamedTuple):
    ids: tuple[int, ...]
    merges: int
