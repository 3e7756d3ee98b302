"""`config.json`, `recipe.yaml`, `labels.json` and `names.json`: the facts about a run that are read before its weights.

`patchloom predict` imports this module, so it must not import torch or the recipes.
"""

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from patchloom.data.datasets import ClassTable, plain_form
from patchloom.runs.checksums import reading_once, write_checked
from patchloom.runs.files import FORMAT, json_bytes, parsed, read_run_file, refuse_format, refuse_shape
from patchloom_runtime.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from patchloom.models.network import Network
    from patchloom.recipes.schema import Recipe

CONFIG = "config.json"
LABELS = "labels.json"
RECIPE = "recipe.yaml"
OTHER_NAMES = "names.json"  # synonyms of the class names of a published network
CHANNELS = 3
RESIZES = ("short_side", "square")  # values of test.resize in recipes
MOST_PIXELS = 4096  # longest image side
LARGER = 8  # most times the training resolution that a config may request, from 1,024 pixels on
POOLED = "resnet50_attention_pool"  # name of timm's and torchvision's networks in `config.json`
_CONFIG = {"format": int, "task?": str, "network": str, "options": dict}
_IMAGE_CONFIG = {
    "options": {"num_classes": int, "image_size": list[int]},
    "preprocessing": {
        "mean": Any,  # these four are checked by `_check_values`, whose messages say more
        "std": Any,
        "image_size": Any,
        "crop_ratio": Any,
        "interpolation?": str,
        "resize?": str,
    },
    "level?": str | None,
}


@dataclass(frozen=True)
class Preprocessing:
    """How an image file becomes the input of the network."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: tuple[int, int]  # height, width
    crop_ratio: float
    interpolation: str = "bicubic"
    resize: str = "short_side"  # or "square", as test.resize of the recipe


@dataclass(frozen=True)
class RunFiles:
    """Everything a run folder says about its network besides the weights."""

    network: str
    options: dict[str, Any]
    preprocessing: Preprocessing
    folder: Path | None
    labels: tuple[str, ...]
    level: str | None = None  # taxonomy level of `labels`; None: the finest level of the data
    task: str = ""  # empty for runs of versions that did not store it
    recipe_yaml: bytes | None = field(default=None, repr=False)

    @property
    def model(self) -> str:
        """Network name as recipes and --model use it: torchvision:mobilenet_v2, timm:resnet18, resmlp_s12."""
        inner = self.options.get("backbone")
        options = inner if isinstance(inner, Mapping) else self.options  # of a dense network, the backbone's
        if self.network == POOLED and options.get("pool") == "average":
            backbone = str(options["backbone"])
            return backbone if ":" in backbone else f"timm:{backbone}"
        return self.network

    @cached_property
    def recipe(self) -> "Recipe | None":
        """Recipe of the run, or None if it is not known."""
        return _parse_recipe(self.recipe_yaml, Path(self.folder or "", RECIPE)) if self.recipe_yaml else None

    @cached_property
    def also(self) -> dict[str, int]:
        """Synonym (in `plain_form`) → class index, for published networks."""
        if (data := self.other_names) is None:
            return {}
        lists = parsed(data, Path(self.folder or "", OTHER_NAMES), list[list[str]])
        return {plain_form(name): number for number, names in enumerate(lists[: len(self.labels)]) for name in names}

    @property
    def other_names(self) -> bytes | None:
        """Contents of `names.json`, or None if there is no such file."""
        is_there = self.folder is not None and os.path.lexists(self.folder / OTHER_NAMES)
        return read_run_file(self.folder, OTHER_NAMES) if self.folder and is_there else None

    @property
    def table(self) -> ClassTable:
        """Classes with their synonyms, for matching with those of a dataset."""
        return ClassTable(self.labels, also=self.also)

    def labels_as(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the labels, replacing each by the synonym that occurs in `names`, if any."""
        labels = list(self.labels)
        for name in set(names) - set(labels):
            if (number := self.also.get(plain_form(name))) is not None:
                labels[number] = name
        return tuple(labels)

    @property
    def decides(self) -> bool:
        """Whether the network ends with a classifier of named classes."""
        return 0 < len(self.labels) == self.options["num_classes"]


