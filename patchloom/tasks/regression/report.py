"""The results of a regression model in words, pages and tables."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from markupsafe import Markup
from PIL import Image

from patchloom.data.datasets import ImageSet
from patchloom.evaluation.intervals import LEVEL
from patchloom.evaluation.regression import (
    RegressionReport,
    explained,
    mean_absolute,
    rank_correlation,
    root_mean_square,
)
from patchloom.report.charts import Point, histogram_chart, scatter_chart
from patchloom.report.pictures.look import ImageLook
from patchloom.report.run_report import validation
from patchloom.report.sections import picture_section, table_section
from patchloom.tasks.images.look_page import (
    COUNT,
    LookPage,
    LookRequest,
    chosen_files,
    readable,
    write_look_page,
)
from patchloom.tasks.images.target_vectors import inputs_with_maps, worst_gallery
from patchloom.tasks.regression.evaluation import NUMBERS, evaluate_runs
from patchloom.tasks.regression.model import Regressor, number_text
from patchloom.tasks.report import ReportSettings
from patchloom.tasks.task import Reporting, Scores, TaskPage
from patchloom_runtime.errors import at_least
from patchloom_runtime.printable import plural

WORST = 24
POINTS = 1_000  # of a scatter chart
CHARTED = 6  # numbers with charts of their own


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

    def page(self, folder: Path, settings: ReportSettings) -> TaskPage:
        report, images, notes = NUMBERS.reported(self.task.model, folder, settings)
        split = settings.split or "val"
        one = report is not None and len(report.scale.names) == 1
        best, interval = "", None
        if report is not None:
            best = f"{report.of_each(mean_absolute)[0]:.4g}" if one else f"{report.scaled_mae():.3f} deviations"
            interval = report.interval(mean_absolute) if one else None
        return TaskPage(
            best=best,
            measure=f"mean absolute error on {split}",
            interval=interval,
            numbers=_facts(report, split) if report else [],
            charts={
                "Validation error, standard deviations": validation("scaled_mae"),
                "Validation R²": validation("r2"),
            },
            sections=[_number_table(report), _residuals(report), *_worst(report, images)] if report else [],
            notes=notes,
            next_command=f"patchloom predict {shlex.quote(str(folder))} IMAGE",
        )

    def look(
        self,
        folder: Path,
        images: Sequence[str],
        *,
        data: str | None = None,
        out: Path,
        top: int = 5,
        count: int = COUNT,
    ) -> LookPage:
        """Write predictions with maps on image files or folders, or on the images of val with the largest errors."""
        del top  # every number is predicted
        at_least("count", count, 1)
        notes: list[str] = []
        model = NUMBERS.model_to_look_at(self.task.model, folder, images, notes)
        if images:
            requests = chosen_files(images, (), count, notes)
            title = f"Numbers by {folder.name} of {plural(len(requests), 'image')}"
        else:
            requests, title = _val_requests(folder, data, count), f"Largest errors of {folder.name}"
        named_images = readable(requests, notes)
        results = _number_looks(model, [one.image for one in named_images], [one.truth for one in named_images])
        named = [(one.name, "", result) for one, result in zip(named_images, results, strict=True)]
        write_look_page(out, title, notes, [result.card(name, detail) for name, detail, result in named])
        return LookPage(out, [*named], notes)

    def evaluate(
        self, runs: Mapping[str, Path], data: str | None, *, split: str | None, device: str, **options: Any
    ) -> Scores:
        return evaluate_runs(self.task.model, runs, data, split=split, device=device, **options)


def _facts(report: RegressionReport, split: str) -> list[tuple[str, str, str]]:
    facts = [
        ("mean absolute error", f"{report.scaled_mae():.3f}", "in standard deviations of the training images"),
        ("R²", f"{np.mean(report.of_each(explained)):.3f}", "share of the variance explained; 0: always the mean"),
        ("Spearman", f"{np.mean(report.of_each(rank_correlation)):.3f}", "correlation of the ranks"),
    ]
    if report.scale.grades:
        facts.append(("nearest grade right", f"{report.exact:.1f} %", "of the images"))
    return [*facts, ("images", f"{len(report.index):,}", f"of the {split} split")]


def _number_table(report: RegressionReport) -> Markup:
    metrics = [report.of_each(metric) for metric in (mean_absolute, root_mean_square, explained, rank_correlation)]
    rows = []
    for number, (name, mae, rmse, r2, rho) in enumerate(zip(report.scale.names, *metrics, strict=True)):
        low, high = report.interval(mean_absolute, number)
        mean, std = report.scale.mean[number], report.scale.std[number]
        rows.append(
            (name, f"{mae:.4g}", f"{low:.4g} … {high:.4g}", f"{rmse:.4g}", f"{r2:.3f}", f"{rho:.3f}",
             f"{mean:.4g} ± {std:.4g}")
        )  # fmt: skip
    columns = ["number", "MAE", f"{100 * LEVEL:.0f} %", "RMSE", "R²", "Spearman", "in training"]
    return table_section("Errors per number", columns, rows)


def _residuals(report: RegressionReport) -> Markup:
    """Return charts of predictions and residuals, of the first numbers."""
    charts = []
    for number, name in enumerate(report.scale.names[:CHARTED]):
        known = np.flatnonzero(~np.isnan(report.targets[:, number]))
        chosen = known[:: -(-len(known) // POINTS)]
        true, predicted = report.targets[chosen, number], report.predictions[chosen, number]
        points = [Point(x, y) for x, y in zip(true.tolist(), predicted.tolist(), strict=True)]
        residuals = [Point(x, y) for x, y in zip(predicted.tolist(), (predicted - true).tolist(), strict=True)]
        errors = report.residuals[known, number].tolist()
        charts += [
            (
                f"{name}: predicted and true",
                scatter_chart(points, x_label="true", y_label="predicted", line=(1.0, 0.0)),
                "On the line, both are equal.",
            ),
            (
                f"{name}: residuals",
                scatter_chart(residuals, x_label="predicted", y_label="predicted − true", line=(0.0, 0.0)),
                "A slope or a funnel shows where the model is biased or unsure.",
            ),
            (
                f"{name}: distribution of residuals",
                histogram_chart(errors, x_label="predicted − true", y_label="images"),
                "",
            ),
        ]
    return picture_section(charts, "Residuals", "residuals")


def _worst(report: RegressionReport, images: ImageSet | None) -> list[Markup]:
    errors = [(int(report.index[row]), _in_words(report, row)) for row in report.worst(WORST)]
    return worst_gallery(images, errors, "Largest errors", "Predicted and true numbers.")


def _in_words(report: RegressionReport, row: int) -> str:
    pairs = zip(report.scale.names, report.predictions[row], report.targets[row], strict=True)
    return "; ".join(f"{name} {own:.4g}, true {true:.4g}" for name, own, true in pairs if not np.isnan(true))


@dataclass(frozen=True, eq=False)
class NumberLook(ImageLook):
    """The predicted numbers and the maps of one image; `truth` is the text of its true numbers."""

    truth_name: ClassVar[str] = "true"

    @property
    def right(self) -> bool | None:
        """Return None: a number is not right or wrong."""
        return None

    def in_words(self) -> str:
        """Return the numbers."""
        return ", ".join(starmap(number_text, self.answers))

    def card(self, name: str = "", detail: str = "") -> dict[str, Any]:
        """Return the values of a page's template; numbers are text instead of bars."""
        return super().card(name, detail or self.in_words()) | {"answers": None}


def _number_looks(model: Regressor, images: Sequence[Image.Image], truths: Sequence[str]) -> list[NumberLook]:
    numbers = model.numbers(images)
    drawn = inputs_with_maps(model, images, numbers, caption=number_text, ranked=False)
    return [
        NumberLook(seen, list(zip(model.labels, row.tolist(), strict=True)), maps, truth)
        for row, (seen, maps), truth in zip(numbers, drawn, truths, strict=True)
    ]


def _val_requests(folder: Path, data: str | None, count: int) -> list[LookRequest]:
    """Return the val images with the largest errors."""
    report, images = NUMBERS.kept_val(folder, data)
    return [
        LookRequest(images.where(index), _true_numbers(report, row), partial(images.read, index))
        for row in report.worst(count)
        for index in [int(report.index[row])]
    ]


def _true_numbers(report: RegressionReport, row: int) -> str:
    pairs = zip(report.scale.names, report.targets[row].tolist(), strict=True)
    return ", ".join(number_text(name, true) for name, true in pairs if not np.isnan(true))
