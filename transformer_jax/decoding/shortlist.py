"""Shortlists: the target tokens that a sentence may use, by its source tokens and by frequency.

``learn_shortlist.py`` learns what goes with a source token; text tables of other tools can be read
as well. The search numbers a sentence's tokens by their places in its shortlist; PAD, BOS, EOS and
UNK keep their numbers.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import sparse

from transformer_jax.data.corpus import ranges
from transformer_jax.data.sources import read_lines
from transformer_jax.decoding.buckets import padded_length
from transformer_jax.errors import UserError
from transformer_jax.special_ids import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from transformer_jax.storage import write_atomically
from transformer_jax.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_SPECIAL = (PAD_ID, BOS_ID, EOS_ID, UNK_ID)
_FORMAT = 1
_SMALLEST = 64
_ROWS = 64  # sentences looked up together: bounds memory


class Lexicon(NamedTuple):
    """p(target token | source token), where it is known."""

    probability: sparse.csr_array
    """float32 [source vocabulary, target vocabulary]."""
    frequency: np.ndarray
    """float64 [target vocabulary]: how often each target token occurs, in any unit."""


@dataclass(frozen=True, eq=False)
class Shortlist:
    """Which target tokens each source token may need."""

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
    """How many of them (besides the special ones) every sentence may use."""

    def __post_init__(self) -> None:
        arrays = self.offsets, self.candidates, self.by_frequency
        vocab_size = len(self.by_frequency)
        if any(array.ndim != 1 or array.dtype.kind != "i" for array in arrays):
            raise UserError("The shortlist's arrays are not flat integers; make it again.")
        _check_tokens(self.by_frequency, vocab_size)
        _check_range(self.candidates, vocab_size)
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
        # NULL has PAD's row; padding must not change what a sentence may use.
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
        """Read what ``save`` wrote, or a text table ``target source probability``.

        Raises:
          UserError: a file that is missing, damaged or made with another tokenizer; a table
            without tokens of this vocabulary.
        """
        path = Path(path)
        if not path.is_file():
            raise UserError(
                f"shortlist is {str(path)!r}, which does not exist; expected a file of python -m "
                "transformer_jax.decoding.learn_shortlist, or a table of lines "
                "`target source probability`."
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
        except Exception as error:  # NumPy, zipfile and zlib raise many kinds
            raise UserError(
                f"Shortlist {str(path)!r} is damaged, or no shortlist ({error}); make it again."
            ) from None
        if version != _FORMAT:
            raise UserError(
                f"Shortlist {str(path)!r} has format {version}; expected {_FORMAT}: make it again."
            )
        if fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"Shortlist {str(path)!r} was made with another tokenizer; expected one made for "
                "this run."
            )
        sizes = len(offsets) - 1, len(by_frequency)
        if sizes != (tokenizer.source_vocab_size, tokenizer.target_vocab_size):
            raise UserError(
                f"Shortlist {str(path)!r} has {sizes} source and target tokens, not as many as its "
                "tokenizer; make it again."
            )
        return cls(fingerprint, offsets, candidates, by_frequency, frequent)

    def save(self, path: str | Path) -> None:
        """Write a ``.npz`` file of plain arrays (no pickle)."""
        file = io.BytesIO()
        np.savez_compressed(
            file,
            format=np.int32(_FORMAT),
            fingerprint=np.array(self.fingerprint),
            offsets=self.offsets,
            candidates=self.candidates,
            by_frequency=self.by_frequency,
            frequent=np.int32(self.frequent),
        )
        write_atomically(Path(path), file.getvalue())

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
        """Each sentence's shortlist, given its source tokens (PAD after them): int32 [B, X].

        First ``shared_C``, then, sorted, what goes with its own source tokens and its forced target
        tokens ``prefix_BP`` (negative: none), then -1. Each token is there once. X - C is one of
        few sizes, so that few shapes are compiled.
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
        """Each candidate of these source tokens: its source token's place in P, and itself."""
        if len(source_P) and not 0 <= source_P.min() <= source_P.max() < len(self.offsets) - 1:
            raise UserError(
                f"Source tokens go from {source_P.min()} to {source_P.max()}; expected "
                f"0..{len(self.offsets) - 2}."
            )
        starts_P, lengths_P = self.offsets[source_P], np.diff(self.offsets)[source_P]
        places = np.repeat(np.arange(len(source_P)), lengths_P)
        return places, self.candidates[ranges(starts_P, lengths_P)]


