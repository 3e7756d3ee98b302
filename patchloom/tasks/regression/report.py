"""The results of a regression model in words, pages and tables."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from patchloom.evaluation.regression import RegressionReport, explained, mean_absolute
from patchloom.tasks.regression.evaluation import evaluate_runs
from patchloom.tasks.regression.page import look_at_numbers, regression_page
from patchloom.tasks.report import ReportSettings
from patchloom.tasks.task import Reporting, Scores, TaskPage


class RegressionReporting(Reporting):
    """Errors, explained variance, residuals, and the images with the largest errors."""

    draws_looks = True
    reading_options = ("labels", "label_column", "label_pattern")

    def metrics_text(self, metrics: Mapping[str, float]) -> str:
        error = f"MAE {metrics['mae']:.4g}" if "mae" in metrics else f"MAE {metrics['scaled_mae']:.3f} deviations"
        exact = f", nearest grade right {metrics['exact']:.1f} %" if "exact" in metrics else ""
        return f"{error}, R² {metrics['r2']:.3f}{exact}"

    def result_lines(self, plan: Any, report: RegressionReport) -> Iterator[str]:
        del plan
        scale = report.scale
        r2 = report.of_each(explained)
        for number, (name, mae) in enumerate(zip(scale.names, report.of_each(mean_absolute), strict=True)):
            low, high = report.interval(mean_absolute, number)
            yield f"           {name}: MAE {mae:.4g} ({low:.4g} … {high:.4g}, 95 %), R² {r2[number]:.3f}"

    def next_commands(self, plan: Any) -> Sequence[str]:
        folder, data = shlex.quote(str(plan.folder)), shlex.quote(plan.settings.data_text)
        return f"patchloom predict {folder} IMAGE…", f"patchloom evaluate {folder} {data}"

    def page(self, folder: Path, settings: ReportSettings) -> TaskPage:
        return regression_page(self.task.model, folder, settings)

    def look(self, folder: Path, images: Sequence[str], **options: Any) -> Any:
        return look_at_numbers(self.task.model, folder, images, **options)

    def evaluate(
        self, runs: Mapping[str, Path], data: str | None, *, split: str | None, device: str, **options: Any
    ) -> Scores:
        return evaluate_runs(self.task.model, runs, data, split=split, device=device, **options)
