"""The page `sweep.html`: the results table of a sweep, one chart per numeric field, and a list of its runs."""

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

WIDE = 8  # ratio of the largest to the smallest value from which the x axis is logarithmic
_ABOUT = (
    "Scores are {metric} on val images, which are not trained on, averaged over seeds; “mean” is over datasets, “std” "
    "over seeds. A setting with a failed run has no mean. With --test the best setting, and no other, is evaluated on "
    "the test images."
)


def write_sweep_page(sweep: Sweep) -> None:
    """Write `sweep.html` into the folder of the sweep."""
    columns, rows = sweep.table()
    sets = list(sweep.rows[0].runs)
    done = [run for run in sweep.runs.values() if run.score is not None]
    failed = [run for run in sweep.runs.values() if run.failed]
    facts = [
        ("data", ", ".join(sets)),
        ("settings", str(len(sweep.rows))),
        ("runs", f"{len(done)} of {len(sweep.runs)} finished" + (f", {len(failed)} failed" if failed else "")),
        ("time", duration(sum(run.seconds for run in sweep.runs.values()))),
    ]
    write_page(
        sweep.page,
        "sweep.html.j2",
        title=f"Sweep over {', '.join(short_names(list(sweep.rows[0].setting)).values()) or 'seeds'}",
        best=_best(sweep),
        best_title=f"best by {sweep.metric or 'score'} on val",
        table_title="Settings",
        about=_ABOUT.format(metric=sweep.metric or "score"),
        metric=sweep.metric or "score",
        facts=facts,
        columns=[(name.removeprefix("#"), name.startswith("#")) for name in columns],
        rows=[(row, of.is_best) for row, of in zip(rows, sweep.rows, strict=True)],
        best_of_sets=sweep.best_of_sets_in_words,
        curves=curves(sweep),
        failed=[(run.data, in_words(run.setting), run.failed) for run in failed],
        runs=[(run.data, in_words(run.setting), name, *score_and_time(run)) for name, run in sweep.runs.items()],
        notes=sweep.notes,
    )


def score_and_time(run: RunResult) -> tuple[str, str]:
    """Return the score of a run, or its status if it has none, and the training time."""
    if run.score is None:
        return ("failed" if run.failed else "no score" if run.metrics else "not done yet"), "–"
    return f"{run.score:.4g}", duration(run.seconds)


def _best(sweep: Sweep) -> tuple[str, str] | None:
    """Return the score of the best setting, and a line with its values, spread over seeds and test score."""
    best = sweep.best
    if best is None or best.mean is None:
        return None
    details = [in_words(best.setting)]
    if sweep.ties:
        tied = [in_words(row.setting) for row in sweep.rows if row.is_best]
        details = [f"{sweep.ties} settings tie, so this sweep does not choose between them: " + "; ".join(tied)]
    details += [f"± {best.spread.std:.2f} over {best.spread.runs} seeds"] if best.spread else []
    details += [f"{best.test_mean:.2f} % on the test images, evaluated once"] if best.test_mean is not None else []
    return f"{best.mean:.2f}", " · ".join(details)


def curves(sweep: Sweep) -> list[tuple[str, Markup, str]]:
    """Return (title, chart, caption) for each field with two or more numeric values."""
    made = []
    keys = list(sweep.rows[0].setting) if sweep.rows else []
    for key in keys:
        values = list(dict.fromkeys(row.setting[key] for row in sweep.rows))
        if len(values) < 2 or not all(isinstance(value, int | float) for value in values):
            continue
        lines, caption = _lines(sweep, key, keys)
        if not any(line.points for line in lines):
            continue
        factor = 100 if key == SHARE else 1
        log = min(values) > 0 and max(values) >= WIDE * min(values)
        scaled = [Series(line.name, [(x * factor, y) for x, y in line.points], line.color) for line in lines]
        label = "% of the training images of each class" if key == SHARE else key
        title = f"{sweep.metric or 'score'} against {'the share of the training set' if key == SHARE else key}"
        made.append((title, line_chart(scaled, x_label=label, y_label=sweep.metric or "score", log=log), caption))
    return made


def _lines(sweep: Sweep, key: str, keys: Sequence[str]) -> tuple[list[Series], str]:
    """Return the lines of a chart and its caption.

    There is one line per dataset if no other field varies, else one line per combination of the other fields. If there
    are more combinations than colors, a single line shows the best of them at each value.
    """
    others = [other for other in keys if other != key]
    groups: dict[tuple[Any, ...], list[SettingRow]] = {}
    for row in sweep.rows:
        groups.setdefault(tuple(row.setting[other] for other in others), []).append(row)
    if len(groups) == 1:
        sets = list(sweep.rows[0].runs)
        lines = [
            Series(Path(data).name or data, _points(key, [(row, row.of_set(data)) for row in sweep.rows]), number + 1)
            for number, data in enumerate(sets[: LINE_COLORS - 1])
        ]
        mean = Series("mean", _points(key, [(row, row.mean) for row in sweep.rows]), 0)
        return ([mean, *lines], "The mean over datasets, and one line per dataset.") if len(sets) > 1 else ([mean], "")
    if len(groups) <= LINE_COLORS:
        names = short_names(others)
        return [
            Series(
                ", ".join(f"{names[o]}={value_text(v)}" for o, v in zip(others, at, strict=True)),
                _points(key, [(row, row.mean) for row in rows]),
                number,
            )
            for number, (at, rows) in enumerate(groups.items())
        ], "One line per combination of the other fields: the mean over datasets."
    best = [max(filter(None, (row.mean for row in rows)), default=math.nan) for rows in _by_value(sweep, key).values()]
    points = list(zip(_by_value(sweep, key), best, strict=True))
    return [
        Series("best of the other fields", sorted(points), 0)
    ], "The best score at each value over all combinations of the other fields."


def _by_value(sweep: Sweep, key: str) -> dict[float, list[SettingRow]]:
    rows: dict[float, list[SettingRow]] = {}
    for row in sweep.rows:
        rows.setdefault(row.setting[key], []).append(row)
    return rows


def _points(key: str, rows: Sequence[tuple[SettingRow, float | None]]) -> list[tuple[float, float]]:
    return sorted((row.setting[key], value) for row, value in rows if value is not None)
