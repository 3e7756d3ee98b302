"""What tasks on images have in common: batches, views, averages, pictures, a folder with labels and preprocessing."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from patchloom.tasks.task import Task
from patchloom_runtime.errors import DataError

if TYPE_CHECKING:
    from patchloom.data.checking.survey import Survey
    from patchloom.data.datasets import ImageSet, Source, Splits
    from patchloom.engine.distribution import Processes
    from patchloom.engine.ema import Ema
    from patchloom.models.network import Network
    from patchloom.objectives.objective import Objective
    from patchloom.recipes.choices import Choice
    from patchloom.report.pictures.epoch_pictures import EpochPictures
    from patchloom.tasks.images.plan import ImagePlan, Resolved
    from patchloom.tasks.plan import TrainingSettings

EPOCH_PICTURES = 4


class ImageTask(Task["ImagePlan"]):
    """A task on images: all of it but what judges, keeps and reports."""

    judges_decisions = True
    levels_are_of_labels: ClassVar[bool] = True  # else --level is heeded where the source is prepared

    # Before ---------------------------------------------------------------------------------------------------------

    def plan(self, settings: "TrainingSettings", device: str) -> "ImagePlan":
        """Everything that can be wrong is found here, before any work."""
        from patchloom.tasks.images.plan import plan_images

        return plan_images(self, settings, device)

    def source(self, source: "Source", settings: "TrainingSettings") -> "Source":
        """What was found, as this task learns from it."""
        del settings
        return source

    def shown(self, splits: "Splits") -> "Splits":
        """Train, val and test with what this task reads beside their pictures."""
        return splits

    def fault_notes(self, seen: "Survey", settings: "TrainingSettings") -> tuple[str, ...]:
        """What is wrong with that which this task reads beside pictures."""
        del seen, settings
        return ()

    def learns_from_labels(self, settings: "TrainingSettings") -> bool:
        """Whether pictures must have labels; for the recipe of `auto` they must."""
        from patchloom.tasks.images.plan import learns_from_labels

        return learns_from_labels(settings)

    def resolve(
        self, splits: "Splits", settings: "TrainingSettings", device: str, epochs: "Choice | None" = None
    ) -> "Resolved":
        """The recipe for these data, and what its network costs."""
        from patchloom.tasks.images.plan import resolve

        return resolve(splits, settings, device, epochs)

    def planned_for(self, plan: "ImagePlan", epochs: "Choice", device: str) -> "ImagePlan":
        """The same run with so many epochs, and with what follows from them."""
        from patchloom.tasks.images.plan import planned_for

        return planned_for(plan, epochs, device)

    def data_lines(self, plan: "ImagePlan", *, dry_run: bool) -> list[str]:
        """Pictures, what is left out, notes, the network and what it starts from."""
        from patchloom.tasks.images.plan import data_lines

        return data_lines(plan, dry_run=dry_run)

    def data_facts(self, plan: "ImagePlan") -> dict[str, Any]:
        """The data of a plan for machines."""
        splits = plan.splits
        return {
            "name": splits.name,
            "train": len(splits.train),
            "val": len(splits.val),
            "classes": list(splits.classes.names),
            "notes": list(plan.notes),
        }

    def examples(self, plan: "ImagePlan") -> "ImageSet":
        """The training images."""
        return plan.splits.train

    def model_facts(self, plan: "ImagePlan") -> dict[str, Any]:
        """What a pass costs."""
        return {"multiply_adds": plan.cost.multiply_adds}

    # The objects of a run -------------------------------------------------------------------------------------------

    def network(self, plan: "ImagePlan") -> Any:
        """With random weights, or those of --init."""
        from patchloom.runs.weights import refuse_bad
        from patchloom.tasks.images.networks import fix_scales, initialize, make_network
        from patchloom_runtime.errors import CheckpointError

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

    def begin(self, plan: "ImagePlan", network: "Network", processes: "Processes", say: Callable[[str], None]) -> None:
        """The head first, where the recipe wants it and the classifier is new."""
        from patchloom.tasks.images.fitted_head import fit_head, fits_head

        if _has_new_head(plan) and fits_head(network):
            images = fit_head(plan, network, processes)
            say(f"head       fitted to the trained features of {images:,} images")

    def shown_before(self, plan: "ImagePlan") -> int:
        """Those that the head is fitted to."""
        from patchloom.tasks.images.fitted_head import MOST_IMAGES

        return min(MOST_IMAGES, len(plan.splits.train)) if _has_new_head(plan) else 0

    def loader(self, plan: "ImagePlan", processes: "Processes", stores: Any) -> Any:
        """Batches of images, or of views of them where the method compares views; and how they are made."""
        from patchloom.data.batches.decoded_dataset import make_loader
        from patchloom.data.batches.views import make_view_loader, views_of

        recipe, settings = plan.recipe, plan.settings
        shared: dict[str, Any] = {
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
        if plan.method.views:
            return make_view_loader(plan.learned, views_of(recipe), **shared)
        return make_loader(plan.learned, recipe.augment, recipe.model.image_size, **shared)

    def objective(
        self, plan: "ImagePlan", network: "Network", loader: Any, processes: "Processes", compiles: bool
    ) -> "Objective":
        """What the recipe minimises, with its teacher where it has one."""
        import torch

        from patchloom.objectives.objective import Ingredients, make_objective
        from patchloom.tasks.images.networks import make_teacher

        teacher = None
        if plan.recipe.objective.teacher:
            with processes.randomness_kept():
                teacher = make_teacher(plan.recipe.objective.teacher, plan.splits).to(processes.device)
            if compiles:
                teacher.compile()
        return make_objective(
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

    def average(self, plan: "ImagePlan", network: "Network", loader: Any) -> "Ema | None":
        """The exponential average of the weights, where the recipe has one."""
        from patchloom.engine.ema import Ema

        del loader
        return Ema(network, plan.recipe.optim.ema_decay) if plan.recipe.optim.ema_decay else None

    def prepare_compiling(self, plan: "ImagePlan", network: "Network", mode: str | None) -> None:
        """Compile the passes of small views through a network of one size."""
        import torch

        views = plan.recipe.views
        if not views.local or network.any_resolution:
            return
        device, size = next(network.parameters()).device, views.local_size
        with torch.no_grad():  # once uncompiled: what it prepares is then there
            network.forward_resampled(torch.zeros(1, network.config.channels, size, size, device=device))
        network.forward_resampled = torch.compile(network.forward_resampled, mode=mode)  # type: ignore[method-assign]

    def after_epoch(self, plan: "ImagePlan", network: "Network", processes: "Processes") -> "EpochPictures | None":
        """What draws the network every few epochs, with pictures from all over val, where it was asked for."""
        from patchloom.report.pictures.epoch_pictures import EpochPictures
        from patchloom.tasks.images.plan import preprocessing_of

        if plan.settings.pictures is None:
            return None
        return EpochPictures(
            plan.folder,
            _spread(plan.splits.val, EPOCH_PICTURES),
            plan.splits.classes.names,
            preprocessing=preprocessing_of(plan.recipe, network),
            every=plan.settings.pictures,
            last=plan.recipe.schedule.epochs,
            is_main=processes.is_main,
        )

    # After ----------------------------------------------------------------------------------------------------------

    def write_files(self, plan: "ImagePlan", network: "Network") -> None:
        """Config, recipe, labels, what it began with and what was left out."""
        from patchloom.runs.config import write_run_files
        from patchloom.runs.provenance import write_left_out, write_provenance
        from patchloom.tasks.images.plan import preprocessing_of

        shown = preprocessing_of(plan.recipe, network)
        # Classes that taught nothing are no part of what was trained.
        labels = plan.splits.classes.names if plan.method.learns_from in ("labels", "masks", "boxes") else ()
        write_run_files(plan.folder, network, shown, plan.recipe, labels, plan.settings.level, task=self.name)
        assert plan.record is not None
        write_provenance(plan.folder, plan.record)
        write_left_out(plan.folder, plan.left_out)

    def final(self, plan: "ImagePlan", run: Any, network: "Network") -> Any:
        """The best weights on the val split."""
        import torch

        del plan
        if not run.evaluators:
            return None
        with torch.no_grad(), run.processes.autocast():
            return run.evaluators[0].report(network.to(run.processes.device))

    def data_name(self, plan: "ImagePlan") -> str:
        """As the source is called."""
        return plan.splits.name

    def page(self, folder: Path, asked: Any) -> Any:
        """Decisions, mistakes, and what goes on inside the network."""
        from patchloom.tasks.images.report import image_page

        return image_page(folder, asked)

    # A run's folder -------------------------------------------------------------------------------------------------

    def load_network(self, folder: Path) -> Any:
        """The trained network, in eval mode."""
        from patchloom.runs.weights import load_network

        return load_network(folder)[0]

    def readers(self, folder: Path) -> dict[str, Callable[[], object]]:
        """Config and labels fit together."""
        from patchloom.runs.config import read_run_files

        return {"config.json": lambda: read_run_files(folder)}

    def load(self, folder: Path, *, device: str = "auto") -> Any:
        """The trained model with its labels and preprocessing."""
        from patchloom.inference.classifier import load

        return load(folder, device=device)


def _spread(pictures: "ImageSet", count: int) -> list[Any]:
    """So many pictures from all over the set; one that cannot be read is left out, as it is in training."""
    found = []
    for place in range(min(count, len(pictures))):
        with suppress(DataError):
            found.append(pictures.read(place * len(pictures) // count))
    return found


def _has_new_head(plan: "ImagePlan") -> bool:
    """Whether the recipe wants a head to be fitted, and it is not one that was trained for these very classes."""
    kept = plan.start is not None and plan.start.keeps(plan.splits.classes.names)
    return plan.recipe.model.fit_head and not kept
