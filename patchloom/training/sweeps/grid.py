"""The grid of a sweep: which fields take which values, the settings of each run, and the folder it gets.

A field is one of a recipe by its dotted key (`optim.lr`, `seed`, `train_share`), or one of the `OPTIONS` of `train`.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from patchloom.recipes.schema import Recipe, field_names
from patchloom.recipes.values import Count, read_value
from patchloom.tasks.plan import folder_name
from patchloom.tasks.provenance import place_of
from patchloom.tasks.settings import TrainingSettings
from patchloom_runtime.errors import UsageError, nearest

SEED, SHARE = "seed", "train_share"
# Options of `train` that can be swept in addition to recipe fields, and how their values are read.
OPTIONS: Mapping[str, Any] = {
    "model": str, "recipe": str, "init": str, "teacher": str, "level": str, "epochs": Count, "size": Count,
    "batch": Count,
}  # fmt: skip
_OPTION = "model.options."
# What changes where and how fast a run is done, not what it becomes.
_NOT_LEARNED = ("out", "device", "workers", "worker_timeout", "micro_batches", "compiled", "shard", "trackers")
NAME_LETTERS = 80

Grid = Mapping[str, Sequence[Any]]
Setting = dict[str, Any]  # field → value


def read_grid(texts: Sequence[str]) -> dict[str, list[str]]:
    """'optim.lr=1e-3,3e-4' → {'optim.lr': ['1e-3', '3e-4']}."""
    grid: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        key, choices = key.strip(), [value.strip() for value in values.split(",")]
        if not equals or not key or not all(choices):
            raise UsageError(f"--grid takes field=value,value…, such as optim.lr=1e-3,3e-4; got {text!r}")
        if key in grid:
            raise UsageError(f"--grid has {key} twice; pass all its values at once: {key}=A,B,C")
        grid[key] = choices
    return grid


def settings_of(grid: Grid) -> list[Setting]:
    """Every combination of the grid's values, the last field changing fastest; numbers in text are read as numbers."""
    known = [*OPTIONS, *field_names()]
    for key in grid:
        if key not in known and not (key.startswith(_OPTION) and key != _OPTION):
            raise UsageError(
                f"{key!r} cannot be swept: it is neither a recipe field nor one of {', '.join(OPTIONS)}."
                f"{nearest(key, known)} `patchloom recipes NAME` shows the fields of a recipe"
            )
    read = {key: [_read(key, value) for value in values] for key, values in grid.items()}
    for key, values in read.items():
        if len({str(value) for value in values}) < len(values) or not values:
            raise UsageError(
                f"the values of {key} are {', '.join(map(str, values)) or 'none'}; pass one or more, each once"
            )
    return [dict(zip(read, values, strict=True)) for values in product(*read.values())]


def _read(key: str, value: Any) -> Any:
    if key in OPTIONS:
        return read_value(key, value, OPTIONS[key])
    for kind in (int, float):
        try:
            return kind(value) if isinstance(value, str) else value
        except ValueError:
            continue
    return value


def with_setting(base: TrainingSettings, setting: Setting) -> TrainingSettings:
    """Return the settings at one point of the grid."""
    own = {key: value for key, value in setting.items() if key in OPTIONS}
    changes = {key: value for key, value in setting.items() if key not in OPTIONS}
    clash = [key for key in changes if key in base.changes] + [key for key in own if _is_set(base, key)]
    if clash:
        raise UsageError(f"{clash[0]} is both swept and set; drop one of the two")
    return replace(base, **own, changes={**base.changes, **changes})


def _is_set(base: TrainingSettings, name: str) -> bool:
    default = next(each.default for each in fields(TrainingSettings) if each.name == name)
    return bool(getattr(base, name) != default)


def drop_seed(setting: Setting) -> Setting:
    """Return the setting without its seed."""
    return {key: value for key, value in setting.items() if key != SEED}


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return field → its last part, or the whole field if two end in the same part."""
    last = {key: key.rpartition(".")[2] for key in keys}
    return {key: name if list(last.values()).count(name) == 1 else key for key, name in last.items()}


def in_words(setting: Setting) -> str:
    """lr=0.001, seed=0"""
    names = short_names(list(setting))
    return ", ".join(f"{names[key]}={value_text(value)}" for key, value in setting.items()) or "as it is"


def value_text(value: Any) -> str:
    """Return the value of a field as text."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def run_folder(out: Path, settings: TrainingSettings, setting: Setting) -> Path:
    """Return OUT/DATA/lr=0.001,seed=0-3f2a9c; the end is a digest of all settings."""
    # Without defaults, so that an option that a later version adds does not change the folder.
    chosen = [each.name for each in fields(TrainingSettings) if _is_set(settings, each.name)]
    values = {name: getattr(settings, name) for name in chosen if name not in _NOT_LEARNED}
    values |= {"data": place_of(settings.data), "recipe": _recipe_text(settings.recipe)}
    values["changes"] = {key: _read(key, value) for key, value in settings.changes.items()}  # 1e-3 is 0.001
    text = json.dumps(values, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:6]
    name = re.sub(r"[^A-Za-z0-9._=,+-]+", "-", in_words(setting).replace(", ", ","))[:NAME_LETTERS]
    return out / folder_name(settings.data) / f"{name}-{digest}"


def _recipe_text(recipe: str | Recipe) -> str:
    """Return the content of a recipe, as its file may change."""
    if isinstance(recipe, Recipe):
        return recipe.to_yaml()
    file = Path(recipe)
    is_file = recipe.endswith((".yaml", ".yml")) and file.is_file()
    return file.read_text("utf-8", "replace") if is_file else recipe
