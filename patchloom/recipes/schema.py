"""The recipe: everything a training run is told, in one frozen, typed, comparable value.

A recipe has groups of fields (model, augment, objective, optim, schedule, test; views, dino, grafit, text where its
method reads them) and a few of its own. A field is named by its dotted key, `augment.mixup`, in files, overrides and
messages alike. Text is read by the field's type wherever it comes from: `1e-3` means the same on a command line, in
YAML and in Python.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NoReturn, get_type_hints

import yaml

from patchloom.errors import UsageError, nearest
from patchloom.recipes.values import (
    Count,
    CountOrZero,
    NotNegative,
    Options,
    OptionValue,
    Positive,
    Probability,
    Range,
    read_value,
)


class _Checked:
    """Reads every field by its type when the value is made, then looks for fields that clash."""

    group: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            key = f"{self.group}.{name}" if self.group else name
            object.__setattr__(self, name, read_value(key, getattr(self, name), hint))
        self.check_clashes()

    def check_clashes(self) -> None:
        """Raise UsageError where two fields of the group contradict each other."""


@dataclass(frozen=True, kw_only=True)
class ModelPart(_Checked):
    """Which network is trained, at which size, and how much of it."""

    group: ClassVar[str] = "model"

    name: str
    image_size: Count = 224  # side in pixels, as seen by the network while training
    drop_path: Probability = 0.0  # stochastic depth
    drop_path_rule: Literal["uniform", "linear"] = "uniform"  # the same in every layer, or growing from 0
    dropout: Probability = 0.0
    trainable: Literal["all", "attention", "head"] = "all"
    eval_mode: bool = False  # fine-tune without stochastic depth and dropout, batch statistics fixed
    options: Mapping[str, OptionValue] = field(default_factory=Options)


@dataclass(frozen=True, kw_only=True)
class AugmentPart(_Checked):
    """What happens to training images."""

    group: ClassVar[str] = "augment"

    crop: Literal["random_resized", "simple_random", "pad", "resize"] = "random_resized"
    crop_min_scale: Annotated[float, Range(0, 1, above=True)] = 0.08  # random_resized: smallest share of the area
    crop_max_scale: Annotated[float, Range(0, 1, above=True)] = 1.0  # random_resized: largest share of the area
    crop_padding: CountOrZero = 4  # simple_random and pad: pixels added on each side
    flip: Probability = 0.5  # left to right
    policy: Literal["none", "randaugment", "autoaugment", "three_augment", "trivial"] = "none"
    policy_magnitude: NotNegative = 9.0  # randaugment
    policy_magnitude_std: NotNegative = 0.0  # randaugment
    policy_layers: Count = 2  # randaugment: transformations an image
    color_jitter: NotNegative = 0.0  # brightness, contrast and saturation
    saturation: NotNegative | None = None  # jitter of saturation alone; none = as color_jitter
    hue: Annotated[float, Range(0, 0.5)] = 0.0  # jitter of hue, as a share of the colour circle
    jitter_probability: Probability = 1.0  # of color_jitter, saturation and hue together
    grey: Probability = 0.0
    blur: Probability = 0.0  # Gaussian, of a radius of 0.1 to 2 pixels
    solarise: Probability = 0.0  # values from 128 on are inverted
    erasing: Probability = 0.0
    mixup: NotNegative = 0.0  # α of the Beta distribution; 0 = off
    cutmix: NotNegative = 0.0  # α of the Beta distribution; 0 = off
    mix_probability: Probability = 1.0  # that a batch is mixed at all
    mix_switch: Probability = 0.5  # that it is CutMix, where both are on
    repeats: Count = 1  # repeated augmentation: copies of an image in a batch

    @property
    def jitters(self) -> tuple[float, float, float, float]:
        """How far brightness, contrast, saturation and hue are moved at most."""
        saturation = self.color_jitter if self.saturation is None else self.saturation
        return self.color_jitter, self.color_jitter, saturation, self.hue

    def check_clashes(self) -> None:
        """The largest crop is not smaller than the smallest."""
        if self.crop_max_scale < self.crop_min_scale:
            raise UsageError(
                f"augment.crop_max_scale is {self.crop_max_scale:g}, below augment.crop_min_scale "
                f"{self.crop_min_scale:g}. Raise the first or lower the second."
            )


@dataclass(frozen=True, kw_only=True)
class ObjectivePart(_Checked):
    """What is minimised."""

    group: ClassVar[str] = "objective"

    # classification, dino, and Grafit with the methods it is compared with (thesis tables 2.1, 2.4, 2.7)
    method: Literal[
        "classification",
        "dino",
        "grafit",
        "grafit_fc",
        "snca",
        "snca_plus",
        "instance",
        "cross_entropy_instance",
        "triplet",
        "cross_entropy_triplet",
        "clusterfit",
        "translation",
    ] = "classification"
    loss: Literal["cross_entropy", "bce"] = "cross_entropy"  # bce: every mixed class is a target of 1
    smoothing: Annotated[float, Range(0, 1)] = 0.0
    distillation: Literal["none", "soft", "hard"] = "none"
    teacher: str | None = None
    distillation_weight: Probability = 0.5  # of the teacher's term; the labels keep the rest
    temperature: Positive = 1.0  # soft distillation

    def check_clashes(self) -> None:
        """BCE has no smoothed targets; a teacher needs a way to be followed, and classes."""
        if self.distillation != "none" and self.method != "classification":
            raise UsageError(
                f"objective.distillation is {self.distillation}, but objective.method {self.method} has no teacher. "
                "Set objective.distillation to none."
            )
        if self.loss == "bce" and self.smoothing:
            raise UsageError(
                f"objective.loss bce cannot be smoothed, but objective.smoothing is {self.smoothing:g}. "
                "Set objective.smoothing to 0 or objective.loss to cross_entropy."
            )
        if self.teacher and self.distillation == "none":
            raise UsageError(
                f"objective.teacher is {self.teacher}, but objective.distillation is none. "
                "Set objective.distillation to hard or soft, or objective.teacher to none."
            )


@dataclass(frozen=True, kw_only=True)
class ViewsPart(_Checked):
    """Which views of an image are compared; `augment` makes those of full size. Read by all but classification."""

    group: ClassVar[str] = "views"

    number: Count = 1  # of full size
    second_blur: Probability | None = None  # of the second of them; none = as augment.blur
    second_solarise: Probability | None = None
    local: CountOrZero = 0  # small ones beside them
    local_size: Count = 96
    local_min_scale: Annotated[float, Range(0, 1, above=True)] = 0.05
    local_max_scale: Annotated[float, Range(0, 1, above=True)] = 0.4
    local_blur: Probability = 0.5

    def check_clashes(self) -> None:
        """A range has its ends in order."""
        if self.local_min_scale > self.local_max_scale:
            raise UsageError(
                f"views.local_min_scale is {self.local_min_scale:g}, above views.local_max_scale "
                f"{self.local_max_scale:g}. Lower it."
            )


@dataclass(frozen=True, kw_only=True)
class DinoPart(_Checked):
    """What objective.method dino reads; the authors' defaults."""

    group: ClassVar[str] = "dino"

    outputs: Count = 65536  # prototypes of the head
    hidden: Count = 2048
    bottleneck: Count = 256
    batch_norm: bool = False  # in the head
    fixed_norm: bool = True  # prototypes of length 1
    small_views: Literal["resample", "resize", "none"] = "resample"  # how a network of a fixed size sees local views
    student_temperature: Positive = 0.1
    teacher_temperature: Positive = 0.04  # after its warm-up; their longest trainings use 0.07
    warmup_teacher_temperature: Positive = 0.04
    warmup_teacher_epochs: CountOrZero = 0  # 30 in their longest trainings
    centre_momentum: Probability = 0.9
    teacher_momentum: Probability = 0.996  # at the first update; 1 at the end
    frozen_last_layer_epochs: CountOrZero = 1


