"""What a run leaves on disk: one folder that is enough alone.

    config.json               format, network and its options, preprocessing, label level
    recipe.yaml               what was asked for
    labels.json               class names, in the order of the outputs
    checksums.json            of these and of data.json, run.json, predictions.safetensors: see `engine.checksums`
    data.json                 what it began with: place and checksums of the data, weights it started from
    metrics.jsonl             see `engine.records`
    run.json                  how it went: see `deployment.run_record`
    predictions.safetensors   what it decided about each val image: see `evaluation.predictions`
    weights.safetensors       the best weights so far; what `load_network` reads
    checkpoints/step-00000123 what an exact resume needs; the newest two are kept

A checkpoint is written into a hidden folder, synced, and renamed; its manifest, with the SHA-256 of every file, is
written last. Whatever interrupts a write, the checkpoint before it stays as it was. There is no pickle anywhere.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from patchloom.engine.checksums import read_checked, write_checked
from patchloom.engine.disk import (
    Lock,
    atomic_write,
    disk_errors,
    plain_name,
    sync_folder,
    temporary_beside,
    write_new,
)
from patchloom.engine.state import Progress, Snapshot, load_weights
from patchloom.errors import CheckpointError, NumericalError, UsageError
from patchloom.foreign import MOST_BYTES, check_shape, parse_json, read_plain
from patchloom.models.from_config import make_for
from patchloom.models.network import Network
from patchloom.models.registry import create_model
from patchloom.recipes.schema import Recipe

FORMAT = 1
WEIGHTS = "weights.safetensors"
KEPT = 2
CHANNELS = 3
MOST_PIXELS = 4096  # of a side
LARGER = 8  # times the size of training at which a config may show pictures, from 1,024 pixels on
MOST_WEIGHTS = 1 << 40  # bytes
_MOST_DIMENSIONS = 64  # that torch computes with
_CONFIG = {"format": int, "task?": str, "network": str, "options": dict}
_OF_PICTURES = {
    "options": {"num_classes": int, "image_size": list[int]},
    "preprocessing": {
        "mean": Any,  # these four are looked at by `_usable`, which has more to say of them
        "std": Any,
        "image_size": Any,
        "crop_ratio": Any,
        "interpolation?": str,
    },
    "level?": str | None,
}
_STATE = {
    "progress": {
        "step": int,
        "epoch": int,
        "best?": float | None,
        "best_tie?": float | None,
        "best_weights": str,
        "best_step?": int,
        "not_better?": int,
        "records?": int,
        "ended": str,
    },
    "steps_per_epoch": int,
    "averaged": float,
    "world": int,
    "optimizer": {"kind": str, "plain": dict},
    "scaler": dict | None,
}
_RANDOM = {"python": 627, "numpy": 627}  # numbers of the states of generators
_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")


@dataclass(frozen=True)
class Preprocessing:
    """From a picture to what the network was trained on."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: tuple[int, int]  # height, width
    crop_ratio: float
    interpolation: str = "bicubic"


