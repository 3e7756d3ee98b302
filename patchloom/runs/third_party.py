"""timm's and torchvision's networks with their trained weights, as folders of runs.

timm:mobilenetv2_100[.TAG]      with its published weights, fetched by timm
timm:mobilenetv2_100@FILE       the same network with weights of one's own; torchvision:mobilenet_v2[@FILE] likewise

The folder lies with other published weights in the user's cache; that of a file is known by the file's contents.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.disk import disk_errors, one_at_a_time
from patchloom.models.network import Network
from patchloom.models.registry import build_model
from patchloom.models.torchvision_trunk import check_name, last_linear, made
from patchloom.objectives.third_party_weights import fetching, misfits, read_weights
from patchloom.runs.config import Preprocessing, is_run
from patchloom.runs.imagenet_names import names_for
from patchloom.runs.published import published_folder, write_published
from patchloom_runtime.errors import CheckpointError, UsageError, nearest

NETWORK = "resnet50_attention_pool"  # what timm's and torchvision's networks are called in `config.json`
_DIGITS = 16  # of a file's SHA-256, in the name of its folder
_CLOSE = 1e-3  # as a share of the largest output


@dataclass(frozen=True)
class ThirdPartyNetwork:
    """A network of another library with its weights, and what is known of it."""

    spec: str
    module: nn.Module
    classifier: Any  # its last layer
    prefix: str  # of the names of its weights, as patchloom's trunk has them
    shown: Preprocessing
    facts: dict[str, str]


def third_party_run(spec: str) -> Path:
    """The folder of the run that 'timm:NAME', 'torchvision:NAME' or one with '@FILE' names; it is made once."""
    library, name, path, known = _parsed(spec)
    folder = published_folder(_folder_name(library, name, known, path))
    if is_run(folder):
        return folder
    lock = folder.with_name(f".{folder.name}.lock")
    with disk_errors(folder), one_at_a_time(lock, f"makes a run of {spec}"):
        if not is_run(folder):
            write_third_party_run(spec, folder)
    return folder


def write_third_party_run(spec: str, folder: Path, labels: Sequence[str] | None = None) -> None:
    """Make the folder of a run of it anywhere, with names for its classes."""
    library, name, path, known = _parsed(spec)
    foreign = (_from_timm if library == "timm" else _from_torchvision)(spec, name, path, known)
    network = _network(foreign)
    names, others = names_for(network.config.num_classes, labels)
    write_published(
        network,
        folder,
        origin=f"Weights of {library}:{name}{f', from {Path(path).name}' if path else ''}",
        labels=names,
        other_names=others,
        preprocessing=foreign.shown,
        facts=foreign.facts,
    )


def is_made(spec: str) -> bool:
    """Whether that folder is here already."""
    library, name, path, known = _parsed(spec)
    return is_run(published_folder(_folder_name(library, name, known, path)))


def _parsed(spec: str) -> tuple[str, str, str, Any]:
    """Library, name, file, and what the library says of the network's weights; a UsageError where it knows none."""
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


def _network(foreign: ThirdPartyNetwork) -> Network:
    """The same network as one of patchloom, which must answer as it does in its library."""
    kind, _, rest = foreign.spec.partition(":")
    name = rest.partition("@")[0]
    backbone = name.partition(".")[0] if kind == "timm" else f"{kind}:{name}"
    head = _linear(foreign.classifier)
    network = build_model(
        NETWORK,
        backbone=backbone,
        pool="average",
        num_classes=len(head["weight"]) if head else 0,
        image_size=foreign.shown.image_size,
    )
    theirs = {f"trunk.{foreign.prefix}{key}": tensor for key, tensor in foreign.module.state_dict().items()}
    own = network.state_dict()
    state = {key: theirs.get(key, own[key]) for key in own} | {f"classifier.{key}": each for key, each in head.items()}
    network.load_state_dict(state)
    _check_answers(network.eval(), foreign.module.eval(), foreign, decides=bool(head))
    return network


