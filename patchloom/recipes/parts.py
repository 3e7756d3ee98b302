"""The groups of a recipe's fields, in the order of the recipe. Each parses and checks its fields when created.

A new field is a line here; `methods.py` lists the methods that read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from patchloom.recipes.methods import method_of
from patchloom.recipes.values import (
    Count,
    CountOrZero,
    NotNegative,
    NumberRange,
    Options,
    OptionValue,
    Positive,
    Probability,
    read_value,
)
from patchloom_runtime.errors import UsageError


class Checked:
    """Base class that parses every field by its type, then checks for conflicting fields."""

    group: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, hint in fields_of(type(self)).items():
            key = f"{self.group}.{name}" if self.group else name
            object.__setattr__(self, name, read_value(key, getattr(self, name), hint))
        self.check_clashes()

    def check_clashes(self) -> None:
        """Raise UsageError if two fields of the group contradict each other."""

    def check_order(self, low: str, high: str) -> None:
        """Raise UsageError if the lower end of a range is above the upper end."""
        least, most = getattr(self, low), getattr(self, high)
        if most < least:
            raise UsageError(
                f"{self.group}.{high} is {most:g}, below {self.group}.{low} {least:g}. "
                "Raise the first or lower the second."
            )


@dataclass(frozen=True, kw_only=True)
class ModelPart(Checked):
    """The network, its image size, and which of its parts are trained."""

    group: ClassVar[str] = "model"

    name: str
    image_size: Count = 224  # side in pixels during training
    drop_path: Probability = 0.0  # stochastic depth
    drop_path_rule: Literal["uniform", "linear"] = "uniform"  # equal in every layer, or growing from 0
    dropout: Probability = 0.0
    # For image-level networks; the head always learns. head_and_norm: with the last norm (FixRes); lora: with changes
    # of low rank of attention and MLP layers, which are merged into the weights that a run saves.
    trainable: Literal["all", "attention", "head", "head_and_norm", "lora"] = "all"
    lora_rank: Count = 8
    frozen_epochs: CountOrZero = 0  # at the start, in which the head alone learns
    # Quant-Noise: bits to which each step rounds a random share of the matrices A, B and C of `patchloom prune`
    quantized_bits: Annotated[int, NumberRange(2, 8)] | None = None
    quantized_share: Annotated[float, NumberRange(0, 1, above=True)] = 0.5  # of the weights
    fit_head: bool = False  # fit a new classifier to the features, as the best linear one, before the first step
    freeze: Literal["none", "backbone"] = "none"  # for dense networks: train only the parts on top of the backbone
    eval_mode: bool = False  # fine-tune without stochastic depth and dropout, with fixed batch statistics
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, a third more time
    size_from: Literal["start", "recipe"] = "start"  # with --init: image sizes and crop of the run, or of this recipe
    scales_from: str | None = None  # a run whose learned LayerScale is used, fixed, from the first step on
    options: Mapping[str, OptionValue] = field(default_factory=Options)


@dataclass(frozen=True, kw_only=True)
class AugmentPart(Checked):
    """Augmentation of training images."""

    group: ClassVar[str] = "augment"

    # square_random: a window of the image resized to a larger square; centre: as in testing (all: docs/training.md)
    crop: Literal["random_resized", "simple_random", "square_random", "centre", "pad", "resize", "scaled"] = (
        "random_resized"
    )
    crop_min_scale: Annotated[float, NumberRange(0, 1, above=True)] = 0.08  # random_resized: smallest share of the area
    crop_max_scale: Annotated[float, NumberRange(0, 1, above=True)] = 1.0  # random_resized: largest share of the area
    crop_padding: CountOrZero = 4  # simple_random and pad: pixels added on each side
    crop_ratio: Annotated[float, NumberRange(0, 1, above=True)] = 0.875  # square_random, centre: as test.crop_ratio
    # scaled: short side before scaling, with a long side of up to 4 times that; 0 = any
    short_side: CountOrZero = 0
    scale_min: Positive = 0.5  # scaled: smallest factor for both sides, before a window is cropped or padded
    scale_max: Positive = 2.0  # scaled: largest factor
    # scaled: largest share of one class in a window's labeled pixels
    largest_class: Annotated[float, NumberRange(0, 1, above=True)] = 1.0
    flip: Probability = 0.5  # left to right
    policy: Literal["none", "randaugment", "autoaugment", "three_augment", "trivial", "photometric"] = "none"
    policy_magnitude: NotNegative = 9.0  # randaugment
    policy_magnitude_std: NotNegative = 0.0  # randaugment
    policy_layers: Count = 2  # randaugment: transformations per image
    policy_choices: tuple[Literal["grey", "solarise", "blur"], ...] = ("grey", "solarise", "blur")  # three_augment
    color_jitter: NotNegative = 0.0  # brightness, contrast and saturation
    saturation: NotNegative | None = None  # jitter of saturation alone; none = as color_jitter
    hue: Annotated[float, NumberRange(0, 0.5)] = 0.0  # jitter of hue, as a share of the color circle
    jitter_probability: Probability = 1.0  # for color_jitter, saturation and hue together
    grey: Probability = 0.0
    blur: Probability = 0.0  # Gaussian, with a radius of 0.1 to 2 pixels
    solarise: Probability = 0.0  # invert values from 128 on
    erasing: Probability = 0.0
    mixup: NotNegative = 0.0  # α of the Beta distribution; 0 = off
    cutmix: NotNegative = 0.0  # α of the Beta distribution; 0 = off
    mix_probability: Probability = 1.0  # that a batch is mixed
    mix_switch: Probability = 0.5  # that it is CutMix, if both are on
    repeats: Count = 1  # repeated augmentation: copies of an image in a batch

    @property
    def jitters(self) -> tuple[float, float, float, float]:
        """Return the maximum jitter of brightness, contrast, saturation and hue."""
        saturation = self.color_jitter if self.saturation is None else self.saturation
        return self.color_jitter, self.color_jitter, saturation, self.hue

    def check_clashes(self) -> None:
        """Check the order of ranges and that three_augment has choices."""
        self.check_order("crop_min_scale", "crop_max_scale")
        self.check_order("scale_min", "scale_max")
        if self.policy == "three_augment" and not self.policy_choices:
            raise UsageError("augment.policy three_augment has no choices. Set augment.policy to none.")


@dataclass(frozen=True, kw_only=True)
class ObjectivePart(Checked):
    """The loss and the teacher."""

    group: ClassVar[str] = "objective"

    method: str = "classification"  # a row of `recipes.methods`
    loss: Literal["cross_entropy", "bce"] = "cross_entropy"  # bce: every mixed class is a target of 1
    # ε: each of the K classes gets ε/K, as in timm, which the authors use (thesis 3.3: the other classes share it)
    smoothing: Annotated[float, NumberRange(0, 1)] = 0.0
    distillation: Literal["none", "soft", "hard", "labels"] = "none"  # labels: the second token learns the labels
    teacher: str | None = None  # several, separated by commas, are averaged in probability
    distillation_weight: Probability = 0.5  # of the teacher's term; the labels have the rest
    temperature: Positive = 1.0  # soft distillation
    # soft: mean of the divergence over the batch, as in thesis equation 3.2, or also over classes, as in DeiT's code
    soft_mean: Literal["batch", "batch_and_classes"] = "batch"
    position_weight: Probability = (
        0.5  # distill_features: weight of the features per position; the pooled have the rest
    )

    def check_clashes(self) -> None:
        """Check that the method exists and that loss, smoothing, distillation and teacher are compatible."""
        gives = method_of(self.method).teacher
        if self.distillation != "none" and gives != "classes":
            raise UsageError(
                f"objective.distillation is {self.distillation}, but objective.method {self.method} has no teacher for "
                "classes. Set objective.distillation to none."
            )
        if self.teacher and gives == "none":
            raise UsageError(
                f"objective.teacher is {self.teacher}, but objective.method {self.method} has no teacher. "
                "Set objective.teacher to none."
            )
        if self.loss == "bce" and self.smoothing:
            raise UsageError(
                f"objective.loss bce cannot be smoothed, but objective.smoothing is {self.smoothing:g}. "
                "Set objective.smoothing to 0 or objective.loss to cross_entropy."
            )
        if self.teacher and gives == "classes" and self.distillation in ("none", "labels"):
            raise UsageError(
                f"objective.teacher is {self.teacher}, but objective.distillation is {self.distillation}. "
                "Set objective.distillation to hard or soft, or objective.teacher to none."
            )


@dataclass(frozen=True, kw_only=True)
class BalancePart(Checked):
    """Remedies for classes with few images, one per run; predictions are made as without them (docs/imbalance.md)."""

    group: ClassVar[str] = "balance"

    # classes in an epoch: as in the data, by the square root of their images, or equally often
    sampling: Literal["none", "sqrt", "balanced"] = "none"
    class_weights: Literal["none", "inverse", "effective"] = "none"  # of the loss: by images or effective number
    effective_beta: Annotated[float, NumberRange(0, 1, above=True)] = 0.999  # β of the effective number
    logit_adjustment: NotNegative = 0.0  # τ: the loss adds τ·log(share of the class) to the logits; 0 = off

    @property
    def remedies(self) -> list[str]:
        """Return the fields that are in use, with their values."""
        used = {"sampling": self.sampling, "class_weights": self.class_weights}
        texts = [f"balance.{name}={value}" for name, value in used.items() if value != "none"]
        return texts + ([f"balance.logit_adjustment={self.logit_adjustment:g}"] if self.logit_adjustment else [])

    def check_clashes(self) -> None:
        """Check that one remedy is used: two would correct twice."""
        if self.effective_beta == 1:
            raise UsageError(
                "balance.effective_beta is 1, expected less than 1. For the limit, set balance.class_weights=inverse."
            )
        if len(self.remedies) > 1:
            first, second = self.remedies[:2]
            raise UsageError(f"{first} and {second} both correct for the class sizes. Use one of them.")


@dataclass(frozen=True, kw_only=True)
class ViewsPart(Checked):
    """The views of an image that are compared. `augment` defines those of full size. Not read by classification."""

    group: ClassVar[str] = "views"

    number: Count = 1  # of full size
    second_blur: Probability | None = None  # for the second view; none = as augment.blur
    second_solarise: Probability | None = None
    local: CountOrZero = 0  # number of additional small views
    local_size: Count = 96
    local_min_scale: Annotated[float, NumberRange(0, 1, above=True)] = 0.05
    local_max_scale: Annotated[float, NumberRange(0, 1, above=True)] = 0.4
    local_blur: Probability = 0.5

    def check_clashes(self) -> None:
        """Check the order of the local scales."""
        self.check_order("local_min_scale", "local_max_scale")


@dataclass(frozen=True, kw_only=True)
class DinoPart(Checked):
    """Settings of objective.method dino; the authors' defaults."""

    group: ClassVar[str] = "dino"

    outputs: Count = 65536  # prototypes of the head
    hidden: Count = 2048
    bottleneck: Count = 256
    batch_norm: bool = False  # in the head
    fixed_norm: bool = True  # prototypes of length 1
    small_views: Literal["resample", "resize", "none"] = "resample"  # local views for networks with a fixed size
    student_temperature: Positive = 0.1
    teacher_temperature: Positive = 0.04  # after its warm-up; their longest trainings use 0.07
    warmup_teacher_temperature: Positive = 0.04
    warmup_teacher_epochs: CountOrZero = 0  # 30 in their longest trainings
    centre_momentum: Probability = 0.9
    teacher_momentum: Probability = 0.996  # at the first update; 1 at the end
    frozen_last_layer_epochs: CountOrZero = 1


