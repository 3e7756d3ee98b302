"""The results of a classifier in words."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from patchloom.evaluation.calibration import fewest_images, parts_of
from patchloom.evaluation.classification import MACRO_METRICS, ClassificationReport, overfitting_note
from patchloom.options import share_of
from patchloom.runs.calibration import read_calibration
from patchloom.runs.metrics import read_metrics
from patchloom.tasks.classification.calibrate import CONFIDENCE
from patchloom.tasks.images.automatic_start import FEW_IMAGES, fine_tuning_advice, may_start_from_weights
from patchloom.tasks.images.report import image_page
from patchloom.tasks.report import ReportSettings
from patchloom.tasks.task import Reporting, TaskPage

GOOD_TOP1 = 95.0  # percent; above, there is little to gain from pretrained weights


class ClassificationReporting(Reporting):
    """Accuracy, mistakes and pictures of the network."""

    def metrics_text(self, metrics: Mapping[str, float]) -> str:
        return f"top-1 {metrics['top1']:.2f} %"

    def headline(self, report: ClassificationReport) -> str:
        """Return top-1, and the metrics that count every class equally if the classes of val are uneven."""
        values = dict(report)
        more = [f"{name} {values[key]:.2f} %" for key, name in MACRO_METRICS.items()] if report.is_imbalanced else []
        return ", ".join([self.metrics_text(values), *more])

    def result_lines(self, plan: Any, report: ClassificationReport) -> Iterator[str]:
        """Yield the calibration, a warning if training images were memorized, and advice if they are few."""
        yield from _calibration_lines(plan)
        records = read_metrics(plan.folder / "metrics.jsonl")
        if note := overfitting_note(records, report, pretrained=bool(plan.settings.init)):
            yield f"warning: {note}"
        images, settings = len(plan.splits.train), plan.settings
        fine_tunes = settings.init or not may_start_from_weights(settings, plan.opened.median_side)
        if not fine_tunes and images < FEW_IMAGES and report.top(1) < GOOD_TOP1 and not settings.model:
            yield fine_tuning_advice(images, f"patchloom train {shlex.quote(settings.data_text)} --init in1k")

    def page(self, folder: Path, settings: ReportSettings) -> TaskPage:
        return image_page(folder, settings)


def _calibration_lines(plan: Any) -> Iterator[str]:
    calibration, max_error = read_calibration(plan.folder), plan.settings.max_error
    before, after, promise = calibration.before, calibration.after, calibration.rules.promise
    if calibration.fit and not calibration.fit.helps:
        yield calibration.temperature_in_words
    elif before and after:
        errors = f"calibration error {before.calibration_error:.1f} % → {after.calibration_error:.1f} %"
        fit = calibration.fit
        losses = f"held-out loss {fit.loss_without:.4g} → {fit.loss_with:.4g}, " if fit else ""
        yield f"calibrated with temperature {calibration.rules.temperature:.3g}: {losses}{errors}"
    if promise:
        yield promise.in_words()
    elif max_error is not None:
        command = f"patchloom calibrate {shlex.quote(str(plan.folder))} --max-error {max_error}"
        least = fewest_images(share_of(max_error, "--max-error"), CONFIDENCE)
        yield (
            f"note: val does not allow the promise, so the run answers every image. It takes {least:,} answered images "
            f"without a mistake, or more with some, of the {len(parts_of(calibration.images)[1]):,} of val that are "
            f"tested; on other images: {command} DATA"
        )
