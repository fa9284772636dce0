"""Search with CTranslate2 instead of JAX, behind the same API (``--engine ctranslate2``).

CTranslate2 has its own stopping rule (``decoding.patience``), and batches of whole sentences: a
sentence that arrives waits until a thread is free (dynamic batching).
"""

from __future__ import annotations

import json
from concurrent.futures import InvalidStateError
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from transformer_jax import Bucket, Hypothesis, Sentence, Translator, UserError
from transformer_jax.devices.machine import num_cores
from transformer_jax.errors import needs_extra
from transformer_jax.serving.workers import Entry, Workers

_LONGEST = 2**16


def ctranslate2_workers(translator: Translator, folder: Path) -> Workers:
    """Load the model that ``transformer_jax.export`` wrote to ``folder``, for one search thread per
    core.

    Raises:
      UserError: there is no such model, or a setting is unsupported.
    """
    engine, threads = translator.engines[0], num_cores()
    bucket = Bucket((engine.longest_source,), max(1, translator.config.batch_size // threads))
    search = CTranslate2Rows(translator, folder, bucket, threads)
    return Workers(
        [[copy(search)] for _ in range(threads)],
        lambda sentence: bucket._replace(terms=engine.bucket_of(sentence).terms),
    )


class CTranslate2Rows:
    """The sentences that a thread translates together, with the methods of ``LiveRows``."""

    def __init__(self, translator: Translator, folder: Path, bucket: Bucket, threads: int):
        with needs_extra("export"):
            import ctranslate2
        file = folder / "generation_config.json"
        if not file.exists():
            raise UserError(
                f"{str(folder)!r} is missing; expected an export of the model: python -m "
                f"transformer_jax.export --workdir {folder.parent} --format ctranslate2 "
                f"--output {folder}"
            )
        self.bucket, self.largest, self.running = bucket, bucket, list[Entry]()
        self.most = self.num_idle = bucket.rows
        self._config, self._tokenizer = translator.config, translator.tokenizer
        self._settings = _settings(translator, json.loads(file.read_bytes()), folder)
        self._model = ctranslate2.Translator(
            str(folder),
            compute_type="int8" if self._config.weights == "int8" else "float32",
            inter_threads=threads,
            intra_threads=1,
        )
        lengths = jnp.arange(_LONGEST)
        self._divisors = np.asarray(translator.engines[0].method.divisor(lengths))

    def compile(self) -> None:
        """Do nothing: CTranslate2 does not compile."""

    def resize(self, count: int) -> None:
        """Do nothing: batches have any size."""

    def turn(self, entries: list[Entry], max_steps: int) -> None:
        """Translate sentences and resolve their futures."""
        self.running = entries
        found = self._search([entry.sentence for entry in entries]) if entries else []
        self.running = []
        for entry, hypotheses in zip(entries, found, strict=True):
            with suppress(InvalidStateError):  # canceled
                entry.future.set_result(hypotheses)

    def _search(self, sentences: list[Sentence]) -> list[list[Hypothesis]]:
        source, target = self._tokenizer.source, self._tokenizer.target
        prefixes = [target.tokens(sentence.prefix) for sentence in sentences]
        results = self._model.translate_batch(
            [source.tokens(sentence.tokens) for sentence in sentences],
            target_prefix=prefixes if any(prefixes) else None,
            num_hypotheses=max(sentence.wanted for sentence in sentences),
            return_scores=True,
            **self._settings,
        )
        return [
            [self._hypothesis(*each) for each in zip(result.hypotheses, result.scores)][: s.wanted]
            for result, s in zip(results, sentences, strict=True)
        ]

    def _hypothesis(self, tokens: list[str], score: float) -> Hypothesis:
        """Convert a hypothesis. CTranslate2 divides log-probabilities by length^alpha."""
        length = min(len(tokens) + 1, _LONGEST - 1)
        log_prob = score * length**self._config.length_penalty
        ids = self._tokenizer.target.ids(tokens)
        return Hypothesis(ids, log_prob / float(self._divisors[length]), log_prob, [])


def _settings(translator: Translator, exported: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the keyword arguments of ``translate_batch``. Flags may have changed those of the
    export.
    """
    config = translator.config
    if config.method != "beam":
        raise UserError(
            f"decoding.method is {config.method!r}, which --engine ctranslate2 does not support; "
            "expected 'beam'."
        )
    source = translator.engines[0].longest_source
    limits = source, config.longest_target(source, translator.model.config.position_limit)
    most = exported["max_input_length"], exported["max_decoding_length"]
    if limits[0] > most[0] or limits[1] > most[1]:  # CTranslate2 would cut or fail
        raise UserError(
            f"A sentence can have {limits} source and target tokens (decoding.max_source_length, "
            f"max_extra_length, max_length); expected at most {most}, the limits of the export in "
            f"{str(folder)!r}. Lower these settings, or change them in config.json and export "
            "again."
        )
    target = translator.tokenizer.target
    suppressed = [*target.tokens([target.pad_id]), *config.suppress]
    changed = {
        "beam_size": config.beam_size,
        "length_penalty": config.length_penalty,
        "min_decoding_length": config.min_length,
        "no_repeat_ngram_size": config.no_repeat_ngram,
        "max_decoding_length": limits[1],
        "suppress_sequences": [[token] for token in suppressed],
    } | ({"patience": config.patience} if config.patience else {})
    return exported | changed
