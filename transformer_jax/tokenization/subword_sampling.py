"""Random segmentation for subword regularization: BPE-dropout with a reproducible seed.

SentencePiece can also sample, but (as of 0.2.3) it salts each process's generator randomly, so a
seed does not reproduce a segmentation. Its distribution also differs from the paper's: a dropped
merge stays dropped until a neighbor changes. Here, pieces and scores come from SentencePiece,
random numbers from ``random.Random``, and the distribution from Algorithm 1 in the paper.
"""

from __future__ import annotations

import heapq
import math
import random
import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from transformer_jax.errors import UserError, short_repr

# Units that are segmented separately: words that start with ▁ (a space), words that end with ▁, or,
# if tokens span several words, the whole line.
_UNITS = "\u2581?[^\u2581]+|\u2581", "[^\u2581]*\u2581|[^\u2581]+", "(?s:.+)"
_CACHED_WORDS = 2**15


def model_proto(model: bytes) -> Any:
    """Parse a model file into a protocol buffer: ``pieces``, ``trainer_spec`` and other fields."""
    proto: Any = sentencepiece_model_pb2  # generated code, opaque to type checkers
    return proto.ModelProto.FromString(model)


def symbols_of(proto: Any) -> list[str]:
    """Return a model's user-defined symbols, in order. Text is never split inside them."""
    return [piece.piece for piece in proto.pieces if piece.type == piece.USER_DEFINED]


def any_of(symbols: Iterable[str]) -> str:
    """Return a regular expression that matches any of the symbols, preferring the longest."""
    return "|".join(map(re.escape, sorted(symbols, key=len, reverse=True)))


class SubwordSampler:
    """BPE-dropout (Provilkov et al., 2020, Algorithm 1).

    Before every merge, each possible merge is dropped with probability ``dropout``. The best of the
    others is made. Segmentation ends when none is left.
    """

    def __init__(self, processor: sentencepiece.SentencePieceProcessor, dropout: float) -> None:
        model = model_proto(processor.serialized_model_proto())
        trainer, pieces = model.trainer_spec, model.pieces
        if trainer.model_type != trainer.BPE:
            raise UserError(
                "tokenizer.sampling needs a BPE model; set tokenizer.sampling to 0 or "
                "tokenizer.algorithm to bpe."
            )
        if unused := [p.piece for p in pieces if p.type == p.UNUSED]:
            raise UserError(
                f"tokenizer.sampling needs a model without unused tokens; this model has "
                f"{short_repr(unused)}. Set tokenizer.sampling to 0."
            )
        self._processor = processor
        self.dropout = dropout
        self._ranks = {p.piece: -p.score for p in pieces if p.type == p.NORMAL}
        units = map(re.compile, _UNITS)
        self._unit = next(unit for unit in units if all(map(unit.fullmatch, self._ranks)))
        self._spells_bytes = any(p.type == p.BYTE for p in pieces)
        self._symbols = set(symbols_of(model))
        self._symbol = re.compile(f"({any_of(self._symbols)})") if self._symbols else None
        self._merged = lru_cache(_CACHED_WORDS)(self._merge)

    def sample(self, line: str, generator: random.Random) -> list[str]:
        """Draw a random segmentation of ``line`` and return its pieces."""
        text = self._processor.normalize(line)
        pieces: list[str] = []
        for part in [text] if self._symbol is None else self._symbol.split(text):
            if part in self._symbols:
                pieces.append(part)
            else:
                for word in self._unit.findall(part):
                    pieces += self._draw(word, generator)
        return pieces

    def _draw(self, word: str, generator: random.Random) -> list[str]:
        # The number of merges before the first drop has a geometric distribution. Often no merge
        # in the word is dropped.
        first_drop = self._merges_before_drop(generator)
        pieces, merges = self._merged(word)
        return pieces if first_drop >= merges else self._merge(word, first_drop, generator)[0]

    def _merges_before_drop(self, generator: random.Random) -> int:
        return int(math.log(1.0 - generator.random()) / math.log1p(-self.dropout))

    def _merge(
        self, word: str, until_drop: float = math.inf, generator: random.Random | None = None
    ) -> tuple[list[str], int]:
        """Encode a word with BPE, best pair first. Returns the pieces and the number of merges.

        After ``until_drop`` merges, drops one merge and draws a new ``until_drop`` from
        ``generator``. The dropped merge is possible again after the next merge.
        """
        n = len(word)
        end = list(range(1, n + 1))  # end of the part that begins at i
        begin = list(range(-1, n))  # begin of the part that ends at i
        agenda, dropped = list[tuple[float, int, int, int]](), list[tuple[float, int, int, int]]()
        merges, rank_of = 0, self._ranks.get

        def propose(left: int, middle: int, right: int) -> None:
            rank = rank_of(word[left:right])
            if rank is not None:
                heapq.heappush(agenda, (rank, left, middle, right))

        for i in range(n - 1):
            propose(i, i + 1, i + 2)
        while agenda:
            best = heapq.heappop(agenda)
            _, left, middle, right = best
            if end[left] != middle or end[middle] != right:
                continue  # one of the two parts was merged with another part
            if until_drop == 0 and generator is not None:
                until_drop = self._merges_before_drop(generator)
                dropped.append(best)
                continue
            until_drop -= 1
            merges += 1
            end[left], begin[right], end[middle] = right, left, 0
            if left:
                propose(begin[left], left, right)
            if right < n:
                propose(left, right, end[right])
            while dropped:
                heapq.heappush(agenda, dropped.pop())
        parts = [word[start:stop] for start, stop in enumerate(end) if stop]
        return self._spelled(parts), merges

    def _spelled(self, parts: Iterable[str]) -> list[str]:
        """Convert parts of a word to pieces. Adjacent unknown parts become one piece, or bytes."""
        pieces: list[str] = []
        for known, run in groupby(parts, self._ranks.__contains__):
            if known:
                pieces += run
            elif self._spells_bytes:
                pieces += (f"<0x{byte:02X}>" for byte in "".join(run).encode())
            else:
                pieces.append("".join(run))
        return pieces
