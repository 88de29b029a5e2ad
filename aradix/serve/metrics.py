"""`ServeMetrics`: what the engine does and how long clients wait, for Prometheus, beside the figures of the cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from aradix.engine.engine import AsyncEngine, EngineStats
from aradix.serve.protocol import FinishReason

__all__ = ["ServeMetrics"]

_PREFIX = "aradix:"

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)

_Read = Callable[[EngineStats], float]

_GAUGES: tuple[tuple[str, str, _Read], ...] = (
    ("num_requests_running", "Requests that are being computed.", lambda s: s.running),
    ("num_requests_waiting", "Requests that wait for a place in the batch.", lambda s: s.waiting),
)
_COUNTERS: tuple[tuple[str, str, _Read], ...] = (
    ("prefill_tokens", "Tokens of prompts that were computed, some of them again.", lambda s: s.prefill_tokens),
    ("generation_tokens", "Tokens that were generated one by one.", lambda s: s.decoded_tokens),
    ("num_preemptions", "Times that a request gave its slots back and waited again.", lambda s: s.retractions),
    ("engine_steps", "Steps of the model.", lambda s: s.steps),
    ("request_abort", "Generations that nobody wanted any more.", lambda s: s.aborted),
    ("request_failure", "Generations that ended in an error.", lambda s: s.failed),
)


class _EngineFigures(Collector):
    """The engine's own counts, at the moment they are asked for."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats()
        for name, about, read in _GAUGES:
            yield GaugeMetricFamily(_PREFIX + name, about, value=read(stats))
        for name, about, read in _COUNTERS:
            yield CounterMetricFamily(_PREFIX + name, about, value=read(stats))


class ServeMetrics:
    """What a server counts. No call waits.

    Args:
        engine: its own counts are asked when somebody scrapes, on the loop of the server.
        registry: where the figures go.
        clock: seconds.
    """

    def __init__(
        self, engine: AsyncEngine, registry: CollectorRegistry, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.clock = clock
        registry.register(_EngineFigures(engine))
        self._answers = Counter(
            f"{_PREFIX}http_responses", "Requests to /v1 by what was answered.", ["path", "status"], registry=registry
        )
        self._disconnects = Counter(
            f"{_PREFIX}http_disconnects", "Clients that left before their answer was through.", registry=registry
        )
        self._finished = Counter(
            f"{_PREFIX}request_success", "Answers that came to their end.", ["finished_reason"], registry=registry
        )
        self._first = Histogram(
            f"{_PREFIX}time_to_first_token_seconds",
            "From a request's arrival to its first text.",
            buckets=_FIRST,
            registry=registry,
        )
        self._whole = Histogram(
            f"{_PREFIX}e2e_request_latency_seconds",
            "From a request's arrival to its last text.",
            buckets=_WHOLE,
            registry=registry,
        )

    def answered(self, path: str, status: int) -> None:
        """A request got this status; the answer may go on."""
        self._answers.labels(path, status).inc()

    def disconnected(self) -> None:
        """A client left."""
        self._disconnects.inc()

    def ended(self, reason: FinishReason) -> None:
        """An answer came to its end."""
        self._finished.labels(reason).inc()

    def began(self, arrived: float) -> None:
        """A request that arrived then has its first text."""
        self._first.observe(self.clock() - arrived)

    def finished(self, arrived: float) -> None:
        """A request that arrived then has its last text."""
        self._whole.observe(self.clock() - arrived)
