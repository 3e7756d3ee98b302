"""To find objects: their boxes, classes and, where the data have them, masks."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchloom.tasks.images.task import ImageTask

if TYPE_CHECKING:
    from patchloom.data.datasets import LabeledImages, Source, Splits
    from patchloom.engine.distribution import Processes
    from patchloom.models.dense.detector import Detector
    from patchloom.recipes.choices import Choice
    from patchloom.tasks.detection.detector import ObjectDetector
    from patchloom.tasks.detection.judge import DetectionJudge
    from patchloom.tasks.detection.run_files import ValDetections
    from patchloom.tasks.images.plan import ImagePlan, Resolved
    from patchloom.tasks.plan import TrainingSettings
    from patchloom.tasks.task import Scores, TaskPage


# Settings that are about whole images.
_OF_IMAGES = ("teacher", "pictures", "labels", "label_column", "label_pattern", "classes")


class Detection(ImageTask):
    """Mask R-CNN on the recipe's network; without masks Faster R-CNN."""

    name = "detection"
    kind = "detector"
    judges_decisions = False
    levels_are_of_labels = False  # but of the objects
    not_read = "is about classes of whole images; leave it out where objects are found"
    fits_recipes = False
    writes_predictions = True
    draws_looks = True
    compiles_by_default = False  # the number of proposals and regions differs from step to step

    # Before ---------------------------------------------------------------------------------------------------------

    def source(self, source: "Source", settings: "TrainingSettings") -> "Source":
        """As it was found; options about whole images are refused."""
        from patchloom.tasks.plan import refuse_fit, refuse_unread

        refuse_unread(settings, _OF_IMAGES, self.not_read)
        refuse_fit(settings)
        return source

    def learns_from_labels(self, settings: "TrainingSettings") -> bool:
        """Boxes are what it learns from."""
        del settings
        return False

    def resolve(
        self, splits: "Splits", settings: "TrainingSettings", device: str, epochs: "Choice | None" = None
    ) -> "Resolved":
        """The recipe for these data, and what its network costs."""
        from patchloom.tasks.detection.plan import resolve_detection

        return resolve_detection(splits, settings, device, epochs)

    def classes(self, plan: "ImagePlan") -> tuple[str, ...]:
        """What is told apart."""
        from patchloom.tasks.detection.plan import object_classes

        return object_classes(plan.splits, plan.settings.level)

    def data_lines(self, plan: "ImagePlan", *, dry_run: bool) -> list[str]:
        """Pictures, and what is found in them."""
        from patchloom.tasks.detection.plan import detection_lines

        return detection_lines(plan, super().data_lines(plan, dry_run=dry_run))

    def data_facts(self, plan: "ImagePlan") -> dict[str, Any]:
        """The data of a plan for machines."""
        from patchloom.tasks.detection.plan import learns_masks

        return super().data_facts(plan) | {
            "classes": list(self.classes(plan)),
            "masks": learns_masks(plan.splits, plan.recipe),
        }

    # The objects of a run -------------------------------------------------------------------------------------------

    def network(self, plan: "ImagePlan") -> "Detector":
        """With random weights; the backbone starts from those of --init."""
        from patchloom.runs.weights import refuse_bad
        from patchloom.tasks.detection.plan import detector_of
        from patchloom.tasks.images.networks import initialize
        from patchloom_runtime.errors import CheckpointError

        network = detector_of(plan.recipe, plan.splits, plan.settings.level)
        if plan.start:
            plan.start.normalize_for(network.backbone)
        if init := plan.settings.init:
            initialize(network.backbone, init, keep_head=False)
            refuse_bad(dict(network.backbone.state_dict()), init, CheckpointError)
        return network

    def begin(self, plan: "ImagePlan", network: Any, processes: "Processes", say: Callable[[str], None]) -> None:
        """Its heads learn as they are."""
        del plan, network, processes, say

    def loader(self, plan: "ImagePlan", processes: "Processes", stores: Any) -> Any:
        """Pictures on canvases, with boxes and objects' numbers, from workers."""
        from patchloom.data.augmentation.canvas import JitteredCanvas
        from patchloom.data.batches.loader import Loader
        from patchloom.tasks.detection.plan import parts_of

        del stores
        recipe, side = plan.recipe, plan.recipe.model.image_size
        loader = Loader(
            self.objects_of(plan, "train").with_parts(*parts_of(plan)),
            JitteredCanvas(recipe.augment, (side, side), recipe.detect),
            batch_size=recipe.optim.batch_size,
            seed=recipe.seed,
            workers=plan.workers,
            rank=processes.rank,
            world=processes.world,
            pin=processes.device.type == "cuda",
            skip_broken=not plan.settings.strict,
            timeout_s=plan.settings.worker_timeout,
        )
        return loader, f"{plan.workers} workers"

    def objects_of(self, plan: "ImagePlan", split: str) -> "LabeledImages":
        """A split whose objects are numbered by the classes of the plan."""
        from patchloom.tasks.detection.data import telling

        return telling(getattr(plan.splits, split), self.classes(plan), plan.settings.level)

    def judge(self, plan: "ImagePlan", processes: "Processes") -> "DetectionJudge":
        """Average precision on val."""
        from patchloom.tasks.detection.judge import DetectionJudge
        from patchloom.tasks.detection.plan import view_of_plan

        return DetectionJudge(plan, self.classes(plan), self.objects_of(plan, "val"), view_of_plan(plan), processes)

    def prepare_compiling(self, plan: "ImagePlan", network: Any, mode: str | None) -> None:
        """Nothing runs beside it."""
        del plan, network, mode

    def after_epoch(self, plan: "ImagePlan", network: Any, processes: "Processes") -> None:
        """Nothing is drawn."""
        del plan, network, processes

    # After ----------------------------------------------------------------------------------------------------------

    def write_files(self, plan: "ImagePlan", network: Any) -> None:
        """Config, recipe, labels, what it began with and what was left out."""
        from patchloom.runs.config import Preprocessing, write_run_files
        from patchloom.runs.provenance import write_left_out, write_provenance

        shown = Preprocessing(network.pixel_mean, network.pixel_std, network.image_size, 1.0)
        level = plan.settings.level
        write_run_files(plan.folder, network, shown, plan.recipe, self.classes(plan), level, task=self.name)
        assert plan.record is not None
        write_provenance(plan.folder, plan.record)
        write_left_out(plan.folder, plan.left_out)

    def keep(self, plan: "ImagePlan", judged: "ValDetections") -> None:
        """`val.json`: what there was to find and what was found."""
        from patchloom.tasks.detection.run_files import keep_val

        keep_val(plan.folder, judged)

    def in_words(self, run: Any, metrics: Mapping[str, float]) -> str:
        """AP of boxes and masks."""
        del run
        said = f"box AP {metrics['ap']:.1f}, AP50 {metrics['ap50']:.1f}"
        return said + (
            f"; mask AP {metrics['mask_ap']:.1f}, AP50 {metrics['mask_ap50']:.1f}" if "mask_ap" in metrics else ""
        )

    def more_words(self, plan: "ImagePlan", judged: "ValDetections") -> Iterator[str]:
        """How sure that is."""
        del plan
        from patchloom.tasks.detection.report import interval_words

        yield f"           {interval_words(judged.report)}"

    def next_commands(self, plan: "ImagePlan") -> Sequence[str]:
        """Use it, or judge it."""
        folder, data = shlex.quote(str(plan.folder)), shlex.quote(plan.settings.data)
        return f"patchloom predict {folder} IMAGE… --out FOLDER", f"patchloom evaluate {folder} {data}"

    def page(self, folder: Path, asked: Any) -> "TaskPage":
        """Numbers, classes, curves, and the worst and best pictures beside the truth."""
        from patchloom.tasks.detection.report import detection_page

        return detection_page(folder, asked)

    def look(self, folder: Path, images: Sequence[str], **options: Any) -> Any:
        """What is found in pictures; without pictures the worst of val beside the truth."""
        from patchloom.tasks.detection.look import look_at_detected

        return look_at_detected(folder, images, **options)

    def evaluate(
        self, runs: Mapping[str, Path], data: str | None, *, split: str | None, device: str, **options: Any
    ) -> "Scores":
        """One row per run; without data what was found in val when they were trained."""
        from patchloom.tasks.detection.report import evaluate_detectors

        return evaluate_detectors(runs, data, split=split, device=device, **options)

    # A run's folder -------------------------------------------------------------------------------------------------

    def load_network(self, folder: Path) -> "Detector":
        """The trained network, in eval mode."""
        from patchloom.tasks.detection.run_files import load_detector

        return load_detector(folder)[0]

    def readers(self, folder: Path) -> dict[str, Callable[[], object]]:
        """What was found in val too."""
        from patchloom.tasks.detection.run_files import VAL, read_val

        return {**super().readers(folder), VAL: lambda: read_val(folder)}

    def load(self, folder: Path, *, device: str = "auto") -> "ObjectDetector":
        """The detector as it is used."""
        from patchloom.tasks.detection.detector import load_object_detector

        return load_object_detector(folder, device=device)