@dataclass(frozen=True, kw_only=True)
class GrafitPart(_Checked):
    """What Grafit and its baselines read."""

    group: ClassVar[str] = "grafit"

    instance_weight: NotNegative = 1.0  # λ of equation 2.4
    temperature: Positive = 0.05  # σ of equations 2.2 and 2.6, as SNCA's
    target_decay: Probability = 0.99  # at the first update; BYOL's for 100 to 300 epochs, 0.996 for 1000
    margin: NotNegative = 0.2  # triplet: of squared distances between unit vectors, as FaceNet's
    clusters: Count = 1500  # clusterfit; 15000 for ImageNet
    clusters_of: str | None = None  # clusterfit: the run whose features are clustered


@dataclass(frozen=True, kw_only=True)
class TextPart(_Checked):
    """What objective.method translation reads; there, optim.batch_size counts tokens (data/token_batches.py)."""

    group: ClassVar[str] = "text"

    source: str | None = None  # languages; none = as the text has them
    target: str | None = None
    vocabulary: Count = 32_768  # pieces, both languages together
    max_length: Annotated[int, Range(2)] = 256  # positions: subwords of a sentence and its end
    max_ratio: Annotated[float, Range(1)] | None = 9.0  # between subwords of the sides of a pair; none = any
    averaged_epochs: Count = 10  # the mean of the weights after so many last epochs is tried too; 1 = it is not
    beams: Count = 4
    length_penalty: NotNegative = 0.6  # scores are divided by length to this power