@dataclass(frozen=True, kw_only=True)
class GrafitPart(Checked):
    """Settings of Grafit and its baselines."""

    group: ClassVar[str] = "grafit"

    instance_weight: NotNegative = 1.0  # λ of equation 2.4
    temperature: Positive = 0.05  # σ of equations 2.2 and 2.6, as in SNCA
    target_decay: Probability = 0.99  # at the first update; BYOL's for 100 to 300 epochs, 0.996 for 1000
    margin: NotNegative = 0.2  # triplet: for squared distances between unit vectors, as in FaceNet
    clusters: Count = 1500  # clusterfit; 15000 for ImageNet
    clusters_of: str | None = None  # clusterfit: the run whose features are clustered


@dataclass(frozen=True, kw_only=True)
class SegmentPart(Checked):
    """Settings of objective.method segmentation: the head on the network, and testing."""

    group: ClassVar[str] = "segment"

    head: Literal["upernet", "linear"] = "upernet"  # linear: one layer on the raw features
    channels: Count = 512  # of UperNet's head
    norm: Literal["batch", "group"] = "batch"  # of the head; group for small batches
    auxiliary_weight: NotNegative = 0.4  # loss weight of the auxiliary head; 0 = no such head
    auxiliary_channels: Count = 256
    dropout: Probability = 0.1  # of whole feature maps, before the classifier
    reduce_zero_label: bool = False  # mask value 0 is unlabeled, and classes start at 1 (ADE20K)
    test: Literal["auto", "whole", "slide"] = "auto"  # auto: whole if the network accepts images of any size
    test_short_side: CountOrZero | None = None  # of test images; none = as augment.short_side, 0 = any
    window_stride: Annotated[float, NumberRange(0, 1, above=True)] = 2 / 3  # slide: share of a window's side


