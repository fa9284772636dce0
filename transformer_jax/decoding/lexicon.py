"""Which target tokens go with a source token, and how likely: learned from a corpus, or read from a
text table.

Learning is IBM model 1 (Brown et al., 1993): every target token comes from one source token of its
sentence, or from none (NULL), whatever the places of the two. Few EM iterations of it are enough to
tell translations from chance company.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import sparse

from transformer_jax.data.corpus import Corpus, ranges
from transformer_jax.data.sources import read_lines
from transformer_jax.errors import UserError
from transformer_jax.special_ids import EOS_ID, PAD_ID
from transformer_jax.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_NULL = PAD_ID  # which no sentence has
_CHUNK = 2_000_000  # links looked at together: what bounds memory, with the next one
_MOST_ENTRIES = 16_000_000


class Lexicon(NamedTuple):
    """p(target token | source token), as far as it is known."""

    probability: sparse.csr_array
    """float32 [source vocabulary, target vocabulary]."""
    frequency: np.ndarray
    """float64 [target vocabulary]: how often each target token occurs, in any unit."""


def learn(
    corpus: Corpus,
    *,
    source_vocab_size: int,
    target_vocab_size: int,
    iterations: int = 5,
    max_pairs: int = 300_000,
) -> Lexicon:
    """Learn from at most ``max_pairs`` sequences, evenly spread over the corpus; ``iterations``
    counts the uniform start.

    Memory is bounded whatever the corpus' size: when the table grows too large, each source token
    keeps its strongest.
    """
    total = corpus.num_samples * corpus.num_pairs
    sequences = np.arange(min(total, max_pairs)) * total // min(total, max_pairs)
    shape = source_vocab_size, target_vocab_size
    counts, waiting, frequency = (
        sparse.csr_array(shape, dtype=np.float32),
        [],
        np.zeros(target_vocab_size),
    )
    for links in _links(corpus, sequences):
        frequency += np.bincount(links.target_P[links.first_T], minlength=target_vocab_size)
        expected_P = (1 / np.repeat(links.choices_T, links.choices_T)).astype(np.float32)
        waiting.append(
            sparse.coo_array((expected_P, (links.source_P, links.target_P)), shape).tocsr()
        )
        if sum(chunk.nnz for chunk in waiting) > _MOST_ENTRIES // 4:
            counts, waiting = _bounded(sum(waiting, counts)), []
    counts = sum(waiting, counts)
    counts.sort_indices()
    rows_E = np.repeat(np.arange(source_vocab_size), np.diff(counts.indptr))
    keys_E = rows_E * target_vocab_size + counts.indices
    for iteration in range(2, iterations + 1):
        probability_E = _normalized(counts).data
        expected_E = np.zeros(len(keys_E))
        for links in _links(corpus, sequences):
            keys_P = links.source_P * target_vocab_size + links.target_P
            order_P = np.argsort(keys_P)  # sorted, they are found several times as fast
            keys_P, target_of_P = (
                keys_P[order_P],
                np.repeat(np.arange(len(links.choices_T)), links.choices_T)[order_P],
            )
            places_P = np.minimum(np.searchsorted(keys_E, keys_P), len(keys_E) - 1)
            # 0: not among the strongest
            p_P = np.where(keys_E[places_P] == keys_P, probability_E[places_P], 0)
            sums_T = np.maximum(np.bincount(target_of_P, p_P), 1e-30)
            first_U = np.flatnonzero(np.diff(places_P, prepend=-1))
            expected_E[places_P[first_U]] += np.add.reduceat(p_P / sums_T[target_of_P], first_U)
        counts.data = expected_E.astype(np.float32)
        log.info("IBM model 1: iteration %d of %d.", iteration, iterations)
    return Lexicon(_normalized(counts), frequency)


def read_table(path: str | Path, tokenizer: Tokenizer) -> Lexicon:
    """A text table as Marian and fast_align have it (``.gz`` too): ``target source probability`` a
    line, in tokens.

    Entries with NULL or with tokens that the vocabularies lack are passed over.

    Raises:
      UserError: a line that is no such entry (with its number), or a table without a single token
        of the vocabularies.
    """
    source_ids = {
        token: i
        for i, token in enumerate(tokenizer.source_tokens(range(tokenizer.source_vocab_size)))
    }
    target_ids = {
        token: i
        for i, token in enumerate(tokenizer.target_tokens(range(tokenizer.target_vocab_size)))
    }
    sources, targets, probabilities, unknown = [], [], [], 0
    for number, line in enumerate(read_lines(path), 1):
        if not line:
            continue
        fields = line.replace("\t", " ").split(" ")  # only these: a token may be any other space
        if len(fields) != 3 or not 0 <= _number(fields[2]) <= 1:
            raise UserError(
                f"{path}, line {number} is {line!r}; expected `target source probability`, single spaces between."
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
            f"{path} has no entry in the tokens of this vocabulary; expected a table made with its tokenizer."
        )
    if unknown:
        log.warning(
            "%s: %d entries with tokens that the vocabulary lacks are passed over.", path, unknown
        )
    shape = len(source_ids), len(target_ids)
    probability = sparse.coo_array(
        (np.array(probabilities, np.float32), (sources, targets)), shape
    ).tocsr()
    # what goes with much occurs often
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


class _Links(NamedTuple):
    """Every target token of some sentences with each source token (or NULL) of its sentence: P
    links, T target tokens.
    """

    source_P: np.ndarray
    target_P: np.ndarray
    first_T: np.ndarray
    """Where in P the links of a target token begin."""
    choices_T: np.ndarray
    """How many they are."""


def _links(corpus: Corpus, sequences: np.ndarray) -> Iterator[_Links]:
    for start in range(0, len(sequences), 1 << 16):
        block = sequences[start : start + (1 << 16)]
        source, s_N = corpus.source(block)
        target, t_N = corpus.target(block)
        target, t_N = np.delete(target, np.cumsum(t_N) - 1), t_N - 1  # without EOS
        edges = np.flatnonzero(np.diff(np.cumsum(s_N * t_N) // _CHUNK)) + 1
        chunks = zip(
            np.split(source, np.cumsum(s_N)[edges - 1]),
            np.split(s_N, edges),
            np.split(target, np.cumsum(t_N)[edges - 1]),
            np.split(t_N, edges),
        )
        for chunk in chunks:
            links = _links_of(*chunk)
            if len(links.target_P):
                yield links


def _links_of(source: np.ndarray, s_N: np.ndarray, target: np.ndarray, t_N: np.ndarray) -> _Links:
    source = source.astype(np.int64)
    source[source == EOS_ID] = _NULL  # its place is free
    choices_T = np.repeat(s_N, t_N)
    source_starts_T = np.repeat(np.cumsum(s_N) - s_N, t_N)
    return _Links(
        source_P=source[ranges(source_starts_T, choices_T)],
        target_P=np.repeat(target.astype(np.int64), choices_T),
        first_T=np.cumsum(choices_T) - choices_T,
        choices_T=choices_T,
    )


def _bounded(counts: sparse.csr_array) -> sparse.csr_array:
    if counts.nnz <= _MOST_ENTRIES:
        return counts
    kept = strongest(counts, max(1, _MOST_ENTRIES // 2 // counts.shape[0]))
    kept.sort_indices()
    return kept


def _normalized(counts: sparse.csr_array) -> sparse.csr_array:
    """Rows that sum to 1, or to 0."""
    sums = np.maximum(np.asarray(counts.sum(axis=1)), 1e-30)
    data = counts.data / np.repeat(sums, np.diff(counts.indptr)).astype(np.float32)
    return sparse.csr_array((data, counts.indices, counts.indptr), counts.shape)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
