"""The results of a detector in words, pages and tables."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from patchloom.tasks.detection.look import look_at_detected
from patchloom.tasks.detection.page import detection_page, evaluate_detectors, interval_words
from patchloom.tasks.detection.run_files import ValDetections
from patchloom.tasks.report import ReportSettings
from patchloom.tasks.task import Reporting, Scores, TaskPage


class DetectionReporting(Reporting):
    """Average precision, classes, curves, and images next to the truth."""

    evaluation_options = ("cost",)

    draws_looks = True

    def metrics_text(self, metrics: Mapping[str, float]) -> str:
        text = f"box AP {metrics['ap']:.1f}, AP50 {metrics['ap50']:.1f}"
        if "mask_ap" in metrics:
            text += f"; mask AP {metrics['mask_ap']:.1f}, AP50 {metrics['mask_ap50']:.1f}"
        return text

    def result_lines(self, plan: Any, report: ValDetections) -> Iterator[str]:
        del plan
        yield f"           {interval_words(report.report)}"

    def next_commands(self, plan: Any) -> Sequence[str]:
        folder, data = shlex.quote(str(plan.folder)), shlex.quote(plan.settings.data_text)
        return f"patchloom predict {folder} IMAGE… --out FOLDER", f"patchloom evaluate {folder} {data}"

    def page(self, folder: Path, settings: ReportSettings) -> TaskPage:
        return detection_page(folder, settings)

    def look(self, folder: Path, images: Sequence[str], **options: Any) -> Any:
        return look_at_detected(folder, images, **options)

    def evaluate(
        self, runs: Mapping[str, Path], data: str | None, *, split: str | None, device: str, **options: Any
    ) -> Scores:
        return evaluate_detectors(runs, data, split=split, device=device, **options)
