"""Counters, gauges and latency percentiles of a server, in the format of Prometheus."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from driftgen.serve.batcher import Batcher
from driftgen.serve.model_process import ModelProcess

__all__ = ["QUANTILES", "ServiceMetrics"]

QUANTILES = (0.5, 0.9, 0.95, 0.99)
RECENT = 1024  # requests that percentiles are over
SIZES = [*(float(2**i) for i in range(13)), math.inf]  # upper bounds of the histogram of batches


class ServiceMetrics(Collector):
    """Prometheus collector: counters since the start, and the state of the queue when it is read."""

    def __init__(self, batcher: Batcher, model: ModelProcess) -> None:
        self.batcher, self.model = batcher, model
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("driftgen_requests", "Answered requests", ["path", "status"], **own)
        self.rows = Counter("driftgen_rows", "Images or action chunks sent", **own)
        self._recent: dict[str, deque[float]] = {}
        self._totals: dict[str, tuple[int, float]] = {}
        self.registry.register(self)

    def count(self, path: str, status: int, seconds: float) -> None:
        """Record an answer. Percentiles are of requests that succeeded."""
        self.requests.labels(path, str(status)).inc()
        if status == 200:
            self._recent.setdefault(path, deque(maxlen=RECENT)).append(seconds)
            number, total = self._totals.get(path, (0, 0.0))
            self._totals[path] = number + 1, total + seconds

    def collect(self) -> Iterator[Metric]:
        """Yield what is computed when it is asked for."""
        latency = Metric(
            "driftgen_latency_seconds", f"Time of a request, the last {RECENT} of each path", "summary"
        )
        for path, recent in self._recent.items():
            for quantile, value in zip(QUANTILES, np.quantile(list(recent), QUANTILES), strict=True):
                labels = {"path": path, "quantile": str(quantile)}
                latency.add_sample("driftgen_latency_seconds", labels, float(value))
            number, total = self._totals[path]
            latency.add_sample("driftgen_latency_seconds_count", {"path": path}, number)
            latency.add_sample("driftgen_latency_seconds_sum", {"path": path}, total)
        yield latency
        sizes = self.batcher.sizes
        buckets = [
            (
                "+Inf" if math.isinf(most) else str(most),
                float(sum(n for rows, n in sizes.items() if rows <= most)),
            )
            for most in SIZES
        ]
        total_rows = float(sum(rows * n for rows, n in sizes.items()))
        yield HistogramMetricFamily("driftgen_batch_rows", "Rows of a batch", buckets, total_rows)
        gauges = {
            "driftgen_waiting_rows": ("Images or action chunks in the queue", self.batcher.waiting),
            "driftgen_model_ready": ("1 if the model's process is alive", int(self.model.ready)),
            "driftgen_model_restarts": ("Restarts of the model's process", self.model.restarts),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value)

    def show(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self.registry)
