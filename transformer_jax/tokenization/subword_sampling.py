"""Subword sampling: random segmentations of a training text, with a reproducible seed.

SentencePiece can also sample, but (as of 0.2.3) it salts each process's generator randomly, so a
seed does not reproduce a segmentation. Its distribution also differs from the paper's: a dropped
merge stays dropped until a neighbor changes. Here, pieces and scores come from SentencePiece,
random numbers from ``random.Random``, and the distribution from Algorithm 1 in the paper.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

import sentencepiece

from transformer_jax.errors import UserError
from transformer_jax.settings.config import TokenizerConfig

# Units that are segmented separately: words that start with ▁ (a space), words that end with ▁, or,
# if tokens span several words, the whole line.
_WORD_PATTERNS = "\u2581?[^\u2581]+|\u2581", "[^\u2581]*\u2581|[^\u2581]+", "(?s:.+)"
_CACHED_WORDS = 2**15


def any_symbol_pattern(symbols: Iterable[str]) -> str:
    """Return a regular expression that matches any of the symbols, preferring the longest; one that
    never matches, if there are none.
    """
    return "|".join(map(re.escape, sorted(symbols, key=len, reverse=True))) or "(?!)"


@dataclass(frozen=True)
class BpeDropout:
    """BPE-dropout (Provilkov et al., 2020, Algorithm 1).

    Before every merge, each possible merge is dropped with probability ``dropout``. The best of the
    others is made. Segmentation ends when none is left.
    """

    dropout: float
    num_samples: int = 1
    """Number of copies of each pair in a corpus, each in a newly drawn segmentation."""

    @property
    def version(self) -> Sequence[object]:
        """What determines a segmentation, for the fingerprint of a corpus."""
        return "Algorithm 1", self.dropout


def subword_sampling(config: TokenizerConfig) -> BpeDropout | None:
    """Return the kind of sampling that the settings turn on, if any."""
    if config.bpe_dropout:
        return BpeDropout(config.bpe_dropout, config.bpe_dropout_samples)
    return None


class BpeDropoutSampler:
    """Draws segmentations of a SentencePiece model (see ``segmenters.model_proto``).

    Raises ``UserError`` if the model does not suit.
    """

    def __init__(
        self, processor: sentencepiece.SentencePieceProcessor, proto: Any, dropout: float
    ) -> None:
        trainer = proto.trainer_spec
        pieces = proto.pieces
        if trainer.model_type != trainer.BPE or any(p.type == p.UNUSED for p in pieces):
            raise UserError(
                "tokenizer.bpe_dropout needs a BPE model without unused tokens; set "
                "tokenizer.bpe_dropout to 0 or tokenizer.algorithm to bpe."
            )
        self._processor = processor
        self.dropout = dropout
        self._ranks = {p.piece: -p.score for p in pieces if p.type == p.NORMAL}
        self._word_pattern = next(
            unit
            for unit in map(re.compile, _WORD_PATTERNS)
            if all(map(unit.fullmatch, self._ranks))
        )
        self._has_byte_fallback = any(p.type == p.BYTE for p in pieces)
        self._symbols = {p.piece for p in pieces if p.type == p.USER_DEFINED}
        self._symbol_pattern = re.compile(f"({any_symbol_pattern(self._symbols)})")
        self._cached_merge = lru_cache(_CACHED_WORDS)(self._merge)

    def sample(self, line: str, generator: random.Random) -> list[str]:
        """Draw a random segmentation of ``line`` and return its pieces."""
        text = self._processor.normalize(line)
        pieces: list[str] = []
        for part in self._symbol_pattern.split(text):
            if part in self._symbols:
                pieces.append(part)
            else:
                for word in self._word_pattern.findall(part):
                    pieces += self._segment_word(word, generator)
        return pieces

    def _segment_word(self, word: str, generator: random.Random) -> list[str]:
        # The number of merges before the first drop has a geometric distribution. Often no merge
        # in the word is dropped.
        first_drop = self._merges_before_drop(generator)
        if first_drop >= len(word) - 1:
            return self._cached_merge(word)
        return self._merge(word, first_drop, generator)

    def _merges_before_drop(self, generator: random.Random) -> int:
        return int(math.log(1.0 - generator.random()) / math.log1p(-self.dropout))

    def _merge(
        self, word: str, until_drop: float = math.inf, generator: random.Random | None = None
    ) -> list[str]:
        """Encode a word with BPE, best pair first.

        After ``until_drop`` merges, drops one merge and draws a new ``until_drop`` from
        ``generator``. The dropped merge is possible again after the next merge.
        """
        rank = self._ranks.get
        no_merge = math.inf
        parts = list(word)
        ranks = [rank(a + b, no_merge) for a, b in pairwise(word)]
        candidate_ranks = ranks  # after drops
        while candidate_ranks and (best := min(candidate_ranks)) < no_merge:
            i = candidate_ranks.index(best)
            if until_drop == 0 and generator is not None:
                until_drop = self._merges_before_drop(generator)
                candidate_ranks = candidate_ranks.copy()
                candidate_ranks[i] = no_merge
                continue
            until_drop -= 1
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
            neighborhood = slice(max(0, i - 1), i + 2)
            ranks[neighborhood] = [rank(a + b, no_merge) for a, b in pairwise(parts[neighborhood])]
            candidate_ranks = ranks
        return self._join_unknown(parts)

    def _join_unknown(self, parts: Iterable[str]) -> list[str]:
        """Convert parts of a word to pieces. Adjacent unknown parts become one piece, or bytes."""
        pieces: list[str] = []
        for known, run in groupby(parts, self._ranks.__contains__):
            if known:
                pieces += run
            elif self._has_byte_fallback:
                pieces += (f"<0x{byte:02X}>" for byte in "".join(run).encode())
            else:
                pieces.append("".join(run))
        return pieces
