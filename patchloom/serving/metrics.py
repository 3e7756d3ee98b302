"""What Prometheus reads: how many requests came of it, how long each waited and why, what waits now."""

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
INPUTS = (1, 2, 4, 8, 16, 32, 64, 128)
Labels = tuple[tuple[str, str], ...]


class Histogram:
    """Counts of values up to each bound, per set of labels."""

    def __init__(self, name: str, told: str, bounds: Sequence[float]) -> None:
        self.name, self.told, self._bounds = name, told, bounds
        self._counts: dict[Labels, list[int]] = {}
        self._sums: Counter[Labels] = Counter()

    def add(self, value: float, **labels: str) -> None:
        """Note one value."""
        key = tuple(labels.items())
        counts = self._counts.setdefault(key, [0] * (len(self._bounds) + 1))
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[key] += value  # type: ignore[assignment]

    def lines(self) -> Iterator[str]:
        """As Prometheus reads them."""
        yield from _head(self.name, self.told, "histogram")
        for key, counts in self._counts.items():
            total = 0
            for bound, count in zip((*map(str, self._bounds), "+Inf"), counts, strict=True):
                total += count
                yield f"{self.name}_bucket{_labels((*key, ('le', bound)))} {total}"
            yield f"{self.name}_sum{_labels(key)} {self._sums[key]:.6f}"
            yield f"{self.name}_count{_labels(key)} {total}"


class Metrics:
    """All that a server counts."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.waited = Histogram(
            "patchloom_wait_seconds",
            "How long answered requests waited, by reason: upload (for the client), queue (for a free model process), "
            "batch (for others to join), model (for the answer).",
            SECONDS,
        )
        self.answered = Histogram("patchloom_answer_seconds", "From the headers to the answer, by route.", SECONDS)
        self.batches = Histogram("patchloom_batch_inputs", "Pictures or lines answered together.", INPUTS)
        self.model_seconds = 0.0

    def batch(self, inputs: int, seconds: float) -> None:
        """Note a batch."""
        self.batches.add(inputs)
        self.model_seconds += seconds

    def text(self, gauges: Mapping[str, tuple[str, float]], pids: Sequence[int]) -> str:
        """Everything, with what is so now: name → what it is, value."""
        return "\n".join([*self._lines(gauges, pids), ""])

    def _lines(self, gauges: Mapping[str, tuple[str, float]], pids: Sequence[int]) -> Iterator[str]:
        yield from _head("patchloom_requests_total", "Requests, by route and status.", "counter")
        for (route, status), count in sorted(self.requests.items()):
            yield f"patchloom_requests_total{_labels((('route', route), ('status', str(status))))} {count}"
        yield from self.waited.lines()
        yield from self.answered.lines()
        yield from self.batches.lines()
        yield from _head("patchloom_model_seconds_total", "Time that model processes spent on batches.", "counter")
        yield f"patchloom_model_seconds_total {self.model_seconds:.6f}"
        for name, (told, value) in gauges.items():
            yield from _head(name, told, "counter" if name.endswith("_total") else "gauge")
            yield f"{name} {value:g}"
        name = "patchloom_memory_bytes"
        yield from _head(name, "Resident memory, of this process and of those that hold the model.", "gauge")
        yield f"{name}{_labels((('process', 'front'),))} {_resident(os.getpid())}"
        yield f"{name}{_labels((('process', 'model'),))} {sum(map(_resident, pids))}"


def _head(name: str, told: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {told}"
    yield f"# TYPE {name} {kind}"


def _labels(pairs: Labels) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in pairs) + "}" if pairs else ""


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
