"""Tokenization of sentence pairs into arrays, in worker processes.

Workers import this module, so none of its imports may import jax.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, cycle, islice
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from transformer_jax.data.sources import ParallelText, TextPair
from transformer_jax.devices.machine import num_cores
from transformer_jax.errors import UserError
from transformer_jax.settings.config import DataConfig
from transformer_jax.tokenization.rows import with_eos
from transformer_jax.tokenization.subword_sampling import BpeDropout
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.tokenization.words import token_links

_FORMAT = 5  # part of the fingerprint; increase it if the arrays for the same input change
_CHUNK_PAIRS = 8192  # also in the fingerprint, because each chunk has its own seed

Pairs = list[TextPair]
FlatSequences = tuple[np.ndarray, np.ndarray]


class TokenizedChunk(NamedTuple):
    """Tokenized pairs of a chunk that pass the filters."""

    sides: list[FlatSequences]  # source, target and, if the text is aligned, links
    num_read: int


@dataclass(frozen=True)
class TokenizeJob:
    """All settings that determine how a text is tokenized."""

    tokenizer: Tokenizer
    data: DataConfig
    sampling: BpeDropout | None = None
    seed: int = 0

    @property
    def num_samples(self) -> int:
        """Number of copies of each pair."""
        return self.sampling.num_samples if self.sampling else 1

    def fingerprint(self, text: ParallelText) -> str:
        """Return the SHA-256 (hex) of the text, the settings and the format."""
        data = self.data
        settings: list[object] = [
            (_FORMAT, _CHUNK_PAIRS),
            text.fingerprint,
            self.tokenizer.fingerprint,
            (data.max_source_length, data.max_target_length),
            (self.sampling.version if self.sampling else 0.0, self.num_samples, self.seed),
        ]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    def dtypes(self) -> list[np.dtype]:
        """Return the dtypes of source tokens, target tokens and links."""
        limits = self.tokenizer.source.vocab_size, self.tokenizer.target.vocab_size, 2**31
        return [np.dtype(np.uint16 if limit <= 2**16 else np.int32) for limit in limits]

    def tokenize(self, chunk_number: int, pairs: Pairs) -> TokenizedChunk:
        """Tokenize and filter one chunk. Random seeds include its ``chunk_number``.

        Each pair is repeated ``num_samples`` times, and each copy gets a newly drawn segmentation.
        """
        pairs = [pair for pair in pairs for _ in range(self.num_samples)]
        affixes_of = {
            languages: self.tokenizer.affixes(*languages)
            for languages in dict.fromkeys(pair.languages for pair in pairs)
        }
        affixes = [affixes_of[pair.languages] for pair in pairs]
        sides = []
        encoded = []
        for i, side in enumerate((self.tokenizer.source, self.tokenizer.target)):
            digest = hashlib.sha256(repr((self.seed, chunk_number, i)).encode()).digest()
            seed = int.from_bytes(digest[:4], "little")
            lines = [pair.target if i else pair.source for pair in pairs]
            texts = side.encode(lines, sampling=self.sampling, seed=seed)
            tokens = [
                line_affixes.target(ids) if i else line_affixes.source(ids)
                for line_affixes, ids in zip(affixes, texts)
            ]
            sides.append(concatenate(tokens, self.dtypes()[i], side.eos_id))
            encoded.append(tokens)
        lengths_2N = np.stack([lengths for _, lengths in sides])
        max_lengths_2 = np.array([self.data.max_source_length, self.data.max_target_length])
        passes_N = np.array([all(line.strip() for line in pair[:2]) for pair in pairs])
        passes_N &= (lengths_2N > 1).all(0)
        passes_N &= (lengths_2N <= max_lengths_2[:, None]).all(0)
        if pairs[0].links is not None:
            links: list[int] = []
            for pair, source_ids, target_ids in zip(pairs, *encoded):
                assert pair.links is not None
                ids = source_ids, target_ids
                links.extend(token_links(self.tokenizer, pair[:2], ids, pair.links))
            sides.append((np.array(links, np.int32), lengths_2N[1]))
        filtered_sides = []
        for flat_tokens, lengths in sides:
            filtered_sides.append((flat_tokens[np.repeat(passes_N, lengths)], lengths[passes_N]))
        return TokenizedChunk(filtered_sides, len(pairs))


def concatenate(sequences: Iterable[Sequence[int]], dtype: np.dtype, eos_id: int) -> FlatSequences:
    """Append EOS to each sequence that lacks it and concatenate them. Returns the tokens and int32
    lengths.
    """
    ended = [with_eos(ids, eos_id) for ids in sequences]
    lengths = np.array(list(map(len, ended)), np.int32)
    tokens = chain.from_iterable(ended)
    return np.fromiter(tokens, dtype, int(lengths.sum(dtype=np.int64))), lengths


def _chunks(pairs: Iterable[TextPair]) -> Iterator[tuple[int, Pairs]]:
    """Yield numbered chunks of ``_CHUNK_PAIRS`` pairs."""
    pairs = iter(pairs)
    return enumerate(iter(lambda: list(islice(pairs, _CHUNK_PAIRS)), []))


def tokenize_chunks(
    pairs: Iterable[TextPair], job: TokenizeJob
) -> Generator[TokenizedChunk, None, None]:
    """Tokenize pairs and yield the chunks in order. Uses workers if there are several."""
    chunks = _chunks(pairs)
    workers = job.data.workers or num_cores()
    head = list(islice(chunks, workers))
    if len(head) > 1:
        yield from _tokenized_by_workers(chain(head, chunks), job, len(head))
    else:
        for chunk_number, chunk in chain(head, chunks):
            yield job.tokenize(chunk_number, chunk)


class _Worker:
    """Process that tokenizes one chunk at a time.

    It exits when this object is closed or the parent process exits. ``multiprocessing`` is
    unsuitable: forking is unsafe with JAX's threads, and spawning imports the main program again.
    """

    def __init__(self) -> None:
        self._connection, child_connection = multiprocessing.Pipe()
        descriptor = child_connection.fileno()
        program = f"from {__name__} import work; work({descriptor})"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            stdin=subprocess.DEVNULL,
            pass_fds=[descriptor],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            start_new_session=True,  # signals to the process group reach only the parent
        )
        child_connection.close()

    def send(self, task: TokenizeJob | tuple[int, Pairs]) -> None:
        with _death_reported():
            # ``send`` would trigger a warning in Python 3.13 if the worker dies.
            self._connection.send_bytes(pickle.dumps(task))

    def result(self) -> TokenizedChunk:
        with _death_reported():
            result = self._connection.recv()
        if isinstance(result, Exception):
            raise result
        assert isinstance(result, TokenizedChunk)
        return result

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()


@contextmanager
def _death_reported() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError):  # the worker closed the pipe
        raise UserError(
            "A tokenization process died. If it ran out of memory, lower data.workers."
        ) from None


def _tokenized_by_workers(
    chunks: Iterable[tuple[int, Pairs]], job: TokenizeJob, workers: int
) -> Generator[TokenizedChunk, None, None]:
    """Send chunks to workers in turn. A worker gets a new chunk after its result is received."""
    all_workers: list[_Worker] = []
    busy: deque[_Worker] = deque()
    try:
        for _ in range(workers):
            all_workers.append(_Worker())
        for worker in all_workers:
            worker.send(job)
        for chunk, worker in zip(chunks, cycle(all_workers)):
            result = busy.popleft().result() if len(busy) == workers else None
            worker.send(chunk)
            busy.append(worker)
            if result:
                yield result
        while busy:
            yield busy.popleft().result()
    finally:
        for worker in all_workers:
            worker.close()


def work(descriptor: int) -> None:
    """Tokenize chunks from a pipe until it is closed."""
    with Connection(descriptor) as connection:
        job = connection.recv()
        while True:
            try:
                chunk_number, pairs = connection.recv()
            except EOFError:
                return
            try:
                connection.send(job.tokenize(chunk_number, pairs))
            except BrokenPipeError:
                return
            except Exception as error:
                error.add_note(traceback.format_exc())
                connection.send(error)
