"""Search with CTranslate2: token ids in, hypotheses out.

CTranslate2 has its own stopping rule (``decoding.patience``), and batches of whole sentences: a
sentence that arrives waits until a worker is free (dynamic batching).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.decoding.length_buckets import Bucket
from transformer_jax.decoding.ranking import length_penalty
from transformer_jax.decoding.scheduler import RunningBatch, Task
from transformer_jax.decoding.search import Hypothesis, Sentence
from transformer_jax.devices.machine import num_cores
from transformer_jax.errors import UserError, needs_extra, one_line
from transformer_jax.pretrained.ctranslate2 import adds_source_eos
from transformer_jax.pretrained.search_settings import length_limits, to_ctranslate2
from transformer_jax.settings.config import Config, DecodingConfig
from transformer_jax.tokenization.rows import with_eos
from transformer_jax.tokenization.tokenizer import Tokenizer

_MAX_LENGTH = 2**16
COMPUTE_TYPES = {"auto": "float32", "int8": "int8"}
"""Data type of weights and matmuls by ``decoding.weights``."""


def check_search(config: DecodingConfig) -> None:
    """Raise ``UserError`` for a search that CTranslate2 does not have."""
    if config.method != "beam":
        raise UserError(
            f"decoding.method is {config.method!r}; expected 'beam'. CTranslate2's samples of a "
            "line depend on other lines."
        )
    if config.weights not in COMPUTE_TYPES:
        raise UserError(
            f"decoding.weights is {config.weights!r}; expected {' or '.join(COMPUTE_TYPES)} with "
            "CTranslate2."
        )


class CTranslate2Engine:
    """Runs the search of an exported model on all CPU cores, with one worker for each core.

    A counterpart of ``Engine``, with the same buckets, schedulers and hypotheses, except that
    ``token_log_probs`` are empty.

    Attributes:
      num_workers: number of calls that run at the same time.
      compute_type: data type of weights and matmuls.
      search_settings: the keyword arguments of ``translate_batch``.
    """

    def __init__(self, folder: Path, config: Config, tokenizer: Tokenizer):
        """Load the model that ``export_ctranslate2`` wrote to ``folder``, with the search settings
        of ``config``. Raises ``UserError`` if CTranslate2 cannot load it.
        """
        with needs_extra("export"):
            import ctranslate2
        decoding = config.decoding
        self.compute_type = COMPUTE_TYPES[decoding.weights]
        self.num_workers = num_cores()
        self.search_settings = to_ctranslate2(config, tokenizer)
        self._tokenizer = tokenizer
        self._length_penalty = decoding.length_penalty
        lengths = np.arange(_MAX_LENGTH)
        self._penalties = length_penalty(lengths, decoding.length_penalty, decoding.length_offset)
        self._max_source_length = length_limits(config)[0]
        num_rows = max(1, decoding.batch_size // self.num_workers)
        self._bucket = Bucket((self._max_source_length,), num_rows)
        try:
            self._model = ctranslate2.Translator(
                str(folder),
                compute_type=self.compute_type,
                inter_threads=self.num_workers,
                intra_threads=1,
            )
        except Exception as error:  # of any class, from C++
            raise UserError(f"CTranslate2 cannot load its model: {one_line(error)}.") from None

    def bucket_of(self, sentence: Sentence) -> Bucket:
        """Return the bucket of all sentences."""
        assert sentence.terms is None and len(sentence.tokens) < self._max_source_length
        return self._bucket

    def buckets_with_terms(self, max_terms: int) -> list[Bucket]:
        """Return the only bucket, for sentences without terms."""
        return [self._bucket]

    def new_batch(self, bucket: Bucket, *, is_resizable: bool = False) -> RunningBatch:
        """Create a batch, which is one call of CTranslate2 at a time."""
        return CTranslate2Batch(self, bucket)

    def start(self, sentences: Sequence[Sentence]) -> list[Any]:
        """Start to search. Returns CTranslate2's handle of each sentence's results, at once unless
        all workers have calls waiting.
        """
        source = self._tokenizer.source
        target = self._tokenizer.target
        sources = [sentence.tokens for sentence in sentences]
        if not adds_source_eos(self._tokenizer):
            sources = [with_eos(tokens, source.eos_id) for tokens in sources]
        prefixes = [target.tokens(sentence.prefix) for sentence in sentences]
        results: list[Any] = self._model.translate_batch(
            [*map(source.tokens, sources)],
            target_prefix=prefixes if any(prefixes) else None,
            num_hypotheses=max(sentence.num_hypotheses for sentence in sentences),
            return_scores=True,
            asynchronous=True,
            **self.search_settings,
        )
        return results

    def hypotheses(self, handle: Any) -> list[Hypothesis]:
        """Wait for a sentence's results. Returns its hypotheses, best first."""
        result = handle.result()
        return [
            self._hypothesis(tokens, score)
            for tokens, score in zip(result.hypotheses, result.scores, strict=True)
        ]

    def _hypothesis(self, tokens: list[str], score: float) -> Hypothesis:
        """Convert a hypothesis. CTranslate2 divides log-probabilities by length^alpha."""
        length = min(len(tokens) + 1, _MAX_LENGTH - 1)
        log_prob = score * length**self._length_penalty
        ids = self._tokenizer.target.ids(tokens)
        return Hypothesis(ids, log_prob / float(self._penalties[length]), log_prob, [])


class CTranslate2Batch(RunningBatch):
    """Sentences that a worker translates together. All of them finish at once."""

    def __init__(self, engine: CTranslate2Engine, bucket: Bucket):
        self.bucket = bucket
        self.num_rows = bucket.num_rows
        self._engine = engine
        # Sentences in progress, with CTranslate2's handles of their results.
        self._unread: list[tuple[Task, Any]] = []

    @property
    def running(self) -> list[Task]:
        """The tasks that ``read`` has not finished."""
        return [task for task, _ in self._unread]

    def resize(self, count: int) -> None:
        """Take at most this worker's share of the sentences, so that no worker is idle."""
        self.num_rows = min(max(1, count), self.bucket.num_rows)

    def decode(self, admitted: Sequence[Task], *, max_steps: int, stop_after: int) -> None:
        """Start to translate sentences, to their ends."""
        if admitted:
            handles = self._engine.start([task.sentence for task in admitted])
            self._unread += zip(admitted, handles, strict=True)

    def read(self) -> None:
        """Wait for the results of all sentences, and finish their tasks."""
        for task, handle in self._unread:
            task.finish(self._engine.hypotheses(handle))
        self._unread.clear()
