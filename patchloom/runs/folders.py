"""Write complete run folders in one step: published networks, converted weights, and modified copies of runs.

A folder is written under a temporary name and then renamed, so that it exists whole or not at all.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from patchloom.disk import atomic_write, disk_errors, make_folder, rename, sync_folder, sync_tree, temporary_path
from patchloom.models.network import Network
from patchloom.runs.checksums import read_checked, write_checked
from patchloom.runs.config import OTHER_NAMES, Preprocessing, write_run_files
from patchloom.runs.files import json_bytes
from patchloom.runs.imagenet_names import class_names
from patchloom.runs.metrics import METRICS
from patchloom.runs.model_card import card
from patchloom.runs.predictions import Predictions, save_predictions
from patchloom.runs.provenance import PROVENANCE
from patchloom.runs.run_metadata import read_run_metadata, write_run_metadata
from patchloom.runs.weights import refuse_bad, save_weights
from patchloom_runtime.errors import UsageError

CROP_RATIO = 0.875  # 224 of 256 pixels, if nothing else is known


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `out` on success. Raise UsageError if `out` is taken."""
    refuse_taken(out)
    temporary = temporary_path(out)
    with disk_errors(out):
        make_folder(out.parent)
        try:
            temporary.mkdir()
            yield temporary
            sync_tree(temporary)
            rename(temporary, out)
            sync_folder(out.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def refuse_taken(out: Path) -> None:
    """Raise UsageError if `out` exists and is not an empty folder."""
    if os.path.lexists(out) and not (out.is_dir() and not out.is_symlink() and not any(out.iterdir())):
        raise UsageError(f"{out} exists already; choose another folder or remove it")


def published_folder(name: str) -> Path:
    """Return the run folder of published weights in the user's cache, which may not exist yet."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "patchloom", "published", name)


def write_published(
    network: Network,
    out: Path,
    *,
    origin: str,
    labels: Sequence[str] | None = None,
    other_names: Sequence[Sequence[str]] | None = None,
    preprocessing: Preprocessing | None = None,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write a run folder for `network`, which `load`, `evaluate`, `predict`, `index`, `--init` … accept.

    Args:
        network: Network with trained weights.
        out: Folder to create. Raises UsageError if it is taken.
        origin: Sentence of the model card, without a full stop.
        labels: Class names. Default: ImageNet's for 1,000 classes, else numbers.
        other_names: Synonyms of each class name.
        preprocessing: How the network was trained. Default: its image size, mean and std.
        facts: Further rows of the model card's table, such as license and accuracy.
    """
    names = class_names(network.config.num_classes, labels)
    preprocessing = preprocessing or default_preprocessing(network)
    weights = dict(network.state_dict())
    refuse_bad(weights, origin)
    with new_folder(out) as folder:
        task = "classification" if names else "embedding"
        text = card(network.config.name, preprocessing, names, decides=bool(names), origin=origin, facts=facts)
        atomic_write(folder / "README.md", text.encode())
        save_weights(folder, weights, {})
        if other_names is not None:
            write_checked(folder, {OTHER_NAMES: json_bytes(other_names)})
        write_run_files(folder, network, preprocessing, None, names, task=task)


def default_preprocessing(network: Network) -> Preprocessing:
    """Return the preprocessing of a network about which nothing else is known."""
    return Preprocessing(network.pixel_mean, network.pixel_std, network.config.image_size, CROP_RATIO)


def write_modified_run(
    source: Path, out: Path, save: Callable[[Path], None], note: str, predictions: Predictions | None = None
) -> None:
    """Write a run with changed weights that keeps the provenance, metadata and metrics of the run `source`.

    `save` writes the model into the new folder, `note` says what was changed, and `predictions` are those of the
    changed network on the validation images.
    """
    with new_folder(out) as folder:
        save(folder)
        if (source / PROVENANCE).is_file():
            write_checked(folder, {PROVENANCE: read_checked(source, PROVENANCE)})
        if (metadata := read_run_metadata(source)) is not None:
            write_run_metadata(folder, replace(metadata, notes=[*metadata.notes, note]))
        if (source / METRICS).is_file():
            shutil.copyfile(source / METRICS, folder / METRICS)
        if predictions is not None:
            save_predictions(folder, predictions)
