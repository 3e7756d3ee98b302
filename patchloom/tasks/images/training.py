"""What image tasks share in training: batches, averages, files, and the whole of it for networks of whole images."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn

from patchloom.data.batches.decoded_dataset import make_loader
from patchloom.data.batches.sampler import ClassSampling
from patchloom.data.batches.views import make_view_loader, views_of
from patchloom.data.datasets import ImageSet
from patchloom.engine.distribution import Processes
from patchloom.engine.ema import Ema
from patchloom.engine.run import Run
from patchloom.models.network import Network
from patchloom.objectives.objective import Ingredients, Objective, make_objective
from patchloom.plugins import name_of
from patchloom.recipes.candidates import Candidate
from patchloom.recipes.choices import Choice
from patchloom.report.pictures.augmentation import write_preview
from patchloom.report.pictures.epoch_pictures import EpochPictures
from patchloom.runs.config import Preprocessing, write_run_files
from patchloom.runs.provenance import write_left_out, write_provenance
from patchloom.runs.weights import refuse_bad
from patchloom.tasks.images.fitted_head import MOST_IMAGES, fit_head, fits_head
from patchloom.tasks.images.networks import fix_scales, initialize, make_feature_teacher, make_network, make_teacher
from patchloom.tasks.images.plan import (
    ImagePlan,
    ImagePlanner,
    held_out,
    plan_images,
    with_choices,
    with_epochs,
    with_start,
)
from patchloom.tasks.images.resolved_recipe import preprocessing_of
from patchloom.tasks.plan import TrainingSettings
from patchloom.tasks.task import Training
from patchloom_runtime.errors import CheckpointError, DataError, UsageError, first_line

EPOCH_PICTURES = 4
PREVIEWED = 4  # training images


class ImageTraining(Training[ImagePlan]):
    """Training on images: planning, the average of the weights and the evaluation of the best ones."""

    planner_type: type[ImagePlanner] = ImagePlanner
    plugins: ClassVar[Collection[str]] = ("optimizer", "callback")
    has_classes: ClassVar[bool] = True  # outputs are classes that compete, or none; not labels or numbers

    def plan(self, settings: TrainingSettings, device: str) -> ImagePlan:
        return plan_images(self.planner_type(self.task), settings, device)

    def with_epochs(self, plan: ImagePlan, epochs: Choice, device: str) -> ImagePlan:
        del device
        return with_epochs(self.planner_type(self.task), plan, epochs)

    def with_start(self, plan: ImagePlan, init: str) -> ImagePlan:
        return with_start(self.planner_type(self.task), plan, init)

    def candidates(self, plan: ImagePlan) -> list[Candidate]:
        return self.planner_type(self.task).candidates(plan)

    def with_choices(self, plan: ImagePlan, choices: Sequence[Choice]) -> ImagePlan:
        return with_choices(self.planner_type(self.task), plan, choices)

    def held_out(self, plan: ImagePlan, share: float) -> ImagePlan:
        return held_out(self.planner_type(self.task), plan, share)

    def average(self, plan: ImagePlan, network: Any, loader: Any) -> Ema | None:
        """Return the exponential moving average of the weights, if the recipe has one."""
        del loader
        return Ema(network, plan.recipe.optim.ema_decay) if plan.recipe.optim.ema_decay else None

    def evaluate_best(self, plan: ImagePlan, run: Run, network: Any, reports: Sequence[Any]) -> Any:
        del plan
        if not run.evaluators:
            return None
        judge: Any = run.evaluators[0]
        if reports and judge.is_complete:
            return reports[0]
        with torch.no_grad(), run.processes.autocast():
            return judge.report(network.to(run.processes.device))


class WholeImageTraining(ImageTraining):
    """Training of networks that give each image classes or a vector."""

    def network(self, plan: ImagePlan) -> Network:
        settings, classes = plan.settings, plan.splits.classes.names
        network = make_network(plan.recipe, len(classes))
        if plan.start:
            plan.start.normalize_for(network)
        network.gradient_checkpointing = plan.recipe.model.gradient_checkpointing
        if settings.init:
            initialize(network, settings.init, keep_head=plan.start is None or plan.start.keeps(classes))
            refuse_bad(dict(network.state_dict()), settings.init, CheckpointError)
        if plan.recipe.model.scales_from:
            fix_scales(network, plan.recipe.model.scales_from)
        return network

    def begin(self, plan: ImagePlan, network: Network, processes: Processes, say: Callable[[str], None]) -> None:
        """Fit the classifier to the features, if it is new and the recipe asks for it."""
        if _has_new_head(plan) and fits_head(network):
            images = fit_head(plan, network, processes)
            say(f"head       fitted to the trained features of {images:,} images")

    def images_before(self, plan: ImagePlan) -> int:
        return min(MOST_IMAGES, len(plan.splits.train)) if _has_new_head(plan) else 0

    def loader(self, plan: ImagePlan, processes: Processes, stores: Any) -> Any:
        return image_loader(plan, processes, stores)

    def objective(self, plan: ImagePlan, network: Network, loader: Any, processes: Processes) -> Objective:
        teacher, spec = None, plan.recipe.objective.teacher
        if spec:
            of_features = plan.method.teacher == "features"
            with processes.rng_preserved():
                teacher = make_feature_teacher(spec) if of_features else make_teacher(spec, plan.splits)
                teacher.to(processes.device)
        objective = make_objective(
            Ingredients(
                recipe=plan.recipe,
                network=network,
                labels=torch.from_numpy(plan.learned.labels),
                steps_per_epoch=loader.steps_per_epoch,
                teacher=teacher,
                add_up=processes.sum_,
                gather=processes.gather_rows,
            )
        )
        loss: Any = copy.deepcopy(plan.settings.loss)
        objective.own_loss = loss.to(processes.device) if isinstance(loss, nn.Module) else loss
        objective.batch_transform = plan.settings.batch_transform
        return objective

    def compile_extras(self, plan: ImagePlan, network: Network) -> None:
        """Compile the pass of small views through a network of one image size."""
        views = plan.recipe.views
        if not views.local or network.any_resolution:
            return
        device, size = next(network.parameters()).device, views.local_size
        with torch.no_grad():  # the first pass prepares the resampled weights, which must not be compiled
            network.forward_resampled(torch.zeros(1, network.config.channels, size, size, device=device))
        network.forward_resampled = torch.compile(network.forward_resampled)  # type: ignore[method-assign]

    def after_epoch(self, plan: ImagePlan, network: Network, processes: Processes) -> EpochPictures | None:
        """Return what draws the network every few epochs on images of val, if --pictures is set."""
        if plan.settings.pictures is None:
            return None
        return EpochPictures(
            plan.folder,
            _spread(plan.splits.val, EPOCH_PICTURES),
            plan.splits.classes.names,
            preprocessing=preprocessing_of(plan.recipe, network),
            every=plan.settings.pictures,
            last=plan.recipe.schedule.epochs,
            has_classes=self.has_classes,
            is_main=processes.is_main,
        )

    def write_files(self, plan: ImagePlan, network: Network) -> None:
        # Labels that were not learned are not the model's.
        labels = plan.class_names if plan.method.learns_from == "labels" else ()
        write_image_files(plan, network, preprocessing_of(plan.recipe, network), labels)
        if plan.settings.preview:
            recipe, images = plan.recipe, _spread(plan.splits.train, PREVIEWED)
            write_preview(plan.folder, images, recipe.augment, recipe.model.image_size, seed=recipe.seed)


def image_loader(plan: ImagePlan, processes: Processes, stores: Any) -> Any:
    """Return batches of images, or of views if the method compares views, and a note on how they are made."""
    recipe, settings = plan.recipe, plan.settings
    options: dict[str, Any] = {
        "batch_size": recipe.optim.batch_size,
        "seed": recipe.seed,
        "device": processes.device,
        "workers": plan.workers,
        "rank": processes.rank,
        "world": processes.world,
        "skip_broken": not settings.strict,
        "timeout_s": settings.worker_timeout,
        "stores": stores,
    }
    if recipe.balance.sampling != "none":
        options["sampling"] = ClassSampling(plan.learned.labels, recipe.balance.sampling)
    if plan.method.views:
        return make_view_loader(plan.learned, views_of(recipe), **options)
    return make_loader(plan.learned, recipe.augment, recipe.model.image_size, transform=settings.transform, **options)


def initialize_backbone(plan: ImagePlan, backbone: Network) -> None:
    """Give the network below a dense head the normalization and weights of --init."""
    if plan.start:
        plan.start.normalize_for(backbone)
    if init := plan.settings.init:
        initialize(backbone, init, keep_head=False)
        refuse_bad(dict(backbone.state_dict()), init, CheckpointError)


def write_image_files(plan: ImagePlan, network: Any, preprocessing: Preprocessing, labels: Sequence[str]) -> None:
    """Write config, recipe, labels, the record of the data and the list of unreadable files."""
    level, task = plan.settings.level, plan.task.name
    write_run_files(plan.folder, network, preprocessing, plan.recipe, tuple(labels), level, task=task)
    assert plan.record is not None
    write_provenance(plan.folder, plan.record)
    write_left_out(plan.folder, plan.left_out)


def _spread(dataset: ImageSet, count: int) -> list[Image.Image]:
    """Read `count` images spread over the dataset, without those that cannot be read."""
    images = []
    for number in range(min(count, len(dataset))):
        with suppress(DataError):
            images.append(dataset.read(number * len(dataset) // count))
    return images


def _has_new_head(plan: ImagePlan) -> bool:
    """Return whether the recipe fits new classifiers and --init does not already have one for these classes."""
    keeps_head = plan.start is not None and plan.start.keeps(plan.splits.classes.names)
    return plan.recipe.model.fit_head and not keeps_head


def check_loss(loss: Callable[[Tensor, Tensor], Any], outputs: int, targets: Mapping[str, Tensor]) -> None:
    """Call the user's loss with each kind of targets. Raise UsageError unless it returns a scalar with a gradient."""
    for what, values in targets.items():
        try:
            result = copy.deepcopy(loss)(torch.zeros(len(values), outputs, requires_grad=True), values)
        except Exception as error:  # code of the user
            advice = "; set augment.mixup and augment.cutmix to 0, or accept shares" if "mixed" in what else ""
            raise UsageError(
                f"the loss {name_of(loss)} fails on {what}: {type(error).__name__}: {first_line(error)}{advice}"
            ) from error
        if not isinstance(result, Tensor) or result.numel() != 1 or not result.requires_grad:
            shape = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise UsageError(
                f"the loss {name_of(loss)} returns {shape}; expected a scalar tensor with a gradient with respect to "
                "the outputs"
            )
