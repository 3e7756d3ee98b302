"""The results of a sweep: one row per setting, averaged over seeds and datasets, and the best setting.

The score of a dataset is the mean over seeds, that of a setting the mean over datasets, as in VTAB and the papers. A
setting with a failed run has no mean and is never the best.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchloom.report.notebook import html_card
from patchloom.tasks.classification.seeds import SeedSpread, spread
from patchloom.training.sweeps.grid import Setting, drop_seed, in_words, short_names, value_text
from patchloom.training.sweeps.record import RunResult
from patchloom_runtime.printable import printable


@dataclass(frozen=True)
class SettingRow:
    """One setting: its runs by dataset, the seeds in their order."""

    setting: Setting
    runs: Mapping[str, Sequence[RunResult]]
    is_best: bool = False  # more than one may be

    def of_set(self, data: str) -> float | None:
        """Mean over seeds on the val images of a dataset."""
        return _mean([run.score for run in self.runs.get(data, ())])

    @property
    def mean(self) -> float | None:
        """Mean over datasets."""
        return _mean([self.of_set(data) for data in self.runs])

    @property
    def spread(self) -> SeedSpread | None:
        """Over seeds, of the mean over datasets; None with one seed."""
        by_seed = [_mean([run.score for run in runs]) for runs in zip(*self.runs.values(), strict=False)]
        values = [value for value in by_seed if value is not None]
        return spread("score", values) if len(values) > 1 and self.mean is not None else None

    def test_of_set(self, data: str) -> float | None:
        """Mean over seeds on the test images, where they were looked at."""
        return _mean([run.test.get("top1") for run in self.runs.get(data, ())])

    @property
    def test_mean(self) -> float | None:
        """Mean over datasets of the same."""
        return _mean([self.test_of_set(data) for data in self.runs])

    @property
    def failed(self) -> list[RunResult]:
        """Those of its runs that failed."""
        return [run for runs in self.runs.values() for run in runs if run.failed]


@dataclass(frozen=True)
class Sweep:
    """Rows of settings, the best first known by `best`; `folder` holds the runs, sweep.json and sweep.html."""

    folder: Path
    rows: list[SettingRow]
    runs: dict[str, RunResult]  # folder below `folder` → how it went
    metric: str
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # run → about how long it takes; of a dry run

    def __iter__(self) -> Iterator[SettingRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def best(self) -> SettingRow | None:
        """The setting with the best mean on held-out images; of equals the first."""
        return next((row for row in self.rows if row.is_best), None)

    @property
    def ties(self) -> int:
        """How many settings share the best mean, where more than one does; otherwise 0."""
        best = sum(row.is_best for row in self.rows)
        return best if best > 1 else 0

    @property
    def best_of_sets(self) -> dict[str, SettingRow]:
        """Data set → its own best setting, where there are several sets."""
        sets = list(self.rows[0].runs) if self.rows else []
        scored = {data: [row for row in self.rows if row.of_set(data) is not None] for data in sets}
        better = min if any(run.lower_is_better for run in self.runs.values()) else max
        return {
            data: better(rows, key=lambda row, of=data: row.of_set(of) or 0.0)  # type: ignore[misc]
            for data, rows in scored.items()
            if rows and len(sets) > 1
        }

    @property
    def best_of_sets_in_words(self) -> list[tuple[str, str]]:
        """(dataset, its best setting) where there are several sets; where settings tie, how many do."""
        pairs = []
        for data, best in self.best_of_sets.items():
            ties = sum(_ties(row.of_set(data), best.of_set(data) or 0.0) for row in self.rows)
            pairs.append((data, in_words(best.setting) if ties == 1 else f"{ties} settings tie"))
        return pairs

    @property
    def page(self) -> Path:
        """Where its page is."""
        return self.folder / "sweep.html"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Columns, '#' before those of numbers, and a row per setting: the one table that is printed and shown."""
        sets = list(self.rows[0].runs) if self.rows else []
        names = short_names(list(self.rows[0].setting) if self.rows else [])
        seeds = max((len(runs) for row in self.rows for runs in row.runs.values()), default=1)
        tested = any(row.test_mean is not None for row in self.rows)
        several = len(sets) > 1
        columns = [*(f"#{name}" for name in names.values()), *(f"#{_named(data, self)}" for data in sets)]
        columns += ["#mean"] * several + ["#std"] * (seeds > 1)
        columns += [f"#test {_named(data, self)}" for data in sets] * tested + ["#test mean"] * (tested and several)
        scores = [run.score for run in self.runs.values() if run.score is not None]
        form = ".2f" if any(abs(score) >= 1 for score in scores) else ".3g"  # percent, or a loss
        rows = []
        for row in self.rows:
            numbers = [row.of_set(data) for data in sets] + [row.mean] * several
            numbers += [row.spread.std if row.spread else None] * (seeds > 1)
            numbers += [row.test_of_set(data) for data in sets] * tested + [row.test_mean] * (tested and several)
            cells = [*map(value_text, row.setting.values()), *(_number(number, form) for number in numbers)]
            rank = ["tied best" if self.ties else "best"] * row.is_best
            rows.append([*cells, ", ".join(rank + [f"{len(row.failed)} failed"] * bool(row.failed))])
        return [*columns, ""], rows

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "folder": str(self.folder),
            "metric": self.metric,
            "rows": [_row_dict(row) for row in self.rows],
            "best": self.best.setting if self.best else None,
            "ties": [row.setting for row in self.rows if row.is_best] if self.ties else [],
            "best_of_sets": {data: row.setting for data, row in self.best_of_sets.items()},
            "runs": {
                name: {"data": run.data, "setting": run.setting, "score": run.score, "failed": run.failed or None}
                | {"metrics": dict(run.metrics), "test": dict(run.test), "seconds": run.seconds}
                for name, run in self.runs.items()
            },
            "notes": self.notes,
        } | ({"seconds": {name: round(s, 1) for name, s in self.seconds.items()}} if self.seconds else {})

    def __repr__(self) -> str:
        tied = f", tied with {self.ties - 1} more" if self.ties else ""
        best = f"; best {self.best.setting} {self.best.mean:.2f}{tied}" if self.best else ""
        return f"Sweep({printable(self.folder)}: {len(self.rows)} settings, {len(self.runs)} runs{printable(best)})"

    def _repr_html_(self) -> str:
        columns, rows = self.table()
        titles = [column.removeprefix("#") for column in columns]
        return html_card(str(self.folder), detail=f"{self.metric} on val", columns=titles, rows=rows, notes=self.notes)


