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
        workers = [model.workers for model in models]
        self.registry = CollectorRegistry()
        self._num_sentences = self._counter("sentences", "Sentences translated.")
        self._num_tokens = self._counter("target_tokens", "Target tokens in the best translations.")
        self._gauge("sentences_accepted", "Sentences in progress.", num_accepted)
        self._gauge(
            "sentences_waiting",
            "Waiting sentences.",
            lambda: sum(x.queue.num_waiting for x in workers),
        )
        self._gauge("rows_busy", "Rows in use.", lambda: sum(x.num_running for x in workers))
        self._gauge(
            "rows", "Total rows across all searches.", lambda: sum(x.num_rows for x in workers)
        )

    def count(self, pair: Pair, translation: Translation) -> None:
        """Count the best translation of a sentence."""
        self._num_sentences.labels(pair).inc()
        self._num_tokens.labels(pair).inc(translation.length)

    def _gauge(self, name: str, description: str, value: Callable[[], int]) -> None:
        gauge = Gauge(f"transformer_{name}", description, registry=self.registry)
        gauge.set_function(value)

    def _counter(self, name: str, description: str) -> Counter:
        return Counter(
            f"transformer_{name}", description, labelnames=["pair"], registry=self.registry
        )
