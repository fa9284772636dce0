"""Tokenized corpus: token arrays of sentence pairs, in memory or in a folder.

Text is tokenized once, into the folder ``<directory>/<fingerprint>``. The fingerprint depends on
the text and all relevant settings. The arrays are memory-mapped. The folder is written under a
temporary name and renamed when complete. Its manifest has a checksum for each array, which is used
to verify copies of the folder.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from transformer_jax.data.sources import ParallelText
from transformer_jax.data.tokenize import TokenizeJob, concatenate, tokenize_chunks
from transformer_jax.errors import UserError, short_repr
from transformer_jax.settings.config import DataConfig, PairsConfig
from transformer_jax.storage.files import MANIFEST, checksums, remove_folder
from transformer_jax.tokenization.subword_sampling import BpeDropout
from transformer_jax.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TEMPORARY_PREFIX = "tmp-"
_SIDES = ("source", "target", "links")


class Sequences(NamedTuple):
    """Flat tokens with offsets: sequence j is ``tokens[offsets[j] : offsets[j + 1]]``.

    Each sequence ends with EOS and has no BOS.
    """

    tokens: np.ndarray
    """uint16, or int32 if the vocabulary has more than 65,536 tokens."""
    offsets: np.ndarray
    """int64, from 0 to the total number of tokens."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenized corpus of N pairs. With subword sampling, it contains each pair several times."""

    fingerprint: str
    """SHA-256 (hex) of the text and the settings. Empty if built from lists."""
    sides: tuple[Sequences, ...]
    """Source and target. If aligned, also the position of the source token that each target token
    links to, counted from 1, or 0 for no link."""
    num_read: int
    """Number of pairs before filtering."""
    sizes: Sequence[int] = ()
    """Number of pairs of each part of the text, one after another."""

    @property
    def num_pairs(self) -> int:
        """Number of pairs N."""
        return len(self.sides[0].offsets) - 1

    def lengths(self) -> np.ndarray:
        """Return source and target lengths, including EOS, as int32 [2, N]."""
        return np.stack([np.diff(offsets).astype(np.int32) for _, offsets in self.sides[:2]])

    def read(self, side: int, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated tokens of ``pairs`` and their lengths.

        ``side`` is 0 for the source, 1 for the target and 2 for the links.
        """
        tokens, offsets = self.sides[side]
        starts = offsets[pairs]
        lengths = offsets[pairs + 1] - starts
        return tokens[ranges(starts, lengths)], lengths

    def pairs_in_epoch(self, pairs: np.ndarray, epoch: int) -> np.ndarray:
        """Return ``pairs``. Those of a ``Mix`` depend on the epoch."""
        return pairs

    @classmethod
    def from_lists(
        cls, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], eos_id: int = 2
    ) -> Corpus:
        """Build a corpus in memory from token ids. EOS is appended to sequences that lack it."""
        sides = []
        for lists in (sources, targets):
            tokens, lengths = concatenate(lists, np.dtype(np.int32), eos_id)
            offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            sides.append(Sequences(tokens, offsets))
        return cls("", tuple(sides), len(sources))


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenate ``arange(start, start + count)`` over all starts and counts."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)


def build_corpus(
    text: PairsConfig | ParallelText,
    tokenizer: Tokenizer,
    data: DataConfig,
    directory: str | Path,
    *,
    sampling: BpeDropout | None = None,
    seed: int = 0,
    run_id: str = "",
) -> Corpus:
    """Tokenize ``text`` into ``directory``, or open the corpus if it already exists there.

    Drops pairs that are empty or too long. Raises ``UserError`` if no pairs remain. With
    ``sampling``, the corpus contains each pair several times, each time in a newly drawn
    segmentation. The result does not depend on ``data.workers``. The name of the unfinished corpus
    contains ``run_id``.
    """
    if isinstance(text, PairsConfig):
        text = ParallelText(text, data.root)
    # Without sampling, the corpus does not depend on the seed.
    job = TokenizeJob(tokenizer, data, sampling, seed if sampling else 0)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    corpus = open_corpus(directory, job.fingerprint(text))
    if corpus is not None:
        return corpus
    try:
        corpus = _build(text, job, directory, run_id)
    except OSError as error:  # for example a full disk
        error.filename = error.filename or str(directory)
        raise
    logger.info("%s of %s pairs pass the filters.", f"{corpus.num_pairs:,}", f"{corpus.num_read:,}")
    return corpus


def open_corpus(directory: Path, fingerprint: str) -> Corpus | None:
    """Open the corpus with this fingerprint. Returns None if it is missing or corrupt."""
    folder = directory / fingerprint
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        dtypes = manifest["dtypes"]
        if manifest["checksums"] != checksums(folder, dtypes):
            return None
        arrays = {name: np.memmap(folder / name, dtype, "r") for name, dtype in dtypes.items()}
        sides = tuple(
            Sequences(arrays[f"{side}_tokens"], arrays[f"{side}_offsets"])
            for side in _SIDES[: len(arrays) // 2]
        )
        return Corpus(fingerprint, sides, manifest["num_read"], manifest.get("sizes", ()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _build(text: ParallelText, job: TokenizeJob, directory: Path, run_id: str) -> Corpus:
    """Write the corpus under a temporary name and rename it when complete."""
    prefix = f"{TEMPORARY_PREFIX}{run_id}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=directory) as temporary:
        folder = Path(temporary, "corpus")  # readable by all users, unlike the temporary folder
        folder.mkdir()
        _write(folder, text, job)
        fingerprint = job.fingerprint(text)  # the text may have changed since it was opened
        final_folder = directory / fingerprint
        if final_folder.exists() and open_corpus(directory, fingerprint) is None:
            logger.warning("The tokenized corpus %s is corrupt; rebuilding it.", final_folder)
            remove_folder(final_folder)
        try:
            folder.rename(final_folder)
        except OSError:
            if not final_folder.exists():  # otherwise another process built it first
                raise
    corpus = open_corpus(directory, fingerprint)
    assert corpus is not None, f"{final_folder} was just written"
    return corpus


def _write(folder: Path, text: ParallelText, job: TokenizeJob) -> None:
    """Tokenize and hash the text in one pass."""
    sides = _SIDES if text.config.alignments else _SIDES[:2]
    dtypes = {f"{side}_offsets": "int64" for side in sides}
    dtypes |= {f"{side}_tokens": dtype.name for side, dtype in zip(sides, job.dtypes())}
    num_read = 0
    num_tokens = dict.fromkeys(sides, 0)
    sizes: list[int] = []
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / name).open("wb")) for name in dtypes}
        for side in sides:
            files[f"{side}_offsets"].write(np.zeros(1, np.int64).data)
        for part in text.parts or [text]:
            num_read_of_part = 0
            num_pairs_of_part = 0
            # Closing it, even after an error, ends the worker processes.
            pairs = part.text_pairs(job.tokenizer.languages)
            for chunk in stack.enter_context(closing(tokenize_chunks(pairs, job))):
                num_read_of_part += chunk.num_read
                for side, (tokens, lengths) in zip(sides, chunk.sides):
                    files[f"{side}_tokens"].write(tokens.data)
                    ends = num_tokens[side] + np.cumsum(lengths, dtype=np.int64)
                    files[f"{side}_offsets"].write(ends.data)
                    num_tokens[side] += len(tokens)
                num_pairs_of_part += len(lengths)
            if not num_pairs_of_part:
                raise UserError(
                    f"No sentence pairs remain after filtering the {num_read_of_part:,} pairs in "
                    f"{short_repr(part.config.source)}. Check the text, or "
                    "raise data.max_source_length and data.max_target_length."
                )
            num_read += num_read_of_part
            sizes.append(num_pairs_of_part)
    manifest = {
        "num_read": num_read,
        "sizes": sizes,
        "dtypes": dtypes,
        "checksums": checksums(folder, dtypes),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
