"""Learn a shortlist from the training text of a run.

    python -m transformer_jax.decoding.learn_shortlist --workdir W [--top 100] [--frequent 100]

writes ``W/shortlist.npz``. Learning is IBM model 1 (Brown et al., 1993): every target token comes
from one source token of its sentence, or from none (NULL), whatever their positions. A few EM
iterations are enough to tell translations from tokens that are together by chance.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from transformer_jax.cli import check_output, parse_flags, run_program
from transformer_jax.config_io import load_config_file
from transformer_jax.data.corpus import Corpus, prepare_corpus, ranges
from transformer_jax.decoding.shortlist import Lexicon, Shortlist, strongest
from transformer_jax.errors import UserError
from transformer_jax.remote_workdir import local_workdir
from transformer_jax.special_ids import EOS_ID, PAD_ID
from transformer_jax.storage import is_url, local_path
from transformer_jax.tokenizer import Tokenizer

# As a program its __name__ is another.
log = logging.getLogger("transformer_jax.decoding.learn_shortlist")

_NULL = PAD_ID  # which no sentence has
_CHUNK = 2_000_000  # links looked at together: bounds memory, with the next one
_MOST_ENTRIES = 16_000_000


@dataclass(frozen=True)
class Arguments:
    """Learn from a run's training text which target tokens a source token may need
    (docs/decoding.md).
    """

    workdir: str
    """Work directory of a training run."""
    top: int = 100
    """Likeliest target tokens of each source token."""
    frequent: int = 100
    """Most frequent target tokens, which any sentence may need."""
    pairs: int = 300_000
    """Sentence pairs to learn from, spread over the training text."""
    output: str = ""
    """File to write. Default: shortlist.npz in the work directory."""


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status, as ``run_program`` has it."""
    return run_program(lambda: _learn(argv))


def _learn(argv: list[str] | None) -> None:
    a = parse_flags(Arguments, argv)
    if is_url(a.workdir) and not a.output:
        raise UserError(f"workdir is {a.workdir!r}; expected --output FILE with a URL.")
    output = Path(a.output) if a.output else local_path(a.workdir) / "shortlist.npz"
    if a.output:
        check_output(a.output)
    shortlist = learn_shortlist(a.workdir, top=a.top, frequent=a.frequent, max_pairs=a.pairs)
    shortlist.save(output)
    mean = len(shortlist.candidates) / (len(shortlist.offsets) - 1)
    log.info("%s: %.0f target tokens a source token on average.", output, mean)


def learn_shortlist(
    workdir: str | Path, *, top: int = 100, frequent: int = 100, max_pairs: int = 300_000
) -> Shortlist:
    """A shortlist from the training text of a run; ``UserError`` if there is no run, or it has
    none.
    """
    workdir = local_workdir(workdir)
    if not (workdir / "config.json").is_file():
        raise UserError(
            f"workdir is {str(workdir)!r}, which has no config.json; expected one written by "
            "train.py."
        )
    config, tokenizer = load_config_file(workdir / "config.json"), Tokenizer.load(workdir)
    if not config.data.train.is_given:
        raise UserError(
            f"The config of {str(workdir)!r} names no training text; expected data.train, or give "
            "a text table."
        )
    if top < 1 or frequent < 0 or max_pairs < 1:  # before the work
        raise UserError(
            f"top, frequent and pairs are {top}, {frequent} and {max_pairs}; expected at least 1, "
            "0 and 1."
        )
    # The training run's own, if it is still there.
    corpus = prepare_corpus(workdir, config, tokenizer, "train")
    lexicon = learn(
        corpus,
        source_vocab_size=tokenizer.source_vocab_size,
        target_vocab_size=tokenizer.target_vocab_size,
        max_pairs=max_pairs,
    )
    return Shortlist.from_lexicon(lexicon, tokenizer, top=top, frequent=frequent)


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

    Memory is bounded: where the table grows too large, each source token keeps its strongest
    entries.
    """
    total = corpus.num_samples * corpus.num_pairs
    sequences = np.arange(min(total, max_pairs)) * total // min(total, max_pairs)
    shape = source_vocab_size, target_vocab_size
    probability: Any = None
    for iteration in range(1, iterations + 1):
        counts, waiting = sparse.csr_array(shape), []
        frequency = np.zeros(target_vocab_size)
        for links in _links(corpus, sequences):
            frequency += np.bincount(links.target_P[links.first_T], minlength=target_vocab_size)
            at_P = links.source_P, links.target_P
            # 0: not among the strongest
            p_P = np.ones(len(links.target_P)) if probability is None else probability[at_P]
            sums_T = np.maximum(np.add.reduceat(p_P, links.first_T), 1e-30)
            expected_P = p_P / np.repeat(sums_T, links.choices_T)
            expected = sparse.coo_array((expected_P, at_P), shape).tocsr()
            expected.eliminate_zeros()
            waiting.append(expected)
            if sum(each.nnz for each in waiting) > _MOST_ENTRIES // 4:
                counts, waiting = _bounded(sum(waiting, counts)), []
        probability = _normalized(sum(waiting, counts))
        log.info("IBM model 1: iteration %d of %d.", iteration, iterations)
    return Lexicon(probability.astype(np.float32), frequency)


class _Links(NamedTuple):
    """Each of T target tokens with each source token (or NULL) of its sentence: P links."""

    source_P: np.ndarray
    target_P: np.ndarray
    first_T: np.ndarray
    """Where the links of a target token begin in P."""
    choices_T: np.ndarray
    """How many there are."""


def _links(corpus: Corpus, sequences: np.ndarray) -> Iterator[_Links]:
    for start in range(0, len(sequences), 1 << 16):
        block = sequences[start : start + (1 << 16)]
        source, s_N = corpus.source(block)
        source = np.where(source == EOS_ID, _NULL, source).astype(np.int64)  # translates to nothing
        target, t_N = corpus.target(block)
        # Without EOS.
        target, t_N = np.delete(target, np.cumsum(t_N) - 1).astype(np.int64), t_N - 1
        edges = np.flatnonzero(np.diff(np.cumsum(s_N * t_N) // _CHUNK)) + 1
        chunks = zip(
            np.split(source, np.cumsum(s_N)[edges - 1]),
            np.split(s_N, edges),
            np.split(target, np.cumsum(t_N)[edges - 1]),
            np.split(t_N, edges),
        )
        for source_C, s_C, target_C, t_C in chunks:
            choices_T = np.repeat(s_C, t_C)
            starts_T = np.repeat(np.cumsum(s_C) - s_C, t_C)
            if len(target_C):
                yield _Links(
                    source_P=source_C[ranges(starts_T, choices_T)],
                    target_P=np.repeat(target_C, choices_T),
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
    sums = np.maximum(counts.sum(axis=1), 1e-30)
    data = counts.data / np.repeat(sums, np.diff(counts.indptr))
    return sparse.csr_array((data, counts.indices, counts.indptr), counts.shape)


if __name__ == "__main__":
    sys.exit(main())
