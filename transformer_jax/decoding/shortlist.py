"""The target tokens that a sentence can need: those that go with its source tokens, and the most
frequent ones.

The search numbers a sentence's tokens by their places among what it may use; PAD, BOS, EOS and UNK
keep their numbers.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transformer_jax.data.corpus import ranges
from transformer_jax.decoding.buckets import padded_length
from transformer_jax.decoding.lexicon import Lexicon, read_table, strongest
from transformer_jax.errors import UserError
from transformer_jax.special_ids import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from transformer_jax.tokenizer import Tokenizer

_SPECIAL = (PAD_ID, BOS_ID, EOS_ID, UNK_ID)
_FORMAT = 1
_SMALLEST = 64
_ROWS = 64  # looked at together: what bounds memory
_DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    TypeError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True, eq=False)
class Shortlist:
    """Which target tokens each source token may need. What ``load`` gives is checked."""

    fingerprint: str
    """The tokenizer's."""
    offsets: np.ndarray
    """int64 [source vocabulary + 1]: token s may need ``candidates[offsets[s] : offsets[s +
    1]]``.
    """
    candidates: np.ndarray
    """int32."""
    by_frequency: np.ndarray
    """int32 [target vocabulary]: the special tokens, then all others, most frequent first."""
    frequent: int
    """So many of them (besides the special ones) any sentence may need."""

    def __post_init__(self) -> None:
        arrays, vocab_size = (
            (self.offsets, self.candidates, self.by_frequency),
            len(self.by_frequency),
        )
        if any(array.ndim != 1 or array.dtype.kind != "i" for array in arrays):
            raise UserError("The shortlist's arrays are not flat integers; make it again.")
        _check_tokens(self.by_frequency, vocab_size)
        if (
            len(self.candidates)
            and not 0 <= self.candidates.min() <= self.candidates.max() < vocab_size
        ):
            raise UserError(
                f"The shortlist has tokens outside 0..{vocab_size - 1}; expected target tokens of the vocabulary."
            )
        steps = np.diff(self.offsets)
        if not (
            steps.size
            and self.offsets[0] == 0
            and self.offsets[-1] == len(self.candidates)
            and (steps >= 0).all()
        ):
            raise UserError("The shortlist's offsets do not fit its candidates; make it again.")
        if self.frequent < 0:
            raise UserError(
                f"The shortlist's number of frequent tokens is {self.frequent}; expected 0 or more."
            )

    @classmethod
    def from_lexicon(
        cls, lexicon: Lexicon, tokenizer: Tokenizer, *, top: int = 100, frequent: int = 100
    ) -> Shortlist:
        """The ``top`` likeliest targets of each source token, and in a joint vocabulary the token
        itself (names, numbers).
        """
        if top < 1 or frequent < 0:
            raise UserError(
                f"top is {top} and frequent {frequent}; expected at least 1 and at least 0."
            )
        table = strongest(lexicon.probability, top)
        sources = np.repeat(np.arange(table.shape[0]), np.diff(table.indptr))
        # NULL's row is PAD's; padding must not change what a sentence may need.
        sources, targets = sources[sources != PAD_ID], table.indices[sources != PAD_ID]
        if tokenizer.joint:
            new = np.setdiff1d(np.arange(table.shape[0]), sources[sources == targets])
            sources, targets = np.concatenate([sources, new]), np.concatenate([targets, new])
            order = np.argsort(sources, kind="stable")
            sources, targets = sources[order], targets[order]
        offsets = np.concatenate(
            [[0], np.cumsum(np.bincount(sources, minlength=table.shape[0]), dtype=np.int64)]
        )
        by_frequency = np.argsort(-lexicon.frequency, kind="stable")
        by_frequency = np.concatenate([_SPECIAL, by_frequency[~np.isin(by_frequency, _SPECIAL)]])
        return cls(
            tokenizer.fingerprint,
            offsets,
            targets.astype(np.int32),
            by_frequency.astype(np.int32),
            frequent,
        )

    @classmethod
    def load(cls, path: str | Path, tokenizer: Tokenizer) -> Shortlist:
        """What ``save`` wrote; or a text table ``target source probability``, with this module's
        defaults.

        Raises:
          UserError: no such file, a damaged one, one made with another tokenizer, a table without
            tokens of this vocabulary.
        """
        path = Path(path)
        if not path.is_file():
            raise UserError(
                f"shortlist is {str(path)!r}, which does not exist; expected a file of python -m "
                "transformer_jax.decoding.learn_shortlist, or a table of lines `target source probability`."
            )
        with path.open("rb") as file:
            is_table = file.read(2) != b"PK" and path.suffix != ".npz"
        if is_table:
            return cls.from_lexicon(read_table(path, tokenizer), tokenizer)
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
                version, fingerprint = int(saved["format"]), str(saved["fingerprint"])
                offsets, candidates, by_frequency = (
                    saved[name] for name in ("offsets", "candidates", "by_frequency")
                )
                frequent = int(saved["frequent"])
        except _DAMAGE as error:
            raise UserError(
                f"Shortlist {str(path)!r} is damaged, or none ({error}); make it again."
            ) from None
        if version != _FORMAT:
            raise UserError(
                f"Shortlist {str(path)!r} has format {version}; expected {_FORMAT}: make it again."
            )
        if fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"Shortlist {str(path)!r} was made with another tokenizer; expected one made for this run."
            )
        sizes = len(offsets) - 1, len(by_frequency)
        if sizes != (tokenizer.source_vocab_size, tokenizer.target_vocab_size):
            raise UserError(
                f"Shortlist {str(path)!r} has {sizes} source and target tokens, not its tokenizer's; make it again."
            )
        return cls(fingerprint, offsets, candidates, by_frequency, frequent)

    def save(self, path: str | Path) -> None:
        """Write a ``.npz`` file (plain arrays; no pickle), which appears whole or not at all."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with temporary.open("wb") as file:
            np.savez_compressed(
                file,
                format=np.int32(_FORMAT),
                fingerprint=np.array(self.fingerprint),
                offsets=self.offsets,
                candidates=self.candidates,
                by_frequency=self.by_frequency,
                frequent=np.int32(self.frequent),
            )
        temporary.replace(path)

    def shared(self, first: Sequence[int] = ()) -> np.ndarray:
        """The tokens that every sentence may use, int32 [C], each once: the special ones at 0 to 3,
        then those of ``first`` in their order, then the most frequent ones.
        """
        return np.array(
            list(dict.fromkeys((*_SPECIAL, *first, *self._frequent.tolist()))), np.int32
        )

    def of_sentences(
        self, source_BS: np.ndarray, shared_C: np.ndarray, *, prefix_BP: np.ndarray | None = None
    ) -> np.ndarray:
        """What each sentence (source tokens, PAD after them) may use, each token once: int32 [B,
        X].

        First ``shared_C``, then what goes with its own source tokens and its forced target tokens
        ``prefix_BP`` (negative: none), sorted, then -1. X - C is one of few sizes, so that few
        shapes are compiled.
        """
        own = []
        for start in range(0, len(source_BS), _ROWS):
            source_RS = source_BS[start : start + _ROWS]
            needed_RV = np.zeros((len(source_RS), len(self.by_frequency)), bool)
            places, candidates = self._candidates(source_RS.ravel())
            needed_RV[places // source_RS.shape[1], candidates] = True
            if prefix_BP is not None:
                prefix_RP = prefix_BP[start : start + _ROWS]
                rows, columns = np.nonzero(prefix_RP >= 0)
                needed_RV[rows, prefix_RP[rows, columns]] = True
            needed_RV[:, shared_C] = False
            own += [np.flatnonzero(needed_V) for needed_V in needed_RV]
        width = len(shared_C) + padded_length(max(map(len, own)), _SMALLEST)
        tokens_BX = np.full((len(source_BS), width), -1, np.int32)
        tokens_BX[:, : len(shared_C)] = shared_C
        for row_X, tokens in zip(tokens_BX, own, strict=True):
            row_X[len(shared_C) : len(shared_C) + len(tokens)] = tokens
        return tokens_BX

    @property
    def _frequent(self) -> np.ndarray:
        return self.by_frequency[: len(_SPECIAL) + self.frequent]

    def _candidates(self, source_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The candidates of all these source tokens, and which one (its place in P) each belongs
        to.
        """
        if len(source_P) and not 0 <= source_P.min() <= source_P.max() < len(self.offsets) - 1:
            raise UserError(
                f"Source tokens go from {source_P.min()} to {source_P.max()}; expected 0..{len(self.offsets) - 2}."
            )
        starts_P, lengths_P = self.offsets[source_P], np.diff(self.offsets)[source_P]
        return np.repeat(np.arange(len(source_P)), lengths_P), self.candidates[
            ranges(starts_P, lengths_P)
        ]


def _check_tokens(tokens_K: np.ndarray, vocab_size: int) -> None:
    """``UserError`` unless these are distinct tokens of the vocabulary, the special ones at 0 to
    3.
    """
    for name, token in zip(("PAD", "BOS", "EOS", "UNK"), _SPECIAL, strict=True):
        if len(tokens_K) <= token or tokens_K[token] != token:
            raise UserError(
                f"The shortlist misses {name}; expected token {token} at place {token}."
            )
    if tokens_K.min() < 0 or tokens_K.max() >= vocab_size:
        raise UserError(
            f"The shortlist has tokens outside 0..{vocab_size - 1}; expected target tokens of the vocabulary."
        )
    if len(np.unique(tokens_K)) != len(tokens_K):
        raise UserError("The shortlist has a token twice; expected distinct tokens.")
