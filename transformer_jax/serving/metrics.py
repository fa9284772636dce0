"""Prometheus metrics of the searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from transformer_jax import AsyncTranslator, Translation
from transformer_jax.serving.flags import Pair


class Metrics:
    """Metrics of a service.

    Attributes:
      registry: all metrics, for ``/metrics``.
    """

    def __init__(self, models: Sequence[AsyncTranslator], num_accepted: Callable[[], int]):
        self.registry = CollectorRegistry()
        self._models = models
        self._counters = dict[Pair, tuple[Counter, Counter]]()  # their lookup by label takes time
        self._gauge("sentences_accepted", "Sentences in progress.", num_accepted)
        self._gauge("sentences_waiting", "Waiting sentences.", self._num_waiting)
        self._gauge("rows_busy", "Rows in use.", self._num_running)
        self._gauge("rows", "Total rows across all searches.", self._num_rows)
        self._num_sentences = self._counter("sentences", "Sentences translated.")
        self._num_tokens = self._counter("target_tokens", "Target tokens in the best translations.")

    def count(self, pair: Pair, translation: Translation) -> None:
        """Count the best translation of a sentence."""
        if pair not in self._counters:
            counters = self._num_sentences.labels(pair), self._num_tokens.labels(pair)
            self._counters[pair] = counters
        num_sentences, num_tokens = self._counters[pair]
        num_sentences.inc()
        num_tokens.inc(translation.length)

    def _gauge(self, name: str, description: str, value: Callable[[], int]) -> None:
        gauge = Gauge(f"transformer_{name}", description, registry=self.registry)
        gauge.set_function(value)

    def _counter(self, name: str, description: str) -> Counter:
        return Counter(
            f"transformer_{name}", description, labelnames=["pair"], registry=self.registry
        )

    def _num_waiting(self) -> int:
        return sum(model.workers.num_waiting for model in self._models)

    def _num_running(self) -> int:
        return sum(model.workers.num_running for model in self._models)

    def _num_rows(self) -> int:
        return sum(model.workers.num_rows for model in self._models)
