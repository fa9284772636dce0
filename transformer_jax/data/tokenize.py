"""Sentence pairs to arrays of tokens, by several processes: the working half of ``corpus``.

This module is what the worker processes run: nothing that it imports may import jax.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue
from subprocess import PIPE, Popen
from typing import IO, cast

import numpy as np

from transformer_jax.config import DataConfig, PairsConfig
from transformer_jax.data.files import one_file_each
from transformer_jax.data.sources import pairs_fingerprint
from transformer_jax.errors import UserError
from transformer_jax.machine import num_cores
from transformer_jax.special_ids import EOS_ID
from transformer_jax.tokenizer import Tokenizer

_FORMAT = 1  # part of the fingerprint: raise it when the same input would give other arrays
# part of the fingerprint too: each chunk is segmented by a seed of its own
_CHUNK_PAIRS, _CHUNK_CHARACTERS = 8192, 2**21
_SMALL = 100_000  # pairs x segmentations up to which starting processes costs more than they save

Pairs = list[tuple[str, str]]
Number = int | tuple[int, int]  # of a chunk: within the first file, or (file, number within it)
Flat = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class TokenisedChunk:
    """What is kept of a chunk: ``flat[side][v]`` is (tokens, lengths)."""

    flat: list[list[Flat]]
    statistics: dict[str, int]


@dataclass(frozen=True)
class TokeniseJob:
    """Everything but the text that decides a corpus; sent once to each worker."""

    tokenizer: Tokenizer
    data: DataConfig
    sampling: float
    num_samples: int
    seed: int
    first_file: int = 0
    """Where the text is part of a longer one: how many files stand before it."""

    def fingerprint(self, pairs: PairsConfig, *, digests: Path | None = None) -> str:
        """SHA-256 (hex) of the text, this job's settings and the format. ``digests``: see
        ``pairs_fingerprint``.
        """
        data = self.data
        settings: list[object] = [
            (_FORMAT, _CHUNK_PAIRS, _CHUNK_CHARACTERS),
            pairs_fingerprint(pairs, data.root, digests=digests),
            self.tokenizer.fingerprint,
            (
                data.max_source_length,
                data.max_target_length,
                float(data.max_length_ratio),
                data.invalid_utf8,
            ),
            (self.sampling, self.num_samples, self.seed),
        ]
        if self.sampling and (self.first_file or len(one_file_each(pairs, data.root)) > 1):
            settings.append(("chunks by file", self.first_file))
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    def dtypes(self) -> list[np.dtype]:
        """Of the source's and the target's tokens."""
        sizes = self.tokenizer.source_vocab_size, self.tokenizer.target_vocab_size
        return [np.dtype(np.uint16 if size <= 2**16 else np.int32) for size in sizes]

    def tokenise(self, numbered_chunk: tuple[Number, Pairs]) -> TokenisedChunk:
        """Segment and filter one chunk; its number goes into the seeds."""
        number, pairs = numbered_chunk
        flat: list[list[Flat]] = [[], []]
        for side, encode in enumerate((self.tokenizer.encode_source, self.tokenizer.encode_target)):
            lines = [pair[side] for pair in pairs]
            for v in range(self.num_samples):
                digest = hashlib.sha256(repr((self.seed, number, v, side)).encode()).digest()
                ids = encode(
                    lines, sampling=self.sampling, seed=int.from_bytes(digest[:4], "little")
                )
                flat[side].append(flatten(ids, self.dtypes()[side]))
        # A pair stays if it passes in every segmentation: then all of them hold the same pairs.
        source_KN, target_KN = (np.stack([lengths for _, lengths in side]) for side in flat)
        blank = np.array([not (source.strip() and target.strip()) for source, target in pairs])
        empty = blank | ((source_KN == 1) | (target_KN == 1)).any(0)
        long = (
            (source_KN > self.data.max_source_length) | (target_KN > self.data.max_target_length)
        ).any(0) & ~empty
        # EOS + 4 = 5
        shorter_KN, longer_KN = (
            np.minimum(source_KN, target_KN) + 4,
            np.maximum(source_KN, target_KN) + 4,
        )
        most = self.data.max_length_ratio or np.inf
        ratio = (longer_KN > most * shorter_KN).any(0) & ~empty & ~long
        keep = ~(empty | long | ratio)
        left_out = {"empty": empty, "too_long": long, "ratio": ratio}
        return TokenisedChunk(
            [
                [(tokens[np.repeat(keep, lengths)], lengths[keep]) for tokens, lengths in side]
                for side in flat
            ],
            {"read": len(pairs), "kept": int(keep.sum())}
            | {name: int(mask.sum()) for name, mask in left_out.items()},
        )


def flatten(sequences: Sequence[Sequence[int]], dtype: np.dtype) -> Flat:
    """All tokens in a row, EOS after each sequence, and int32 lengths that count it."""
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


def _numbered_chunks(
    files: Iterable[Iterable[tuple[str, str]]], first_file: int
) -> Iterator[tuple[Number, Pairs]]:
    """Chunks end with their file, and are numbered within it: so they are the same if other files
    are worked on apart.
    """
    for file, pairs in enumerate(files, first_file):
        for number, chunk in enumerate(_chunks(pairs)):
            yield (file, number) if file else number, chunk


def tokenised(
    files: Iterable[Iterable[tuple[str, str]]], job: TokeniseJob
) -> Generator[TokenisedChunk, None, None]:
    """The files' chunks in order, tokenised here if few, else by worker processes with a bounded
    number in flight.
    """
    numbered = _numbered_chunks(files, job.first_file)
    head = list(islice(numbered, _SMALL // (_CHUNK_PAIRS * job.num_samples) + 1))
    more = list(islice(numbered, 1))
    workers = job.data.workers or num_cores()
    everything = chain(head, more, numbered)
    if workers == 1 or not more:
        yield from map(job.tokenise, everything)
        return
    with ThreadPoolExecutor(workers) as pool, _workers(job, workers) as ask:
        pending: deque[Future[TokenisedChunk]] = deque()
        try:
            for chunk in everything:
                pending.append(pool.submit(ask, chunk))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


# The processes are plain ones that read chunks from a pipe, not those of ``multiprocessing``: those
# import the program that was started (jax included) or fork (unsafe beside JAX's threads), and stay
# for ever when their parent is killed.

_WORKER_PROGRAM = f"from {__name__} import _serve; _serve()"


@contextmanager
def _workers(
    job: TokeniseJob, count: int
) -> Iterator[Callable[[tuple[Number, Pairs]], TokenisedChunk]]:
    """A function, for several threads, that has a chunk tokenised by the next idle one of ``count``
    processes.
    """
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    idle: SimpleQueue[Popen[bytes]] = SimpleQueue()

    def ask(numbered_chunk: tuple[Number, Pairs]) -> TokenisedChunk:
        process = idle.get()
        try:
            _send(process.stdin, numbered_chunk)
            answer = pickle.load(cast(IO[bytes], process.stdout))
        except (OSError, EOFError, pickle.UnpicklingError):
            raise UserError(
                f"A tokenising process died (exit status {process.wait()}); if memory ran out, lower data.workers."
            ) from None
        finally:
            idle.put(process)
        if isinstance(answer, Exception):
            raise answer
        return answer

    processes: list[Popen[bytes]] = []
    with ExitStack() as stack:
        for _ in range(count):
            process = Popen(
                [sys.executable, "-c", _WORKER_PROGRAM],
                stdin=PIPE,
                stdout=PIPE,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the parent alone
            )
            stack.callback(_end, process)
            processes.append(process)
        # only now, as the job is more than a pipe holds: they start side by side
        for process in processes:
            with suppress(BrokenPipeError):  # it died at once, as its first chunk will find
                _send(process.stdin, job)
            idle.put(process)
        yield ask


def _end(process: Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):  # from what was not read any more
            pipe.close()


def _send(pipe: IO[bytes] | None, message: object) -> None:
    assert pipe is not None
    pickle.dump(message, pipe, pickle.HIGHEST_PROTOCOL)
    pipe.flush()


def _serve() -> None:
    """A worker: one answer for each chunk, until the parent closes the pipe or ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    with suppress(EOFError, BrokenPipeError):
        job: TokeniseJob = pickle.load(sys.stdin.buffer)
        while True:
            chunk = pickle.load(sys.stdin.buffer)
            answer: TokenisedChunk | Exception
            try:
                answer = job.tokenise(chunk)
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = error
            _send(answers, answer)
