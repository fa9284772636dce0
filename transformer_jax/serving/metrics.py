"""What /metrics tells Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transformer_jax.serving.service import Service

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics(Collector):
    """The figures of a service, and of the requests that ``Measured`` saw."""

    def __init__(self, service: Service):
        self._service = service
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "transformer_requests",
            "Requests, by path and HTTP status.",
            ["path", "status"],
            registry=self._registry,
        )
        self.seconds = Histogram(
            "transformer_request_seconds",
            "From a request's arrival to the end of its answer.",
            ["path"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._registry.register(self)

    def text(self) -> bytes:
        """What is served."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The figures of the models at this moment."""
        service = self._service
        searches = [model.workers for model in service.models.values()]
        for name, said, value in (
            ("sentences_accepted", "Sentences of the requests in progress.", service.num_accepted),
            ("sentences_waiting", "Without a row.", sum(each.num_waiting for each in searches)),
            (
                "rows_busy",
                "Rows of searches with a sentence.",
                sum(each.num_busy for each in searches),
            ),
            ("rows", "Rows of searches.", sum(each.num_rows for each in searches)),
        ):
            yield GaugeMetricFamily(f"transformer_{name}", said, value)
        for name, said, field in (
            ("sentences", "Sentences translated.", "num_lines"),
            ("target_tokens", "Tokens of the best translations.", "num_tokens"),
        ):
            total = CounterMetricFamily(f"transformer_{name}", said, labels=["pair"])
            for pair, model in service.models.items():
                total.add_metric([str(pair)], getattr(model, field))
            yield total


class Measured:
    """ASGI middleware: counts requests and their time."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, status = time.perf_counter(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception:
            status = status or 500  # which is answered outside of this
            raise
        finally:
            # Only paths that there are, so that nobody can make this grow; status 0: the client
            # did not wait for the answer.
            path = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(path, status).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - start)
