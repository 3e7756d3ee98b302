"""The run and an exported file on the same images: what each answers, how often it is right, how fast it is here."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from patchloom_runtime.engines.formats import Graph

Outputs = Mapping[str, np.ndarray]  # of all images: name → (N, …)
BATCH = 32
ROUNDS = 5
# Of the largest output of the run: float32 sums in another order, and 11 bits of a float16.
TOLERANCE = {"float32": 1e-4, "float16": 3e-2}


@dataclass(frozen=True)
class ParityRow:
    """One line of the table: the run, or a file made of it."""

    what: str
    agreement: float  # of decisions with the run's, in percent
    difference: float  # the largest of any output
    relative: float  # the same as a share of the largest output of the run
    accuracy: float | None  # in percent; what it is, the export's `measure` says
    one_ms: float  # milliseconds for one image
    per_second: float  # images, in batches
    mib: float  # of the file; of the run its weights
    integer: int = 0  # operators that compute with integers
    operators: int = 0
    kept: bool = True
    why: str = ""  # it is not kept

    def cells(self) -> list[str]:
        """Of the table's columns."""
        right = "–" if self.accuracy is None else f"{self.accuracy:.2f}"
        counted = f"{self.integer} of {self.operators}" if self.operators else "–"
        return [
            self.what,
            f"{self.agreement:.2f}",
            f"{self.difference:.1e}",
            right,
            f"{self.one_ms:.1f}",
            f"{self.per_second:,.1f}",
            f"{self.mib:.1f}",
            counted,
            ("yes" if self.kept else "no") if self.operators else "–",
        ]


def columns(measure: str, compared: str = "images") -> tuple[str, ...]:
    """Heads of the table; `measure` is what tells how good answers are, `compared` what they are about."""
    speed = (f"1 {compared.removesuffix('s')}, ms", f"{compared}/s")
    numbers = ("same answer, %", "largest difference", f"{measure}, %", *speed, "MiB")
    return "", *(f"#{name}" for name in (*numbers, "integer operators")), "kept"


def answers_of(graph: Graph, rows: np.ndarray, batch: int = BATCH) -> Outputs:
    """What a graph says of all rows, a batch at a time."""
    parts = [graph(rows[start : start + batch]) for start in range(0, len(rows), batch)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def differences(found: Outputs, run: Outputs) -> tuple[float, float]:
    """The largest difference of any output, and the largest share it is of that output's largest number."""
    worst, share = 0.0, 0.0
    for name, expected in run.items():
        gap = float(np.abs(found[name] - expected).max())
        gap = gap if np.isfinite(gap) else float("inf")
        worst, share = max(worst, gap), max(share, gap / max(1.0, float(np.abs(expected).max())))
    return worst, share


def speeds(graphs: Sequence[Graph], rows: np.ndarray, batch: int = BATCH) -> list[tuple[float, float]]:
    """Of each: milliseconds for one image, images per second in batches; the best of rounds in which they take turns.

    In turns, so that whatever else the machine does slows all of them alike.
    """
    one, many = rows[:1], rows[np.arange(batch) % len(rows)]
    best = [[float("inf"), float("inf")] for _ in graphs]
    for number in range(ROUNDS + 1):
        for graph, times in zip(graphs, best, strict=True):
            for place, given in enumerate((one, many)):
                began = time.perf_counter()
                graph(given)
                if number:  # the first call of a graph prepares it
                    times[place] = min(times[place], time.perf_counter() - began)
    return [(1000 * single, len(many) / together) for single, together in best]
