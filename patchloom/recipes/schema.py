"""The recipe: all settings of a training run in one frozen, typed, comparable value.

A recipe has groups of fields (model, augment, objective, optim, schedule, test; balance, views, dino, grafit, segment,
detect, text if its method reads them) and a few fields of its own. A field is named by its dotted key, `augment.mixup`,
in files, overrides and messages. Text is parsed by the field's type: `1e-3` means the same on a command line, in YAML
and in Python.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NoReturn

import yaml

from patchloom.recipes.methods import method_of
from patchloom.recipes.parts import (
    GROUPS,
    AugmentPart,
    BalancePart,
    Checked,
    DetectPart,
    DinoPart,
    EvaluationPart,
    GrafitPart,
    ModelPart,
    ObjectivePart,
    OptimPart,
    SchedulePart,
    SegmentPart,
    TextPart,
    ViewsPart,
    fields_of,
    keys_of,
)
from patchloom.recipes.plain_yaml import load_yaml
from patchloom.recipes.values import CountOrZero, NumberRange, Options
from patchloom_runtime.errors import UsageError, nearest


@dataclass(frozen=True, kw_only=True)
class Recipe(Checked):
    """All settings of a run and the document they come from."""

    name: str
    source: str  # document, table or section, and any departure from it
    seed: CountOrZero = 0
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    # share of each class's training images that is used
    train_share: Annotated[float, NumberRange(0, 1, above=True)] = 1.0
    model: ModelPart
    augment: AugmentPart = field(default_factory=AugmentPart)
    objective: ObjectivePart = field(default_factory=ObjectivePart)
    balance: BalancePart = field(default_factory=BalancePart)
    views: ViewsPart = field(default_factory=ViewsPart)
    dino: DinoPart = field(default_factory=DinoPart)
    grafit: GrafitPart = field(default_factory=GrafitPart)
    segment: SegmentPart = field(default_factory=SegmentPart)
    detect: DetectPart = field(default_factory=DetectPart)
    text: TextPart = field(default_factory=TextPart)
    optim: OptimPart
    schedule: SchedulePart
    test: EvaluationPart = field(default_factory=EvaluationPart)

    def check_clashes(self) -> None:
        """Check for fields that the method does not read, mixed views, and a schedule that ends above its peak."""
        method = method_of(self.objective.method)
        for group in GROUPS:
            part = getattr(self, group)
            changed = [
                f.name
                for f in dataclasses.fields(part)
                if not method.reads_field(group, f.name) and getattr(part, f.name) != f.default
            ]
            if changed:
                hint = "Choose a recipe that does, or remove it."
                other, value = _LIKE.get(f"{group}.{changed[0]}", ("", ""))
                if other and method.reads_field("model", other):
                    hint = f"Set model.{other}={value} instead, or remove it."
                raise UsageError(
                    f"{group}.{changed[0]} is {getattr(part, changed[0])}, but objective.method "
                    f"{self.objective.method} does not read it. {hint}"
                )
        if self.train_share < 1 and method.learns_from == "text":
            raise UsageError(
                f"train_share is {self.train_share:g}, but objective.method {self.objective.method} does not read it. "
                "Remove it."
            )
        mixed = self.augment.mixup or self.augment.cutmix
        if mixed and method.views:
            raise UsageError(
                f"objective.method {self.objective.method} compares views of one image, which cannot be mixed. "
                "Set augment.mixup and augment.cutmix to 0."
            )
        peak, end = self.optim.peak_lr, self.schedule.min_lr
        if self.schedule.decay in ("cosine", "linear", "poly") and end > peak * (1 + 1e-9):
            raise UsageError(
                f"schedule.min_lr is {end:g}, above the peak learning rate {peak:g}. Lower schedule.min_lr."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts, lists and plain values for JSON and YAML, without fields that the method ignores."""
        method = method_of(self.objective.method)
        plain = _as_plain(self)
        for group in GROUPS:
            plain[group] = {name: value for name, value in plain[group].items() if method.reads_field(group, name)}
        if method.learns_from == "text":
            del plain["train_share"]
        return {name: value for name, value in plain.items() if name not in GROUPS or method.reads_field(name)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """Return the recipe that `to_dict` wrote. Missing fields take their defaults; unknown keys are errors."""
        fields: dict[str, Any] = {}
        for key, value in values.items():
            group = GROUPS.get(key)
            if group is None:
                if key not in fields_of(cls):
                    _refuse_key(str(key))
                fields[key] = value
                continue
            if not isinstance(value, Mapping):
                raise UsageError(
                    f"{key} is {value!r}, expected fields such as {keys_of(group)[0]}. Indent them under it."
                )
            for name in value:
                if name not in fields_of(group):
                    _refuse_key(f"{key}.{name}")
            fields[key] = _make(group, value)
        return _make(cls, fields)

    def to_yaml(self) -> str:
        """Return the recipe as YAML."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=110)

    @classmethod
    def from_yaml(cls, text: str) -> Recipe:
        """Return the recipe that `to_yaml` wrote or a person edited."""
        try:
            values = load_yaml(text)
        except ValueError as error:
            raise UsageError(f"The recipe is not YAML: {error}. Correct that line.") from error
        if not isinstance(values, Mapping):
            raise UsageError("The recipe is not a mapping of `key: value` lines. Start from one written by to_yaml.")
        return cls.from_dict(values)


# The two fields that set what learns, and the nearest value of the other.
_LIKE = {"model.trainable": ("freeze", "backbone"), "model.freeze": ("trainable", "head")}
_OPTION = "model.options."


def field_names() -> list[str]:
    """Return the dotted keys of all fields, in the order of the schema."""
    own = [name for name in fields_of(Recipe) if name not in GROUPS]
    return own + [key for part in GROUPS.values() for key in keys_of(part)]


def flatten(recipe: Recipe) -> dict[str, Any]:
    """Return dotted key → value; each model option has its own key."""
    flat: dict[str, Any] = {}
    for key in field_names():
        group, _, name = key.rpartition(".")
        flat[key] = getattr(getattr(recipe, group) if group else recipe, name)
    options = flat.pop("model.options")
    return flat | {_OPTION + name: value for name, value in options.items()}


def override(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return the recipe with some fields changed: dotted key → Python value or text, all checked together."""
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
    if "objective.method" in changes:  # reset groups that only the previous method reads
        method = method_of(changed["objective"].method)
        changed |= {name: group() for name, group in GROUPS.items() if not (method.reads_field(name) or name in parts)}
    return dataclasses.replace(recipe, **own, **changed)


def difference(a: Recipe, b: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return dotted key → (value in a, value in b) for fields that differ, except name and source."""
    left, right = flatten(a), flatten(b)
    keys = [key for key in left | right if key not in ("name", "source")]
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}


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
    # A bare or misplaced name is too far from its dotted key for `nearest`, but its last part is not.
    leaves = {k.rpartition(".")[2] for k in known}
    close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
    same = [k for k in known if close and k.rpartition(".")[2] == close[0]]
    hint = f" Did you mean {', '.join(same)}?" if same else nearest(key, [*GROUPS, *known])
    raise UsageError(f'A recipe has no field "{key}".{hint or " Its groups are " + ", ".join(GROUPS) + "."}')