def is_run(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a run folder."""
    return os.path.isfile(os.path.join(path, CONFIG))  # False rather than an error for any path, however long


def write_run_files(
    folder: Path,
    network: "Network",
    preprocessing: Preprocessing,
    recipe: "Recipe | None",
    labels: Sequence[str],
    level: str | None = None,
    *,
    task: str,
) -> None:
    """Write `config.json`, `recipe.yaml` and `labels.json` of a run on images.

    Training calls this before the first step, so that a folder that cannot be written fails early.
    """
    fields = {"preprocessing": dataclasses.asdict(preprocessing), "level": level}
    write_config(folder, task, network.config, recipe, {LABELS: json_bytes(list(labels))}, **fields)


def write_config(
    folder: Path, task: str, network: Any, recipe: "Recipe | None", others: dict[str, bytes] | None = None, **more: Any
) -> None:
    """Write `config.json`, `recipe.yaml` and the files `others`.

    `network` is the config dataclass of the network; `more` are further fields of `config.json`.
    """
    options = dataclasses.asdict(network)
    config = {"format": FORMAT, "task": task, "network": options.pop("name"), "options": options, **more}
    files = dict(others or {})
    if recipe:
        files[RECIPE] = recipe.to_yaml().encode()
    # config.json comes last, because a folder that has it is a run.
    write_checked(folder, files | {CONFIG: json_bytes(config)})


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of `config.json` of any run. Lists in `options` become tuples."""
    return _with_tuples(_parse_config(folder))


def _parse_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    config: dict[str, Any] = parsed(read_run_file(folder, CONFIG), path, {"format": int})
    refuse_format(config, path)
    refuse_shape(config, _CONFIG, path)
    return config


@reading_once()
def read_run_files(folder: Path) -> RunFiles:
    """Return what `write_run_files` wrote. Every file is read once."""
    raw = _parse_config(folder)
    if "vocabulary" in raw:
        raise UsageError(
            f"{folder} is a translation run and takes no images; use it with `patchloom translate` or `evaluate --text`"
        )
    refuse_shape(raw, _IMAGE_CONFIG, folder / CONFIG)
    config = _with_tuples(raw)
    options, labels = config["options"], _read_labels(folder)
    try:
        preprocessing = Preprocessing(**{name: _tuples(value) for name, value in config["preprocessing"].items()})
        check_preprocessing(preprocessing, options["image_size"])
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG} lacks a field or has one too many: {error}.") from error
    if labels and options["num_classes"] not in (0, len(labels)):
        raise CheckpointError(
            f"{folder / LABELS} is damaged: it names {len(labels):,} classes, but the network of {CONFIG} has "
            f"{options['num_classes']:,} outputs. Restore it."
        )
    # The recipe is parsed on first use, but a changed byte is reported now.
    recipe = read_run_file(folder, RECIPE) if os.path.lexists(folder / RECIPE) else None
    return RunFiles(
        config["network"], options, preprocessing, folder, labels, config.get("level"), config.get("task", ""), recipe
    )


def read_recipe(folder: Path) -> "Recipe | None":
    """Return the recipe of a run folder, or None if it has none."""
    path = folder / RECIPE
    if not os.path.lexists(path):
        return None
    return _parse_recipe(read_run_file(folder, RECIPE), path)


def _parse_recipe(data: bytes, path: Path) -> "Recipe":
    from patchloom.recipes.schema import Recipe  # not needed by `predict`

    try:
        return Recipe.from_yaml(data.decode())
    except (UsageError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error} Restore it, or remove it to continue with the settings of the command."
        ) from error


def check_preprocessing(preprocessing: Preprocessing, trained_at: Sequence[int]) -> None:
    """Raise ValueError if values are out of range or images far larger than the training resolution."""
    _check_values(preprocessing)
    most = max(1024, LARGER * max(trained_at, default=0))
    if max(preprocessing.image_size) > most:
        raise ValueError(
            f"preprocessing.image_size is {_list(preprocessing.image_size)}, expected at most {most} pixels for a "
            f"network of {_list(tuple(trained_at))}"
        )


def _check_values(preprocessing: Preprocessing) -> None:
    for name in ("mean", "std"):
        values = getattr(preprocessing, name)
        if not isinstance(values, tuple) or len(values) != CHANNELS or not all(map(_is_finite, values)):
            raise ValueError(f"{name} is {_list(values)}, expected {CHANNELS} finite numbers")
    if min(preprocessing.std) <= 0:
        raise ValueError(f"std is {_list(preprocessing.std)}, expected numbers above 0")
    size = preprocessing.image_size
    if not isinstance(size, tuple) or len(size) != 2 or not all(type(n) is int and 0 < n <= MOST_PIXELS for n in size):
        raise ValueError(f"image_size is {_list(size)}, expected height and width of 1 to {MOST_PIXELS} pixels")
    ratio = preprocessing.crop_ratio
    if not _is_finite(ratio) or not 0 < ratio <= 1:
        raise ValueError(f"crop_ratio is {ratio}, expected a number above 0 and up to 1")
    if max(size) / ratio > 2 * MOST_PIXELS:
        raise ValueError(f"crop_ratio is {ratio}, which resizes images to more than {2 * MOST_PIXELS} pixels")
    if preprocessing.interpolation.upper() not in Image.Resampling.__members__:
        known = ", ".join(name.lower() for name in Image.Resampling.__members__)
        raise ValueError(f"interpolation is {preprocessing.interpolation!r}, expected one of {known}")
    if preprocessing.resize not in RESIZES:
        raise ValueError(f"resize is {preprocessing.resize!r}, expected one of {', '.join(RESIZES)}")


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _list(values: Any) -> Any:
    return list(values) if isinstance(values, tuple) else values


def _read_labels(folder: Path) -> tuple[str, ...]:
    return tuple(parsed(read_run_file(folder, LABELS), folder / LABELS, list[str]))


def _with_tuples(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"options": {name: _tuples(value) for name, value in config["options"].items()}}


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
