"""Search with CTranslate2 instead of JAX, behind the same API (``--engine ctranslate2``).

CTranslate2 has its own stopping rule (``decoding.patience``), and batches of whole sentences: a
sentence that arrives waits until a thread is free (dynamic batching).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from transformer_jax import Bucket, Hypothesis, Sentence, Translator, UserError
from transformer_jax.decoding.ranking import length_penalty
from transformer_jax.decoding.scheduler import RunningBatch, Task
from transformer_jax.decoding.workers import Workers
from transformer_jax.devices.machine import num_cores
from transformer_jax.errors import needs_extra

_MAX_LENGTH = 2**16


def ctranslate2_workers(translator: Translator, folder: Path) -> Workers:
    """Load the model that ``transformer_jax.export`` wrote to ``folder``, for one search thread per
    core.

    Raises:
      UserError: there is no such model, or a setting is unsupported.
    """
    engine = translator.engines[0]
    num_threads = num_cores()
    bucket = Bucket(
        (engine.max_source_length,), max(1, translator.config.batch_size // num_threads)
    )
    model = CTranslate2Model(translator, folder, num_threads)
    return Workers(
        [[CTranslate2Batch(model, bucket)] for _ in range(num_threads)],
        lambda sentence: bucket._replace(terms=engine.bucket_of(sentence).terms),
    )


class CTranslate2Model:
    """An exported model, whose ``search`` any thread can call."""

    def __init__(self, translator: Translator, folder: Path, num_threads: int):
        with needs_extra("export"):
            import ctranslate2
        file = folder / "generation_config.json"
        if not file.exists():
            raise UserError(
                f"{str(folder)!r} is missing; expected an export of the model: python -m "
                f"transformer_jax.export --workdir {folder.parent} --format ctranslate2 "
                f"--output {folder}"
            )
        self._config = translator.config
        self._tokenizer = translator.tokenizer
        self.search_settings = _search_settings(translator, json.loads(file.read_bytes()), folder)
        self._model = ctranslate2.Translator(
            str(folder),
            compute_type="int8" if self._config.weights == "int8" else "float32",
            inter_threads=num_threads,
            intra_threads=1,
        )
        alpha = self._config.length_penalty
        penalties = length_penalty(jnp.arange(_MAX_LENGTH), alpha, self._config.length_offset)
        self._length_penalties = np.asarray(penalties)

    def search(self, sentences: Sequence[Sentence]) -> list[list[Hypothesis]]:
        """Find hypotheses for each sentence, best first."""
        source = self._tokenizer.source
        target = self._tokenizer.target
        prefixes = [target.tokens(sentence.prefix) for sentence in sentences]
        results = self._model.translate_batch(
            [source.tokens(sentence.tokens) for sentence in sentences],
            target_prefix=prefixes if any(prefixes) else None,
            num_hypotheses=max(sentence.num_hypotheses for sentence in sentences),
            return_scores=True,
            **self.search_settings,
        )
        return [list(map(self._hypothesis, x.hypotheses, x.scores)) for x in results]

    def _hypothesis(self, tokens: list[str], score: float) -> Hypothesis:
        """Convert a hypothesis. CTranslate2 divides log-probabilities by length^alpha."""
        length = min(len(tokens) + 1, _MAX_LENGTH - 1)
        log_prob = score * length**self._config.length_penalty
        ids = self._tokenizer.target.ids(tokens)
        return Hypothesis(ids, log_prob / float(self._length_penalties[length]), log_prob, [])


class CTranslate2Batch(RunningBatch):
    """The sentences that a thread translates together; ``decode`` finishes all of them."""

    def __init__(self, model: CTranslate2Model, bucket: Bucket):
        self.model = model
        self.bucket = bucket
        self.num_rows = bucket.rows
        self._running: list[Task] = []

    @property
    def encode_batch_size(self) -> int:
        """Maximum number of sentences in a call of ``decode``."""
        return self.num_rows

    @property
    def running(self) -> list[Task]:
        """The tasks of the current call of ``decode``."""
        return self._running

    def decode(self, admitted: Sequence[Task], *, max_steps: int, stop_after: int) -> None:
        """Translate sentences and finish their tasks."""
        self._running = list(admitted)
        if admitted:
            results = self.model.search([task.sentence for task in admitted])
            for task, hypotheses in zip(admitted, results, strict=True):
                task.finish(hypotheses)
        self._running = []

    @property
    def is_ready(self) -> bool:
        """True: CTranslate2 does not compile."""
        return True

    def compile_next(self) -> bool:
        """Do nothing."""
        return False

    def resize(self, count: int) -> None:
        """Do nothing: batches have any size."""

    def read(self) -> None:
        """Do nothing: ``decode`` has finished all tasks."""

    def release(self) -> None:
        """Do nothing: CTranslate2 keeps no rows."""


def _search_settings(
    translator: Translator, exported: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """Return the keyword arguments of ``translate_batch``. Flags may have changed those of the
    export.
    """
    config = translator.config
    if config.method != "beam":
        raise UserError(
            f"decoding.method is {config.method!r}, which --engine ctranslate2 does not support; "
            "expected 'beam'."
        )
    max_source_length = translator.engines[0].max_source_length
    position_limit = translator.model.config.position_limit
    limits = max_source_length, config.max_target_length(max_source_length, position_limit)
    exported_limits = exported["max_input_length"], exported["max_decoding_length"]
    # CTranslate2 would cut or fail.
    if limits[0] > exported_limits[0] or limits[1] > exported_limits[1]:
        raise UserError(
            f"A sentence can have {limits} source and target tokens (decoding.max_source_length, "
            f"max_extra_length, max_length); expected at most {exported_limits}, the limits of the "
            f"export in {str(folder)!r}. Lower these settings, or change them in config.json "
            "and export again."
        )
    target = translator.tokenizer.target
    suppressed = [*target.tokens([target.pad_id]), *config.suppress]
    overrides = {
        "beam_size": config.beam_size,
        "length_penalty": config.length_penalty,
        "min_decoding_length": config.min_length,
        "no_repeat_ngram_size": config.no_repeat_ngram,
        "max_decoding_length": limits[1],
        "suppress_sequences": [[token] for token in suppressed],
    } | ({"patience": config.patience} if config.patience else {})
    return exported | overrides
