"""Training of classifiers."""

from patchloom.engine.distribution import Processes
from patchloom.evaluation.classification import ClassificationReport
from patchloom.runs.predictions import Predictions, fingerprint, save_predictions
from patchloom.tasks.images.judges import ClassJudge
from patchloom.tasks.images.plan import ImagePlan
from patchloom.tasks.images.training import WholeImageTraining


class ClassificationTraining(WholeImageTraining):
    """A network with a classifier for the classes of the data, evaluated by its predictions for val."""

    def judge(self, plan: ImagePlan, processes: Processes) -> ClassJudge:
        return ClassJudge(plan, processes)

    def write_val(self, plan: ImagePlan, report: ClassificationReport) -> None:
        """Write `predictions.safetensors`, one row per image of val."""
        save_predictions(plan.folder, Predictions(report, fingerprint(plan.splits.val)))
