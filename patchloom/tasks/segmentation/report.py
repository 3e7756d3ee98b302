"""The results of a segmentation model in words, pages and tables."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from patchloom.evaluation.segmentation import SegmentationReport
from patchloom.tasks.report import ReportSettings
from patchloom.tasks.segmentation.evaluation import evaluate_runs
from patchloom.tasks.segmentation.look import look_at_segmented
from patchloom.tasks.segmentation.page import segmentation_page
from patchloom.tasks.task import Reporting, Scores, TaskPage


class SegmentationReporting(Reporting):
    """mIoU, classes, and images next to their masks."""

    draws_looks = True
    evaluation_options = ("multi_scale", "mode", "cost")

    def metrics_text(self, metrics: Mapping[str, float]) -> str:
        return f"mIoU {metrics['miou']:.2f} %, {metrics['pixel_accuracy']:.2f} % of the pixels right"

    def result_lines(self, plan: Any, report: SegmentationReport) -> Iterator[str]:
        del plan
        low, high = report.miou_interval()
        yield f"           95 % interval of the mIoU: {low:.1f} … {high:.1f} (bootstrap over val images)"

    def next_commands(self, plan: Any) -> Sequence[str]:
        folder, data = shlex.quote(str(plan.folder)), shlex.quote(plan.settings.data_text)
        return f"patchloom predict {folder} IMAGE… --out masks", f"patchloom evaluate {folder} {data} --multi-scale"

    def page(self, folder: Path, settings: ReportSettings) -> TaskPage:
        return segmentation_page(folder, settings)

    def look(self, folder: Path, images: Sequence[str], **options: Any) -> Any:
        return look_at_segmented(folder, images, **options)

    def evaluate(
        self, runs: Mapping[str, Path], data: str | None, *, split: str | None, device: str, **options: Any
    ) -> Scores:
        return evaluate_runs(runs, data, split=split, device=device, **options)
