"""Networks that others trained, as folders of runs: what `convert` writes, what is kept of weights fetched by name."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from patchloom.disk import atomic_write, disk_errors, make_folder, sync_folder, sync_tree, temporary_path
from patchloom.models.network import Network
from patchloom.runs.checksums import write_checked
from patchloom.runs.config import OTHER_NAMES, Preprocessing, write_run_files
from patchloom.runs.files import json_bytes
from patchloom.runs.model_card import card
from patchloom.runs.weights import refuse_bad, save_weights
from patchloom_runtime.errors import UsageError

CROP_RATIO = 0.875  # 224 of 256 pixels, where nothing else is known


def published_folder(name: str) -> Path:
    """Where the run of a network that was fetched by name is kept, in the user's cache."""
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
    """Write the folder of a run with `network` in it, as `load`, `evaluate`, `predict`, `index`, `--init` … read it.

    `labels` are the names of its classes: ImageNet's where there are 1,000, else numbers, where nothing is given.
    `other_names` are what data may call each of them.
    `preprocessing` is what it was trained on: at its image size with its mean and std where nothing is given. `origin`
    is a sentence of the card, without a full stop; `facts` are lines of its table: licence, top-1, publisher …

    The folder is there whole or not at all; a UsageError where something lies in its place.
    """
    names = class_names(network.config.num_classes, labels)
    shown = preprocessing or default_preprocessing(network)
    weights = dict(network.state_dict())
    refuse_bad(weights, origin)
    with new_folder(out) as folder:
        task = "classification" if names else "embedding"
        text = card(network.config.name, shown, names, decides=bool(names), origin=origin, facts=facts)
        atomic_write(folder / "README.md", text.encode())
        save_weights(folder, weights, {})
        if other_names is not None:
            write_checked(folder, {OTHER_NAMES: json_bytes(other_names)})
        write_run_files(folder, network, shown, None, names, task=task)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` when that is done; a UsageError where something lies there."""
    refuse_taken(out)
    temporary = temporary_path(out)
    with disk_errors(out):
        make_folder(out.parent)
        try:
            temporary.mkdir()
            yield temporary
            sync_tree(temporary)
            os.rename(temporary, out)
            sync_folder(out.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def refuse_taken(out: Path) -> None:
    """A UsageError where something lies at `out` already; an empty folder is free."""
    if os.path.lexists(out) and not (out.is_dir() and not out.is_symlink() and not any(out.iterdir())):
        raise UsageError(f"{out} exists already; give another folder, or remove it")


def default_preprocessing(network: Network) -> Preprocessing:
    """Of a network of which no more is known."""
    return Preprocessing(network.pixel_mean, network.pixel_std, network.config.image_size, CROP_RATIO)


def class_names(count: int, labels: Sequence[str] | None = None) -> tuple[str, ...]:
    """Names of a network's classes: `labels` where they are given, ImageNet's 1,000, or numbers."""
    if labels is None:
        return imagenet_names() if count == 1000 else tuple(map(str, range(count)))
    if len(labels) != count:
        raise UsageError(f"the network tells {count:,} classes apart, and {len(labels):,} names were given")
    if len(set(labels)) < count:
        twice = next(name for name in labels if list(labels).count(name) > 1)
        raise UsageError(f"the name {twice!r} was given to more than one class")
    return tuple(labels)


def imagenet_names() -> tuple[str, ...]:
    """ImageNet's 1,000 classes in words, in the order of its WordNet ids, each another: 'tench', 'goldfish' …"""
    from torchvision.models import ResNet50_Weights

    return tuple(ResNet50_Weights.IMAGENET1K_V1.meta["categories"])