@dataclass(frozen=True)
class RunFiles:
    """What is known of a run before its weights are read."""

    network: str
    options: dict[str, Any]
    preprocessing: Preprocessing
    recipe: Recipe | None
    labels: tuple[str, ...]
    level: str | None = None  # of the taxonomy whose classes `labels` are; None: the finest of its data
    task: str = ""  # of a run from before it was written down

    @property
    def decides(self) -> bool:
        """Whether the network ends with a classifier of named classes."""
        return 0 < len(self.labels) == self.options["num_classes"]


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that is whole, and why newer ones were passed over."""

    path: Path
    snapshot: Snapshot
    notes: list[str]


class Folder:
    """The engine's saver: a run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: Lock | None = None

    def save(self, snapshot: Snapshot) -> None:
        """Keep what a resume needs."""
        save_checkpoint(self.path, snapshot)

    def save_weights(self, weights: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Keep the best weights so far."""
        save_weights(self.path, weights, about)
        self._hold_weights()

    def guard(self, lock: Lock, write_files: Callable[[], None]) -> None:
        """From now on `restore` makes the folder again where somebody removes or renames it."""
        self._lock, self._write_files = lock, write_files
        self._hold_weights()

    def restore(self) -> str:
        """Make the folder again, with all that is still known, where it was removed or renamed; a line that says so."""
        if self._lock is None or not self._lock.is_gone():
            return ""
        self._lock.take()
        self._write_files()
        path = self.path / WEIGHTS
        weights = self._lock.kept_open
        if weights and not path.exists():
            atomic_write(path, os.pread(weights.fileno(), os.fstat(weights.fileno()).st_size, 0))
            self._hold_weights()
        return (
            f"warning: {self.path} was removed or renamed while this run was writing to it. The run goes on and writes "
            "what it still has into a new folder of that name."
        )

    def _hold_weights(self) -> None:
        """Keep the file open: until it is closed, its bytes are there, whoever removes its name."""
        if self._lock is None:
            return
        if self._lock.kept_open:
            self._lock.kept_open.close()
        self._lock.kept_open = None
        with suppress(OSError):
            self._lock.kept_open = (self.path / WEIGHTS).open("rb", buffering=0)


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is the folder of a run."""
    return os.path.isfile(os.path.join(path, "config.json"))  # of no path an error, however long it is


# What can be resumed ------------------------------------------------------------------------------------------------


def save_checkpoint(folder: Path, snapshot: Snapshot) -> Path:
    """Write a checkpoint beside the last, then remove all but the newest two."""
    for part, tensors in snapshot.tensors.items():
        refuse_bad(tensors, f"{part} at step {snapshot.step}")
    parent = folder / "checkpoints"
    with disk_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(parent)
        target = _free_name(parent, snapshot.step)
        temporary = temporary_beside(target)
        try:
            temporary.mkdir()
            digests = {}
            for part, tensors in snapshot.tensors.items():
                digests[f"{part}.safetensors"] = write_new(temporary / f"{part}.safetensors", _packed(tensors))
            digests["state.json"] = write_new(temporary / "state.json", _json(snapshot.values))
            write_new(temporary / "manifest.json", _manifest(digests))
            sync_folder(temporary)
            os.rename(temporary, target)
            sync_folder(parent)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        # By the time of writing: a damaged one of a later step must not push out those of the run that went on.
        others = sorted((p for p in checkpoints_of(folder) if p != target), key=_written_at, reverse=True)
        for old in others[KEPT - 1 :]:
            if old.is_dir() and not old.is_symlink():  # what a stranger put there stays
                shutil.rmtree(old)
    return target


def load_checkpoint(path: Path) -> Snapshot:
    """Read one checkpoint; every file is compared with the manifest before it is used."""
    packed = _read(path / "manifest.json")
    manifest = _parsed(packed, path / "manifest.json", {"format": int, "sha256": dict[str, str]})
    _check_format(manifest, path / "manifest.json")
    digests = manifest["sha256"]
    if packed != _manifest(digests):
        raise CheckpointError(f"{path / 'manifest.json'} is damaged: its checksum is not its own.")
    contents = {}
    for name, digest in digests.items():
        plain_name(name, path / "manifest.json")
        contents[name] = _read(path / name, MOST_WEIGHTS)
        if hashlib.sha256(contents[name]).hexdigest() != digest:
            raise CheckpointError(f"{path / name} is damaged: its checksum is not that of the manifest.")
    if "state.json" not in contents:
        raise CheckpointError(f"{path / 'manifest.json'} is damaged: it names no state.json.")
    values = _parsed(contents.pop("state.json"), path / "state.json", dict)
    tensors = {name.removesuffix(".safetensors"): _unpacked(data, path / name) for name, data in contents.items()}
    for part, named in tensors.items():
        refuse_bad(named, str(path / f"{part}.safetensors"), CheckpointError)
    return Snapshot(tensors, values)


def read_checkpoint(path: Path) -> Snapshot:
    """What `load_checkpoint` gives, where it can be that of a run: its values and parts are of the shapes of one."""
    snapshot = load_checkpoint(path)
    _check_state(snapshot.values, path / "state.json")
    if "weights" not in snapshot.tensors:
        raise CheckpointError(f"{path / 'manifest.json'} is damaged: it names no weights.safetensors.")
    for part, named in snapshot.tensors.items():
        _check_part(part, named, path / f"{part}.safetensors")
    return snapshot


def find_checkpoint(folder: Path, read: Callable[[Path], Snapshot] = load_checkpoint) -> Found | None:
    """The newest checkpoint that is whole; None where there never was one, an error where all are damaged.

    To go on with a run, `read` is `read_checkpoint`: one of another shape is then passed over too.
    """
    notes: list[str] = []
    for path in checkpoints_of(folder):
        try:
            return Found(path, read(path), notes)
        except CheckpointError as error:
            notes.append(f"skipped {path.name}: {error}")
    if notes:
        raise CheckpointError(
            f"No checkpoint in {folder / 'checkpoints'} can be used. {' '.join(notes)} "
            "Restore one from a backup, or remove the folder to start again."
        )
    return None


def epochs_begun(folder: Path) -> int:
    """Epochs of which the newest checkpoint that can be read has at least a part; 0 where there is none."""
    values = _newest_state(folder)
    return -(-values["progress"]["step"] // values["steps_per_epoch"]) if values else 0


def lines_written(folder: Path) -> int:
    """Lines that `metrics.jsonl` had at the newest checkpoint that can be read; 0 where there is none."""
    values = _newest_state(folder)
    return values["progress"].get("records", 0) if values else 0


def _newest_state(folder: Path) -> dict[str, Any]:
    for path in checkpoints_of(folder):
        try:
            values: dict[str, Any] = _parsed(_read(path / "state.json"), path / "state.json", dict)
            _check_state(values, path / "state.json")
            return values
        except CheckpointError:
            continue
    return {}


# What is used afterwards --------------------------------------------------------------------------------------------


def save_weights(folder: Path, weights: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write `weights.safetensors`, with a checksum of the weights and what is known of them in its header."""
    refuse_bad(weights, "weights")
    # One key: safetensors writes several in an order that changes from file to file.
    header = {"patchloom": json.dumps({"sha256": weights_digest(weights), **about})}
    atomic_write(folder / WEIGHTS, _packed(weights, header))


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a safetensors file; one that `save_weights` wrote is compared with its checksum."""
    data = _read(path, MOST_WEIGHTS)
    weights = _unpacked(data, path)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
    ours = header.get("patchloom")
    if ours is not None and weights_digest(weights) not in ours:
        raise CheckpointError(f"{path} is damaged: its checksum is not that of its weights. Train or copy it again.")
    refuse_bad(weights, str(path), CheckpointError)
    return weights


def write_run_files(
    folder: Path,
    network: Network,
    preprocessing: Preprocessing,
    recipe: Recipe | None,
    labels: Sequence[str],
    level: str | None = None,
    *,
    task: str,
) -> None:
    """Write `config.json`, `recipe.yaml` and `labels.json`: before the first step, so a bad folder is known then."""
    told = {"preprocessing": dataclasses.asdict(preprocessing), "level": level}
    write_config(folder, task, network.config, recipe, {"labels.json": _json(list(labels))}, **told)


def write_config(
    folder: Path, task: str, network: Any, recipe: Recipe | None, others: dict[str, bytes] | None = None, **more: Any
) -> None:
    """Write `config.json`, with the network's own config and what else belongs to it, `recipe.yaml` and `others`."""
    options = dataclasses.asdict(network)
    config = {"format": FORMAT, "task": task, "network": options.pop("name"), "options": options, **more}
    files = dict(others or {})
    if recipe:
        files["recipe.yaml"] = recipe.to_yaml().encode()
    # Last: it is what makes the folder that of a run.
    write_checked(folder, files | {"config.json": _json(config)})


def read_config(folder: Path, shape: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What `write_config` wrote, of any kind of run; its options as they were. `shape` is what else it must have."""
    path = folder / "config.json"
    config = _parsed(_checked(folder, path.name), path, {"format": int})
    _check_format(config, path)
    _check_shape(config, _CONFIG, path)
    _check_shape(config, shape or {}, path)
    config["options"] = {name: _tuples(value) for name, value in config["options"].items()}
    return config


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
    task = config.get("task", "")
    return RunFiles(config["network"], options, shown, read_recipe(folder), labels, config.get("level"), task)


def read_recipe(folder: Path) -> Recipe | None:
    """What a run in this folder was asked for; None where there is none."""
    path = folder / "recipe.yaml"
    if not os.path.lexists(path):
        return None
    try:
        return Recipe.from_yaml(_checked(folder, "recipe.yaml").decode())
    except (UsageError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error} Restore it, or remove it to continue with the settings given."
        ) from error


def load_network(folder: Path) -> tuple[Network, RunFiles]:
    """The trained network of a run folder, in eval mode, and what belongs to it."""
    files = read_run_files(folder)
    weights, options = read_weights(folder / WEIGHTS), files.options
    network = make_for(
        weights, lambda: create_model(files.network, **options), options, config=str(folder / "config.json")
    )
    load_weights(network, weights, str(folder / WEIGHTS))
    return network.eval(), files


# Values ------------------------------------------------------------------------------------------------------------


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
    return shown


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
    return tuple(_parsed(_checked(folder, path.name), path, list[str]))


def _check_state(values: dict[str, Any], path: Path) -> None:
    """A CheckpointError where what stands in `state.json` is not that of a run, or its numbers do not fit together."""
    _check_shape(values, _STATE, path)
    progress, steps = values["progress"], values["steps_per_epoch"]
    if unknown := progress.keys() - {field.name for field in dataclasses.fields(Progress)}:
        raise CheckpointError(f"{path} is damaged: progress has an unknown field {min(unknown)!r}.")
    counts = [progress.get(name, 0) for name in ("step", "epoch", "best_step", "not_better", "records")]
    fits = steps > 0 and progress["epoch"] * steps <= progress["step"] <= (progress["epoch"] + 1) * steps
    if min(counts) < 0 or values["averaged"] < 0 or values["world"] < 1 or not fits:
        raise CheckpointError(f"{path} is damaged: its counts of steps and epochs do not fit together.")


def _check_part(part: str, tensors: dict[str, Tensor], path: Path) -> None:
    """What every run keeps in one shape; parts with the shapes of a network are compared with it by whoever has it."""
    for name, tensor in tensors.items():
        expected = (_RANDOM.get(name),) if part.startswith("random-") and name in _RANDOM else ()
        if (part == "averages" or expected) and (tensor.shape != expected or not tensor.is_floating_point()):
            raise CheckpointError(f"{path} is damaged: {name} is {tuple(tensor.shape)}, expected {expected}.")
    if part.startswith("random-") and not tensors.keys() >= {*_RANDOM, "torch"}:
        raise CheckpointError(f"{path} is damaged: it lacks the state of a generator.")


# Bytes --------------------------------------------------------------------------------------------------------------


def checkpoints_of(folder: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    try:
        names = os.listdir(folder / "checkpoints")
    except OSError:
        return []
    found = [(m, folder / "checkpoints" / name) for name in names if (m := _NAME.fullmatch(name))]
    return [p for _, p in sorted(found, key=lambda f: (int(f[0][1]), int(f[0][2] or 1)), reverse=True)]


def _remove_unfinished(parent: Path) -> None:
    """What a killed save left; links are left alone."""
    for path in parent.glob(".step-*.tmp"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def _written_at(path: Path) -> int:
    return path.lstat().st_mtime_ns


def _free_name(parent: Path, step: int) -> Path:
    """A step may be saved twice (stopped again before the next); the first stays until the second is whole."""
    path, number = parent / f"step-{step:08d}", 2
    while path.exists():
        path, number = parent / f"step-{step:08d}-{number}", number + 1
    return path


def _packed(tensors: dict[str, Tensor], header: dict[str, str] | None = None) -> bytes:
    on_host: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        # A weight used in two places is stored twice: safetensors refuses to guess which one owns it.
        shared = tensor.numel() > 0 and tensor.data_ptr() in seen
        on_host[name] = tensor.clone() if shared else tensor
        seen.add(tensor.data_ptr())
    return save(on_host, header)


def _unpacked(data: bytes, path: Path) -> dict[str, Tensor]:
    try:
        tensors = load(data)
        if any(tensor.dim() > _MOST_DIMENSIONS for tensor in tensors.values()):
            raise ValueError(f"it has a tensor of more than {_MOST_DIMENSIONS} dimensions")
        return tensors
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RuntimeError) as error:  # the last: torch
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} is not a whole safetensors file: {reason}.") from error


def weights_digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of names, kinds, shapes and values, whatever the order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def refuse_bad(tensors: dict[str, Tensor], where: str, error: type[Exception] = NumericalError) -> None:
    """An error that names the first tensor with NaN or infinity in it."""
    names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    if not names:
        return
    # Of numbers of 8 bits torch cannot tell.
    wide = [tensors[name].float() if tensors[name].itemsize == 1 else tensors[name] for name in names]
    finite = torch.stack([tensor.isfinite().all().cpu() for tensor in wide]).tolist()
    bad = [name for name, good in zip(names, finite, strict=True) if not good]
    if bad:
        raise error(f"{where}: {bad[0]} and {len(bad) - 1} other tensors hold NaN or infinity.")


def _json(values: Any) -> bytes:
    return (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode()


def _read(path: Path, most: int = MOST_BYTES) -> bytes:
    try:
        data = read_plain(path, most)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if not data:
        raise CheckpointError(f"{path} is empty.")
    return data


def _checked(folder: Path, name: str) -> bytes:
    data = read_checked(folder, name)
    if not data:
        raise CheckpointError(f"{folder / name} is empty.")
    return data


def _parsed(data: bytes, path: Path, shape: Any) -> Any:
    try:
        value = parse_json(data)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON ({error}).") from error
    _check_shape(value, shape, path)
    return value


def _check_shape(value: Any, shape: Any, path: Path) -> None:
    try:
        check_shape(value, shape)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error


def _manifest(digests: dict[str, str]) -> bytes:
    """Checksums of the other files, and one of the manifest itself."""
    own = hashlib.sha256(_json([FORMAT, digests])).hexdigest()
    return _json({"format": FORMAT, "sha256": digests, "own_sha256": own})


def _check_format(values: dict[str, Any], path: Path) -> None:
    found = values["format"]
    if found > FORMAT:
        raise CheckpointError(
            f"{path} has format {found}, written by a newer patchloom; this one reads up to {FORMAT}. Update patchloom."
        )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
