"""The page that compares several runs: differing settings, results, and significance."""

import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from patchloom.data.datasets import LabeledImages
from patchloom.data.reading_options import Reading
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
from patchloom.tasks.classification.comparison_figures import (
    branch_charts,
    cloud_chart,
    cost_charts,
    level_charts,
    seed_figures,
)
from patchloom.tasks.classification.levels import MEASURES, LevelEvaluations, evaluate_levels
from patchloom.tasks.classification.seeds import cloud
from patchloom.tasks.classification.several_runs import RunEvaluations, evaluate, runs_by_name
from patchloom.tasks.images.run_contents import MAX_IMAGES, RunContents, count_cost, neighbor_score, read_run
from patchloom_runtime.errors import PatchloomError, UsageError, attempted

MAX_CLASSES = 20
# Recipe fields that name a recipe rather than change the training.
_NAMES = ("name", "source")
# Fields of run.json that change the training and are not in the recipe.
_SETTINGS = ("data", "level", *(field.name for field in fields(Reading)), "init")
_MEASURES = {  # column → (measure, which value is best)
    "top-1, %": ("top1", max),
    "top-5, %": ("top5", max),
    "mean class accuracy, %": ("mean_class_accuracy", max),
    "macro F1, %": ("macro_f1", max),
    "loss": ("loss", min),
    "calibration error, %": ("calibration_error", min),
}

Cells = list[tuple[str, bool]]  # text, whether it is marked


def report_runs(
    runs: Sequence[str], *, data: str | None = None, val: str | None = None, out: Path, **options: Any
) -> Path:
    """Write the page of two or more runs, evaluated on `data` or on their stored val predictions; return its path.

    With `val`, their top-1 on both datasets is compared; by default the first one is each run's own val split, which
    published weights do not have. The other options, such as `split`, are those of `evaluate`.
    """
    contents = {name: read_run(folder) for name, folder in runs_by_name(runs).items()}
    if len(contents) < 2:
        raise UsageError("pass two or more runs to compare; for one run, use its own report")
    notes = [f"{name}: {note}" for name, each in contents.items() for note in each.notes]
    evaluations: RunEvaluations | None = None
    try:
        evaluations = evaluate(runs, data, **options)
        reports = {name: evaluation.report for name, evaluation in evaluations.evaluations.items()}
    except PatchloomError as error:
        notes.append(f"not compared image by image: {error}")
        reports = {name: each.predictions.report for name, each in contents.items() if each.predictions}
    columns, numbers = _numbers(contents, reports)
    numbered = bool(options.get("v2"))  # folders 0, 1 … have no names to find levels of
    leveled = _levels(runs, data, contents, notes) if data and not numbered else None
    seeds = attempted(lambda: seed_figures(evaluations, _short(data)), notes) if evaluations else None
    by_run = evaluations if not (seeds and len(contents) > LINE_COLORS) else None  # for many seeds, the spread suffices
    write_page(
        out,
        "compare.html.j2",
        title=" · ".join(contents) if len(contents) <= 4 else f"{len(contents)} runs",
        runs=list(contents),
        settings=_different_settings(contents),
        columns=columns,
        numbers=numbers,
        comparable=_same_classes(reports),
        pairs=by_run.comparisons() if by_run else [],
        tables=_level_tables(leveled) if leveled else [],
        granularity=level_charts(leveled, contents) if leveled else [],
        energy=_energy(runs, data, notes) if data and len(contents) <= LINE_COLORS else None,
        curves=[] if seeds and len(contents) > LINE_COLORS else _curves(contents),
        seeds=seeds,
        cloud=attempted(lambda: _cloud(evaluations, contents, data, val), notes) if evaluations and data else None,
        costs=cost_charts(contents, {name: report.top(1) for name, report in reports.items()})
        if _same_classes(reports)
        else [],
        branches=branch_charts(contents),
        classes=_classes(reports) if by_run else [],
        apart=_disagreement(by_run) if by_run else None,
        notes=list(
            dict.fromkeys([*notes, *(f"{name}: {note}" for name, each in contents.items() for note in each.notes)])
        ),
    )
    return out


def _levels(
    runs: Sequence[str], data: str, contents: dict[str, RunContents], notes: list[str]
) -> LevelEvaluations | None:
    """Evaluate runs at the levels of a taxonomy if they have different classes or were trained on coarse labels.

    The predictions of such runs cannot be compared, but their vectors can.
    """
    coarse = any(each.files.level is not None or not each.files.decides for each in contents.values())
    if len({each.files.labels for each in contents.values()}) == 1 and not coarse:
        return None
    try:
        evaluations = evaluate_levels(runs, data)
    except PatchloomError as error:
        notes.append(f"not evaluated at the levels of a taxonomy: {error}")
        return None
    notes += evaluations.notes
    return evaluations


def _level_tables(evaluations: LevelEvaluations) -> list[tuple[str, list[str], list[tuple[str, Cells]]]]:
    """Return a table per measure: title, one column per run, one row per level; the level of training is marked."""
    columns = [f"{name} ({run.trained_level or 'no level'})" for name, run in evaluations.runs.items()]
    tables = []
    for measure, title in MEASURES.items():
        rows = [
            (
                f"{level}, {evaluations.levels[level]} classes",
                [(f"{value:.2f}", evaluations.runs[name].trained_level == level) for name, value in values.items()],
            )
            for level, values in evaluations.table(measure).items()
        ]
        tables.append((title, columns, rows))
    return tables


