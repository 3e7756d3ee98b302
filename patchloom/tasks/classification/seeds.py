"""Statistics over runs that differ by chance, such as in their seed (D3-5; thesis 6.3.4, figures 6.7 to 6.10).

The final value of a run is its last evaluation, not its best, since the best would be a selection like the choice of a
seed. A spread has the name of its measure; its values are mean, std (n − 1), min, max and the number of runs.
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
EARLY = (1 / 2, 5 / 6, 29 / 30)  # shares of the training at which the final value is predicted


@dataclass(frozen=True)
class SeedSpread:
    """Statistics of one measure over several runs."""

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
    """A measure of each run on two datasets, such as val and V2 (thesis figure 6.7)."""

    runs: tuple[str, ...]
    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def correlation(self) -> float:
        """Pearson's r; NaN if one of the two is constant."""
        return correlation(self.first, self.second)

    @property
    def line(self) -> tuple[float, float] | None:
        """Slope and intercept of the least-squares line (thesis figure 6.11).

        None for fewer than three runs, or if the first value is constant.
        """
        if len(self.runs) < 3 or np.std(self.first) == 0:
            return None
        slope, intercept = np.polyfit(self.first, self.second, 1)
        return float(slope), float(intercept)


@dataclass(frozen=True)
class EarlyEpochs:
    """A measure of each run at an early epoch and at its last evaluation (thesis figure 6.10)."""

    epoch: int
    then: tuple[float, ...]
    last: tuple[float, ...]

    @property
    def correlation(self) -> float:
        """Pearson's r: how well the early value predicts the final one."""
        return correlation(self.then, self.last)


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Pearson's r; NaN if one of the two is constant."""
    varies = np.std(first) > 0 and np.std(second) > 0
    return float(np.corrcoef(first, second)[0, 1]) if varies else float("nan")


def spread(name: str, values: Sequence[float]) -> SeedSpread:
    """Return mean, deviation, minimum and maximum of one measure."""
    if len(values) < 2:
        raise UsageError(f"a spread needs at least two runs, got {len(values)}")
    x = np.array(values, dtype=np.float64)
    return SeedSpread(name, float(x.mean()), float(x.std(ddof=1)), float(x.min()), float(x.max()), len(x))


def spreads(runs: Mapping[str, Mapping[str, float]]) -> list[SeedSpread]:
    """Return the spread of each measure that all runs have, in the order of the first run."""
    if len(runs) < 2:
        raise UsageError(f"a spread needs at least two runs, got {len(runs)}")
    first, *others = runs.values()
    shared = [name for name in first if all(name in other for other in others)]
    return [spread(name, [numbers[name] for numbers in runs.values()]) for name in shared]


def cloud(first: Mapping[str, float], second: Mapping[str, float]) -> SeedCloud:
    """Combine the values of runs on two datasets; runs without both are left out."""
    runs = tuple(run for run in first if run in second)
    return SeedCloud(runs, tuple(first[run] for run in runs), tuple(second[run] for run in runs))


def epoch_values(folder: Path, name: str = "top1", weights: Weights = "model") -> dict[int, float]:
    """Return epoch → value of a measure, for each evaluation in the run's metrics.jsonl."""
    return {
        record["epoch"]: record["values"][name]
        for record in evaluations(folder, weights)
        if record["values"].get(name) is not None
    }


def final_values(folder: Path, weights: Weights = "model") -> dict[str, float]:
    """Return the values of the run's last evaluation."""
    records = evaluations(folder, weights)
    return {name: value for name, value in records[-1]["values"].items() if value is not None} if records else {}


def spread_by_epoch(folders: Sequence[Path]) -> dict[int, SeedSpread]:
    """Return epoch → spread of top-1, for the epochs that all runs evaluated (thesis figure 6.9)."""
    runs = [epoch_values(folder) for folder in folders]
    shared = [epoch for epoch in runs[0] if all(epoch in run for run in runs[1:])] if runs else []
    return {epoch: spread("top1", [run[epoch] for run in runs]) for epoch in shared}


def early_and_last(folders: Sequence[Path]) -> list[EarlyEpochs]:
    """Return top-1 at about 1/2, 5/6 and 29/30 of the epochs (150, 250 and 290 of 300) with the final values."""
    runs = [epoch_values(folder) for folder in folders]
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
    """Return the evaluation records of a run, oldest first."""
    path = folder / "metrics.jsonl"
    if not os.path.lexists(path):
        raise CheckpointError(f"{path} cannot be read: No such file. Pass a run folder.")
    damaged, records = damaged_lines(path), read_metrics(path)
    if damaged:
        raise CheckpointError(f"{path} is damaged: line {damaged[0]} is not as it was written.")
    return [r for r in records if r.get("kind") == "evaluation" and r.get("weights") == weights]
