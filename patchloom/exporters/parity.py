"""The comparison of a run and its exported files on the same inputs: outputs, quality and speed."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from patchloom_runtime.engines.engine import Graph

Outputs = Mapping[str, np.ndarray]  # name → (N, …), for all inputs
BATCH = 32
ROUNDS = 5
# Relative to the largest output of the run: float32 sums in another order, and the 11 bits of a float16.
TOLERANCE = {"float32": 1e-4, "float16": 3e-2}


@dataclass(frozen=True)
class ParityRow:
    """One row of the table: the run, or a file made from it."""

    what: str
    agreement: float  # predictions equal to the run's, in percent
    difference: float  # largest absolute difference of any output
    relative: float  # the same, relative to the largest output of the run
    accuracy: float | None  # in percent, in the export's `measure`; None without labels
    one_ms: float  # milliseconds for one image
    per_second: float  # images per second, in batches
    mib: float  # of the file, or of the run's weights
    integer: int = 0  # operators that compute with integers
    operators: int = 0
    kept: bool = True
    why: str = ""  # reason if it is not kept

    def cells(self) -> list[str]:
        """Return the cells of the row, in the order of `columns`."""
        accuracy = "–" if self.accuracy is None else f"{self.accuracy:.2f}"
        integer = f"{self.integer} of {self.operators}" if self.operators else "–"
        return [
            self.what,
            f"{self.agreement:.2f}",
            f"{self.difference:.1e}",
            accuracy,
            f"{self.one_ms:.1f}",
            f"{self.per_second:,.1f}",
            f"{self.mib:.1f}",
            integer,
            ("yes" if self.kept else "no") if self.operators else "–",
        ]


def columns(measure: str, compared: str = "images") -> tuple[str, ...]:
    """Return the column names. `measure` is the quality metric, `compared` the plural noun for the inputs."""
    speed = (f"1 {compared.removesuffix('s')}, ms", f"{compared}/s")
    numbers = ("same answer, %", "largest difference", f"{measure}, %", *speed, "MiB")
    return "", *(f"#{name}" for name in (*numbers, "integer operators")), "kept"


def outputs_of(graph: Graph, rows: np.ndarray, batch: int = BATCH) -> Outputs:
    """Run a graph on all rows in batches."""
    parts = [graph(rows[start : start + batch]) for start in range(0, len(rows), batch)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def differences(outputs: Outputs, expected: Outputs) -> tuple[float, float]:
    """Return the largest absolute difference of any output, and the largest relative to that output's maximum."""
    worst, relative = 0.0, 0.0
    for name, values in expected.items():
        gap = float(np.abs(outputs[name] - values).max())
        gap = gap if np.isfinite(gap) else float("inf")
        worst, relative = max(worst, gap), max(relative, gap / max(1.0, float(np.abs(values).max())))
    return worst, relative


def speeds(graphs: Sequence[Graph], rows: np.ndarray, batch: int = BATCH) -> list[tuple[float, float]]:
    """Return milliseconds for one image and images per second in batches, for each graph.

    The graphs take turns, so that other load slows all of them equally; the best of several rounds counts.
    """
    inputs = rows[:1], rows[np.arange(batch) % len(rows)]
    best = [[float("inf"), float("inf")] for _ in graphs]
    for number in range(ROUNDS + 1):
        for graph, times in zip(graphs, best, strict=True):
            for column, values in enumerate(inputs):
                start = time.perf_counter()
                graph(values)
                if number:  # the first call warms up
                    times[column] = min(times[column], time.perf_counter() - start)
    return [(1000 * single, batch / together) for single, together in best]
