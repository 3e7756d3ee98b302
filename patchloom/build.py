"""Names become objects: a recipe, a data set and a command's choices → network, teacher, loaders, objective.

The only file that knows all of them by name. `train.py` puts the objects into a run.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from patchloom.checkpoint import load_network
from patchloom.data.augment import test_transform
from patchloom.data.device import DeviceLoader, decode_all, fits_in_memory
from patchloom.data.loader import WORKER_TIMEOUT_S, Loader
from patchloom.data.sets import UNLABELLED, ImageSet, Splits
from patchloom.data.views import View
from patchloom.engine.distribution import Processes
from patchloom.engine.run import Objective
from patchloom.errors import DataError, UsageError
from patchloom.foreign import read_plain
from patchloom.models.network import Network
from patchloom.models.pooled_convnet import PooledConvNet
from patchloom.models.published import load_published
from patchloom.models.registry import create_model
from patchloom.models.seq2seq import Seq2Seq, create_seq2seq
from patchloom.objectives.classification import Classification
from patchloom.objectives.dino import Dino
from patchloom.objectives.dino_head import DinoHead
from patchloom.objectives.distillation import Distillation
from patchloom.objectives.grafit import METHODS, Grafit
from patchloom.objectives.teacher import Teacher, load_teacher
from patchloom.recipes import Reason, auto_recipe, get_recipe, override
from patchloom.recipes.fit import Facts, fitted, scaled_steps, smaller_network
from patchloom.recipes.parts import DinoPart
from patchloom.recipes.plain_yaml import MAX_CHARACTERS
from patchloom.recipes.schema import Recipe

# Pictures of which the median size is taken: enough to know it, few enough to open at once.
SIZED_PICTURES = 64


@dataclass(frozen=True)
class Choice:
    """One field of the resolved recipe and who chose it."""

    key: str
    value: Any
    why: str  # "auto: …", "given", or "recipe"


def resolve_recipe(
    splits: Splits,
    *,
    recipe: str | Recipe | None,
    model: str | None,
    changes: dict[str, Any],
    device: str,
    pretrained: bool,
    fit: bool = False,
) -> tuple[Recipe, list[Choice]]:
    """The recipe a run will follow, and why each field that nobody published has its value.

    With `fit` a named recipe is fitted to the data and the machine; `auto` always is.
    """
    reasons: list[Reason] = []
    resolved = base_recipe(recipe, model)
    if resolved is None or fit:
        facts = facts_of(splits, device, pretrained)
    if resolved is None:
        resolved, reasons = auto_recipe(
            images=facts.images,
            classes=len(splits.classes),
            image_size_median=facts.image_size_median,
            model=model,
            device=facts.device,
            pretrained=pretrained,
            given=changes,
        )
    elif fit:
        asked = model or changes.get("model.name")
        smaller = [] if asked else smaller_network(resolved, facts)
        network = {reason.field: reason.value for reason in smaller}
        if "model.name" in network:  # documents have values of their own for it
            resolved = base_recipe(recipe, network["model.name"]) or resolved
        resolved, reasons = fitted(override(resolved, network), facts, changes)
        reasons = smaller + reasons
    chosen = [Choice(reason.field, reason.value, f"auto: {reason.why}") for reason in reasons]
    resolved, given = changed_recipe(resolved, changes)
    replaced = {choice.key for choice in given}
    return resolved, [choice for choice in chosen if choice.key not in replaced] + given


def facts_of(splits: Splits, device: str, pretrained: bool) -> Facts:
    """What choices for a run are based on."""
    kind: Literal["cpu", "cuda"] = "cuda" if device.startswith("cuda") else "cpu"
    return Facts(len(splits.train), median_side(splits.train), kind, pretrained)


def changed_recipe(recipe: Recipe, changes: dict[str, Any]) -> tuple[Recipe, list[Choice]]:
    """The recipe with the user's changes, and with what must follow them."""
    follows = _following(recipe, changes)
    resolved = override(recipe, changes | {choice.key: choice.value for choice in follows})
    return resolved, [Choice(key, value, "given") for key, value in changes.items()] + follows


def base_recipe(recipe: str | Recipe | None, model: str | None) -> Recipe | None:
    """What a recipe's name, file or value stands for, before any change; None for `auto`, which asks the data."""
    if recipe is None or recipe == "auto":
        return None
    if isinstance(recipe, str) and not recipe.endswith((".yaml", ".yml")):
        return get_recipe(recipe, model)
    base = recipe if isinstance(recipe, Recipe) else Recipe.from_yaml(_text(Path(recipe)))
    return base if model is None else override(base, {"model.name": model})


