"""Teachers for distillation: any frozen classifier, with the student's images converted to its own preprocessing.

timm:regnety_160.deit_in1k       timm's network with its published weights, downloaded by timm
timm:regnety_160@teacher.pth     the same network with local weights; torchvision:resnet50[@path] likewise
resmlp_s24@weights.safetensors   a patchloom network; resmlp_s24:in1k, its published weights, is resolved by tasks
"""

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchloom.models.pretrained.published import load_published
from patchloom.models.pretrained.table import published
from patchloom.models.registry import create_model, list_models
from patchloom.objectives.third_party_weights import downloading, imagenet_classes, misfits, read_weights
from patchloom_runtime.errors import UsageError, nearest

LARGER_BY = 32  # pixels; every network that downsamples divides by it at most
# Final weights of patchloom's networks, in its own and in the authors' key names; their rows are the classes.
_HEADS = ("classifier.weight", "head.weight", "mlp_head.0.weight")


class Teacher(nn.Module):
    """A classifier for inference only: in eval mode, without gradients.

    `mean`, `std` and `image_size` are those of its training. Images are resized to that size, except that a network
    with `any_resolution` takes larger images unchanged. `classes` are the names of its outputs, if known;
    `match_classes` puts the outputs in the order of the data.
    """

    columns: Tensor | None
    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        module: nn.Module,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        image_size: tuple[int, int],
        num_classes: int,
        any_resolution: bool = False,
        classes: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.module = module.requires_grad_(False)
        self.mean, self.std = tuple(mean), tuple(std)
        self.image_size, self.any_resolution = image_size, any_resolution
        self.num_classes = num_classes
        self.classes = classes
        self.register_buffer("columns", None)
        self.for_images_of(self.mean, self.std)
        self.train(False)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, 3, H, W), normalized as set by `for_images_of`, to logits (B, classes of the data)."""
        with torch.no_grad():
            if self._renormalizes:
                images = images * self.scale + self.shift
            if self._resizes(images.shape[2], images.shape[3]):
                images = F.interpolate(images, self.image_size, mode="bicubic", antialias=True)
            logits = self.module(images)
            return logits if self.columns is None else logits[:, self.columns]

    def _resizes(self, height: int, width: int) -> bool:
        if self.any_resolution:
            return height < self.image_size[0] or width < self.image_size[1]
        return (height, width) != self.image_size

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002
        """Stay in eval mode: a teacher does not learn."""
        return super().train(False)

    def for_images_of(self, mean: Sequence[float], std: Sequence[float]) -> Self:
        """Set the normalization of the input. Mixing preserves means, so mixed images can be renormalized."""
        self._renormalizes = (tuple(mean), tuple(std)) != (self.mean, self.std)
        student, teacher = torch.tensor([mean, std]), torch.tensor([self.mean, self.std])
        scale, shift = student[1] / teacher[1], (student[0] - teacher[0]) / teacher[1]
        device = next((tensor.device for tensor in self.module.parameters()), None)
        self.register_buffer("scale", scale.view(-1, 1, 1).to(device), persistent=False)
        self.register_buffer("shift", shift.view(-1, 1, 1).to(device), persistent=False)
        return self

    def match_classes(self, names: Sequence[str]) -> Self:
        """Select the outputs of the data's classes, in their order. Raise UsageError for an unknown class."""
        if self.classes is None:
            self.check_classes(len(names))
            return self
        _check_names(self.classes, names)
        place = {name: column for column, name in enumerate(self.classes)}
        self.columns = torch.tensor([place[name] for name in names], device=self.scale.device)
        self.num_classes = len(names)
        return self

    def check_classes(self, num_classes: int) -> None:
        """Raise UsageError if the teacher has another number of classes."""
        _check_count(self.num_classes, num_classes)


