"""Training of detectors: Mask R-CNN on the recipe's network, or Faster R-CNN without masks."""

from typing import Any

from patchloom.data.augmentation.canvas import JitteredCanvas
from patchloom.data.batches.decoded_dataset import made_by_image
from patchloom.data.batches.loader import Loader
from patchloom.data.batches.sample_memory import sample_memory
from patchloom.engine.distribution import Processes
from patchloom.models.dense.detector import Detector
from patchloom.objectives.objective import Ingredients, Objective, make_objective
from patchloom.runs.config import Preprocessing
from patchloom.tasks.detection.judge import DetectionJudge
from patchloom.tasks.detection.plan import DetectionPlanner, detector_of
from patchloom.tasks.detection.run_files import ValDetections, write_val
from patchloom.tasks.images.training import ImageTraining, initialize_backbone, write_image_files


class DetectionTraining(ImageTraining):
    """A backbone under the heads of Mask R-CNN."""

    planner_type = DetectionPlanner
    captured_method = "maps"  # of the backbone; the number of proposals and regions differs from step to step
    compiles_by_default = False

    def network(self, plan: Any) -> Detector:
        network = detector_of(plan.recipe, plan.splits, plan.settings.level)
        initialize_backbone(plan, network.backbone)
        return network

    def loader(self, plan: Any, processes: Processes, stores: Any) -> Any:
        """Return batches of images on canvases with boxes and object indices, and a note on how they are made."""
        recipe, side = plan.recipe, plan.recipe.model.image_size
        dataset = plan.objects("train").with_parts(*(("instances", "boxes") if plan.learns_masks else ("boxes",)))
        transform = JitteredCanvas(recipe.augment, (side, side), recipe.detect)
        stores = {} if stores is None else stores
        memory, how = sample_memory(dataset, transform, stores, workers=plan.workers, world=processes.world)
        loader = Loader(
            dataset,
            transform,
            batch_size=recipe.optim.batch_size,
            seed=recipe.seed,
            workers=plan.workers,
            rank=processes.rank,
            world=processes.world,
            pin=processes.device.type == "cuda",
            skip_broken=not plan.settings.strict,
            timeout_s=plan.settings.worker_timeout,
            memory=memory,
        )
        return loader, made_by_image(memory, how, plan.workers)

    def objective(self, plan: Any, network: Any, loader: Any, processes: Processes) -> Objective:
        return make_objective(
            Ingredients(
                recipe=plan.recipe,
                network=network,
                steps_per_epoch=loader.steps_per_epoch,
                add_up=processes.sum_,
                gather=processes.gather_rows,
            )
        )

    def judge(self, plan: Any, processes: Processes) -> DetectionJudge:
        return DetectionJudge(plan, processes)

    def write_files(self, plan: Any, network: Any) -> None:
        preprocessing = Preprocessing(network.pixel_mean, network.pixel_std, network.image_size, 1.0)
        write_image_files(plan, network, preprocessing, plan.class_names)

    def write_val(self, plan: Any, report: ValDetections) -> None:
        """Write `val.json`: the true and the detected objects."""
        write_val(plan.folder, report)