@dataclass(frozen=True, kw_only=True)
class OptimPart(_Checked):
    """How weights are updated."""

    group: ClassVar[str] = "optim"

    name: Literal["adamw", "lamb", "sgd", "adam", "adagrad"] = "adamw"
    lr: Positive  # at the reference batch
    lr_reference_batch: Count | None = None  # the lr grows with batch_size over this; none = as it stands
    batch_size: Count  # images (of text: tokens) a step, over all devices and accumulation steps
    weight_decay: NotNegative = 0.0
    weight_decay_end: NotNegative | None = None  # reached along a cosine; none = it stays as it is
    betas: tuple[Probability, Probability] = (0.9, 0.999)  # adamw, lamb, adam
    momentum: Probability = 0.9  # sgd
    nesterov: bool = False  # sgd
    clip_norm: Positive | None = None  # global norm of the gradient
    clip_each: Positive | None = None  # norm of each tensor's gradient by itself
    ema_decay: Probability | None = None  # average of the weights, a step

    @property
    def peak_lr(self) -> float:
        """The learning rate after warm-up, at this batch size."""
        return self.lr * self.batch_size / self.lr_reference_batch if self.lr_reference_batch else self.lr


@dataclass(frozen=True, kw_only=True)
class SchedulePart(_Checked):
    """How long, and how the learning rate moves."""

    group: ClassVar[str] = "schedule"

    epochs: Count
    warmup_epochs: CountOrZero = 0
    warmup_steps: CountOrZero = 0
    warmup_lr: NotNegative = 0.0  # where the linear warm-up starts
    decay: Literal["cosine", "linear", "step", "constant", "inverse_sqrt"] = "cosine"
    min_lr: NotNegative = 0.0  # where cosine and linear end
    step_epochs: tuple[Count, ...] = ()  # step: epochs at which the rate drops
    step_factor: Annotated[float, Range(0, 1, above=True)] = 0.1  # step: what it is multiplied by

    def check_clashes(self) -> None:
        """One warm-up, within the run; steps where and only where the decay is by steps."""
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
            given = ",".join(map(str, self.step_epochs)) or "empty"
            raise UsageError(
                f"schedule.decay is {self.decay} and schedule.step_epochs {given}. "
                "Set schedule.step_epochs for the decay step, and for no other."
            )
        if list(self.step_epochs) != sorted(set(self.step_epochs)):
            raise UsageError(
                f"schedule.step_epochs is {','.join(map(str, self.step_epochs))}, expected rising epochs. Sort them."
            )


