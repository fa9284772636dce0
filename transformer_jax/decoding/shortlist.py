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
from numpy.lib.npyio import NpzFile
from scipy import sparse

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
        for name, token in zip(("PAD", "BOS", "EOS", "UNK"), _SPECIAL, strict=True):
            if token not in self.by_frequency[token : token + 1]:
                raise UserError(
                    f"The shortlist misses {name}; expected token {token} at place {token}."
                )
        for tokens in (self.by_frequency, self.candidates):
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
                raise UserError(
                    f"The shortlist has tokens outside 0..{vocab_size - 1}; expected target tokens "
                    "of the vocabulary."
                )
        if len(np.unique(self.by_frequency)) != vocab_size:
            raise UserError("The shortlist has a token twice; expected distinct tokens.")
        steps = np.diff(self.offsets, prepend=0, append=len(self.candidates))
        if steps[0] or steps[-1] or (steps < 0).any() or len(steps) < 3:
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
        table = lexicon.probability.copy()
        # NULL has PAD's row; padding must not change what a sentence may use.
        table.data[table.indptr[PAD_ID] : table.indptr[PAD_ID + 1]] = 0
        table = strongest(table, top)
        if tokenizer.joint:
            itself = sparse.eye_array(table.shape[0], dtype=np.float32, format="csr")
            table = strongest(table + itself * np.finfo(np.float32).tiny, top + 1)
        by_frequency = np.argsort(-lexicon.frequency, kind="stable")
        by_frequency = np.concatenate([_SPECIAL, by_frequency[~np.isin(by_frequency, _SPECIAL)]])
        return cls(
            tokenizer.fingerprint,
            table.indptr.astype(np.int64),
            table.indices.astype(np.int32),
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
            with path.open("rb") as file, NpzFile(file, allow_pickle=False) as saved:
                version, fingerprint = int(saved["format"]), str(saved["fingerprint"])
                arrays = {name: saved[name] for name in ("offsets", "candidates", "by_frequency")}
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
        made = cls(fingerprint, **arrays, frequent=frequent)
        sizes = len(made.offsets) - 1, len(made.by_frequency)
        if sizes != (tokenizer.source_vocab_size, tokenizer.target_vocab_size):
            raise UserError(
                f"Shortlist {str(path)!r} has {sizes} source and target tokens, not as many as its "
                "tokenizer; make it again."
            )
        return made

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
        frequent = self.by_frequency[: len(_SPECIAL) + self.frequent].tolist()
        return np.array(list(dict.fromkeys((*_SPECIAL, *first, *frequent))), np.int32)

    def of_sentences(
        self, source_BS: np.ndarray, shared_C: np.ndarray, *, prefix_BP: np.ndarray | None = None
    ) -> np.ndarray:
        """Each sentence's shortlist, given its source tokens (PAD after them): int32 [B, X].

        First ``shared_C``, then, sorted, what goes with its own source tokens and its forced target
        tokens ``prefix_BP`` (negative: none), then -1. Each token is there once. X - C is one of
        few sizes, so that few shapes are compiled.
        """
        own = []
        for i, source_S in enumerate(source_BS):
            needed_V = np.zeros(len(self.by_frequency), bool)
            for token in np.unique(source_S):
                needed_V[self.candidates[self.offsets[token] : self.offsets[token + 1]]] = True
            if prefix_BP is not None:
                needed_V[prefix_BP[i][prefix_BP[i] >= 0]] = True
            needed_V[shared_C] = False
            own.append(np.flatnonzero(needed_V))
        C = len(shared_C)
        width = C + padded_length(max(map(len, own)), _SMALLEST)
        tokens_BX = np.full((len(source_BS), width), -1, np.int32)
        tokens_BX[:, :C] = shared_C
        for row_X, tokens in zip(tokens_BX, own, strict=True):
            row_X[C : C + len(tokens)] = tokens
        return tokens_BX


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
        try:  # only at these two: a token may be any other space
            target_token, source_token, text = line.replace("\t", " ").split(" ")
            probability = float(text)
        except ValueError:
            probability = math.nan
        if not 0 <= probability <= 1:
            raise UserError(
                f"{path}, line {number} is {line!r}; expected `target source probability`, "
                "separated by single spaces."
            )
        target, source = target_ids.get(target_token), source_ids.get(source_token)
        if target is not None and source is not None:
            sources.append(source)
            targets.append(target)
            probabilities.append(probability)
        elif "NULL" not in (target_token, source_token):
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