def _check_range(tokens: np.ndarray, vocab_size: int) -> None:
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise UserError(
            f"The shortlist has tokens outside 0..{vocab_size - 1}; expected target tokens of the "
            "vocabulary."
        )


def _check_tokens(tokens_K: np.ndarray, vocab_size: int) -> None:
    """``UserError`` unless these are distinct tokens of the vocabulary, the special ones at 0 to
    3.
    """
    for name, token in zip(("PAD", "BOS", "EOS", "UNK"), _SPECIAL, strict=True):
        if len(tokens_K) <= token or tokens_K[token] != token:
            raise UserError(
                f"The shortlist misses {name}; expected token {token} at place {token}."
            )
    _check_range(tokens_K, vocab_size)
    if len(np.unique(tokens_K)) != len(tokens_K):
        raise UserError("The shortlist has a token twice; expected distinct tokens.")


def read_table(path: str | Path, tokenizer: Tokenizer) -> Lexicon:
    """Read a text table as Marian and fast_align write it (``.gz`` too): lines ``target source
    probability``, in tokens. Entries with NULL or with unknown tokens are skipped.

    Raises:
      UserError: a line that is no such entry (with its number), or a table without a single token
        of the vocabularies.
    """
    source_tokens = tokenizer.source_tokens(range(tokenizer.source_vocab_size))
    target_tokens = tokenizer.target_tokens(range(tokenizer.target_vocab_size))
    source_ids = {token: i for i, token in enumerate(source_tokens)}
    target_ids = {token: i for i, token in enumerate(target_tokens)}
    sources, targets, probabilities, unknown = [], [], [], 0
    for number, line in enumerate(read_lines(path), 1):
        if not line:
            continue
        fields = line.replace("\t", " ").split(" ")  # only these: a token may be any other space
        if len(fields) != 3 or not 0 <= _number(fields[2]) <= 1:
            raise UserError(
                f"{path}, line {number} is {line!r}; expected `target source probability`, "
                "separated by single spaces."
            )
        target, source = target_ids.get(fields[0]), source_ids.get(fields[1])
        if target is not None and source is not None:
            sources.append(source)
            targets.append(target)
            probabilities.append(float(fields[2]))
        elif "NULL" not in fields[:2]:
            unknown += 1
    if not sources:
        raise UserError(
            f"{path} has no entry in the tokens of this vocabulary; expected a table made with its "
            "tokenizer."
        )
    if unknown:
        log.warning(
            "%s: %d entries with tokens that the vocabulary lacks are skipped.", path, unknown
        )
    shape = len(source_ids), len(target_ids)
    probability = sparse.coo_array(
        (np.array(probabilities, np.float32), (sources, targets)), shape
    ).tocsr()
    # A token that goes with much occurs often.
    return Lexicon(probability, np.asarray(probability.sum(axis=0), np.float64))


def strongest(table: sparse.csr_array, most: int) -> sparse.csr_array:
    """The ``most`` largest positive entries of each row, largest first; among equals the lower
    column goes before.
    """
    rows_E = np.repeat(np.arange(table.shape[0]), np.diff(table.indptr))
    order_E = np.lexsort((table.indices, -table.data, rows_E))
    kept = order_E[(np.arange(table.nnz) - table.indptr[rows_E] < most) & (table.data[order_E] > 0)]
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows_E[kept], minlength=table.shape[0]))])
    return sparse.csr_array((table.data[kept], table.indices[kept], indptr), table.shape)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
