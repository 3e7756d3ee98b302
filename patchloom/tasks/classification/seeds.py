"""Several runs of the same thing: how far numbers lie apart by chance alone (D3-5; thesis 6.3.4, figures 6.7 to 6.10).

What a run ends with is its last evaluation, not its best: the best would select, as choosing a seed does.

The name of a spread is the name of the number; its values: mean, std (n − 1), min, max and how many runs.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from patchloom.runs.metrics import damaged_lines, read_metrics
from patchloom_runtime.errors import CheckpointError, UsageError

Weights = Literal["model", "ema"]
EARLY = (1 / 2, 5 / 6, 29 / 30)  # of a training, where its end is guessed from


@dataclass(frozen=True)
class SeedSpread:
    """One number over several runs."""

    name: str
    mean: float
    std: float
    min: float
    max: float
    runs: int

    def __iter__(self) -> Iterator[tuple[str, float]]:
        for statistic in ("mean", "std", "min", "max", "runs"):
            yield f"{self.name}_{statistic}", float(getattr(self, statistic))


@dataclass(frozen=True)
class SeedCloud:
    """A number of each run on two data sets, as the val-versus-V2 picture shows it (thesis figure 6.7)."""

    runs: tuple[str, ...]
    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def correlation(self) -> float:
        """Pearson's r; NaN where one of the two never changes."""
        return correlation(self.first, self.second)

    @property
    def line(self) -> tuple[float, float] | None:
        """Slope and height at 0 of the straight line with the least squares (thesis figure 6.11), from three runs on.

        None where the first number never changes.
        """
        if len(self.runs) < 3 or np.std(self.first) == 0:
            return None
        slope, height = np.polyfit(self.first, self.second, 1)
        return float(slope), float(height)


@dataclass(frozen=True)
class EarlyEpochs:
    """Each run's number at an epoch beside that of its last evaluation (thesis figure 6.10)."""

    epoch: int
    then: tuple[float, ...]
    last: tuple[float, ...]

    @property
    def correlation(self) -> float:
        """Pearson's r: how much was known by then of how a run ends."""
        return correlation(self.then, self.last)


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Pearson's r; NaN where one of the two never changes."""
    moved = np.std(first) > 0 and np.std(second) > 0
    return float(np.corrcoef(first, second)[0, 1]) if moved else float("nan")


def spread(name: str, values: Sequence[float]) -> SeedSpread:
    """Mean, deviation and extremes of one number."""
    if len(values) < 2:
        raise UsageError(f"A spread needs at least two runs, given {len(values)}")
    of = np.array(values, dtype=np.float64)
    return SeedSpread(name, float(of.mean()), float(of.std(ddof=1)), float(of.min()), float(of.max()), len(of))


def spreads(runs: Mapping[str, Mapping[str, float]]) -> list[SeedSpread]:
    """Run → its numbers; the spread of each number that all runs have, in the order of the first."""
    if len(runs) < 2:
        raise UsageError(f"A spread needs at least two runs, given {len(runs)}")
    first, *others = runs.values()
    shared = [name for name in first if all(name in other for other in others)]
    return [spread(name, [numbers[name] for numbers in runs.values()]) for name in shared]


def cloud(first: Mapping[str, float], second: Mapping[str, float]) -> SeedCloud:
    """Run → its number on one data set, and on another; the runs that have both."""
    runs = tuple(run for run in first if run in second)
    return SeedCloud(runs, tuple(first[run] for run in runs), tuple(second[run] for run in runs))


def epoch_values(folder: Path, name: str = "top1", weights: Weights = "model") -> dict[int, float]:
    """Epoch → the number, at each evaluation in the run's metrics.jsonl."""
    return {
        record["epoch"]: record["values"][name]
        for record in evaluations(folder, weights)
        if record["values"].get(name) is not None
    }


def final_values(folder: Path, weights: Weights = "model") -> dict[str, float]:
    """The numbers of the run's last evaluation."""
    records = evaluations(folder, weights)
    return {name: value for name, value in records[-1]["values"].items() if value is not None} if records else {}


def spread_by_epoch(folders: Sequence[Path], name: str = "top1", weights: Weights = "model") -> dict[int, SeedSpread]:
    """Epoch → spread over the runs, at the epochs that all of them evaluated (thesis figure 6.9)."""
    runs = [epoch_values(folder, name, weights) for folder in folders]
    shared = [epoch for epoch in runs[0] if all(epoch in run for run in runs[1:])] if runs else []
    return {epoch: spread(name, [run[epoch] for run in runs]) for epoch in shared}


def early_and_last(folders: Sequence[Path], name: str = "top1", weights: Weights = "model") -> list[EarlyEpochs]:
    """At about a half, five sixths and all but a thirtieth of the epochs (150, 250 and 290 of 300)."""
    runs = [epoch_values(folder, name, weights) for folder in folders]
    shared = sorted(epoch for epoch in runs[0] if all(epoch in run for run in runs[1:])) if runs else []
    if len(shared) < 2:
        return []
    *before, last = shared
    wanted = [min(before, key=lambda epoch: abs(epoch - share * last)) for share in EARLY]
    return [
        EarlyEpochs(epoch, tuple(run[epoch] for run in runs), tuple(run[last] for run in runs))
        for epoch in dict.fromkeys(wanted)
    ]


def evaluations(folder: Path, weights: Weights = "model") -> list[dict[str, Any]]:
    """The evaluation records of a run, oldest first."""
    path = folder / "metrics.jsonl"
    if not os.path.lexists(path):
        raise CheckpointError(f"{path} cannot be read: No such file. Give the folder of a run.")
    damaged, records = damaged_lines(path), read_metrics(path)
    if damaged:
        raise CheckpointError(f"{path} is damaged: line {damaged[0]} is not as it was written.")
    return [r for r in records if r.get("kind") == "evaluation" and r.get("weights") == weights]
