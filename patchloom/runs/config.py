"""`config.json`, `recipe.yaml` and `labels.json`: what is known of a run before its weights are read."""

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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

RECIPE = "recipe.yaml"
OTHER_NAMES = "names.json"  # of the classes of a published network, as data may call them
CHANNELS = 3
RESIZES = ("short_side", "square")  # test.resize of recipes
MOST_PIXELS = 4096  # of a side
LARGER = 8  # times the size of training at which a config may show pictures, from 1,024 pixels on
_CONFIG = {"format": int, "task?": str, "network": str, "options": dict}
_OF_PICTURES = {
    "options": {"num_classes": int, "image_size": list[int]},
    "preprocessing": {
        "mean": Any,  # these four are looked at by `_usable`, which has more to say of them
        "std": Any,
        "image_size": Any,
        "crop_ratio": Any,
        "interpolation?": str,
        "resize?": str,
    },
    "level?": str | None,
}


POOLED = "resnet50_attention_pool"  # what networks of timm and torchvision are called in `config.json`


@dataclass(frozen=True)
class Preprocessing:
    """From a picture to what the network was trained on."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: tuple[int, int]  # height, width
    crop_ratio: float
    interpolation: str = "bicubic"
    resize: str = "short_side"  # or square: as test.resize of the recipe


@dataclass(frozen=True)
class RunFiles:
    """What is known of a run before its weights are read."""

    network: str
    options: dict[str, Any]
    preprocessing: Preprocessing
    folder: Path | None
    labels: tuple[str, ...]
    level: str | None = None  # of the taxonomy whose classes `labels` are; None: the finest of its data
    task: str = ""  # of a run from before it was written down

    @property
    def model(self) -> str:
        """Its network as recipes and --model call it: torchvision:mobilenet_v2, timm:resnet18, resmlp_s12."""
        inner = self.options.get("backbone")
        options = inner if isinstance(inner, Mapping) else self.options  # of the network under the heads of a task
        if self.network == POOLED and options.get("pool") == "average":
            backbone = str(options["backbone"])
            return backbone if ":" in backbone else f"timm:{backbone}"
        return self.network

    @cached_property
    def recipe(self) -> "Recipe | None":
        """What was asked for; None where that is not known."""
        return read_recipe(self.folder) if self.folder else None

    @cached_property
    def also(self) -> dict[str, int]:
        """What else the classes of a published network are called (`plain_form`) → their numbers."""
        if (data := self.other_names) is None:
            return {}
        lists = parsed(data, Path(self.folder or "", OTHER_NAMES), list[list[str]])
        return {plain_form(name): number for number, names in enumerate(lists[: len(self.labels)]) for name in names}

    @property
    def other_names(self) -> bytes | None:
        """The file of these names; None where there is none."""
        is_there = self.folder is not None and os.path.lexists(self.folder / OTHER_NAMES)
        return read_run_file(self.folder, OTHER_NAMES) if self.folder and is_there else None

    @property
    def table(self) -> ClassTable:
        """Its classes, as data are matched with them."""
        return ClassTable(self.labels, also=self.also)

    def labels_as(self, names: Iterable[str]) -> tuple[str, ...]:
        """Its labels; a class that goes by another of its names among `names` under that name."""
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
    """Whether `path` is the folder of a run."""
    return os.path.isfile(os.path.join(path, "config.json"))  # of no path an error, however long it is


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
    """Write `config.json`, `recipe.yaml` and `labels.json`: before the first step, so a bad folder is known then."""
    told = {"preprocessing": dataclasses.asdict(preprocessing), "level": level}
    write_config(folder, task, network.config, recipe, {"labels.json": json_bytes(list(labels))}, **told)


def write_config(
    folder: Path, task: str, network: Any, recipe: "Recipe | None", others: dict[str, bytes] | None = None, **more: Any
) -> None:
    """Write `config.json`, with the network's own config and what else belongs to it, `recipe.yaml` and `others`."""
    options = dataclasses.asdict(network)
    config = {"format": FORMAT, "task": task, "network": options.pop("name"), "options": options, **more}
    files = dict(others or {})
    if recipe:
        files[RECIPE] = recipe.to_yaml().encode()
    # Last: it is what makes the folder that of a run.
    write_checked(folder, files | {"config.json": json_bytes(config)})