@dataclass(frozen=True, kw_only=True)
class TextPart(Checked):
    """Settings of objective.method translation, where optim.batch_size counts tokens (data/text/token_batches.py)."""

    group: ClassVar[str] = "text"

    source: str | None = None  # languages; none = those of the text
    target: str | None = None
    vocabulary: Count = 32_768  # pieces, both languages together
    max_length: Annotated[int, NumberRange(2)] = 256  # positions: subwords of a sentence and its end
    max_ratio: Annotated[float, NumberRange(1)] | None = 9.0  # between the subword counts of a pair; none = any
    averaged_epochs: Count = 10  # also evaluate the mean of the weights after the last epochs; 1 = off
    beams: Count = 4
    length_penalty: Annotated[float, NumberRange(0, 10)] = 0.6  # scores are divided by length to this power


@dataclass(frozen=True, kw_only=True)
class DetectPart(Checked):
    """Settings of objective.method detection: the image canvas and the heads of Mask R-CNN.

    The defaults are those of XCiT's Mask R-CNN, which the thesis follows; `models/dense/detector.py` has torchvision's.
    """

    group: ClassVar[str] = "detect"

    # jitter: a random factor, augment.scale_min to scale_max of the size that fits the canvas; or a random short side.
    resize: Literal["jitter", "short_side"] = "jitter"
    short_min: Count = 480  # short_side: in steps of 32 pixels; tests use the largest
    short_max: Count = 800
    long_max: Count = 1333  # short_side: maximum of the long side
    min_visible: Probability = 0.0  # minimum visible share of a box for its object to be learned
    masks: bool = True  # learn masks if the data have them; false: boxes alone
    pyramid: Literal["fpn", "simple"] = "fpn"  # top-down, or ViTDet's without a top-down path
    channels: Count = 256  # per feature map
    norm: Literal["none", "batch", "group", "layer"] = "none"  # in pyramid and heads
    box_head: Literal["linear", "convolutions"] = "linear"  # two linear layers, or four convolutions and one
    hidden: Count = 1024  # of the linear layers
    anchor_scale: Positive = 8.0  # side of anchors, in strides
    proposals: Count = 1000  # kept per image
    regions: Count = 512  # training regions per image
    min_score: Probability = 0.05  # of a reported detection
    overlap: Probability = 0.5  # maximum IoU with a better detection of the same class (NMS)
    most: Count = 100  # detections per image

    def check_clashes(self) -> None:
        """Check the order of the short sides."""
        self.check_order("short_min", "short_max")


