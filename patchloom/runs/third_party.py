"""Networks of timm and torchvision with trained weights, as run folders.

timm:mobilenetv2_100[.TAG]      published weights, downloaded by timm
timm:mobilenetv2_100@FILE       the same network with the user's weights; also torchvision:mobilenet_v2[@FILE]

The folder is kept with other published weights in the user's cache. For a weights file, its name contains the digest.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torchvision import models

from patchloom.disk import disk_errors, one_at_a_time
from patchloom.models.network import Network
from patchloom.models.registry import build_model
from patchloom.models.torchvision_trunk import check_name, create_classifier, last_linear
from patchloom.objectives.third_party_weights import downloading, misfits, read_weights
from patchloom.runs.config import POOLED, Preprocessing, is_run
from patchloom.runs.folders import published_folder, write_published
from patchloom.runs.imagenet_names import names_for
from patchloom_runtime.errors import UsageError, nearest

_DIGITS = 16  # of a file's SHA-256, in the name of its folder
_TOLERANCE = 1e-3  # as a share of the largest output


@dataclass(frozen=True)
class ThirdPartyNetwork:
    """A network of another library with its weights and preprocessing."""

    spec: str
    module: nn.Module
    classifier: Any  # its last layer
    prefix: str  # of its weights' names within patchloom's trunk
    preprocessing: Preprocessing
    facts: dict[str, str]  # for the model card


def third_party_run(spec: str) -> Path:
    """Return the run folder of 'timm:NAME[@FILE]' or 'torchvision:NAME[@FILE]', writing it on first use."""
    library, name, path, known = _parse_spec(spec)
    folder = published_folder(_folder_name(library, name, known, path))
    if is_run(folder):
        return folder
    lock = folder.with_name(f".{folder.name}.lock")
    with disk_errors(folder), one_at_a_time(lock, f"writes the run of {spec}"):
        if not is_run(folder):
            write_third_party_run(spec, folder)
    return folder


def is_written(spec: str) -> bool:
    """Return whether the run folder of `spec` exists."""
    library, name, path, known = _parse_spec(spec)
    return is_run(published_folder(_folder_name(library, name, known, path)))


def write_third_party_run(spec: str, folder: Path, labels: Sequence[str] | None = None) -> None:
    """Write the run folder of `spec`, with `labels` as class names."""
    library, name, path, known = _parse_spec(spec)
    source = (_from_timm if library == "timm" else _from_torchvision)(spec, name, path, known)
    network = _convert(source)
    names, synonyms = names_for(network.config.num_classes, labels)
    write_published(
        network,
        folder,
        origin=f"Weights of {library}:{name}{f', from {Path(path).name}' if path else ''}",
        labels=names,
        other_names=synonyms,
        preprocessing=source.preprocessing,
        facts=source.facts,
    )


def _parse_spec(spec: str) -> tuple[str, str, str, Any]:
    """Return library, name, file and the library's config of the network. Raise UsageError if it is unknown."""
    library, _, rest = spec.partition(":")
    name, _, path = rest.partition("@")
    if path and not os.path.isfile(path):
        raise UsageError(f"{spec} names the file {path}, which does not exist. Check the path after @.")
    return library, name, path, _timm_config(name) if library == "timm" else _torchvision_weights(name, path)


def _folder_name(library: str, name: str, known: Any, path: str) -> str:
    if path:
        with open(path, "rb") as file:
            return f"{library}:{name}@{hashlib.file_digest(file, 'sha256').hexdigest()[:_DIGITS]}"
    tag = known.get("tag") if library == "timm" else known.name
    return f"{library}:{name}" if not tag or "." in name else f"{library}:{name}.{tag}"


def _convert(source: ThirdPartyNetwork) -> Network:
    """Return the same network in patchloom. Its outputs are compared with those of the library."""
    kind, _, rest = source.spec.partition(":")
    name = rest.partition("@")[0]
    backbone = name.partition(".")[0] if kind == "timm" else f"{kind}:{name}"
    head = _linear(source.classifier)
    network = build_model(
        POOLED,
        backbone=backbone,
        pool="average",
        num_classes=len(head["weight"]) if head else 0,
        image_size=source.preprocessing.image_size,
    )
    theirs = {f"trunk.{source.prefix}{key}": tensor for key, tensor in source.module.state_dict().items()}
    own = network.state_dict()
    state = {key: theirs.get(key, own[key]) for key in own} | {f"classifier.{key}": each for key, each in head.items()}
    network.load_state_dict(state)
    if head:
        _check_outputs(network.eval(), source)
    return network.eval()