def read_config(folder: Path, shape: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What `write_config` wrote, of any kind of run; its options as they were. `shape` is what else it must have."""
    path, config = folder / "config.json", _parse_config(folder)
    refuse_shape(config, shape or {}, path)
    config["options"] = {name: _tuples(value) for name, value in config["options"].items()}
    return config


def _parse_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    config: dict[str, Any] = parsed(read_run_file(folder, path.name), path, {"format": int})
    refuse_format(config, path)
    refuse_shape(config, _CONFIG, path)
    return config


@reading_once()
def read_run_files(folder: Path) -> RunFiles:
    """What `write_run_files` wrote."""
    if "vocabulary" in read_config(folder):
        raise UsageError(
            f"{folder} translates and knows no images; use it with `patchloom translate` or `evaluate --text`"
        )
    config = read_config(folder, _OF_PICTURES)
    options, labels = config["options"], _read_labels(folder)
    try:
        shown = _usable(Preprocessing(**{k: _tuples(v) for k, v in config["preprocessing"].items()}))
        _check_size(shown, options["image_size"])
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / 'config.json'} lacks a field or has one too many: {error}.") from error
    if labels and options["num_classes"] not in (0, len(labels)):
        raise CheckpointError(
            f"{folder / 'labels.json'} is damaged: it names {len(labels):,} classes, and the network of config.json "
            f"tells {options['num_classes']:,} apart. Restore it."
        )
    if os.path.lexists(folder / RECIPE):
        read_run_file(folder, RECIPE)  # it is read when it is asked for; a changed byte is told now
    return RunFiles(config["network"], options, shown, folder, labels, config.get("level"), config.get("task", ""))


def read_recipe(folder: Path) -> "Recipe | None":
    """What a run in this folder was asked for; None where there is none."""
    from patchloom.recipes.schema import Recipe  # which predicting does not need

    path = folder / RECIPE
    if not os.path.lexists(path):
        return None
    try:
        return Recipe.from_yaml(read_run_file(folder, RECIPE).decode())
    except (UsageError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error} Restore it, or remove it to continue with the settings given."
        ) from error


def _usable(shown: Preprocessing) -> Preprocessing:
    """The same; a ValueError where pictures could not be shown so, or would become numbers that mean nothing."""
    for name in ("mean", "std"):
        values = getattr(shown, name)
        if not isinstance(values, tuple) or len(values) != CHANNELS or not all(map(_is_finite, values)):
            raise ValueError(f"{name} is {_list(values)}, expected {CHANNELS} finite numbers")
    if min(shown.std) <= 0:
        raise ValueError(f"std is {_list(shown.std)}, expected numbers above 0")
    size = shown.image_size
    if not isinstance(size, tuple) or len(size) != 2 or not all(type(n) is int and 0 < n <= MOST_PIXELS for n in size):
        raise ValueError(f"image_size is {_list(size)}, expected height and width of 1 to {MOST_PIXELS} pixels")
    if not _is_finite(shown.crop_ratio) or not 0 < shown.crop_ratio <= 1:
        raise ValueError(f"crop_ratio is {shown.crop_ratio}, expected a number above 0 and up to 1")
    if max(size) / shown.crop_ratio > 2 * MOST_PIXELS:
        raise ValueError(
            f"crop_ratio is {shown.crop_ratio}, which resizes pictures to more than {2 * MOST_PIXELS} pixels"
        )
    if shown.interpolation.upper() not in Image.Resampling.__members__:
        known = ", ".join(name.lower() for name in Image.Resampling.__members__)
        raise ValueError(f"interpolation is {shown.interpolation!r}, expected one of {known}")
    if shown.resize not in RESIZES:
        raise ValueError(f"resize is {shown.resize!r}, expected one of {', '.join(RESIZES)}")
    return shown


def check_preprocessing(shown: Preprocessing, trained_at: Sequence[int]) -> None:
    """A ValueError where a folder with it could not be read again."""
    _check_size(_usable(shown), trained_at)


def _check_size(shown: Preprocessing, trained_at: Sequence[int]) -> None:
    """A ValueError where pictures would be shown so large that the network for them has no end."""
    most = max(1024, LARGER * max(trained_at, default=0))
    if max(shown.image_size) > most:
        raise ValueError(
            f"preprocessing.image_size is {_list(shown.image_size)}, expected at most {most} pixels for a network of "
            f"{_list(tuple(trained_at))}"
        )


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _list(values: Any) -> Any:
    return list(values) if isinstance(values, tuple) else values


def _read_labels(folder: Path) -> tuple[str, ...]:
    path = folder / "labels.json"
    return tuple(parsed(read_run_file(folder, path.name), path, list[str]))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
