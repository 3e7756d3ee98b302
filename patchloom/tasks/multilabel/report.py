"""The results of a multi-label classifier in words, pages and tables."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from patchloom.evaluation.multilabel import RARE, MultilabelReport
from patchloom.tasks.multilabel.evaluation import evaluate_runs
from patchloom.tasks.multilabel.page import look_at_labels, multilabel_page
from patchloom.tasks.report import ReportSettings
from patchloom.tasks.task import Reporting, Scores, TaskPage
from patchloom_runtime.printable import plural


class MultilabelReporting(Reporting):
    """mAP, F1, thresholds, and images with missing and spurious labels."""

    draws_looks = True
    reading_options = ("labels", "label_column", "label_pattern")

    def metrics_text(self, metrics: Mapping[str, float]) -> str:
        return f"mAP {metrics['map']:.2f} %, micro-F1 {metrics['micro_f1']:.2f} %"

    def result_lines(self, plan: Any, report: MultilabelReport) -> Iterator[str]:
        del plan
        low, high = report.map_interval()
        yield f"           95 % interval of the mAP: {low:.1f} … {high:.1f} (bootstrap over val images)"
        shared = int((~report.thresholds.own).sum())
        rare = f"; {plural(shared, 'label')} with fewer than {RARE} images share one" if shared else ""
        yield f"           thresholds chosen on val: macro-F1 {report.macro_f1:.2f} %{rare}"
        if report.left_out:
            listed = ", ".join(report.left_out[:5]) + (" …" if len(report.left_out) > 5 else "")
            yield f"           left out, since they apply to no image of val: {listed}"

    def next_commands(self, plan: Any) -> Sequence[str]:
        folder, data = shlex.quote(str(plan.folder)), shlex.quote(plan.settings.data_text)
        return f"patchloom predict {folder} IMAGE…", f"patchloom evaluate {folder} {data}"

    def page(self, folder: Path, settings: ReportSettings) -> TaskPage:
        return multilabel_page(self.task.model, folder, settings)

    def look(self, folder: Path, images: Sequence[str], **options: Any) -> Any:
        return look_at_labels(self.task.model, folder, images, **options)

    def evaluate(
        self, runs: Mapping[str, Path], data: str | None, *, split: str | None, device: str, **options: Any
    ) -> Scores:
        return evaluate_runs(self.task.model, runs, data, split=split, device=device, **options)
