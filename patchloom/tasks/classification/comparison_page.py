"""Several runs side by side on one page: what differed in their settings, their numbers, and whether one is better."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from patchloom.data.datasets import LabeledImages
from patchloom.data.reading import Reading
from patchloom.data.sources.source import open_data
from patchloom.engine.display import duration
from patchloom.evaluation.classification import ClassificationReport
from patchloom.inference.classifier import load
from patchloom.models.cost import human
from patchloom.recipes.schema import flatten
from patchloom.report.charts import LINE_COLORS, Series, line_chart
from patchloom.report.page import write_page
from patchloom.report.pictures.embeddings import pca_energy_chart
from patchloom.report.run_report import curve, neighbor_count, steps_per_unit, value_text
from patchloom.tasks.classification.comparison_figures import branch_charts, cloud_chart, level_charts, seed_figures
from patchloom.tasks.classification.levels import MEASURES, LevelEvaluations, evaluate_levels
from patchloom.tasks.classification.seeds import cloud
from patchloom.tasks.classification.several_runs import RunEvaluations, evaluate, named
from patchloom.tasks.images.run_contents import LOOKED_AT, RunParts, count_cost, neighbour_score, read_run
from patchloom_runtime.errors import PatchloomError, UsageError, attempted

CLASSES_SHOWN = 20
# Of a recipe's fields, those that name it rather than change what is trained.
_NAMES = ("name", "source")
# Of run.json, what changes what is trained and is no field of a recipe.
_GIVEN = ("data", "level", *(field.name for field in fields(Reading)), "init")


def report_runs(
    runs: Sequence[str], *, data: str | None = None, val: str | None = None, out: Path, **shown: Any
) -> Path:
    """Write the page of two or more runs, on `data` or on what each decided about its val split; return its path.

    With `val` their top-1 on both is drawn, where not each run's own val is meant: published weights kept none. The
    other options, such as `split`, are those of `Shown`.
    """
    parts = {name: read_run(folder) for name, folder in named(runs).items()}
    if len(parts) < 2:
        raise UsageError("Give two or more runs to compare; for one there is its own report")
    notes = [f"{name}: {note}" for name, each in parts.items() for note in each.notes]
    together: RunEvaluations | None = None
    try:
        together = evaluate(runs, data, **shown)
        judged = {name: evaluation.report for name, evaluation in together.evaluations.items()}
    except PatchloomError as error:
        notes.append(f"not compared image by image: {error}")
        judged = {name: each.predictions.report for name, each in parts.items() if each.predictions}
    columns, numbers = _numbers(parts, judged)
    by_number = bool(shown.get("v2"))  # folders 0, 1 …: no classes to find levels of
    leveled = _levels(runs, data, parts, notes) if data and not by_number else None
    seeds = attempted(lambda: seed_figures(together, _short(data)), notes) if together else None
    many = seeds is not None and len(parts) > LINE_COLORS  # one by one they say nothing that their spread does not
    write_page(
        out,
        "compare.html.j2",
        title=" · ".join(parts) if len(parts) <= 4 else f"{len(parts)} runs",
        runs=list(parts),
        settings=_settings(parts),
        columns=columns,
        numbers=numbers,
        comparable=_same_classes(judged),
        pairs=together.comparisons() if together and not many else [],
        tables=_level_tables(leveled) if leveled else [],
        granularity=level_charts(leveled, parts) if leveled else [],
        energy=_energy(runs, data, notes) if data and len(parts) <= LINE_COLORS else None,
        curves=[] if many else _curves(parts),
        seeds=seeds,
        cloud=attempted(lambda: _cloud(together, parts, data, val), notes) if together and data else None,
        branches=branch_charts(parts),
        classes=_classes(judged) if together and not many else [],
        apart=_apart(together) if together and not many else None,
        notes=list(
            dict.fromkeys([*notes, *(f"{name}: {note}" for name, each in parts.items() for note in each.notes)])
        ),
    )
    return out


def _levels(runs: Sequence[str], data: str, parts: dict[str, RunParts], notes: list[str]) -> LevelEvaluations | None:
    """Runs with other classes than one another cannot be compared by their decisions; by their vectors they can.

    So can runs on coarse labels, whose vectors are there to tell finer classes apart.
    """
    coarse = any(each.files.level is not None or not each.files.decides for each in parts.values())
    if len({each.files.labels for each in parts.values()}) == 1 and not coarse:
        return None
    try:
        found = evaluate_levels(runs, data)
    except PatchloomError as error:
        notes.append(f"not judged at the levels of a taxonomy: {error}")
        return None
    notes += found.notes
    return found


def _level_tables(found: LevelEvaluations) -> list[tuple[str, list[str], list[tuple[str, list[tuple[str, bool]]]]]]:
    """Of each measure: its title, a column per run, and rows of (text, is the level it was trained at)."""
    columns = [f"{name} ({run.trained_level or 'no level'})" for name, run in found.runs.items()]
    tables = []
    for measure, title in MEASURES.items():
        rows = [
            (
                f"{level}, {found.levels[level]} classes",
                [(f"{value:.2f}", found.runs[name].trained_level == level) for name, value in of.items()],
            )
            for level, of in found.table(measure).items()
        ]
        tables.append((title, columns, rows))
    return tables


def _energy(runs: Sequence[str], data: str, notes: list[str]) -> Markup | None:
    """Energy of the principal components of each run's vectors of the same images (thesis figure 2.1)."""
    try:
        val = open_data(data).val
        assert isinstance(val, LabeledImages)
        step = max(1, len(val) // LOOKED_AT)
        some = replace(val, rows=val.rows[::step][:LOOKED_AT], labels=val.labels[::step][:LOOKED_AT])
        return pca_energy_chart({name: load(folder).embed(some).vectors for name, folder in named(runs).items()})
    except PatchloomError as error:
        notes.append(f"the spaces of the runs are not compared: {error}")
        return None


def _settings(parts: dict[str, RunParts]) -> list[list[str]]:
    """What was given and is not the same in all runs: its name, then its value in each."""
    fields = {
        name: {key: "–" if (value := getattr(each.record, key)) is None else value for key in _GIVEN if each.record}
        | (flatten(each.files.recipe) if each.files.recipe else {})
        for name, each in parts.items()
    }
    keys = dict.fromkeys(key for values in fields.values() for key in values if key not in _NAMES)
    rows = [[key, *(value_text(fields[name].get(key, "–")) for name in parts)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _numbers(
    parts: dict[str, RunParts], judged: dict[str, ClassificationReport]
) -> tuple[list[str], list[tuple[str, list[tuple[str, bool]]]]]:
    """Names of the columns, and a row of (text, is the best) a run."""
    measures = {"top-1, %": ("top1", max), "top-5, %": ("top5", max), "loss": ("loss", min)}
    measures |= {"calibration error, %": ("calibration_error", min)}
    values = {name: dict(report) for name, report in judged.items()}
    for name, each in parts.items():
        if by_neighbours := neighbour_score(each, each.metrics):
            neighbours, score = by_neighbours
            measures[f"top-1 of the {neighbours} nearest, %"] = (f"knn{neighbours}_top1", max)
            values[name] = {f"knn{neighbours}_top1": score}
    present = {title: of for title, of in measures.items() if any(of[0] in row for row in values.values())}
    rows = []
    for name, each in parts.items():
        cells = []
        for key, better in present.values():
            own = values.get(name, {}).get(key, math.nan)
            best = better(row[key] for row in values.values() if key in row)
            text = f"{own:.2f}" if math.isfinite(own) else "–"
            if key == "top1" and name in judged:
                text += " ({:.1f} … {:.1f})".format(*judged[name].top_interval())
            cells.append((text, own == best and len(values) > 1 and _same_classes(judged)))
        cost, record = count_cost(each), each.record
        cells += [
            (f"{len(judged[name].index):,}" if name in judged else "–", False),
            (human(cost.parameters) if cost else "–", False),
            (human(cost.multiply_adds) if cost else "–", False),
            (str(record.epochs) if record else "–", False),
            (duration(record.seconds) if record else "–", False),
        ]
        rows.append((name, cells))
    return [*present, "images", "parameters", "multiply-adds", "epochs", "time"], rows


def _same_classes(judged: dict[str, ClassificationReport]) -> bool:
    return len({frozenset(report.classes) for report in judged.values()}) <= 1


def _curves(parts: dict[str, RunParts]) -> list[tuple[str, Markup]]:
    """Validation top-1, by neighbours too, and training loss; where a run averages its weights, the average's top-1."""
    charts: dict[str, list[Series]] = {}
    for i, (name, each) in enumerate(parts.items()):
        records = each.metrics
        steps = steps_per_unit(records)[1]
        neighbours = neighbor_count(records)
        judged = {"Validation top-1, %": "top1", f"Top-1 of the {neighbours} nearest, %": f"knn{neighbours}_top1"}
        of_run = {
            title: curve(records, steps, "evaluation", "ema", key) or curve(records, steps, "evaluation", "model", key)
            for title, key in judged.items()
        }
        of_run["Training loss"] = curve(records, steps, "train", "model", "loss")
        for title, points in of_run.items():
            charts.setdefault(title, []).extend([Series(name, points, i % LINE_COLORS)] if points else [])
    return [(title, line_chart(lines, x_label="epoch")) for title, lines in charts.items() if lines]


def _classes(judged: dict[str, ClassificationReport]) -> list[list[str]]:
    """The classes whose accuracy differs most between runs, and that accuracy in each."""
    accuracy = np.stack([report.class_accuracy for report in judged.values()])  # (runs, classes)
    spread = np.nan_to_num(accuracy.max(axis=0) - accuracy.min(axis=0))
    order = np.argsort(-spread, kind="stable")[:CLASSES_SHOWN]
    names = next(iter(judged.values())).classes
    return [[names[i], *(f"{value:.1f}" for value in accuracy[:, i])] for i in order if spread[i] > 0]


def _cloud(
    together: RunEvaluations, parts: dict[str, RunParts], data: str, val: str | None
) -> tuple[Markup, str] | None:
    """Top-1 on `val`, or else on the val split each run was trained with, and on `data`."""
    if val is None:
        return cloud_chart(together.cloud(), parts, "its val split", _short(data) or data)
    first = evaluate([str(folder) for folder in together.folders.values()], val)
    own = {name: of.report.top(1) for name, of in zip(together.folders, first.evaluations.values(), strict=True)}
    here = {name: of.report.top(1) for name, of in together.evaluations.items()}
    return cloud_chart(cloud(own, here), parts, _short(val) or val, _short(data) or data)


def _short(data: str | None) -> str | None:
    """What data are called beside an axis."""
    return data and (Path(data).name or data)


def _apart(together: RunEvaluations) -> tuple[list[str], list[list[str]]]:
    table = together.disagreement()
    rows = [
        [name, *(f"{100 * share:.1f}" for share in shares)]
        for name, shares in zip(table.names, table.shares, strict=True)
    ]
    return list(table.names), rows
