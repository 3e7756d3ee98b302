"""`sweep.html`: the table of a sweep, a curve per numeric field, and the runs behind them."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from patchloom.engine.display import duration
from patchloom.report.charts import LINE_COLORS, Series, line_chart
from patchloom.report.page import write_page
from patchloom.training.sweeps.grid import SHARE, in_words, short_names, value_text
from patchloom.training.sweeps.record import RunResult
from patchloom.training.sweeps.table import SettingRow, Sweep

WIDE = 8  # times the smallest value from which on an axis is logarithmic


def write_sweep_page(found: Sweep) -> None:
    """Write the page."""
    columns, rows = found.table()
    sets = list(found.rows[0].runs)
    done = [run for run in found.runs.values() if run.score is not None]
    failed = [run for run in found.runs.values() if run.failed]
    facts = [
        ("data", ", ".join(sets)),
        ("settings", str(len(found.rows))),
        ("runs", f"{len(done)} of {len(found.runs)} finished" + (f", {len(failed)} failed" if failed else "")),
        ("time", duration(sum(run.seconds for run in found.runs.values()))),
    ]
    write_page(
        found.page,
        "sweep.html.j2",
        title=f"Sweep over {', '.join(short_names(list(found.rows[0].setting)).values()) or 'seeds'}",
        best=_best(found),
        metric=found.metric or "score",
        facts=facts,
        columns=[(name.removeprefix("#"), name.startswith("#")) for name in columns],
        rows=[(row, of.is_best) for row, of in zip(rows, found.rows, strict=True)],
        best_of_sets=found.best_of_sets_in_words,
        curves=curves(found),
        failed=[(run.data, in_words(run.setting), run.failed) for run in failed],
        runs=[(run.data, in_words(run.setting), name, *_told(run)) for name, run in found.runs.items()],
        notes=found.notes,
    )


def _told(run: RunResult) -> tuple[str, str]:
    """Its score, or what else there is to say; and its time."""
    if run.score is None:
        return ("failed" if run.failed else "no score" if run.metrics else "not done yet"), "–"
    return f"{run.score:.4g}", duration(run.seconds)


def _best(found: Sweep) -> tuple[str, str] | None:
    """The score of the chosen setting; what it is, how far seeds lie apart, and how it was tested."""
    best = found.best
    if best is None or best.mean is None:
        return None
    told = [in_words(best.setting)]
    if found.ties:
        tied = [in_words(row.setting) for row in found.rows if row.is_best]
        told = [f"{found.ties} settings tie, so this sweep does not choose between them: " + "; ".join(tied)]
    told += [f"± {best.spread.std:.2f} over {best.spread.runs} seeds"] if best.spread else []
    told += [f"{best.test_mean:.2f} % on test images, looked at once"] if best.test_mean is not None else []
    return f"{best.mean:.2f}", " · ".join(told)


def curves(found: Sweep) -> list[tuple[str, Markup, str]]:
    """(title, chart, what its lines are) of each field with two or more numbers."""
    made = []
    keys = list(found.rows[0].setting) if found.rows else []
    for key in keys:
        values = list(dict.fromkeys(row.setting[key] for row in found.rows))
        if len(values) < 2 or not all(isinstance(value, int | float) for value in values):
            continue
        lines, told = _lines(found, key, keys)
        if not any(line.points for line in lines):
            continue
        factor = 100 if key == SHARE else 1
        log = min(values) > 0 and max(values) >= WIDE * min(values)
        scaled = [Series(line.name, [(x * factor, y) for x, y in line.points], line.color) for line in lines]
        label = "% of the training images of each class" if key == SHARE else key
        title = f"{found.metric or 'score'} against {'the share of the training set' if key == SHARE else key}"
        made.append((title, line_chart(scaled, x_label=label, log=log), told))
    return made


def _lines(found: Sweep, key: str, keys: Sequence[str]) -> tuple[list[Series], str]:
    """A line per data set, or per combination of the other fields, or the best of these where they are many."""
    others = [other for other in keys if other != key]
    groups: dict[tuple[Any, ...], list[SettingRow]] = {}
    for row in found.rows:
        groups.setdefault(tuple(row.setting[other] for other in others), []).append(row)
    if len(groups) == 1:
        sets = list(found.rows[0].runs)
        lines = [
            Series(Path(data).name or data, _points(key, [(row, row.of_set(data)) for row in found.rows]), number + 1)
            for number, data in enumerate(sets[: LINE_COLORS - 1])
        ]
        mean = Series("mean", _points(key, [(row, row.mean) for row in found.rows]), 0)
        return ([mean, *lines], "The mean over data sets, and each of them.") if len(sets) > 1 else ([mean], "")
    if len(groups) <= LINE_COLORS:
        names = short_names(others)
        return [
            Series(
                ", ".join(f"{names[o]}={value_text(v)}" for o, v in zip(others, at, strict=True)),
                _points(key, [(row, row.mean) for row in rows]),
                number,
            )
            for number, (at, rows) in enumerate(groups.items())
        ], "One line per combination of the other fields; the mean over data sets."
    best = [max(filter(None, (row.mean for row in rows)), default=math.nan) for rows in _by_value(found, key).values()]
    points = list(zip(_by_value(found, key), best, strict=True))
    return [Series("best of the other fields", sorted(points), 0)], "At each value, the best of the other fields."


def _by_value(found: Sweep, key: str) -> dict[float, list[SettingRow]]:
    rows: dict[float, list[SettingRow]] = {}
    for row in found.rows:
        rows.setdefault(row.setting[key], []).append(row)
    return rows


def _points(key: str, rows: Sequence[tuple[SettingRow, float | None]]) -> list[tuple[float, float]]:
    return sorted((row.setting[key], value) for row, value in rows if value is not None)