@dataclass(frozen=True, kw_only=True)
class EvaluationPart(_Checked):
    """How the network is tested."""

    group: ClassVar[str] = "test"

    image_size: Count | None = None  # none = as in training
    crop_ratio: Annotated[float, Range(0, 1, above=True)] = 0.875  # image_size over the resized short side


@dataclass(frozen=True, kw_only=True)
class Recipe(_Checked):
    """All settings of a run and the document they come from."""

    name: str
    source: str  # document, table or section, and any departure from it
    seed: CountOrZero = 0
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    model: ModelPart
    augment: AugmentPart = field(default_factory=AugmentPart)
    objective: ObjectivePart = field(default_factory=ObjectivePart)
    views: ViewsPart = field(default_factory=ViewsPart)
    dino: DinoPart = field(default_factory=DinoPart)
    grafit: GrafitPart = field(default_factory=GrafitPart)
    text: TextPart = field(default_factory=TextPart)
    optim: OptimPart
    schedule: SchedulePart
    test: EvaluationPart = field(default_factory=EvaluationPart)

    def check_clashes(self) -> None:
        """No field of a method that is not used; a schedule that does not end above its peak (rounding apart)."""
        for group in GROUPS:
            part = getattr(self, group)
            unread = _unread_fields(self.objective.method, group)
            changed = [
                f.name for f in dataclasses.fields(part) if f.name in unread and getattr(part, f.name) != f.default
            ]
            if changed:
                raise UsageError(
                    f"{group}.{changed[0]} is {getattr(part, changed[0])}, but objective.method "
                    f"{self.objective.method} does not read it. Choose a recipe that does, or leave it out."
                )
        mixed = self.augment.mixup or self.augment.cutmix
        if mixed and "views" not in _unread(self.objective.method):
            raise UsageError(
                f"objective.method {self.objective.method} compares views of one image, which are not mixed. "
                "Set augment.mixup and augment.cutmix to 0."
            )
        peak, end = self.optim.peak_lr, self.schedule.min_lr
        if self.schedule.decay in ("cosine", "linear") and end > peak * (1 + 1e-9):
            raise UsageError(
                f"schedule.min_lr is {end:g}, above the peak learning rate {peak:g}. Lower schedule.min_lr."
            )

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts, lists and plain values: what JSON and YAML hold, without what only other methods read."""
        method = self.objective.method
        read = {name: value for name, value in _as_plain(self).items() if name not in _unread(method)}
        for group in _UNREAD_FIELDS if method == "translation" else ():
            read[group] = {name: v for name, v in read[group].items() if name not in _unread_fields(method, group)}
        return read

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """The recipe that `to_dict` wrote; fields left out take their defaults, unknown keys are errors."""
        made: dict[str, Any] = {}
        for key, value in values.items():
            group = GROUPS.get(key)
            if group is None:
                if key not in _hints(cls):
                    _refuse_key(str(key))
                made[key] = value
                continue
            if not isinstance(value, Mapping):
                raise UsageError(
                    f"{key} is {value!r}, expected fields such as {_keys_of(group)[0]}. Indent them under it."
                )
            for name in value:
                if name not in _hints(group):
                    _refuse_key(f"{key}.{name}")
            made[key] = _make(group, value)
        return _make(cls, made)

    def to_yaml(self) -> str:
        """The text form of a recipe."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=110)

    @classmethod
    def from_yaml(cls, text: str) -> Recipe:
        """The recipe that `to_yaml` wrote or a person edited."""
        try:
            values = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # the latter two: a wrong date, deep nesting
            raise UsageError(f"The recipe is not YAML: {' '.join(str(error).split())}. Correct that line.") from error
        if not isinstance(values, Mapping):
            raise UsageError("The recipe is not a list of `key: value` lines. Start from one written by to_yaml.")
        return cls.from_dict(values)


