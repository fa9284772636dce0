"""Sentence pairs to token arrays, in several processes.

The worker processes import this module: nothing that it imports may import jax.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType

import numpy as np

from transformer_jax.config import DataConfig, PairsConfig
from transformer_jax.data.sources import pairs_fingerprint
from transformer_jax.errors import UserError
from transformer_jax.machine import num_cores
from transformer_jax.special_ids import EOS_ID
from transformer_jax.tokenizer import Tokenizer

_FORMAT = 1  # part of the fingerprint: raise it when the same input would give other arrays
# Part of the fingerprint too, as each chunk is segmented with its own seed.
_CHUNK_PAIRS, _CHUNK_CHARACTERS = 8192, 2**21
_SMALL = 100_000  # pairs x segmentations; below, starting processes costs more than it saves

Pairs = list[tuple[str, str]]
Flat = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class TokenisedChunk:
    """The pairs of a chunk that pass the filters: ``flat[side][v]`` is (tokens, lengths)."""

    flat: list[list[Flat]]
    statistics: dict[str, int]


@dataclass(frozen=True)
class TokeniseJob:
    """Everything that decides what a tokenised text contains."""

    pairs: PairsConfig
    tokenizer: Tokenizer
    data: DataConfig
    sampling: float = 0.0
    num_samples: int = 1
    seed: int = 0

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the text, the settings and the format; see ``pairs_fingerprint``."""
        data = self.data
        settings: list[object] = [
            (_FORMAT, _CHUNK_PAIRS, _CHUNK_CHARACTERS),
            pairs_fingerprint(self.pairs, data.root),
            self.tokenizer.fingerprint,
            (
                data.max_source_length,
                data.max_target_length,
                float(data.max_length_ratio),
                data.invalid_utf8,
            ),
            (self.sampling, self.num_samples, self.seed),
        ]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    def dtypes(self) -> list[np.dtype]:
        """Of source and target tokens."""
        sizes = self.tokenizer.source_vocab_size, self.tokenizer.target_vocab_size
        return [np.dtype(np.uint16 if size <= 2**16 else np.int32) for size in sizes]

    def tokenise(self, numbered_chunk: tuple[int, Pairs]) -> TokenisedChunk:
        """Segment and filter one chunk; its number goes into the seeds."""
        number, pairs = numbered_chunk
        flat: list[list[Flat]] = [[], []]
        for side, encode in enumerate((self.tokenizer.encode_source, self.tokenizer.encode_target)):
            lines = [pair[side] for pair in pairs]
            for v in range(self.num_samples):
                digest = hashlib.sha256(repr((self.seed, number, v, side)).encode()).digest()
                seed = int.from_bytes(digest[:4], "little")
                ids = encode(lines, sampling=self.sampling, seed=seed)
                flat[side].append(flatten(ids, self.dtypes()[side]))
        lengths_2KN = np.array([[lengths for _, lengths in side] for side in flat])
        shorter_KN, longer_KN = lengths_2KN.min(0) + 4, lengths_2KN.max(0) + 4
        most = self.data.max_source_length, self.data.max_target_length
        # A pair stays if it passes in every segmentation: then all of them hold the same pairs.
        fails = {
            "empty": np.array([not (source.strip() and target.strip()) for source, target in pairs])
            | (lengths_2KN == 1).any((0, 1)),
            "too_long": np.greater(lengths_2KN.max(1).T, most).any(1),
            # The ratio is of tokens + 5; EOS is one of these 5.
            "ratio": (longer_KN > (self.data.max_length_ratio or np.inf) * shorter_KN).any(0),
        }
        statistics, keep = {"read": len(pairs)}, np.ones(len(pairs), bool)
        for reason, fails_N in fails.items():
            statistics[reason] = int((keep & fails_N).sum())
            keep &= ~fails_N
        statistics["kept"] = int(keep.sum())
        kept = [
            [(tokens[np.repeat(keep, lengths)], lengths[keep]) for tokens, lengths in side]
            for side in flat
        ]
        return TokenisedChunk(kept, statistics)


def flatten(sequences: Sequence[Sequence[int]], dtype: np.dtype) -> Flat:
    """All tokens in a row, EOS after each sequence, and int32 lengths that count EOS."""
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
        executor = ProcessPoolExecutor(
            workers, mp_context=_Workers(), initializer=_start_worker, initargs=(os.getpid(),)
        )
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


def _start_worker(parent: int) -> None:
    os.setsid()  # signals to the program's group are for the parent alone
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _tokenise_in_worker(job: str, chunk: tuple[int, Pairs]) -> TokenisedChunk:
    return _load(job).tokenise(chunk)


@functools.cache
def _load(job: str) -> TokeniseJob:
    return pickle.loads(Path(job).read_bytes())
