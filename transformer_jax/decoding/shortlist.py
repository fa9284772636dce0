"""A softmax over the pieces that a sentence can need: those that go with its source pieces, and the most frequent ones.

    python -m transformer_jax.decoding.shortlist --workdir W [--top 100] [--frequent 100]

learns which pieces go together from the run's own training text and writes ``W/shortlist.npz``. The search then numbers a
sentence's pieces by their places among what it may use; PAD, BOS, EOS and UNK keep their numbers.
"""

from __future__ import annotations

import logging
import os
import sys
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from transformer_jax.config_files import from_json
from transformer_jax.data.files import is_url
from transformer_jax.data.parts import prepare_corpus
from transformer_jax.decoding.lexicon import Lexicon, learn, read_table, strongest
from transformer_jax.errors import UserError
from transformer_jax.program import run_program
from transformer_jax.remote import local_workdir
from transformer_jax.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Tokenizer

log = logging.getLogger("transformer_jax.decoding.shortlist")  # also as a program, where __name__ is another

_SPECIAL = (PAD_ID, BOS_ID, EOS_ID, UNK_ID)
_FORMAT = 1
_SMALLEST = 64
_DAMAGE = (OSError, ValueError, KeyError, EOFError, TypeError, NotImplementedError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True, eq=False)
class Shortlist:
    """Which target pieces each source piece may need. What ``load`` gives is checked."""

    fingerprint: str
    """The tokenizer's."""
    offsets: np.ndarray
    """int64 [source vocabulary + 1]: piece s may need ``candidates[offsets[s] : offsets[s + 1]]``."""
    candidates: np.ndarray
    """int32."""
    by_frequency: np.ndarray
    """int32 [target vocabulary]: the special pieces, then all others, most frequent first."""
    frequent: int
    """So many of them (besides the special ones) any sentence may need."""

    def __post_init__(self) -> None:
        arrays, vocab_size = (self.offsets, self.candidates, self.by_frequency), len(self.by_frequency)
        if any(array.ndim != 1 or array.dtype.kind != "i" for array in arrays):
            raise UserError("The shortlist's arrays are not flat integers; make it again.")
        _check_pieces(self.by_frequency, vocab_size)
        if len(self.candidates) and not 0 <= self.candidates.min() <= self.candidates.max() < vocab_size:
            raise UserError(f"The shortlist has pieces outside 0..{vocab_size - 1}; expected target pieces of the vocabulary.")
        steps = np.diff(self.offsets)
        if not (steps.size and self.offsets[0] == 0 and self.offsets[-1] == len(self.candidates) and (steps >= 0).all()):
            raise UserError("The shortlist's offsets do not fit its candidates; make it again.")
        if self.frequent < 0:
            raise UserError(f"The shortlist's number of frequent pieces is {self.frequent}; expected 0 or more.")

    @classmethod
    def from_lexicon(cls, lexicon: Lexicon, tokenizer: Tokenizer, *, top: int = 100, frequent: int = 100) -> Shortlist:
        """The ``top`` likeliest targets of each source piece, and in a joint vocabulary the piece itself (names, numbers)."""
        if top < 1 or frequent < 0:
            raise UserError(f"top is {top} and frequent {frequent}; expected at least 1 and at least 0.")
        table = strongest(lexicon.probability, top)
        sources = np.repeat(np.arange(table.shape[0]), np.diff(table.indptr))
        # NULL's row is PAD's; padding must not change what a sentence may need.
        sources, targets = sources[sources != PAD_ID], table.indices[sources != PAD_ID]
        if tokenizer.joint:
            new = np.setdiff1d(np.arange(table.shape[0]), sources[sources == targets])
            sources, targets = np.concatenate([sources, new]), np.concatenate([targets, new])
            order = np.argsort(sources, kind="stable")
            sources, targets = sources[order], targets[order]
        offsets = np.concatenate([[0], np.cumsum(np.bincount(sources, minlength=table.shape[0]), dtype=np.int64)])
        by_frequency = np.argsort(-lexicon.frequency, kind="stable")
        by_frequency = np.concatenate([_SPECIAL, by_frequency[~np.isin(by_frequency, _SPECIAL)]])
        return cls(tokenizer.fingerprint, offsets, targets.astype(np.int32), by_frequency.astype(np.int32), frequent)

    @classmethod
    def load(cls, path: str | Path, tokenizer: Tokenizer) -> Shortlist:
        """What ``save`` wrote; or a text table ``target source probability``, with this module's defaults.

        Raises:
          UserError: no such file, a damaged one, one made with another tokenizer, a table without pieces of this vocabulary.
        """
        path = Path(path)
        if not path.is_file():
            raise UserError(
                f"shortlist is {str(path)!r}, which does not exist; expected a file of python -m "
                "transformer_jax.decoding.shortlist, or a table of lines `target source probability`."
            )
        with path.open("rb") as file:
            is_table = file.read(2) != b"PK" and path.suffix != ".npz"
        if is_table:
            return cls.from_lexicon(read_table(path, tokenizer), tokenizer)
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
                version, fingerprint = int(saved["format"]), str(saved["fingerprint"])
                offsets, candidates, by_frequency = (saved[name] for name in ("offsets", "candidates", "by_frequency"))
                frequent = int(saved["frequent"])
        except _DAMAGE as error:
            raise UserError(f"Shortlist {str(path)!r} is damaged, or none ({error}); make it again.") from None
        if version != _FORMAT:
            raise UserError(f"Shortlist {str(path)!r} has format {version}; expected {_FORMAT}: make it again.")
        if fingerprint != tokenizer.fingerprint:
            raise UserError(f"Shortlist {str(path)!r} was made with another tokenizer; expected one made for this run.")
        sizes = len(offsets) - 1, len(by_frequency)
        if sizes != (tokenizer.source_vocab_size, tokenizer.target_vocab_size):
            raise UserError(
                f"Shortlist {str(path)!r} has {sizes} source and target pieces, not its tokenizer's; make it again."
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
        """The pieces that every sentence may use, int32 [C], each once: the special ones at 0 to 3, then those of ``first`` in
        their order, then the most frequent ones."""
        return np.array(list(dict.fromkeys((*_SPECIAL, *first, *self._frequent.tolist()))), np.int32)

    def of_sentences(self, source_BS: np.ndarray, shared_C: np.ndarray, *, prefix_BP: np.ndarray | None = None) -> np.ndarray:
        """What each sentence (source pieces, PAD after them) may use, each piece once: int32 [B, X].

        First ``shared_C``, then what goes with its own source pieces and its forced target pieces ``prefix_BP`` (negative:
        none), sorted, then -1. X - C is one of few sizes, so that few shapes are compiled.
        """
        needed_BV = np.zeros((len(source_BS), len(self.by_frequency)), bool)
        tokens, candidates = self._candidates(source_BS.ravel())
        needed_BV[tokens // source_BS.shape[1], candidates] = True
        if prefix_BP is not None:
            rows, columns = np.nonzero(prefix_BP >= 0)
            needed_BV[rows, prefix_BP[rows, columns]] = True
        needed_BV[:, shared_C] = False
        rows, pieces = np.nonzero(needed_BV)
        counts_B = np.bincount(rows, minlength=len(source_BS))
        pieces_BX = np.full((len(source_BS), len(shared_C) + _padded(counts_B.max())), -1, np.int32)
        pieces_BX[:, : len(shared_C)] = shared_C
        pieces_BX[rows, len(shared_C) + np.arange(len(rows)) - np.repeat(np.cumsum(counts_B) - counts_B, counts_B)] = pieces
        return pieces_BX

    @property
    def _frequent(self) -> np.ndarray:
        return self.by_frequency[: len(_SPECIAL) + self.frequent]

    def _candidates(self, source_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The candidates of all these source pieces, and which one (its place in P) each belongs to."""
        if len(source_P) and not 0 <= source_P.min() <= source_P.max() < len(self.offsets) - 1:
            raise UserError(f"Source pieces go from {source_P.min()} to {source_P.max()}; expected 0..{len(self.offsets) - 2}.")
        starts_P, lengths_P = self.offsets[source_P], np.diff(self.offsets)[source_P]
        owner = np.repeat(np.arange(len(source_P)), lengths_P)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(lengths_P) - lengths_P, lengths_P)
        return owner, self.candidates[starts_P[owner] + within]


def _check_pieces(pieces_K: np.ndarray, vocab_size: int) -> None:
    """``UserError`` unless these are distinct pieces of the vocabulary, the special ones at 0 to 3."""
    for name, piece in zip(("PAD", "BOS", "EOS", "UNK"), _SPECIAL, strict=True):
        if len(pieces_K) <= piece or pieces_K[piece] != piece:
            raise UserError(f"The shortlist misses {name}; expected piece {piece} at place {piece}.")
    if pieces_K.min() < 0 or pieces_K.max() >= vocab_size:
        raise UserError(f"The shortlist has pieces outside 0..{vocab_size - 1}; expected target pieces of the vocabulary.")
    if len(np.unique(pieces_K)) != len(pieces_K):
        raise UserError("The shortlist has a piece twice; expected distinct pieces.")


def _padded(count: int) -> int:
    """The next of 64, 96, 128, 192, 256, ..."""
    return next(width << i for i in range(64) for width in (_SMALLEST, _SMALLEST * 3 // 2) if width << i >= count)


@dataclass(frozen=True)
class Arguments:
    """Learn from a run's training text which target pieces a source piece may need (docs/decoding.md)."""

    workdir: str
    """Work directory of a training run."""
    top: int = 100
    """Likeliest target pieces of each source piece."""
    frequent: int = 100
    """Most frequent target pieces, which any sentence may need."""
    pairs: int = 300_000
    """Learn from so many sentence pairs, spread over the training text."""
    output: str = ""
    """File to write. Default: shortlist.npz in the work directory."""


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status, as ``run_program`` has it."""
    return run_program(lambda: _learn(argv))


def _learn(argv: list[str] | None) -> None:
    a = tyro.cli(Arguments, prog="python -m transformer_jax.decoding.shortlist", args=argv)
    if is_url(a.workdir) and not a.output:
        raise UserError(f"workdir is {a.workdir!r}; expected --output FILE with a URL.")
    shortlist = learn_shortlist(a.workdir, top=a.top, frequent=a.frequent, max_pairs=a.pairs)
    output = Path(a.output or Path(a.workdir) / "shortlist.npz")
    shortlist.save(output)
    mean = len(shortlist.candidates) / (len(shortlist.offsets) - 1)
    log.info("%s: %.0f target pieces a source piece on average.", output, mean)


def learn_shortlist(workdir: str | Path, *, top: int = 100, frequent: int = 100, max_pairs: int = 300_000) -> Shortlist:
    """A shortlist from the training text of a run; ``UserError`` if there is no run, or it has none."""
    workdir = local_workdir(workdir)
    if not (workdir / "config.json").is_file():
        raise UserError(f"workdir is {str(workdir)!r}, which has no config.json; expected one written by train.py.")
    config, tokenizer = from_json((workdir / "config.json").read_text()), Tokenizer.load(workdir)
    if config.data.train.kind == "none":
        raise UserError(f"The config of {str(workdir)!r} names no training text; expected data.train, or give a text table.")
    if top < 1 or frequent < 0 or max_pairs < 1:  # before the work
        raise UserError(f"top, frequent and pairs are {top}, {frequent} and {max_pairs}; expected at least 1, 0 and 1.")
    corpus = prepare_corpus(workdir, config, tokenizer, "train")  # that of the training run, if it is still there
    sizes = {"source_vocab_size": tokenizer.source_vocab_size, "target_vocab_size": tokenizer.target_vocab_size}
    return Shortlist.from_lexicon(learn(corpus, **sizes, max_pairs=max_pairs), tokenizer, top=top, frequent=frequent)


if __name__ == "__main__":
    sys.exit(main())
