"""Random segmentations for subword regularization: seeded BPE-dropout and unigram sampling.

SentencePiece also samples, but mixes a random salt of each process into its generator (seen in
0.2.3), so a seed cannot reproduce a segmentation. Here, pieces and scores come from SentencePiece,
and the draws from ``random.Random``. Words are segmented one by one, because no piece of our models
crosses a space.
"""

from __future__ import annotations

import heapq
import math
import random
import re
from bisect import bisect
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from transformer_jax.errors import UserError

_WORD = re.compile("\u2581?[^\u2581]+|\u2581")  # begins with ▁, the sign for a space
_CACHED_WORDS = 2**15


def model_proto(model: bytes) -> Any:
    """Return the parsed content of a model file: ``pieces``, ``trainer_spec`` and others."""
    proto: Any = sentencepiece_model_pb2  # generated code, opaque to type checkers
    return proto.ModelProto.FromString(model)


def symbols_of(proto: Any) -> list[str]:
    """Return a model's user-defined pieces, in order. Text is never split inside them."""
    return [piece.piece for piece in proto.pieces if piece.type == piece.USER_DEFINED]


def any_of(symbols: Iterable[str]) -> str:
    """Return a regular expression that matches any of the symbols, preferring the longest."""
    return "|".join(map(re.escape, sorted(symbols, key=len, reverse=True)))


class SubwordSampler:
    """Sampler of segmentations from one SentencePiece model.

    ``strength``: the merge dropout p of a BPE model (Provilkov et al., 2020), or the smoothing
    alpha of a unigram model, whose segmentations have probability P(pieces)^alpha / Z (Kudo, 2018).
    """

    def __init__(self, processor: sentencepiece.SentencePieceProcessor, strength: float) -> None:
        model = model_proto(processor.serialized_model_proto())
        trainer, pieces = model.trainer_spec, model.pieces
        if trainer.model_type not in (trainer.BPE, trainer.UNIGRAM):
            raise UserError(
                "tokenizer.sampling needs a BPE or unigram model; set it to 0 for this "
                "tokenizer.model."
            )
        self._processor = processor
        self.strength = strength
        self._scores = {p.piece: p.score for p in pieces if p.type == p.NORMAL}
        self._longest = max(map(len, self._scores))
        self._unknown_score = min(self._scores.values()) - 10  # as in SentencePiece
        self._spells_bytes = any(p.type == p.BYTE for p in pieces)
        self._symbols = set(symbols_of(model))
        self._symbol = re.compile(f"({any_of(self._symbols)})") if self._symbols else None
        self._draw = self._draw_bpe if trainer.model_type == trainer.BPE else self._draw_unigram
        self._merged = lru_cache(_CACHED_WORDS)(self._merge)
        self._lattice = lru_cache(_CACHED_WORDS)(self._make_lattice)

    def sample(self, line: str, generator: random.Random) -> list[str]:
        """Draw one random segmentation of ``line`` and return its pieces."""
        text = self._processor.normalize(line)
        pieces: list[str] = []
        for part in [text] if self._symbol is None else self._symbol.split(text):
            if part in self._symbols:
                pieces.append(part)
            else:
                for word in _WORD.findall(part):
                    pieces += self._draw(word, generator)
        return pieces

    def _draw_bpe(self, word: str, generator: random.Random) -> list[str]:
        # The number of merges before the first drop is geometrically distributed, and often covers
        # the whole word.
        first_drop = self._merges_before_drop(generator)
        pieces, merges = self._merged(word)
        return pieces if first_drop >= merges else self._merge(word, first_drop, generator)[0]

    def _merges_before_drop(self, generator: random.Random) -> int:
        return int(math.log(1.0 - generator.random()) / math.log1p(-self.strength))

    def _merge(
        self, word: str, until_drop: float = math.inf, generator: random.Random | None = None
    ) -> tuple[list[str], int]:
        """Encode a word with BPE, best pair first; also return the number of merges.

        After ``until_drop`` merges, one merge is dropped, and ``generator`` draws the next
        ``until_drop``.
        """
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
                continue  # one of its parts has been merged elsewhere
            if until_drop == 0 and generator is not None:
                until_drop = self._merges_before_drop(generator)
                continue
            until_drop -= 1
            merges += 1
            end[left], begin[right], end[middle] = right, left, 0
            if left:
                propose(begin[left], left, right)
            if right < n:
                propose(left, right, end[right])
        parts = [word[start:stop] for start, stop in enumerate(end) if stop]
        return self._spelled(parts), merges

    def _draw_unigram(self, word: str, generator: random.Random) -> list[str]:
        lattice = self._lattice(word)
        parts = []
        position = len(word)
        while position:  # backwards: draw a last piece by the weight of all paths that end in it
            starts, cumulative = lattice[position]
            drawn = bisect(cumulative, generator.random() * cumulative[-1])
            start = starts[min(drawn, len(starts) - 1)]
            parts.append(word[start:position])
            position = start
        return self._spelled(reversed(parts))

    def _make_lattice(self, word: str) -> list[tuple[list[int], list[float]]]:
        """Return, for each position, the starts of pieces that end there and cumulative weights."""
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

    def _spelled(self, parts: Iterable[str]) -> list[str]:
        """Convert parts of a word to pieces. Unknown neighbors become one piece, or bytes."""
        pieces: list[str] = []
        for known, run in groupby(parts, self._scores.__contains__):
            if known:
                pieces += run
            elif self._spells_bytes:
                pieces += (f"<0x{byte:02X}>" for byte in "".join(run).encode())
            else:
                pieces.append("".join(run))
        return pieces
