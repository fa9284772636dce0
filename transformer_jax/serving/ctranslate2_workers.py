"""Search with CTranslate2 instead of JAX, behind the same API (``--engine ctranslate2``).

CTranslate2 has its own stopping rule (``decoding.patience``), and batches of whole sentences: a
sentence that arrives waits until a worker is free (dynamic batching).
"""

from __future__ import annotations

import json
from concurrent.futures import InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from transformer_jax import (
    DecodingConfig,
    Hypothesis,
    Sentence,
    Translator,
    UserError,
)
from transformer_jax.serving.async_translator import Workers
from transformer_jax.support import needs_extra, num_cores

_LONGEST = 2**16


class CTranslate2Workers(Workers):
    """One search thread per core, each of which translates the oldest waiting sentences together.

    Attributes:
      num_rows: maximum number of sentences in progress: the translator's ``batch_size``.
    """

    def __init__(self, translator: Translator, folder: Path):
        """Load the model that ``interop export`` wrote to ``folder``.

        Raises:
          UserError: there is no such model, or a setting is unsupported.
        """
        super().__init__(translator.engines)
        with needs_extra("interop"):
            import ctranslate2
        file = folder / "generation_config.json"
        if not file.exists():
            raise UserError(
                f"{str(folder)!r} is missing; expected an export of the model: python -m "
                f"transformer_jax.interop export --workdir {folder.parent} --format ctranslate2 "
                f"--output {folder}"
            )
        self._workers = num_cores()
        self._model = ctranslate2.Translator(
            str(folder),
            compute_type="int8" if translator.config.weights == "int8" else "float32",
            inter_threads=self._workers,
            intra_threads=1,
        )
        self._settings = json.loads(file.read_text()) | _settings(translator.config)
        self._config, sides = translator.config, translator.tokenizer
        self._names = sides.source.tokens, sides.target.tokens
        names = sides.target.tokens(range(sides.target.vocab_size))
        self._ids = {token: id_ for id_, token in enumerate(names)}
        lengths = jnp.arange(_LONGEST)
        self._divisors = np.asarray(translator.engines[0].method.divisor(lengths))
        self._running = 0

    @property
    def num_busy(self) -> int:
        """Number of sentences in progress."""
        return self._running

    @property
    def num_rows(self) -> int:
        """Maximum number of sentences in progress."""
        return self._most * self._workers

    @property
    def _most(self) -> int:
        return max(1, self._config.batch_size // self._workers)

    def _prepare(self) -> None:
        """Give each thread no searches: it only calls ``_turn``."""
        self._searches = [[] for _ in range(self._workers)]

    def _turn(self, _: Any) -> None:
        """Translate the oldest waiting sentences."""
        with self._changed:
            waiting = [entry for entries in self._waiting.values() for entry in entries]
            entries = waiting[: self._most]
            for of_bucket in self._waiting.values():
                of_bucket[:] = [entry for entry in of_bucket if entry not in entries]
            entries = [entry for entry in entries if not entry.future.cancelled()]
            self._running += len(entries)
        found = self._search([entry.sentence for entry in entries]) if entries else []
        with self._changed:
            self._running -= len(entries)
        for entry, hypotheses in zip(entries, found, strict=True):
            with suppress(InvalidStateError):  # canceled
                entry.future.set_result(hypotheses)

    def _search(self, sentences: list[Sentence]) -> list[list[Hypothesis]]:
        prefixes = [self._names[1](sentence.prefix) for sentence in sentences]
        results = self._model.translate_batch(
            [self._names[0](sentence.tokens) for sentence in sentences],
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
        ids = [self._ids[token] for token in tokens]
        return Hypothesis(ids, log_prob / float(self._divisors[length]), log_prob, [])


def _settings(config: DecodingConfig) -> dict[str, Any]:
    """Return the keyword arguments of ``translate_batch`` that flags may have changed."""
    if config.method != "beam":
        raise UserError(
            f"decoding.method is {config.method!r}, which --engine ctranslate2 does not support; "
            "expected 'beam'."
        )
    return {
        "beam_size": config.beam_size,
        "length_penalty": config.length_penalty,
        "min_decoding_length": config.min_length,
        "no_repeat_ngram_size": config.no_repeat_ngram,
    } | ({"patience": config.patience} if config.patience else {})