def _energy(runs: Sequence[str], data: str, notes: list[str]) -> Markup | None:
    """Draw the energy of the principal components of each run's vectors of the same images (thesis figure 2.1)."""
    try:
        val = open_data(data).val
        assert isinstance(val, LabeledImages)
        step = max(1, len(val) // MAX_IMAGES)
        some = val.subset(np.arange(len(val))[::step][:MAX_IMAGES])
        vectors = {name: load(folder).embed(some).vectors for name, folder in runs_by_name(runs).items()}
        return pca_energy_chart(vectors)
    except PatchloomError as error:
        notes.append(f"the embeddings of the runs are not compared: {error}")
        return None


def _different_settings(contents: dict[str, RunContents]) -> list[list[str]]:
    """Return the settings that differ between the runs: name, then the value of each run."""
    settings = {
        name: {key: "–" if (value := getattr(each.record, key)) is None else value for key in _SETTINGS if each.record}
        | (flatten(each.files.recipe) if each.files.recipe else {})
        for name, each in contents.items()
    }
    keys = dict.fromkeys(key for values in settings.values() for key in values if key not in _NAMES)
    rows = [[key, *(value_text(settings[name].get(key, "–")) for name in contents)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _numbers(
    contents: dict[str, RunContents], reports: dict[str, ClassificationReport]
) -> tuple[list[str], list[tuple[str, Cells]]]:
    """Return the column names and one row per run; the best value of a column is marked."""
    measures = dict(_MEASURES)
    values = {name: dict(report) for name, report in reports.items()}
    for name, each in contents.items():
        if by_neighbors := neighbor_score(each, each.metrics):
            k, score = by_neighbors
            measures[f"top-1 of the {k} nearest, %"] = (f"knn{k}_top1", max)
            values[name] = {f"knn{k}_top1": score}
    present = {title: of for title, of in measures.items() if any(of[0] in row for row in values.values())}
    rows = []
    for name, each in contents.items():
        cells = []
        for key, better in present.values():
            own = values.get(name, {}).get(key, math.nan)
            best = better(row[key] for row in values.values() if key in row)
            text = f"{own:.2f}" if math.isfinite(own) else "–"
            if key == "top1" and name in reports:
                text += " ({:.1f} … {:.1f})".format(*reports[name].top_interval())
            cells.append((text, own == best and len(values) > 1 and _same_classes(reports)))
        cost, record = count_cost(each), each.record
        cells += [
            (f"{len(reports[name].index):,}" if name in reports else "–", False),
            (human(cost.parameters) if cost else "–", False),
            (human(cost.multiply_adds) if cost else "–", False),
            (str(record.epochs) if record else "–", False),
            (duration(record.seconds) if record else "–", False),
        ]
        rows.append((name, cells))
    return [*present, "images", "parameters", "multiply-adds", "epochs", "time"], rows


def _same_classes(reports: dict[str, ClassificationReport]) -> bool:
    return len({frozenset(report.classes) for report in reports.values()}) <= 1


def _curves(contents: dict[str, RunContents]) -> list[tuple[str, Markup]]:
    """Draw validation top-1 (of averaged weights if a run has them), k-NN top-1 and training loss."""
    charts: dict[str, list[Series]] = {}
    for i, (name, each) in enumerate(contents.items()):
        records = each.metrics
        steps = steps_per_unit(records)[1]
        k = neighbor_count(records)
        measures = {"Validation top-1, %": "top1", f"Top-1 of the {k} nearest, %": f"knn{k}_top1"}
        curves = {
            title: curve(records, steps, "evaluation", "ema", key) or curve(records, steps, "evaluation", "model", key)
            for title, key in measures.items()
        }
        curves["Training loss"] = curve(records, steps, "train", "model", "loss")
        for title, points in curves.items():
            charts.setdefault(title, []).extend([Series(name, points, i % LINE_COLORS)] if points else [])
    return [(title, line_chart(lines, x_label="epoch", y_label=title)) for title, lines in charts.items() if lines]


def _classes(reports: dict[str, ClassificationReport]) -> list[list[str]]:
    """Return the classes whose accuracy differs most between runs, with the accuracy of each run."""
    accuracy = np.stack([report.class_accuracy for report in reports.values()])  # (runs, classes)
    spread = np.nan_to_num(accuracy.max(axis=0) - accuracy.min(axis=0))
    order = np.argsort(-spread, kind="stable")[:MAX_CLASSES]
    names = next(iter(reports.values())).classes
    return [[names[i], *(f"{value:.1f}" for value in accuracy[:, i])] for i in order if spread[i] > 0]


def _cloud(
    evaluations: RunEvaluations, contents: dict[str, RunContents], data: str, val: str | None
) -> tuple[Markup, str] | None:
    """Compare top-1 on `val` (default: the val split of each run's training) with top-1 on `data`."""
    if val is None:
        return cloud_chart(evaluations.cloud(), contents, "its val split", _short(data) or data)
    first = evaluate([str(folder) for folder in evaluations.folders.values()], val)
    names = evaluations.folders
    on_val = {name: result.report.top(1) for name, result in zip(names, first.evaluations.values(), strict=True)}
    on_data = {name: result.report.top(1) for name, result in evaluations.evaluations.items()}
    return cloud_chart(cloud(on_val, on_data), contents, _short(val) or val, _short(data) or data)


def _short(data: str | None) -> str | None:
    """Return the name of a dataset for the label of an axis."""
    return data and (Path(data).name or data)


def _disagreement(evaluations: RunEvaluations) -> tuple[list[str], list[list[str]]]:
    table = evaluations.disagreement()
    rows = [
        [name, *(f"{100 * share:.1f}" for share in shares)]
        for name, shares in zip(table.names, table.shares, strict=True)
    ]
    return list(table.names), rows
