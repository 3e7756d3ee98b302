"""The networks of image tasks, their initial weights and their teachers."""

from pathlib import Path
from typing import Any

import torch

from patchloom.data.datasets import Splits
from patchloom.layers.residual import Branch
from patchloom.models.network import Network
from patchloom.models.pooled_convnet import PooledConvNet
from patchloom.models.pretrained.published import load_published
from patchloom.models.registry import build_model
from patchloom.objectives.feature_distillation import FeatureExtractor
from patchloom.objectives.teacher import Mixture, Teacher, load_teacher
from patchloom.recipes.methods import method_of
from patchloom.recipes.schema import Recipe
from patchloom.runs.locate import find_run, is_third_party, run_folder
from patchloom.runs.weights import load_backbone, load_network
from patchloom_runtime.errors import UsageError


def make_network(recipe: Recipe, classes: int) -> Network:
    """Build the recipe's network for a number of classes, with random weights; 'timm:NAME' is a network of timm."""
    method = method_of(recipe.objective.method)
    name, options = network_options(recipe)
    if method.projector != "none":
        options["projector"] = method.projector
    outputs = {"classes": classes, "clusters": recipe.grafit.clusters, "none": 0}[method.head]
    return build_model(name, num_classes=outputs, image_size=recipe.model.image_size, **options)


def make_backbone(recipe: Recipe) -> Network:
    """Build the recipe's network without a classifier, with random weights, for tasks with their own heads."""
    name, options = network_options(recipe)
    network = build_model(name, num_classes=0, image_size=recipe.model.image_size, **options)
    network.gradient_checkpointing = recipe.model.gradient_checkpointing
    return network


def network_options(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    """Return the name and options of the recipe's network for `create_model`."""
    part = recipe.model
    name, options = part.name, dict(part.options)
    if is_third_party(name):
        options = {"backbone": name.removeprefix("timm:"), "pool": "average", **options}
        name = "resnet50_attention_pool"
    options |= {"drop_path": part.drop_path, "drop_path_rule": part.drop_path_rule}
    if part.dropout:
        options["dropout"] = part.dropout
    return name, options


def initialize(network: Network, init: str, *, keep_head: bool = True) -> None:
    """Load the weights of a run or of a published file.

    The head keeps its random weights without `keep_head` or for another number of classes. Weights of another
    resolution are resampled.
    """
    source: Any = init
    if folder := find_run(init):
        trained, _ = load_backbone(folder)
        size = network.config.image_size
        if isinstance(trained, PooledConvNet) and trained.config.image_size != size:
            trained = trained.at_resolution(size)  # `load_published` knows the grids of patchloom's own networks
        heads = () if keep_head else tuple(trained.classifiers())
        source = {key: tensor for key, tensor in trained.state_dict().items() if key.split(".")[0] not in heads}
    load_published(network, source, new_head=True, adapt_resolution=True)


@torch.no_grad()
def fix_scales(network: Network, run: str) -> None:
    """Give every branch the fixed LayerScale that it has in `run`: the control experiment of thesis 3.5.3."""
    trained, _ = load_backbone(run_folder(run))
    theirs = {name: branch.scale for name, branch in trained.named_modules() if isinstance(branch, Branch)}
    for name, branch in network.named_modules():
        if not isinstance(branch, Branch):
            continue
        scale = theirs.get(name)
        if branch.scale is None or scale is None or scale.shape != branch.scale.shape:
            raise UsageError(
                f"model.scales_from {run} is a {trained.config.name} without the LayerScale of this network's {name}; "
                "pass a run of the same depth and width, trained with LayerScale"
            )
        branch.scale.copy_(scale)
        branch.scale.requires_grad_(False)


def make_teacher(spec: str, splits: Splits) -> Teacher | Mixture:
    """Load one teacher of classes, or a mixture of several that are separated by commas."""
    teachers = [_one_teacher(each, splits) for each in teacher_names(spec)]
    return teachers[0] if len(teachers) == 1 else Mixture(teachers)


def teacher_names(spec: str) -> list[str]:
    """Split a list of teachers at its commas; an existing path may contain commas."""
    if Path(spec).exists():
        return [spec]
    return [name for each in spec.split(",") if (name := each.strip())]


def _one_teacher(spec: str, splits: Splits) -> Teacher:
    """Load a run, published weights or a name that `load_teacher` knows, and match its classes with the data's."""
    names = splits.classes.names
    if is_third_party(spec) or not (folder := find_run(spec)):
        return load_teacher(spec, len(names), names)
    network, files = load_network(folder)
    if not files.decides:
        raise UsageError(
            f"The teacher {spec} has no classifier, so it cannot teach classes. Pass one with a classifier."
        )
    preprocessing = files.preprocessing
    teacher = Teacher(
        network,
        mean=preprocessing.mean,
        std=preprocessing.std,
        image_size=preprocessing.image_size,
        any_resolution=network.any_resolution,
        num_classes=len(files.labels),
        classes=files.labels_as(names),
    )
    return teacher.match_classes(names)


def make_feature_teacher(spec: str) -> Teacher:
    """Load any network as a teacher of features: a run, published weights, timm:NAME or torchvision:NAME."""
    network, files = load_backbone(run_folder(spec))
    used = files.preprocessing
    return Teacher(
        FeatureExtractor(network),
        mean=used.mean,
        std=used.std,
        image_size=used.image_size,
        any_resolution=network.any_resolution,
        num_classes=0,
    )