def rows_of(settings: Sequence[Setting], runs: Sequence[RunResult]) -> list[SettingRow]:
    """Return one row per setting, with its seeds joined and the best marked."""
    joined = list({str(drop_seed(setting)): drop_seed(setting) for setting in settings}.values())
    sets = list(dict.fromkeys(run.data for run in runs))
    rows = [
        SettingRow(one, {data: [r for r in runs if r.data == data and drop_seed(r.setting) == one] for data in sets})
        for one in joined
    ]
    scored = [row for row in rows if row.mean is not None]
    if not scored:
        return rows
    lower = any(run.lower_is_better for run in runs)
    best = (min if lower else max)(row.mean or 0.0 for row in scored)
    return [SettingRow(row.setting, row.runs, _ties(row.mean, best)) for row in rows]


def metric_of(runs: Sequence[RunResult]) -> str:
    """Return the metric that selects the best; several if the datasets have different ones."""
    return " and ".join(dict.fromkeys(run.metric for run in runs if run.metric))


def _named(data: str, sweep: Sweep) -> str:
    """Return the column title: the metric for one dataset, else the name of the dataset."""
    sets = list(sweep.rows[0].runs)
    return sweep.metric or "score" if len(sets) == 1 else Path(data).name or data


def _row_dict(row: SettingRow) -> dict[str, Any]:
    return {
        "setting": row.setting,
        "val": {data: row.of_set(data) for data in row.runs},
        "mean": row.mean,
        "std": row.spread.std if row.spread else None,
        "failed": [{"data": run.data, "setting": run.setting, "why": run.failed} for run in row.failed],
        "best": row.is_best,
        "test": {data: row.test_of_set(data) for data in row.runs} if row.test_mean is not None else None,
        "test_mean": row.test_mean,
    }


def _ties(score: float | None, best: float) -> bool:
    """Return whether a score is the best, up to rounding."""
    return score is not None and math.isclose(score, best, rel_tol=1e-9, abs_tol=1e-12)


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean, or None if a value is missing."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
