"""Run names → run folders.

    PATH                             a run folder
    hub:user/name                    a repository of the Hugging Face hub
    s3://bucket/runs/a               a run in a bucket; also gs:// and az://
    resmlp_s12:in1k                  published weights (`models.pretrained.table`)
    timm:NAME, torchvision:NAME      networks of other libraries (`third_party`)

Published weights become a run folder in $XDG_CACHE_HOME/patchloom/published, written once by the first process that
needs it, so that every command that takes a run accepts them. Nothing is downloaded unless the user names it.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from patchloom.data.buckets.mirror import Mirror
from patchloom.data.buckets.objects import list_folder
from patchloom.data.sources.specs import is_url
from patchloom.disk import atomic_write, disk_errors, one_at_a_time
from patchloom.models.pretrained.table import Weights, is_published_name, weights_named
from patchloom.models.registry import create_model
from patchloom.runs.config import Preprocessing, is_run
from patchloom.runs.folders import published_folder, write_published
from patchloom.runs.imagenet_names import imagenet_labels
from patchloom_runtime.artifacts.metadata import EARLIER_FILE, FILE
from patchloom_runtime.errors import CheckpointError, UsageError
from patchloom_runtime.untrusted import parse_json, read_plain

PREFIX = "hub:"
FILES_OF_ARTIFACTS = (FILE, EARLIER_FILE)
ORIGIN = "published.json"  # the row of the table of weights that a folder was written from


def run_folder(source: str | os.PathLike[str]) -> Path:
    """Return a run folder, downloaded if needed. Raise UsageError if `source` does not name a run."""
    if (folder := find_run(source)) is not None:
        return folder
    name = os.fspath(source)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not os.path.exists(name):
        raise UsageError(f"{name}: no such folder; for a repository of the Hugging Face hub write {PREFIX}{name}")
    raise UsageError(f"{name} is not a run folder: it has no config.json")


def find_run(source: str | os.PathLike[str]) -> Path | None:
    """Return a run folder, or None if `source` names something else, such as a weights file."""
    if is_run(source):
        return Path(source)
    name = os.fspath(source)
    if is_on_hub(name):
        folder = _download_from_hub(name)
        if not is_run(folder):
            raise UsageError(f"{name} is not a patchloom model: it has no config.json")
        return folder
    if is_url(name):
        return Mirror(name).pull(is_file_of_run) if holds(name, ["config.json"]) else None
    if is_third_party(name):
        from patchloom.runs.third_party import third_party_run  # loads timm and torchvision

        return third_party_run(name)
    if is_published_name(name) and not os.path.exists(name):
        return _published_run(weights_named(name))
    return None


def local_copy(source: str) -> str:
    """Return a path as it is; download a run or an artifact in a bucket and return the path of the copy."""
    if not is_url(source):
        return source
    if not holds(source, ("config.json", *FILES_OF_ARTIFACTS)):
        raise UsageError(f"{source} is neither a run nor an artifact: it has no config.json")
    return str(Mirror(source).pull(is_file_of_run))


def holds(url: str, names: Sequence[str]) -> bool:
    """Return whether a folder in a bucket has a file of one of these names."""
    if url.startswith("http") or url.endswith((".tar", ".parquet")):
        return False
    return any(facts.url.rpartition("/")[2] in names for facts in list_folder(url))


def is_file_of_run(name: str) -> bool:
    """Return whether a file of a run folder is needed to use the run; checkpoints only are to continue it."""
    return not name.startswith("checkpoints/")


def names_run(source: str | os.PathLike[str]) -> bool:
    """Return whether `source` names a run, without downloading anything."""
    name = os.fspath(source)
    if is_url(name):
        return holds(name, ["config.json"])
    return is_run(name) or is_on_hub(name) or is_third_party(name) or is_published_name(name)


def is_on_hub(source: str | os.PathLike[str]) -> bool:
    """Return whether `source` names a repository of the hub: hub:user/name."""
    return os.fspath(source).startswith(PREFIX)


def is_third_party(source: str | os.PathLike[str]) -> bool:
    """Return whether `source` names a network of timm or torchvision. torchvision:cifar10 is a dataset."""
    library, _, rest = os.fspath(source).partition(":")
    if library != "torchvision":
        return library == "timm"
    from patchloom.data.sources.torchvision_sets import NAMES

    return rest.partition("@")[0] not in NAMES


def is_downloaded(source: str) -> bool:
    """Return whether a run can be read without network access."""
    if is_third_party(source):
        from patchloom.runs.third_party import is_written

        return is_written(source)
    if is_published_name(source) and not os.path.exists(source):
        weights = weights_named(source)
        return _is_current(published_folder(weights.name), weights)
    return is_run(source)


def _download_from_hub(source: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    repository = source.removeprefix(PREFIX)
    try:
        return Path(snapshot_download(repository))
    except (errors.HfHubHTTPError, errors.HFValidationError, errors.LocalEntryNotFoundError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise UsageError(f"{repository} cannot be downloaded from the Hugging Face hub: {reason}") from error


# Published weights --------------------------------------------------------------------------------------------------


def _published_run(weights: Weights) -> Path:
    folder = published_folder(weights.name)
    if not _is_current(folder, weights):
        lock = folder.with_name(f".{folder.name}.lock")
        with disk_errors(folder), one_at_a_time(lock, f"downloads {weights.name}"):
            if not _is_current(folder, weights):
                _write_published_run(weights, folder)
    return folder


def _is_current(folder: Path, weights: Weights) -> bool:
    """Return whether the folder was written from this row; another version of patchloom may have another row."""
    try:
        return is_run(folder) and bool(parse_json(read_plain(folder / ORIGIN)) == _row(weights))
    except (OSError, ValueError):
        return False


def _write_published_run(weights: Weights, folder: Path) -> None:
    # Imported here, because reading an existing run does not need the published weights.
    from patchloom.models.pretrained.downloads import fetch_weights
    from patchloom.models.pretrained.published import load_published

    file = fetch_weights(weights)
    network = create_model(
        weights.variant, num_classes=weights.classes, image_size=weights.image_size, **weights.options
    )
    try:
        load_published(network, file, new_head=weights.classes == 0)
    except CheckpointError as error:
        reason = str(error).rstrip(".")
        raise CheckpointError(
            f"{file} is not {weights.name}: {reason}. Remove the file to download it again."
        ) from error
    labels, synonyms = imagenet_labels(weights.classes)
    size = (weights.image_size, weights.image_size)
    for leftover in [folder, *folder.parent.glob(f".{folder.name}.*.tmp")]:  # outdated, or of a killed process
        shutil.rmtree(leftover, ignore_errors=True)
    write_published(
        network,
        folder,
        origin=f"Published weights, trained on {weights.trained_on}",
        labels=labels,
        other_names=synonyms,
        preprocessing=Preprocessing(weights.mean, weights.std, size, weights.crop_ratio, weights.interpolation),
        facts=_card_facts(weights),
    )
    atomic_write(folder / ORIGIN, json.dumps(_row(weights), indent=1).encode())


def _row(weights: Weights) -> Any:
    return json.loads(json.dumps(dataclasses.asdict(weights)))


def _card_facts(weights: Weights) -> dict[str, str]:
    facts = {
        "name": weights.name,
        "published at": ", ".join(filter(None, (weights.url, weights.hub and f"huggingface.co/{weights.hub}"))),
        "top-1 on ImageNet-1k val, as published": weights.score,
        "licence": weights.licence or "not stated",
        "parameters": f"{weights.parameters:,}",
    }
    return {name: fact for name, fact in facts.items() if fact}