GROUPS: dict[str, type[_Checked]] = {
    part.group: part
    for part in (
        *(ModelPart, AugmentPart, ObjectivePart, ViewsPart, DinoPart, GrafitPart, TextPart),
        *(OptimPart, SchedulePart, EvaluationPart),
    )
}
_OPTION = "model.options."


# Of the groups that every method has, what translation does not read.
_UNREAD_FIELDS = {
    "model": ("image_size", "drop_path", "drop_path_rule", "trainable", "eval_mode"),
    "objective": ("loss", "distillation", "teacher", "distillation_weight", "temperature"),
    "optim": ("ema_decay",),
}


def _unread(method: str) -> tuple[str, ...]:
    """The groups that a method does not read."""
    return {
        "classification": ("views", "dino", "grafit", "text"),
        "clusterfit": ("views", "dino", "text"),
        "dino": ("grafit", "text"),
        "translation": ("augment", "views", "dino", "grafit", "test"),
    }.get(method, ("dino", "text"))


def _unread_fields(method: str, group: str) -> Collection[str]:
    """The fields of a group that a method does not read."""
    if group in _unread(method):
        return _hints(GROUPS[group])
    return _UNREAD_FIELDS.get(group, ()) if method == "translation" else ()


def field_names() -> list[str]:
    """The dotted keys of all fields, in the order of the schema."""
    own = [name for name in _hints(Recipe) if name not in GROUPS]
    return own + [key for part in GROUPS.values() for key in _keys_of(part)]


def flatten(recipe: Recipe) -> dict[str, Any]:
    """Dotted key → value; each model option under its own key."""
    flat: dict[str, Any] = {}
    for key in field_names():
        group, _, name = key.rpartition(".")
        flat[key] = getattr(getattr(recipe, group) if group else recipe, name)
    options = flat.pop("model.options")
    return flat | {_OPTION + name: value for name, value in options.items()}


def override(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with some fields changed: dotted key → Python value or text, all checked together."""
    known = field_names()
    own: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    options = dict(recipe.model.options)
    for key, value in changes.items():
        if key.startswith(_OPTION) and key != _OPTION:
            options[key.removeprefix(_OPTION)] = value
            parts.setdefault("model", {})["options"] = options
            continue
        if key not in known:
            _refuse_key(key)
        group, _, name = key.rpartition(".")
        (parts.setdefault(group, {}) if group else own)[name] = value
    changed: Any = {group: dataclasses.replace(getattr(recipe, group), **values) for group, values in parts.items()}
    return dataclasses.replace(recipe, **own, **changed)


def difference(a: Recipe, b: Recipe) -> dict[str, tuple[Any, Any]]:
    """Dotted key → (value in a, value in b) where two recipes train differently, name and source apart."""
    left, right = flatten(a), flatten(b)
    keys = [key for key in left | right if key not in ("name", "source")]
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}


def _read_hints(part: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(part, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(part)}


_hints: Callable[..., dict[str, Any]] = cache(_read_hints)


def _keys_of(part: type[_Checked]) -> list[str]:
    return [f"{part.group}.{name}" for name in _hints(part)]


def _make(part: type[Any], values: Mapping[str, Any]) -> Any:
    for f in dataclasses.fields(part):
        if f.name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            key = f"{part.group}.{f.name}" if part.group else f.name
            raise UsageError(f"The recipe has no {key}, which has no default. Add it.")
    return part(**values)


def _as_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _as_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Options):
        return {name: _as_plain(v) for name, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _refuse_key(key: str) -> NoReturn:
    known = field_names()
    leaf = key.rpartition(".")[2]
    # A bare or misplaced name is too far from its dotted key for `nearest`; its last part is not.
    leaves = {k.rpartition(".")[2] for k in known}
    close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
    same = [k for k in known if close and k.rpartition(".")[2] == close[0]]
    hint = f" Did you mean {', '.join(same)}?" if same else nearest(key, [*GROUPS, *known])
    raise UsageError(f'A recipe has no field "{key}".{hint or " Its groups are " + ", ".join(GROUPS) + "."}')
