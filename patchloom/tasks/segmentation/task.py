"""To tell the class of every pixel: any network under UperNet, judged by mIoU."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from patchloom.tasks.images.task import ImageTask
from patchloom.tasks.task import Scores

if TYPE_CHECKING:
    from patchloom.data.checking.survey import Survey
    from patchloom.data.datasets import Source, Splits
    from patchloom.engine.distribution import Processes
    from patchloom.evaluation.segmentation import SegmentationReport
    from patchloom.models.dense.upernet import SegmentationNetwork
    from patchloom.objectives.objective import Objective
    from patchloom.recipes.choices import Choice
    from patchloom.tasks.images.plan import ImagePlan, Resolved
    from patchloom.tasks.plan import TrainingSettings
    from patchloom.tasks.segmentation.judge import SegmentationJudge
    from patchloom.tasks.segmentation.segmenter import Segmenter

# Settings that are about whole images.
_OF_IMAGES = ("teacher", "pictures", "labels", "label_column", "label_pattern", "classes")
PART = "mask"


class Segmentation(ImageTask):
    """Pictures and masks, a backbone under a head, classes of pixels."""

    name = "segmentation"
    kind = "segmenter"
    judges_decisions = False
    levels_are_of_labels = False
    fits_recipes = False
    compiles_by_default = False
    writes_predictions = True
    draws_looks = True
    evaluation_options: ClassVar[tuple[str, ...]] = ("multi_scale", "mode")
    not_read = "is about whole images; leave it out where pixels are classified"

    # Before ---------------------------------------------------------------------------------------------------------

    def source(self, source: "Source", settings: "TrainingSettings") -> "Source":
        """Its pictures with their masks, whose classes are learned."""
        from patchloom.data.annotations.mask_classes import of_masks
        from patchloom.recipes.choices import base_recipe
        from patchloom.recipes.schema import override
        from patchloom.tasks.plan import refuse_fit, refuse_unread

        refuse_unread(settings, _OF_IMAGES, self.not_read)
        refuse_fit(settings)
        base, key = base_recipe(settings.recipe, settings.model), "segment.reduce_zero_label"
        if base is None:
            from patchloom.recipes.segmentation import upernet_160k

            base = override(upernet_160k(), {key: False})
        given = {name: value for name, value in settings.recipe_changes().items() if name == key}
        reduced = override(base, given).segment.reduce_zero_label
        return of_masks(source, reduce_zero_label=reduced, level=settings.level)

    def shown(self, splits: "Splits") -> "Splits":
        """With their masks."""
        test: Any = splits.test
        return replace(
            splits,
            train=splits.train.with_parts(PART),  # type: ignore[attr-defined]
            val=splits.val.with_parts(PART),  # type: ignore[attr-defined]
            test=test and test.with_parts(PART),
        )

    def fault_notes(self, seen: "Survey", settings: "TrainingSettings") -> tuple[str, ...]:
        """Masks that cannot be used, or not all of them; with --strict they end it."""
        from patchloom_runtime.errors import DataError

        faults = [fault for fault in seen.annotation_faults() if fault.kind.startswith(PART)]
        faults += [fault for fault in seen.source.faults if PART in fault.kind]
        if not faults:
            return ()
        first = f"{faults[0].where}: {faults[0].kind} ({faults[0].detail})"
        told = f"{len(faults):,} masks have faults, first {first}; all: patchloom check"
        told += f" {shlex.quote(settings.data)}"
        if settings.strict:
            raise DataError(told)
        return (told,)

    def learns_from_labels(self, settings: "TrainingSettings") -> bool:
        """Masks are what is learned from."""
        del settings
        return False

    def resolve(
        self, splits: "Splits", settings: "TrainingSettings", device: str, epochs: "Choice | None" = None
    ) -> "Resolved":
        """The recipe for these data, and what its network costs."""
        import torch

        from patchloom.models.cost import cost
        from patchloom.recipes.segmentation import auto_segmentation
        from patchloom.tasks.images.plan import Resolved, resolve_fields
        from patchloom_runtime.errors import UsageError

        recipe, choices, start = resolve_fields(splits, settings, device, epochs, auto_segmentation)
        if recipe.optim.batch_size < 2 and recipe.segment.norm == "batch":
            raise UsageError(
                "optim.batch_size is 1, and a batch of one image has no statistics; set segment.norm=group"
            )
        with torch.device("meta"):
            network = self._make(recipe, len(splits.classes))
        side = recipe.model.image_size
        return Resolved(recipe, choices, network.notes, cost(network, side), start)

    @staticmethod
    def _make(recipe: Any, classes: int) -> "SegmentationNetwork":
        from patchloom.models.dense.upernet import SegmentationConfig, SegmentationNetwork
        from patchloom.tasks.images.networks import network_options

        part, size = recipe.segment, (recipe.model.image_size,) * 2
        name, options = network_options(recipe)
        return SegmentationNetwork(
            SegmentationConfig(
                name=name,
                num_classes=classes,
                image_size=size,
                backbone={"num_classes": 0, "image_size": size, **options},
                head=part.head,
                channels=part.channels,
                auxiliary_channels=part.auxiliary_channels if part.auxiliary_weight else 0,
                norm=part.norm,
                dropout=part.dropout,
            )
        )

    # The objects of a run -------------------------------------------------------------------------------------------

    def network(self, plan: "ImagePlan") -> "SegmentationNetwork":
        """With random weights, or a backbone with those of --init."""
        from patchloom.runs.weights import refuse_bad
        from patchloom.tasks.images.networks import initialize
        from patchloom_runtime.errors import CheckpointError

        network = self._make(plan.recipe, len(plan.splits.classes))
        network.gradient_checkpointing = plan.recipe.model.gradient_checkpointing
        if plan.start:
            plan.start.normalize_for(network.backbone)
        if plan.settings.init:
            initialize(network.backbone, plan.settings.init, keep_head=False)
            refuse_bad(dict(network.backbone.state_dict()), plan.settings.init, CheckpointError)
        return network

    def begin(self, plan: "ImagePlan", network: Any, processes: "Processes", say: Callable[[str], None]) -> None:
        """No head is fitted first: it reads maps, not vectors."""
        del plan, network, processes, say

    def objective(
        self, plan: "ImagePlan", network: Any, loader: Any, processes: "Processes", compiles: bool
    ) -> "Objective":
        """The loss of every labelled pixel."""
        from torch import nn

        from patchloom.objectives.objective import Ingredients, make_objective

        del compiles
        if processes.world > 1 and processes.device.type == "cuda":  # a CPU has no statistics over processes
            for name in network.classifiers():
                setattr(network, name, nn.SyncBatchNorm.convert_sync_batchnorm(getattr(network, name)))
        return make_objective(
            Ingredients(
                recipe=plan.recipe,
                network=network,
                ignored=plan.splits.train.layers[PART].outside,
                steps_per_epoch=loader.steps_per_epoch,
                add_up=processes.sum_,
            )
        )

    def judge(self, plan: "ImagePlan", processes: "Processes") -> "SegmentationJudge":
        """mIoU of val."""
        from patchloom.tasks.segmentation.judge import SegmentationJudge

        return SegmentationJudge(plan, processes)

    def prepare_compiling(self, plan: "ImagePlan", network: Any, mode: str | None) -> None:
        """Nothing runs beside the network."""
        del plan, network, mode

    def after_epoch(self, plan: "ImagePlan", network: Any, processes: "Processes") -> None:
        """Nothing is drawn."""
        del plan, network, processes

    # After ----------------------------------------------------------------------------------------------------------

    def keep(self, plan: "ImagePlan", judged: "SegmentationReport") -> None:
        """`segmented.safetensors`: counts of each image of val."""
        from patchloom.runs.predictions import fingerprint
        from patchloom.tasks.segmentation.run_files import ValSegmentation, keep_segmented

        keep_segmented(plan.folder, ValSegmentation(judged, fingerprint(plan.splits.val)))

    def in_words(self, run: Any, metrics: Mapping[str, float]) -> str:
        """mIoU and the rest."""
        del run
        return f"mIoU {metrics['miou']:.2f} %, {metrics['pixel_accuracy']:.2f} % of the pixels right"

    def more_words(self, plan: "ImagePlan", judged: "SegmentationReport") -> Any:
        """How sure it is."""
        del plan
        low, high = judged.miou_interval()
        yield f"           95 % interval of the mIoU: {low:.1f} … {high:.1f} (bootstrap over val images)"

    def next_commands(self, plan: "ImagePlan") -> Sequence[str]:
        """Use it, or judge it."""
        folder, data = shlex.quote(str(plan.folder)), shlex.quote(plan.settings.data)
        return (
            f"patchloom predict {folder} IMAGE… --out masks",
            f"patchloom evaluate {folder} {data} --multi-scale",
        )

    def page(self, folder: Path, asked: Any) -> Any:
        """Classes, confusions, best and worst images beside the truth."""
        from patchloom.tasks.segmentation.report import segmentation_page

        return segmentation_page(folder, asked)

    def look(self, folder: Path, images: Sequence[str], **options: Any) -> Any:
        """Answers over pictures and a map per class; without pictures the worst of val."""
        from patchloom.tasks.segmentation.look import look_at_segmented

        return look_at_segmented(folder, images, **options)

    def evaluate(
        self, runs: Mapping[str, Path], data: str | None, *, split: str | None, device: str, **options: Any
    ) -> Scores:
        """One row per run; several runs on the same images are compared."""
        from patchloom.tasks.segmentation.evaluation import evaluate_runs

        return evaluate_runs(runs, data, split=split, device=device, **options)

    # A run's folder -------------------------------------------------------------------------------------------------

    def load_network(self, folder: Path) -> "SegmentationNetwork":
        """The trained network, in eval mode."""
        from patchloom.tasks.segmentation.segmenter import load_segmentation

        return load_segmentation(folder)[0]

    def readers(self, folder: Path) -> dict[str, Callable[[], object]]:
        """Its answers about val too."""
        from patchloom.tasks.segmentation.run_files import FILE, read_segmented

        return {**super().readers(folder), FILE: lambda: read_segmented(folder)}

    def load(self, folder: Path, *, device: str = "auto") -> "Segmenter":
        """The trained model with its classes."""
        from patchloom.tasks.segmentation.segmenter import load_segmenter

        return load_segmenter(folder, device=device)
