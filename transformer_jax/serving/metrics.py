"""Search metrics for Prometheus. The instrumentator in ``app.py`` adds request metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from transformer_jax.serving.service import Service


class SearchMetrics(Collector):
    """Metrics of a service's models."""

    def __init__(self, service: Service):
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        service = self._service
        searches = [model.workers for model in service.models.values()]
        for name, said, value in (
            ("sentences_accepted", "Sentences in progress.", service.num_accepted),
            ("sentences_waiting", "Waiting sentences.", sum(each.num_waiting for each in searches)),
            ("rows_busy", "Rows in use.", sum(each.num_busy for each in searches)),
            ("rows", "Total rows across all searches.", sum(each.num_rows for each in searches)),
        ):
            yield GaugeMetricFamily(f"transformer_{name}", said, value)
        for name, said, field in (
            ("sentences", "Sentences translated.", "num_lines"),
            ("target_tokens", "Target tokens in the best translations.", "num_tokens"),
        ):
            total = CounterMetricFamily(f"transformer_{name}", said, labels=["pair"])
            for pair, model in service.models.items():
                total.add_metric([str(pair)], getattr(model, field))
            yield total
