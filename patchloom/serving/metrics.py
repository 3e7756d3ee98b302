"""Prometheus metrics: request counts, waiting time by reason, batches, queue length, memory."""

import os
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from patchloom.serving.processes import ModelProcesses

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_INPUTS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """All metrics of one server."""

    def __init__(self, processes: ModelProcesses) -> None:
        self.total_requests = 0
        self._registry = registry = _Registry()
        self._requests = Counter(
            "patchloom_requests", "Requests, by route and status.", ["route", "status"], registry=registry
        )
        waits = Histogram(
            "patchloom_wait_seconds",
            "Waiting time of completed requests, by reason: upload (for the client), queue (for a free model process), "
            "batch (for the batch to fill), model (for the model).",
            ["reason"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._waits = {reason: waits.labels(reason) for reason in ("upload", "queue", "batch", "model")}
        self._responses = Histogram(
            "patchloom_answer_seconds",
            "Time from the headers to the response, by route.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._batches = Histogram(
            "patchloom_batch_inputs", "Images or lines per batch.", buckets=_INPUTS, registry=registry
        )
        self._model_seconds = Counter(
            "patchloom_model_seconds", "Time that model processes spent on batches.", registry=registry
        )
        registry.register(_CurrentState(processes))

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Count a response."""
        self.total_requests += 1
        self._requests.labels(route, str(status)).inc()
        self._responses.labels(route).observe(seconds)

    def count_waits(self, seconds: Mapping[str, float]) -> None:
        """Record the waiting time of one completed request by reason."""
        for reason, value in seconds.items():
            self._waits[reason].observe(value)

    def count_batch(self, inputs: int, seconds: float) -> None:
        """Record the size of a batch and the model's time for it."""
        self._batches.observe(inputs)
        self._model_seconds.inc(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Registry(CollectorRegistry):
    """A registry without the `_created` series, which would double the number of series."""

    def collect(self) -> Iterable[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class _CurrentState(Collector):
    """Values read when Prometheus asks: queue, uploads, model processes, memory."""

    def __init__(self, processes: ModelProcesses) -> None:
        self._processes = processes

    def describe(self) -> Iterable[Metric]:
        return ()  # `collect` needs a running event loop

    def collect(self) -> Iterable[Metric]:
        processes, admission = self._processes, self._processes.admission
        for name, help_text, value in (
            ("patchloom_queue_inputs", "Images or lines in the queue.", admission.waiting),
            ("patchloom_queue_limit", "Images or lines that the queue holds.", admission.limits.queue),
            ("patchloom_in_process_inputs", "Images or lines in model processes.", admission.in_process),
            ("patchloom_expected_wait_seconds", "Expected wait of a new request.", admission.expected_seconds()),
            ("patchloom_uploads", "Request bodies being read.", len(admission.uploads)),
            ("patchloom_held_bytes", "Request bodies in memory.", admission.held_bytes),
            ("patchloom_model_processes", "Model processes that are ready.", len(processes.ready)),
        ):
            yield GaugeMetricFamily(name, help_text, value)
        yield CounterMetricFamily("patchloom_model_restarts", "Restarts of model processes.", processes.restarts)
        memory = GaugeMetricFamily(
            "patchloom_memory_bytes", "Resident memory of the front and the model processes.", labels=["process"]
        )
        memory.add_metric(["front"], _resident_bytes(os.getpid()))
        memory.add_metric(["model"], sum(map(_resident_bytes, processes.pids)))
        yield memory


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
