"""The results of an embedding network in words."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from patchloom.tasks.images.report import image_page
from patchloom.tasks.report import ReportSettings
from patchloom.tasks.task import Reporting, TaskPage


class EmbeddingReporting(Reporting):
    """Accuracy of the nearest neighbors, and pictures of the network."""

    def metrics_text(self, metrics: Mapping[str, float]) -> str:
        name = next(name for name in metrics if name.startswith("knn") and name.endswith("_top1"))
        neighbors = name.removeprefix("knn").removesuffix("_top1")
        return f"top-1 of the {neighbors} nearest {metrics[name]:.2f} %"

    def next_commands(self, plan: Any) -> Sequence[str]:
        folder, data = shlex.quote(str(plan.folder)), shlex.quote(plan.settings.data_text)
        if plan.settings.level:
            return f"patchloom probe {folder} {data} --levels", f"patchloom look {folder} --ranked"
        if len(plan.splits.classes):
            return f"patchloom probe {folder} {data} --knn --linear", f"patchloom train {data} --init {folder}"
        return f"patchloom index {folder} {data} --out {folder}.index", f"patchloom train LABELED --init {folder}"

    def page(self, folder: Path, settings: ReportSettings) -> TaskPage:
        return image_page(folder, settings)