class Mixture(nn.Module):
    """Several teachers as one: the logarithm of the mean of their probabilities (thesis 3.3)."""

    def __init__(self, teachers: Sequence[Teacher]) -> None:
        super().__init__()
        self.teachers = nn.ModuleList(teachers)
        self.num_classes = teachers[0].num_classes

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, 3, H, W), normalized as set by `for_images_of`, to logits (B, classes of the data)."""
        outputs = torch.stack([teacher(images).float().log_softmax(dim=1) for teacher in self.teachers])
        return outputs.logsumexp(dim=0) - math.log(len(outputs))

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002
        """Stay in eval mode: teachers do not learn."""
        return super().train(False)

    def for_images_of(self, mean: Sequence[float], std: Sequence[float]) -> Self:
        """Set the normalization of the input."""
        for teacher in self.teachers:
            teacher.for_images_of(mean, std)  # type: ignore[operator]
        return self

    def check_classes(self, num_classes: int) -> None:
        """Raise UsageError if a teacher has another number of classes."""
        for teacher in self.teachers:
            teacher.check_classes(num_classes)  # type: ignore[operator]


def load_teacher(spec: str, num_classes: int, class_names: Sequence[str] | None = None) -> Teacher:
    """Load the teacher that a recipe names, for data with `num_classes` classes.

    If the class names of both the teacher (published ImageNet weights) and the data are known, they are matched by
    name, and the teacher may have more classes than the data. Otherwise the same order is assumed.
    """
    kind, _, rest = spec.partition(":") if spec.startswith(("timm:", "torchvision:")) else ("", "", spec)
    name, _, path = rest.partition("@")
    if path and not Path(path).is_file():
        raise UsageError(f"The teacher {spec} names the file {path}, which does not exist. Check the path after @.")
    make = {"timm": _from_timm, "torchvision": _from_torchvision, "": _from_patchloom}[kind]
    teacher = make(name, path, num_classes, class_names)
    return teacher if class_names is None else teacher.match_classes(class_names)


# Loaders per source. Classes are compared before weights are downloaded or a network is built. ----------------------


def _from_timm(name: str, path: str, num_classes: int, class_names: Sequence[str] | None) -> Teacher:
    import timm

    module: Any
    try:
        known: Any = timm.get_pretrained_cfg(name, allow_unregistered=False)
    except RuntimeError as error:
        raise _unknown("timm:", name, timm.list_models() + timm.list_pretrained()) from error
    config = known.to_dict()
    if path:
        state = read_weights(path)
        heads = config.get("classifier", ())
        heads = (heads,) if isinstance(heads, str) else heads
        _check_rows(state, [f"{head}.weight" for head in heads], num_classes)
        overlay = {"state_dict": state, "num_classes": num_classes, "custom_load": False}
        with misfits(name, path):
            module = timm.create_model(name, True, pretrained_cfg_overlay=overlay, num_classes=num_classes)
        del module.pretrained_cfg["state_dict"]
        classes = None
    else:
        classes = imagenet_classes(config["num_classes"])
        _check_outputs(config["num_classes"], classes, num_classes, class_names)
        with downloading(f"timm:{name}"):
            module = timm.create_model(name, pretrained=True)
    return Teacher(
        module,
        mean=config["mean"],
        std=config["std"],
        image_size=config["input_size"][1:],
        any_resolution=_takes_larger(module, config["input_size"][1:]),
        num_classes=module.num_classes,
        classes=classes,
    )


def _from_torchvision(name: str, path: str, num_classes: int, class_names: Sequence[str] | None) -> Teacher:
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise _unknown("torchvision:", name, known)
    weights = models.get_model_weights(name)["DEFAULT"]
    outputs = num_classes if path else len(weights.meta["categories"])
    classes = None if path else imagenet_classes(outputs)
    if path:
        state = read_weights(path)
        module = models.get_model(name, num_classes=num_classes)
        _check_rows(state, [list(module.state_dict())[-1]], num_classes)
        with misfits(name, path):
            module.load_state_dict(state)
    else:
        _check_outputs(outputs, classes, num_classes, class_names)
        with downloading(f"torchvision:{name}"):
            module = models.get_model(name, weights=weights)
    transform = weights.transforms()
    return Teacher(
        module,
        mean=transform.mean,
        std=transform.std,
        image_size=(transform.crop_size[0], transform.crop_size[0]),
        any_resolution=_takes_larger(module, (transform.crop_size[0], transform.crop_size[0])),
        num_classes=outputs,
        classes=classes,
    )


def _from_patchloom(name: str, path: str, num_classes: int, class_names: Sequence[str] | None) -> Teacher:  # noqa: ARG001
    if name not in list_models():
        raise _unknown("", name, list_models())
    if not path:
        known = ", ".join(weights.name for weights in published(name) if weights.classes)
        others = f", or published ones: {known}" if known else ""
        raise UsageError(f"The teacher {name} has no weights. Name a file: {name}@PATH{others}")
    state = read_weights(path)
    _check_rows(state, _HEADS, num_classes)
    network = load_published(create_model(name, num_classes=num_classes), state)
    return Teacher(
        network,
        mean=network.pixel_mean,
        std=network.pixel_std,
        image_size=network.config.image_size,
        any_resolution=network.any_resolution,
        num_classes=num_classes,
    )


def _takes_larger(module: nn.Module, image_size: Sequence[int]) -> bool:
    """Return whether the network accepts larger images, so that a student's fine-tuning images need no resizing."""
    larger = torch.zeros(1, 3, *(side + LARGER_BY for side in image_size), device="meta")
    try:
        with torch.no_grad():
            copy.deepcopy(module).to("meta").eval()(larger)
    except Exception:  # libraries raise many types for a size that their network does not accept
        return False
    return True


# Checks. --------------------------------------------------------------------------------------------------------------


def _check_outputs(
    count: int, classes: Sequence[str] | None, wanted: int, wanted_classes: Sequence[str] | None
) -> None:
    if classes is None or wanted_classes is None:
        _check_count(count, wanted)
    else:
        _check_names(classes, wanted_classes)


def _check_rows(state: dict[str, Any], heads: Sequence[str], num_classes: int) -> None:
    for head in heads:
        if head in state:
            _check_count(len(state[head]), num_classes)


def _check_count(count: int, wanted: int) -> None:
    if count != wanted:
        raise UsageError(
            f"The teacher has {count} classes, the data {wanted}. "
            "Use a teacher that was trained or fine-tuned on these classes."
        )


def _check_names(classes: Sequence[str], wanted: Sequence[str]) -> None:
    known = set(classes)
    missing = [name for name in wanted if name not in known]
    if missing:
        raise UsageError(
            f"The teacher has {len(classes)} classes ({classes[0]}, …), the data {len(wanted)}, of which "
            f"{len(missing)} are not among them ({', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}). "
            "Use a teacher that was trained or fine-tuned on these classes."
        )


def _unknown(kind: str, name: str, known: list[str]) -> UsageError:
    return UsageError(f"Unknown teacher {kind}{name}.{nearest(name, known)}")
