"""Published weights that are already in a cache: a run can start from them without a download."""

import os
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants

from patchloom.models.pretrained import table
from patchloom.models.pretrained.downloads import HUB_FILE, cache_name, url_path
from patchloom.runs.folders import published_folder
from patchloom.runs.locate import is_downloaded

_TIMM_REPOSITORY = "models--timm--"  # a folder of the hub's cache


def cached_weights() -> list[str]:
    """Return the names of all weights in the caches: patchloom's own, then those of timm and torchvision by name.

    Patchloom's are in the order of their table.
    """
    own = [weights.name for weights in table.WEIGHTS if _is_cached(weights)]
    return [*own, *sorted({*_third_party_runs(), *_timm_files(), *_torchvision_files()})]


def _is_cached(weights: table.Weights) -> bool:
    return (
        is_downloaded(weights.name)
        or bool(weights.url and url_path(weights.url).is_file())
        or bool(weights.hub and _is_in_hub_cache(weights.hub))
    )


def _is_in_hub_cache(repository: str) -> bool:
    return isinstance(huggingface_hub.try_to_load_from_cache(repository, HUB_FILE), str)


def _third_party_runs() -> Iterator[str]:
    """Yield the networks of other libraries that an earlier command has used with their published weights."""
    for name in _entries(published_folder("any").parent):
        library, _, network = name.partition(":")
        if library in ("timm", "torchvision") and "@" not in network:
            yield f"timm:{network}" if library == "timm" else f"torchvision:{network.partition('.')[0]}"


def _timm_files() -> Iterator[str]:
    own = {weights.hub for weights in table.WEIGHTS}
    for name in _entries(Path(constants.HF_HUB_CACHE)):
        network = name.removeprefix(_TIMM_REPOSITORY)
        repository = f"timm/{network}"
        if name.startswith(_TIMM_REPOSITORY) and repository not in own and _is_in_hub_cache(repository):
            yield f"timm:{network}"


def _torchvision_files() -> Iterator[str]:
    files = {name for name in _entries(url_path("x/y.pth").parent) if name.endswith(".pth")}
    if not files:
        return
    from torchvision import models  # only if there may be some: it takes a second

    for name in models.list_models(module=models):
        if cache_name(models.get_model_weights(name)["DEFAULT"].url) in files:
            yield f"torchvision:{name}"


def _entries(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
