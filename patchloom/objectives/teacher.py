"""The teacher of a distillation: any frozen classifier, shown the student's images the way it knows images.

timm:regnety_160.deit_in1k       timm's network with its published weights, fetched by timm
timm:regnety_160@teacher.pth     the same network with weights of one's own; torchvision:resnet50[@path] likewise
resmlp_s24@weights.safetensors   a network of patchloom; resmlp_s24:in1k, its published weights, is resolved by tasks
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
from patchloom.objectives.third_party_weights import fetching, imagenet_classes, misfits, read_weights
from patchloom_runtime.errors import UsageError, nearest

LARGER_BY = 32  # pixels, by which all networks that reduce the image divide
# Last weights of patchloom's networks, in its own and in the authors' names; their rows are the classes.
_HEADS = ("classifier.weight", "head.weight", "mlp_head.0.weight")


class Teacher(nn.Module):
    """A classifier that only ever answers: in eval mode, without gradients.

    `mean`, `std` and `image_size` are those it was trained with; images are resized to that size, except that one
    of `any_resolution` takes larger images as they are. `classes` are the names of its outputs, where they are
    known; `match_classes` puts the outputs in the order of the data.
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
        """Images (B, 3, H, W), normalised as `for_images_of` was told → logits (B, classes of the data)."""
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
        """A teacher does not learn: it stays in eval mode."""
        return super().train(False)

    def for_images_of(self, mean: Sequence[float], std: Sequence[float]) -> Self:
        """Expect images normalised by these numbers. Mixing keeps means, so mixed images may be renormalised."""
        self._renormalizes = (tuple(mean), tuple(std)) != (self.mean, self.std)
        student, teacher = torch.tensor([mean, std]), torch.tensor([self.mean, self.std])
        scale, shift = student[1] / teacher[1], (student[0] - teacher[0]) / teacher[1]
        device = next((tensor.device for tensor in self.module.parameters()), None)
        self.register_buffer("scale", scale.view(-1, 1, 1).to(device), persistent=False)
        self.register_buffer("shift", shift.view(-1, 1, 1).to(device), persistent=False)
        return self

    def match_classes(self, names: Sequence[str]) -> Self:
        """Answer for the classes of the data, in their order; a class the teacher does not know is an error."""
        if self.classes is None:
            self.check_classes(len(names))
            return self
        _check_names(self.classes, names)
        place = {name: column for column, name in enumerate(self.classes)}
        self.columns = torch.tensor([place[name] for name in names], device=self.scale.device)
        self.num_classes = len(names)
        return self

    def check_classes(self, num_classes: int) -> None:
        """One clear line for a teacher of other classes than the data's."""
        _check_count(self.num_classes, num_classes)


class Mixture(nn.Module):
    """Several teachers that answer as one: the mean of their probabilities, as its logarithm (thesis 3.3)."""

    def __init__(self, teachers: Sequence[Teacher]) -> None:
        super().__init__()
        self.teachers = nn.ModuleList(teachers)
        self.num_classes = teachers[0].num_classes

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W), normalised as `for_images_of` was told → logits (B, classes of the data)."""
        answers = torch.stack([teacher(images).float().log_softmax(dim=1) for teacher in self.teachers])
        return answers.logsumexp(dim=0) - math.log(len(answers))

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002
        """Teachers do not learn: they stay in eval mode."""
        return super().train(False)

    def for_images_of(self, mean: Sequence[float], std: Sequence[float]) -> Self:
        """Expect images normalised by these numbers."""
        for teacher in self.teachers:
            teacher.for_images_of(mean, std)  # type: ignore[operator]
        return self

    def check_classes(self, num_classes: int) -> None:
        """One clear line for teachers of other classes than the data's."""
        for teacher in self.teachers:
            teacher.check_classes(num_classes)  # type: ignore[operator]


def load_teacher(spec: str, num_classes: int, class_names: Sequence[str] | None = None) -> Teacher:
    """The teacher a recipe names, for data of `num_classes`.

    Where the teacher's class names are known (published ImageNet weights) and the data's are given, they are
    matched by name, and a teacher may know more classes than the data. Otherwise the order is taken on trust.
    """
    kind, _, rest = spec.partition(":") if spec.startswith(("timm:", "torchvision:")) else ("", "", spec)
    name, _, path = rest.partition("@")
    if path and not Path(path).is_file():
        raise UsageError(f"The teacher {spec} names the file {path}, which does not exist. Check the path after @.")
    make = {"timm": _from_timm, "torchvision": _from_torchvision, "": _from_patchloom}[kind]
    teacher = make(name, path, num_classes, class_names)
    return teacher if class_names is None else teacher.match_classes(class_names)


# Where teachers come from. Classes are compared before weights are fetched or a network is made. --------------------


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
        given = {"state_dict": state, "num_classes": num_classes, "custom_load": False}
        with misfits(name, path):
            module = timm.create_model(name, True, pretrained_cfg_overlay=given, num_classes=num_classes)
        del module.pretrained_cfg["state_dict"]
        classes = None
    else:
        classes = imagenet_classes(config["num_classes"])
        _check_outputs(config["num_classes"], classes, num_classes, class_names)
        with fetching(f"timm:{name}"):
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
        with fetching(f"torchvision:{name}"):
            module = models.get_model(name, weights=weights)
    shown = weights.transforms()
    return Teacher(
        module,
        mean=shown.mean,
        std=shown.std,
        image_size=(shown.crop_size[0], shown.crop_size[0]),
        any_resolution=_takes_larger(module, (shown.crop_size[0], shown.crop_size[0])),
        num_classes=outputs,
        classes=classes,
    )


def _from_patchloom(name: str, path: str, num_classes: int, class_names: Sequence[str] | None) -> Teacher:  # noqa: ARG001
    if name not in list_models():
        raise _unknown("", name, list_models())
    if not path:
        known = ", ".join(weights.name for weights in published(name) if weights.classes)
        others = f", or published ones: {known}" if known else ""
        raise UsageError(f"The teacher {name} has no weights. Name their file: {name}@PATH{others}")
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
    """Whether a student fine-tuned at a higher resolution may show its images as they are (thesis 3.3)."""
    larger = torch.zeros(1, 3, *(side + LARGER_BY for side in image_size), device="meta")
    try:
        with torch.no_grad():
            copy.deepcopy(module).to("meta").eval()(larger)
    except Exception:  # whatever a library raises for a size that its network does not take
        return False
    return True


# What can be wrong with one. ----------------------------------------------------------------------------------------


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
            f"The teacher knows {count} classes, the data has {wanted}. "
            "Use a teacher that was trained or fine-tuned on these classes."
        )


def _check_names(classes: Sequence[str], wanted: Sequence[str]) -> None:
    known = set(classes)
    missing = [name for name in wanted if name not in known]
    if missing:
        raise UsageError(
            f"The teacher knows {len(classes)} classes ({classes[0]}, …), the data has {len(wanted)}, of which "
            f"{len(missing)} are not among them ({', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}). "
            "Use a teacher that was trained or fine-tuned on these classes."
        )


def _unknown(kind: str, name: str, known: list[str]) -> UsageError:
    return UsageError(f"No teacher is called {kind}{name}.{nearest(name, known)}")