def _following(recipe: Recipe, changes: dict[str, Any]) -> list[Choice]:
    """Fields that must follow a shorter run or a smaller batch, unless the user set them too."""
    follows: list[Choice] = []
    # Without its warm-up and last rate the recipe can be changed freely; what they must be is seen on the result.
    loose = {"schedule.warmup_epochs": 0, "schedule.warmup_steps": 0, "schedule.min_lr": 0.0}
    changed = override(recipe, loose | changes)
    longest = max(1, changed.schedule.epochs // 10)
    told = changes.keys() & {"schedule.warmup_epochs", "schedule.warmup_steps"}
    if not told and "schedule.epochs" in changes and recipe.schedule.warmup_epochs > longest:
        why = f"auto: a tenth of {changed.schedule.epochs} epochs"
        follows.append(Choice("schedule.warmup_epochs", longest, why))
    if recipe.schedule.step_epochs and "schedule.epochs" in changes and "schedule.step_epochs" not in changes:
        dropping = scaled_steps(recipe, changed.schedule.epochs)
        follows.append(Choice(dropping.field, dropping.value, f"auto: {dropping.why}"))
    peak = changed.optim.peak_lr
    if "schedule.min_lr" not in changes and recipe.schedule.min_lr >= peak:
        follows.append(Choice("schedule.min_lr", peak / 100, f"auto: below the peak of {peak:.2g} at this batch"))
    return follows


def _text(path: Path) -> str:
    if not os.path.isfile(path):
        raise UsageError(f"{path}: no such recipe file; give one written by a run, or a name from `patchloom recipes`")
    try:
        return read_plain(path, MAX_CHARACTERS).decode("utf-8")
    except OSError as error:
        raise UsageError(f"recipe {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a recipe: it is not text ({error.reason} at byte {error.start})") from error


def median_side(dataset: ImageSet) -> int:
    """The median of the shorter sides of some pictures that can be read, in pixels."""
    step = max(1, len(dataset) // SIZED_PICTURES)
    sides, reason = [], ""
    for i in range(0, len(dataset), step):
        try:
            sides.append(min(dataset.read(i).size))
        except DataError as error:
            reason = str(error)
    if not sides:
        raise DataError(
            f"none of {len(range(0, len(dataset), step))} pictures tried can be read; the last one: {reason}"
        )
    return sorted(sides)[len(sides) // 2]


# Networks and teachers ----------------------------------------------------------------------------------------------


def make_network(recipe: Recipe, classes: int) -> Network:
    """The recipe's network for data of so many `classes`, with random weights; 'timm:NAME' is timm's network."""
    part = recipe.model
    name, options = part.name, dict(part.options)
    if name.startswith("timm:"):
        options = {"backbone": name.removeprefix("timm:"), "pool": "average", **options}
        name = "resnet50_attention_pool"
    options |= {"drop_path": part.drop_path, "drop_path_rule": part.drop_path_rule}
    if part.dropout:
        options["dropout"] = part.dropout
    if projector := _projector_of(recipe):
        options["projector"] = projector
    return create_model(name, num_classes=_outputs_of(recipe, classes), image_size=part.image_size, **options)


def make_seq2seq(recipe: Recipe, vocabulary: int) -> Seq2Seq:
    """The recipe's translation network for so many subwords, with random weights."""
    part = recipe.model
    given: dict[str, Any] = {"vocabulary": vocabulary, "max_length": recipe.text.max_length, "dropout": part.dropout}
    if doubled := [name for name in given if name in part.options]:
        group = "model" if doubled[0] == "dropout" else "text"
        raise UsageError(f"model.options.{doubled[0]} is set by {group}.{doubled[0]}. Set that instead.")
    return create_seq2seq(part.name, **given | dict(part.options))


def _outputs_of(recipe: Recipe, classes: int) -> int:
    """Outputs of the classifier; 0 where the method trains none."""
    method = recipe.objective.method
    if method == "clusterfit":
        return recipe.grafit.clusters
    return classes if method == "classification" or _learns(recipe, "cross_entropy") else 0


def _projector_of(recipe: Recipe) -> str | None:
    """What the kNN loss trains belongs to the network: images are searched by it."""
    return METHODS[recipe.objective.method].projector if _learns(recipe, "knn") else None


def _learns(recipe: Recipe, labels: Literal["knn", "cross_entropy"]) -> bool:
    method = METHODS.get(recipe.objective.method)
    return method is not None and method.labels == labels


def reads_labels(method: str) -> bool:
    """Whether an objective.method needs labels of the images."""
    return method == "classification" or (method in METHODS and METHODS[method].labels != "none")


def compares_views(recipe: Recipe) -> bool:
    """Whether the objective takes batches of views."""
    return recipe.objective.method not in ("classification", "clusterfit")


def tells_classes(recipe: Recipe) -> bool:
    """Whether the network ends with a classifier for the classes of the data."""
    return recipe.objective.method == "classification" or _learns(recipe, "cross_entropy")


def initialise(network: Network, init: str, *, keep_head: bool = True) -> None:
    """Start from the weights of a run or of a published file.

    Without `keep_head`, and for another number of classes, the head stays fresh; another resolution is resampled.
    """
    source: Any = init
    if is_run(init):
        trained, _ = load_network(Path(init))
        size = network.config.image_size
        if isinstance(trained, PooledConvNet) and trained.config.image_size != size:
            trained = trained.at_resolution(size)  # `load_published` knows the grids of patchloom's own networks
        heads = () if keep_head else tuple(trained.classifiers())
        source = {key: tensor for key, tensor in trained.state_dict().items() if key.split(".")[0] not in heads}
    load_published(network, source, new_head=True, adapt_resolution=True)


def make_teacher(spec: str, splits: Splits) -> Teacher:
    """A run of patchloom, or any name `load_teacher` knows; its classes are compared with the data's."""
    names = splits.classes.names
    if not is_run(spec):
        return load_teacher(spec, len(names), names)
    network, files = load_network(Path(spec))
    shown = files.preprocessing
    teacher = Teacher(
        network,
        mean=shown.mean,
        std=shown.std,
        image_size=shown.image_size,
        any_resolution=network.any_resolution,
        num_classes=len(files.labels),
        classes=files.labels,
    )
    return teacher.match_classes(names)


def is_run(path: str) -> bool:
    """Whether `path` is the folder of a run."""
    return os.path.isfile(os.path.join(path, "config.json"))  # of no path an error, however long it is


# Objective and loaders ----------------------------------------------------------------------------------------------


def make_objective(
    recipe: Recipe,
    network: Network,
    processes: Processes,
    *,
    labels: np.ndarray,
    steps_per_epoch: int,
    teacher: Teacher | None = None,
) -> Objective:
    """What the recipe minimises, on the network's device; `labels` are those of all training images."""
    device = next(network.parameters()).device
    pixels: dict[str, Any] = {"pixel_mean": network.pixel_mean, "pixel_std": network.pixel_std}
    epochs = recipe.schedule.epochs
    if recipe.objective.method == "dino":
        return Dino(
            network,
            _dino_head(recipe.dino, network),
            recipe.dino,
            global_views=recipe.views.number,
            steps_per_epoch=steps_per_epoch,
            epochs=epochs,
            add_up=processes.sum_,
            **pixels,
        ).to(device)
    if compares_views(recipe):
        part = recipe.grafit
        return Grafit(
            METHODS[recipe.objective.method],
            network,
            torch.from_numpy(labels),
            total_steps=steps_per_epoch * epochs,
            instance_weight=part.instance_weight,
            temperature=part.temperature,
            decay=part.target_decay,
            margin=part.margin,
            seed=recipe.seed,
            gather=processes.gather_rows,
            **pixels,
        ).to(device)
    shared: dict[str, Any] = {"num_classes": network.config.num_classes, "seed": recipe.seed, **pixels}
    if teacher is None:
        return Classification(recipe.objective, recipe.augment, **shared)
    token = bool(getattr(network.config, "distilled", False))
    return Distillation(recipe.objective, recipe.augment, teacher=teacher, token=token, **shared)


def _dino_head(part: DinoPart, network: Network) -> DinoHead:
    return DinoHead(
        network.feature_dim,
        part.outputs,
        hidden=part.hidden,
        bottleneck=part.bottleneck,
        batch_norm=part.batch_norm,
        fixed_norm=part.fixed_norm,
    )


def make_views(recipe: Recipe) -> list[View]:
    """How the views of an image are made: those of full size, then the local ones."""
    part, augment, size = recipe.views, recipe.augment, recipe.model.image_size
    second = replace(
        augment,
        blur=augment.blur if part.second_blur is None else part.second_blur,
        solarise=augment.solarise if part.second_solarise is None else part.second_solarise,
    )
    local = replace(
        augment, crop_min_scale=part.local_min_scale, crop_max_scale=part.local_max_scale, blur=part.local_blur
    )
    whole = [View(second if number == 1 else augment, size) for number in range(part.number)]
    return [*whole, *[View(local, part.local_size)] * part.local]


def make_evaluation_loader(
    dataset: ImageSet,
    image_size: int | tuple[int, int],
    crop_ratio: float,
    interpolation: str = "bicubic",
    *,
    batch_size: int,
    device: torch.device,
    workers: int,
    rank: int = 0,
    world: int = 1,
    skip_broken: bool = True,
    timeout_s: float = WORKER_TIMEOUT_S,
) -> Loader | DeviceLoader:
    """A set in its order, every picture once; kept decoded on the device where it fits."""
    transform = test_transform(image_size, crop_ratio, interpolation)
    shared: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": False,
        "drop_last": False,
        "rank": rank,
        "world": world,
    }
    if fits_in_memory(len(dataset), transform.image_size):
        store = decode_all(dataset, transform, device, workers=workers, skip_broken=skip_broken, timeout_s=timeout_s)
        if store.broken:  # no picture counts in place of another
            store.labels[torch.tensor(list(store.broken))] = UNLABELLED
        return DeviceLoader(store, None, transform.image_size, **shared)
    shared |= {"workers": workers, "skip_broken": skip_broken, "timeout_s": timeout_s}
    return Loader(dataset, transform, pin=device.type == "cuda", **shared)