@dataclass(frozen=True, kw_only=True)
class OptimPart(Checked):
    """The optimizer, batch size and gradient clipping."""

    group: ClassVar[str] = "optim"

    name: Literal["adamw", "lamb", "sgd", "adam", "adagrad"] = "adamw"
    lr: Positive  # at the reference batch
    lr_reference_batch: Count | None = None  # the lr scales with batch_size over this; none = no scaling
    batch_size: Count  # images (for text: tokens) per step, over all devices and accumulation steps
    weight_decay: NotNegative = 0.0
    weight_decay_end: NotNegative | None = None  # reached along a cosine; none = constant
    betas: tuple[Probability, Probability] = (0.9, 0.999)  # adamw, lamb, adam
    momentum: Probability = 0.9  # sgd
    nesterov: bool = False  # sgd
    clip_norm: Positive | None = None  # maximum norm of the whole gradient
    clip_each: Positive | None = None  # maximum norm of each tensor's gradient
    ema_decay: Probability | None = None  # EMA decay per step
    # learning-rate factor per block, from the last to the first
    layer_decay: Annotated[float, NumberRange(0, 1, above=True)] = 1.0

    @property
    def peak_lr(self) -> float:
        """Return the learning rate after warm-up, at this batch size."""
        return self.lr * self.batch_size / self.lr_reference_batch if self.lr_reference_batch else self.lr


