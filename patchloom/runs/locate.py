"""Runs by name: a folder, 'hub:user/name' of the Hugging Face hub, published weights such as 'resmlp_s12:in1k', or
'timm:NAME' and 'torchvision:NAME' (`foreign`).

Published weights become the folder of a run in $XDG_CACHE_HOME/patchloom/published, made once by one of the processes
that ask for it, so that whatever takes a run takes them. Nothing is fetched that was not named.
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

from patchloom.disk import atomic_write, disk_errors, one_at_a_time
from patchloom.models.pretrained.table import Weights, is_published_name, weights_named
from patchloom.runs.config import Preprocessing, is_run
from patchloom.runs.published import published_folder, write_published
from patchloom_runtime.errors import CheckpointError, UsageError
from patchloom_runtime.untrusted import parse_json, read_plain

PREFIX = "hub:"
ORIGIN = "published.json"  # the row of the table that a folder was made from


def run_folder(source: str | os.PathLike[str]) -> Path:
    """The folder of the run that a user names; a UsageError where there is none."""
    if (folder := find_run(source)) is not None:
        return folder
    given = os.fspath(source)
    if given.count("/") == 1 and not given.startswith((".", "/", "~")) and not os.path.exists(given):
        raise UsageError(f"{given}: no such folder; for a repository of the Hugging Face hub write {PREFIX}{given}")
    raise UsageError(f"{given} is not the folder of a run: it has no config.json")


def find_run(source: str | os.PathLike[str]) -> Path | None:
    """The same; None where what is named is something else, such as a file of weights."""
    if is_run(source):
        return Path(source)
    given = os.fspath(source)
    if is_on_hub(given):
        folder = _from_hub(given)
        if not is_run(folder):
            raise UsageError(f"{given} is no model of patchloom: it has no config.json")
        return folder
    if is_third_party(given):
        from patchloom.runs.third_party import third_party_run  # which patchloom's own networks do without

        return third_party_run(given)
    if is_published_name(given) and not os.path.exists(given):
        return _published(weights_named(given))
    return None


def names_run(source: str | os.PathLike[str]) -> bool:
    """Whether a user names a run, be it one that would have to be fetched."""
    return is_run(source) or is_on_hub(source) or is_third_party(source) or is_published_name(os.fspath(source))


def is_on_hub(source: str | os.PathLike[str]) -> bool:
    """Whether a user names a repository of the hub: hub:user/name."""
    return os.fspath(source).startswith(PREFIX)


def is_third_party(source: str | os.PathLike[str]) -> bool:
    """Whether a user names a network of timm or torchvision; torchvision:cifar10 is data."""
    library, _, rest = os.fspath(source).partition(":")
    if library != "torchvision":
        return library == "timm"
    from patchloom.data.sources.torchvision_sets import NAMES

    return rest.partition("@")[0] not in NAMES


def is_here(source: str) -> bool:
    """Whether a run can be read without asking any network."""
    if is_third_party(source):
        from patchloom.runs.third_party import is_made

        return is_made(source)
    if is_published_name(source) and not os.path.exists(source):
        weights = weights_named(source)
        return _is_made(published_folder(weights.name), weights)
    return is_run(source)


def _from_hub(source: str) -> Path:
    """The folder of 'hub:user/name', fetched where it is not here yet."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository = source.removeprefix(PREFIX)
    try:
        return Path(snapshot_download(repository))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise UsageError(f"{repository} cannot be fetched from the Hugging Face hub: {reason}") from error


# Published weights --------------------------------------------------------------------------------------------------


def _published(weights: Weights) -> Path:
    """The folder of published weights, made where it is not here yet."""
    folder = published_folder(weights.name)
    if not _is_made(folder, weights):
        lock = folder.with_name(f".{folder.name}.lock")
        with disk_errors(folder), one_at_a_time(lock, f"fetches {weights.name}"):
            if not _is_made(folder, weights):
                _make(weights, folder)
    return folder


def _is_made(folder: Path, weights: Weights) -> bool:
    """Whether the folder was made from this row: another version of patchloom may know more of the weights."""
    try:
        return is_run(folder) and bool(parse_json(read_plain(folder / ORIGIN)) == _row(weights))
    except (OSError, ValueError):
        return False


def _make(weights: Weights, folder: Path) -> None:
    # Runs that are read do without these, which know every family and the names of its published weights.
    from patchloom.models.pretrained.downloads import fetch_weights
    from patchloom.models.pretrained.published import load_published
    from patchloom.models.registry import create_model
    from patchloom.runs.imagenet_names import imagenet_labels

    file = fetch_weights(weights)
    network = create_model(
        weights.variant, num_classes=weights.classes, image_size=weights.image_size, **weights.options
    )
    try:
        load_published(network, file, new_head=weights.classes == 0)
    except CheckpointError as error:
        reason = str(error).rstrip(".")
        raise CheckpointError(f"{file} is not {weights.name}: {reason}. Remove it, and it is fetched anew.") from error
    labels, others = imagenet_labels(weights.classes)
    size = (weights.image_size, weights.image_size)
    for leftover in [folder, *folder.parent.glob(f".{folder.name}.*.tmp")]:  # older, or of a killed process
        shutil.rmtree(leftover, ignore_errors=True)
    write_published(
        network,
        folder,
        origin=f"Published weights, trained on {weights.trained_on}",
        labels=labels,
        other_names=others,
        preprocessing=Preprocessing(weights.mean, weights.std, size, weights.crop_ratio, weights.interpolation),
        facts=_facts(weights),
    )
    atomic_write(folder / ORIGIN, json.dumps(_row(weights), indent=1).encode())


def _row(weights: Weights) -> Any:
    return json.loads(json.dumps(dataclasses.asdict(weights)))


def _facts(weights: Weights) -> dict[str, str]:
    told = {
        "name": weights.name,
        "published at": ", ".join(filter(None, (weights.url, weights.hub and f"huggingface.co/{weights.hub}"))),
        "top-1 on ImageNet-1k's val, as published": weights.score,
        "licence": weights.licence or "not stated",
        "parameters": f"{weights.parameters:,}",
    }
    return {name: fact for name, fact in told.items() if fact}
