"""To name the class of an image, among those of the data."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchloom.tasks.images.task import ImageTask

if TYPE_CHECKING:
    from patchloom.engine.distribution import Processes
    from patchloom.evaluation.classification import ClassificationReport
    from patchloom.tasks.images.judges import ClassJudge
    from patchloom.tasks.images.plan import ImagePlan


class Classification(ImageTask):
    """The network ends with a classifier for the classes of the data."""

    name = "classification"

    def judge(self, plan: "ImagePlan", processes: "Processes") -> "ClassJudge":
        """Its decisions about val."""
        from patchloom.tasks.images.judges import ClassJudge

        return ClassJudge(plan, processes)

    def keep(self, plan: "ImagePlan", judged: Any) -> None:
        """`predictions.safetensors`: one row per image of val."""
        from patchloom.runs.predictions import Predictions, fingerprint, save_predictions

        save_predictions(plan.folder, Predictions(judged, fingerprint(plan.splits.val)))

    def readers(self, folder: Path) -> dict[str, Callable[[], object]]:
        """Its decisions too."""
        from patchloom.runs.predictions import FILE, check_predictions

        return {**super().readers(folder), FILE: lambda: check_predictions(folder)}

    def in_words(self, run: Any, metrics: Mapping[str, float]) -> str:
        """Top-1."""
        del run
        return f"top-1 {metrics['top1']:.2f} %"

    def more_words(self, plan: "ImagePlan", judged: "ClassificationReport") -> Iterator[str]:
        """Whether the training images were learned by heart."""
        from patchloom.evaluation.classification import overfitting_note
        from patchloom.runs.metrics import read_metrics

        records = read_metrics(plan.folder / "metrics.jsonl")
        if note := overfitting_note(records, judged, pretrained=bool(plan.settings.init)):
            yield f"warning: {note}"

    def next_commands(self, plan: "ImagePlan") -> Sequence[str]:
        """Use it, or judge it."""
        folder, data = shlex.quote(str(plan.folder)), shlex.quote(plan.settings.data)
        return f"patchloom predict {folder} IMAGE…", f"patchloom evaluate {folder} {data}"