@dataclass(frozen=True, kw_only=True)
class SchedulePart(Checked):
    """The length of the run and the learning-rate schedule."""

    group: ClassVar[str] = "schedule"

    epochs: Count
    warmup_epochs: CountOrZero = 0
    warmup_steps: CountOrZero = 0
    warmup_lr: NotNegative = 0.0  # start of the linear warm-up
    steps: CountOrZero = 0  # updates; if set, replaced by the nearest number of epochs on the data
    decay: Literal["cosine", "linear", "poly", "step", "constant", "inverse_sqrt"] = "cosine"
    power: Positive = 0.9  # poly: exponent of the remaining share
    min_lr: NotNegative = 0.0  # final value of cosine, linear and poly
    step_epochs: tuple[Count, ...] = ()  # step: epochs at which the rate drops
    step_factor: Annotated[float, NumberRange(0, 1, above=True)] = 0.1  # step: factor of each drop

    def check_clashes(self) -> None:
        """Check that there is one warm-up within the run, and step epochs only for the decay step."""
        if self.warmup_epochs and self.warmup_steps:
            raise UsageError(
                f"schedule.warmup_epochs is {self.warmup_epochs} and schedule.warmup_steps is "
                f"{self.warmup_steps}, expected one of them. Set the other to 0."
            )
        if self.warmup_epochs > self.epochs:
            raise UsageError(
                f"schedule.warmup_epochs is {self.warmup_epochs} in a run of {self.epochs} epochs. "
                f"Set schedule.warmup_epochs to {self.epochs} or less."
            )
        if (self.decay == "step") != bool(self.step_epochs):
            epochs = ",".join(map(str, self.step_epochs)) or "empty"
            raise UsageError(
                f"schedule.decay is {self.decay} and schedule.step_epochs {epochs}. "
                "Set schedule.step_epochs for the decay step only."
            )
        if list(self.step_epochs) != sorted(set(self.step_epochs)):
            raise UsageError(
                f"schedule.step_epochs is {','.join(map(str, self.step_epochs))}, expected increasing epochs. "
                "Sort them."
            )


@dataclass(frozen=True, kw_only=True)
class EvaluationPart(Checked):
    """Image size and crop for testing."""

    group: ClassVar[str] = "test"

    image_size: Count | None = None  # none = as in training
    crop_ratio: Annotated[float, NumberRange(0, 1, above=True)] = 0.875  # image_size over the resized short side
    resize: Literal["short_side", "square"] = "short_side"  # square: the whole image, whatever its shape (Mixer C)


GROUPS: dict[str, type[Checked]] = {
    part.group: part
    for part in (
        *(ModelPart, AugmentPart, ObjectivePart, BalancePart, ViewsPart, DinoPart, GrafitPart),
        *(SegmentPart, DetectPart, TextPart),
        *(OptimPart, SchedulePart, EvaluationPart),
    )
}


@cache
def _field_types(part: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(part, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(part)}


fields_of: Callable[..., dict[str, Any]] = _field_types  # name → type


def keys_of(part: type[Checked]) -> list[str]:
    """Return the dotted keys of a group."""
    return [f"{part.group}.{name}" for name in fields_of(part)]
