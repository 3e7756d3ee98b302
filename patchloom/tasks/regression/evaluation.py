"""`patchloom evaluate` and `compare` of regression runs: on data or by their val predictions."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.annotations.image_labels import of_numbers
from patchloom.data.batches.decoded_dataset import make_evaluation_loader
from patchloom.data.datasets import LabeledImages
from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.evaluation.regression import (
    RegressionReport,
    evaluate,
    explained,
    mean_absolute,
    rank_correlation,
    root_mean_square,
)
from patchloom.runs.predictions import fingerprint
from patchloom.tasks.images.data import open_targets
from patchloom.tasks.regression.model import Regressor
from patchloom.tasks.regression.run_files import ValNumbers, read_val_numbers
from patchloom.tasks.task import ModelLoader, Scores
from patchloom_runtime.artifacts.artifact import is_artifact
from patchloom_runtime.errors import UsageError

BATCH = 64


def open_numbers(
    data: str, names: Sequence[str], *, split: str | None, folder: Path | None, reading: Reading = AS_IT_IS
) -> LabeledImages:
    """Open the images of a split with their numbers, matched by name with those of a model (`open_targets`)."""
    return open_targets(data, names, of_numbers, split=split, folder=folder, reading=reading)


def evaluate_runs(
    loader: ModelLoader,
    runs: Mapping[str, Path],
    data: str | None,
    *,
    split: str | None = None,
    device: str = "auto",
    reading: Reading = AS_IT_IS,
) -> Scores:
    """Evaluate runs, one row per run and number, and compare runs with the same images."""
    results: dict[str, ValNumbers] = {}
    notes: list[str] = []
    for name, folder in runs.items():
        if data is None:
            if split or is_artifact(folder):
                what = "--split needs images" if split else f"{folder} is an artifact and keeps no val predictions"
                raise UsageError(f"{what}: patchloom evaluate {folder} DATA{' --split ' + split if split else ''}")
            results[name] = read_val_numbers(folder)
            continue
        is_run = not is_artifact(folder)
        model = loader.load(folder, device=device) if is_run else loader.open_artifact(folder)
        images = open_numbers(data, model.labels, split=split, folder=folder if is_run else None, reading=reading)
        results[name], broken = evaluate_on(model, images)
        notes += [*images.notes, *broken]
    pairs = [
        (one, other)
        for one, other in combinations(results, 2)
        if results[one].fingerprint == results[other].fingerprint
        and results[one].report.scale.names == results[other].report.scale.names
    ]
    if len(results) > 1 and not pairs:
        notes.append("the runs have different images or numbers, so they are not compared")
    reports = {name: result.report for name, result in results.items()}
    return _scores(reports, pairs, list(dict.fromkeys(notes)))


def evaluate_on(model: Regressor, images: LabeledImages) -> tuple[ValNumbers, list[str]]:
    """Evaluate a model on images with its numbers; return notes on images that cannot be read."""
    own = model.preprocessing
    loader = make_evaluation_loader(
        images,
        own.image_size,
        own.crop_ratio,
        own.interpolation,
        own.resize,
        batch_size=BATCH,
        device=model.device,
        workers=0,
    )
    report = evaluate(model.model, loader.epoch(0), scale=model.scale, pixel_mean=own.mean, pixel_std=own.std)
    broken = loader.broken
    notes = [f"{len(broken)} images cannot be read and do not count: {next(iter(broken.values()))}"] if broken else []
    return ValNumbers(report, fingerprint(images)), notes


def _scores(reports: Mapping[str, RegressionReport], pairs: Sequence[tuple[str, str]], notes: Sequence[str]) -> Scores:
    columns = ["run", "number", "#MAE", "95 %", "#RMSE", "#R²", "#Spearman", "#images"]
    rows: list[tuple[str, ...]] = []
    values: dict[str, Any] = {}
    lines = []
    for run, report in reports.items():
        metrics = {
            metric.__name__: report.of_each(metric)
            for metric in (mean_absolute, root_mean_square, explained, rank_correlation)
        }
        intervals = [report.interval(mean_absolute, column) for column in range(len(report.scale.names))]
        for number, (name, (low, high)) in enumerate(zip(report.scale.names, intervals, strict=True)):
            mae, rmse, r2, rho = (of[number] for of in metrics.values())
            images = int((~np.isnan(report.targets[:, number])).sum())
            rows.append(
                (run, name, f"{mae:.4g}", f"{low:.4g} … {high:.4g}", f"{rmse:.4g}", f"{r2:.3f}", f"{rho:.3f}",
                 f"{images:,}")
            )  # fmt: skip
        values[run] = {
            **dict(report),
            "numbers": {
                name: {"mae": mae, "interval": list(interval), "rmse": rmse, "r2": r2, "spearman": rho}
                for name, mae, interval, rmse, r2, rho in zip(
                    report.scale.names, metrics["mean_absolute"], intervals, *list(metrics.values())[1:], strict=True
                )
            },
        }
        if report.scale.grades:
            lines.append(f"{run}: the nearest grade is right for {report.exact:.1f} % of the images")
    for first, second in pairs:
        lines.append(_compared(first, reports[first], second, reports[second]))
    return Scores(columns=columns, rows=rows, values=values, notes=notes, lines=lines)


def _compared(first: str, a: RegressionReport, second: str, b: RegressionReport) -> str:
    """Compare two reports on the same images by a bootstrap over these."""
    differences = a.resampled_mae - b.resampled_mae
    low, high = np.quantile(differences, [0.025, 0.975])
    share = min(float((differences <= 0).mean()), float((differences >= 0).mean()))
    difference = a.scaled_mae() - b.scaled_mae()
    points = f"{difference:+.3f} standard deviations of mean absolute error ({low:+.3f} … {high:+.3f}, 95 %)"
    return f"{first} − {second}: {points}, p {min(1.0, 2 * share):.3f}"
