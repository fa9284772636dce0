"""Sentence pairs to token arrays, in several processes.

The worker processes import this module: nothing that it imports may import jax.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from transformer_jax.config import DataConfig
from transformer_jax.data.sources import ParallelText
from transformer_jax.errors import UserError
from transformer_jax.machine import num_cores
from transformer_jax.special_ids import EOS_ID
from transformer_jax.tokenizer import Tokenizer

_FORMAT = 2  # part of the fingerprint: raise it when the same input would give other arrays
# Part of the fingerprint too, as each chunk is segmented with its own seed.
_CHUNK_PAIRS, _CHUNK_CHARACTERS = 8192, 2**21
_SMALL = 100_000  # pairs x segmentations; below, starting processes costs more than it saves

Pairs = list[tuple[str, str]]
Flat = tuple[np.ndarray, np.ndarray]


class TokenisedChunk(NamedTuple):
    """The pairs of a chunk that pass the filters."""

    sides: list[Flat]  # of source and target; segmentation v of pair i is sequence i * K + v
    statistics: dict[str, int]


@dataclass(frozen=True)
class TokeniseJob:
    """Everything that decides how a text is tokenised."""

    tokenizer: Tokenizer
    data: DataConfig
    sampling: float = 0.0
    num_samples: int = 1
    seed: int = 0

    def fingerprint(self, text: ParallelText) -> str:
        """SHA-256 (hex) of the text, the settings and the format."""
        data = self.data
        settings: list[object] = [
            (_FORMAT, _CHUNK_PAIRS, _CHUNK_CHARACTERS),
            text.fingerprint,
            self.tokenizer.fingerprint,
            (data.max_source_length, data.max_target_length, float(data.max_length_ratio)),
            data.invalid_utf8,
            (self.sampling, self.num_samples, self.seed),
        ]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    def dtypes(self) -> list[np.dtype]:
        """Of source and target tokens."""
        sizes = self.tokenizer.source.vocab_size, self.tokenizer.target.vocab_size
        return [np.dtype(np.uint16 if size <= 2**16 else np.int32) for size in sizes]

    def tokenise(self, numbered_chunk: tuple[int, Pairs]) -> TokenisedChunk:
        """Segment and filter one chunk; its number goes into the seeds."""
        number, pairs = numbered_chunk
        sides = []
        for side, encode in enumerate((self.tokenizer.source.encode, self.tokenizer.target.encode)):
            lines, versions = [pair[side] for pair in pairs], []
            for v in range(self.num_samples):
                digest = hashlib.sha256(repr((self.seed, number, v, side)).encode()).digest()
                seed = int.from_bytes(digest[:4], "little")
                versions.append(encode(lines, sampling=self.sampling, seed=seed))
            sides.append(flatten(chain.from_iterable(zip(*versions)), self.dtypes()[side]))
        lengths_2NK = np.stack([lengths for _, lengths in sides]).reshape(2, -1, self.num_samples)
        shorter_NK, longer_NK = lengths_2NK.min(0) + 4, lengths_2NK.max(0) + 4
        most = self.data.max_source_length, self.data.max_target_length
        # A pair stays if it passes in every segmentation: then all of them hold the same pairs.
        fails = {
            "empty": np.array([not (source.strip() and target.strip()) for source, target in pairs])
            | (lengths_2NK == 1).any((0, 2)),
            "too_long": np.greater(lengths_2NK.max(2).T, most).any(1),
            # The ratio is of tokens + 5; EOS is one of these 5.
            "ratio": (longer_NK > (self.data.max_length_ratio or np.inf) * shorter_NK).any(1),
        }
        statistics, keep = {"read": len(pairs)}, np.ones(len(pairs), bool)
        for reason, fails_N in fails.items():
            statistics[reason] = int((keep & fails_N).sum())
            keep &= ~fails_N
        statistics["kept"] = int(keep.sum())
        kept = np.repeat(keep, self.num_samples)
        sides = [(tokens[np.repeat(kept, lengths)], lengths[kept]) for tokens, lengths in sides]
        return TokenisedChunk(sides, statistics)


def flatten(sequences: Iterable[Sequence[int]], dtype: np.dtype) -> Flat:
    """All tokens in a row, EOS after each sequence, and int32 lengths that count EOS."""
    sequences = list(sequences)
    lengths = np.array([len(sequence) + 1 for sequence in sequences], np.int32)
    ended = chain.from_iterable(chain(sequence, (EOS_ID,)) for sequence in sequences)
    return np.fromiter(ended, dtype, int(lengths.sum(dtype=np.int64))), lengths


def _chunks(pairs: Iterable[tuple[str, str]]) -> Iterator[Pairs]:
    chunk: Pairs = []
    characters = 0
    for pair in pairs:
        chunk.append(pair)
        characters += len(pair[0]) + len(pair[1])
        if len(chunk) == _CHUNK_PAIRS or characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def tokenised(
    pairs: Iterable[tuple[str, str]], job: TokeniseJob
) -> Generator[TokenisedChunk, None, None]:
    """The text's chunks in order; worker processes tokenise them unless there are few."""
    numbered = enumerate(_chunks(pairs))
    few = _SMALL // (_CHUNK_PAIRS * job.num_samples) + 1
    head = list(islice(numbered, few + 1))
    workers = job.data.workers or num_cores()
    if workers == 1 or len(head) <= few:
        yield from map(job.tokenise, chain(head, numbered))
    else:
        yield from _tokenised_by_workers(chain(head, numbered), job, workers)


class _Worker(SpawnProcess):
    """A process that does not import the main program: that may import JAX, and may have no guard
    by ``__name__``. A fork is out of the question: JAX has threads.
    """

    def start(self) -> None:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # where multiprocessing looks for it
        # Ctrl-C is for the parent alone, which gets it after the start; a process inherits this.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            super().start()
        finally:
            sys.modules["__main__"] = main
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Workers(SpawnContext):
    Process = _Worker


def _tokenised_by_workers(
    chunks: Iterable[tuple[int, Pairs]], job: TokeniseJob, workers: int
) -> Generator[TokenisedChunk, None, None]:
    with tempfile.NamedTemporaryFile() as file:  # as an argument it would start them one by one
        pickle.dump(job, file, pickle.HIGHEST_PROTOCOL)
        file.flush()
        executor = ProcessPoolExecutor(workers, _Workers(), _start_worker)
        pending: deque[Future[TokenisedChunk]] = deque()
        try:
            for chunk in chunks:
                pending.append(executor.submit(_tokenise_in_worker, file.name, chunk))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise UserError(
                "A tokenizing process died. If memory ran out, lower data.workers."
            ) from None
        finally:
            executor.shutdown(cancel_futures=True)


def _start_worker() -> None:
    os.setsid()  # signals to the program's group are for the parent alone
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _tokenise_in_worker(job: str, chunk: tuple[int, Pairs]) -> TokenisedChunk:
    return _load(job).tokenise(chunk)


@functools.cache
def _load(job: str) -> TokeniseJob:
    return pickle.loads(Path(job).read_bytes())
