"""`patchloom evaluate` and `compare` of regression runs: on data or by their val predictions."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.annotations.image_labels import of_numbers
from patchloom.data.images.image_batch import ImageBatch
from patchloom.evaluation.regression import (
    RegressionReport,
    evaluate,
    explained,
    mean_absolute,
    rank_correlation,
    root_mean_square,
)
from patchloom.tasks.images.target_vectors import TargetVectors, p_value
from patchloom.tasks.regression.model import Regressor
from patchloom.tasks.regression.run_files import read_val_numbers
from patchloom.tasks.task import ModelLoader, Scores


def _evaluate(model: Regressor, batches: Iterable[ImageBatch], **pixels: Any) -> RegressionReport:
    return evaluate(model.model, batches, scale=model.scale, **pixels)


NUMBERS = TargetVectors(
    "numbers", "val predictions", of_numbers, _evaluate, read_val_numbers, lambda report: report.scale.names
)


def evaluate_runs(loader: ModelLoader, runs: Mapping[str, Path], data: str | None, **options: Any) -> Scores:
    """Evaluate runs, one row per run and number, and compare runs with the same images."""
    return _scores(*NUMBERS.evaluate_runs(loader, runs, data, **options))


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
    (low, high), p = p_value(a.resampled_mae - b.resampled_mae)
    difference = a.scaled_mae() - b.scaled_mae()
    points = f"{difference:+.3f} standard deviations of mean absolute error ({low:+.3f} … {high:+.3f}, 95 %)"
    return f"{first} − {second}: {points}, p {p:.3f}"