def _linear(classifier: Any) -> dict[str, Tensor]:
    """Weight and bias of a classifier that is one linear layer; of another kind none, and the run has no classes."""
    if not isinstance(classifier, nn.Linear | nn.Conv2d):
        return {}
    weight = classifier.weight.detach().flatten(1)
    bias = weight.new_zeros(len(weight)) if classifier.bias is None else classifier.bias.detach()
    return {"weight": weight, "bias": bias}


@torch.no_grad()
def _check_answers(network: Network, module: nn.Module, foreign: ThirdPartyNetwork, *, decides: bool) -> None:
    images = torch.randn(1, 3, *foreign.shown.image_size, generator=torch.Generator().manual_seed(0))
    if not decides:
        return
    ours, theirs = network(images), module(images)
    if not torch.allclose(ours, theirs, rtol=_CLOSE, atol=_CLOSE * float(theirs.abs().max())):
        raise UsageError(
            f"{foreign.spec} does more between its features and its classes than patchloom knows of, and would answer "
            "otherwise here; choose another network"
        )


# timm ---------------------------------------------------------------------------------------------------------------


def _timm_config(name: str) -> Mapping[str, Any]:
    import timm

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
    import timm

    module: Any
    if path:
        state = _read(path)
        heads = config.get("classifier") or ()
        heads = (heads,) if isinstance(heads, str) else heads
        rows = next((len(state[key]) for key in (f"{head}.weight" for head in heads) if key in state), 0)
        given = {"state_dict": state, "num_classes": rows, "custom_load": False}
        with misfits(f"timm's {name}", path):
            module = timm.create_model(name, True, pretrained_cfg_overlay=given, num_classes=rows)
    else:
        if not any(config.get(place) for place in ("url", "file", "hf_hub_id")):
            raise UsageError(f"timm has no published weights of {name}; give timm:{name}@FILE")
        with fetching(spec):
            module = timm.create_model(name, pretrained=True)
    height, width = config["input_size"][1:]
    shown = Preprocessing(
        tuple(config["mean"]),
        tuple(config["std"]),
        (height, width),
        config.get("crop_pct") or 0.875,
        _resampling(config["interpolation"]),
    )
    licence = {} if path or not config.get("license") else {"licence": config["license"]}
    return ThirdPartyNetwork(spec, module, module.get_classifier(), "", shown, licence)


# torchvision --------------------------------------------------------------------------------------------------------


def _torchvision_weights(name: str, path: str) -> Any:
    """The published weights of torchvision's network: those of the file's name, else the newest."""
    from torchvision import models

    check_name(name)
    known = models.get_model_weights(name)
    same = [each for each in known if path and each.url.rpartition("/")[2] == Path(path).name]
    return same[0] if same else known["DEFAULT"]


def _from_torchvision(spec: str, name: str, path: str, weights: Any) -> ThirdPartyNetwork:
    from torchvision import models

    preset = weights.transforms()
    side = preset.crop_size[0]
    if path:
        state = _read(path)
        head = last_linear(made(name, (side, side), num_classes=1))
        rows = len(state[f"{head}.weight"]) if f"{head}.weight" in state else 0
        module = made(name, (side, side), num_classes=max(rows, 1))
        if not rows:
            module.set_submodule(head, nn.Identity())
        with misfits(f"torchvision's {name}", path):
            module.load_state_dict(state)
    else:
        with fetching(spec):
            module = models.get_model(name, weights=weights)
        head = last_linear(module)
    shown = Preprocessing(
        tuple(preset.mean),
        tuple(preset.std),
        (side, side),
        min(side / preset.resize_size[0], 1.0),
        _resampling(preset.interpolation.value),
    )
    facts = {} if path else {"weights": str(weights), "licence": "BSD-3-Clause"}
    return ThirdPartyNetwork(spec, module, module.get_submodule(head), "net.", shown, facts)


def _read(path: str) -> dict[str, Any]:
    try:
        return read_weights(path)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace("The teacher's weights", "The weights")) from error


def _resampling(name: str) -> str:
    """Pillow's word; timm also says 'random' and 'bicubic-tv'."""
    return name if name in ("bilinear", "bicubic", "lanczos", "box", "hamming", "nearest") else "bicubic"