def _linear(classifier: Any) -> dict[str, Tensor]:
    """Return weight and bias of a linear classifier. Any other classifier is dropped: the run then has no classes."""
    if not isinstance(classifier, nn.Linear | nn.Conv2d):
        return {}
    weight = classifier.weight.detach().flatten(1)
    bias = weight.new_zeros(len(weight)) if classifier.bias is None else classifier.bias.detach()
    return {"weight": weight, "bias": bias}


@torch.no_grad()
def _check_outputs(network: Network, source: ThirdPartyNetwork) -> None:
    size = source.preprocessing.image_size
    images = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))
    ours, theirs = network(images), source.module.eval()(images)
    if not torch.allclose(ours, theirs, rtol=_TOLERANCE, atol=_TOLERANCE * float(theirs.abs().max())):
        raise UsageError(
            f"{source.spec} has layers between its features and its classifier that patchloom does not support, so its "
            "predictions would differ; choose another network"
        )


# timm ---------------------------------------------------------------------------------------------------------------


def _timm_config(name: str) -> Mapping[str, Any]:
    try:
        config = timm.get_pretrained_cfg(name, allow_unregistered=False).to_dict()  # type: ignore[union-attr]
    except RuntimeError as error:
        raise UsageError(
            f"timm has no network {name!r}.{nearest(name, timm.list_models() + timm.list_pretrained())}"
        ) from error
    if config["input_size"][0] != 3:
        raise UsageError(f"timm's {name} takes images of {config['input_size'][0]} channels, expected 3")
    return config


def _from_timm(spec: str, name: str, path: str, config: Mapping[str, Any]) -> ThirdPartyNetwork:
    module: Any
    if path:
        state = read_weights(path)
        heads = config.get("classifier") or ()
        heads = (heads,) if isinstance(heads, str) else heads
        rows = next((len(state[key]) for key in (f"{head}.weight" for head in heads) if key in state), 0)
        overlay = {"state_dict": state, "num_classes": rows, "custom_load": False}
        with misfits(f"timm's {name}", path):
            module = timm.create_model(name, True, pretrained_cfg_overlay=overlay, num_classes=rows)
    else:
        if not any(config.get(place) for place in ("url", "file", "hf_hub_id")):
            raise UsageError(f"timm has no published weights of {name}; pass your own as timm:{name}@FILE")
        with downloading(spec):
            module = timm.create_model(name, pretrained=True)
    height, width = config["input_size"][1:]
    preprocessing = Preprocessing(
        tuple(config["mean"]),
        tuple(config["std"]),
        (height, width),
        config.get("crop_pct") or 0.875,
        _resampling(config["interpolation"]),
    )
    facts = {} if path or not config.get("license") else {"licence": config["license"]}
    return ThirdPartyNetwork(spec, module, module.get_classifier(), "", preprocessing, facts)


# torchvision --------------------------------------------------------------------------------------------------------


def _torchvision_weights(name: str, path: str) -> Any:
    """Return the published weights whose file name is that of `path`, else the newest ones."""
    check_name(name)
    known = models.get_model_weights(name)
    same = [each for each in known if path and each.url.rpartition("/")[2] == Path(path).name]
    return same[0] if same else known["DEFAULT"]


def _from_torchvision(spec: str, name: str, path: str, weights: Any) -> ThirdPartyNetwork:
    preset = weights.transforms()
    side = preset.crop_size[0]
    if path:
        state = read_weights(path)
        head = last_linear(create_classifier(name, (side, side), num_classes=1))
        rows = len(state[f"{head}.weight"]) if f"{head}.weight" in state else 0
        module = create_classifier(name, (side, side), num_classes=max(rows, 1))
        if not rows:
            module.set_submodule(head, nn.Identity())
        with misfits(f"torchvision's {name}", path):
            module.load_state_dict(state)
    else:
        with downloading(spec):
            module = models.get_model(name, weights=weights)
        head = last_linear(module)
    preprocessing = Preprocessing(
        tuple(preset.mean),
        tuple(preset.std),
        (side, side),
        min(side / preset.resize_size[0], 1.0),
        _resampling(preset.interpolation.value),
    )
    facts = {} if path else {"weights": str(weights), "licence": "BSD-3-Clause"}
    return ThirdPartyNetwork(spec, module, module.get_submodule(head), "net.", preprocessing, facts)


def _resampling(name: str) -> str:
    """Return Pillow's name of a filter. timm also has 'random' and 'bicubic-tv'."""
    return name if name in ("bilinear", "bicubic", "lanczos", "box", "hamming", "nearest") else "bicubic"
