"""Build networks from weight files, and rename weights for timm, torchvision or the authors' code."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import timm
import torch
from torch import nn

from patchloom.models.network import Network
from patchloom.models.pooled_convnet import PooledConvNet
from patchloom.models.pretrained.names import Publisher, State, named_as, namings
from patchloom.models.pretrained.published import image_size_of, load_published, read_state, renamed_for
from patchloom.models.registry import build_model, default_options
from patchloom.models.torchvision_trunk import create_classifier, last_linear
from patchloom_runtime.errors import CheckpointError, UsageError

# timm's names of the networks. The size in a name is that of its weights; `img_size` changes it.
TIMM = {
    "resmlp_s12": "resmlp_12_224",
    "resmlp_s24": "resmlp_24_224",
    "resmlp_s36": "resmlp_36_224",
    "resmlp_b24_8": "resmlp_big_24_224",
    "mixer_s32": "mixer_s32_224",
    "mixer_s16": "mixer_s16_224",
    "mixer_b32": "mixer_b32_224",
    "mixer_b16": "mixer_b16_224",
    "mixer_l32": "mixer_l32_224",
    "mixer_l16": "mixer_l16_224",
    "deit_ti": "deit_tiny_patch16_224",
    "deit_s": "deit_small_patch16_224",
    "deit_b": "deit_base_patch16_224",
    "deit_ti_distilled": "deit_tiny_distilled_patch16_224",
    "deit_s_distilled": "deit_small_distilled_patch16_224",
    "deit_b_distilled": "deit_base_distilled_patch16_224",
    "deit3_s": "deit3_small_patch16_224",
    "deit3_m": "deit3_medium_patch16_224",
    "deit3_b": "deit3_base_patch16_224",
    "deit3_l": "deit3_large_patch16_224",
    "deit3_h": "deit3_huge_patch14_224",
    "cait_xxs24": "cait_xxs24_224",
    "cait_xxs36": "cait_xxs36_224",
    "cait_xs24": "cait_xs24_384",
    "cait_s24": "cait_s24_224",
    "cait_s36": "cait_s36_384",
    "cait_m36": "cait_m36_384",
    "cait_m48": "cait_m48_448",
}
# Options that do not affect the outputs of a trained network, or that are passed separately.
_FREE = ("name", "num_classes", "image_size", "drop_path", "drop_path_rule", "dropout", "scale_init", "scale_uniform")
_MOST_LISTED = 4


def network_of(name: str, state_dict_or_path: Mapping[str, Any] | str | os.PathLike[str]) -> Network:
    """Create a network with the image size and number of classes of published weights, and load them.

    Weights without a classifier give a network without one.
    """
    weights = read_state(state_dict_or_path)
    with torch.device("meta"):
        meta_network = build_model(name, num_classes=0)
    state = renamed_for(meta_network, weights)
    head = state.get("classifier.weight")
    options: dict[str, Any] = {"num_classes": len(head) if head is not None and head.ndim else 0}
    tokens = state.get("attention_pool.token.weight")
    if tokens is not None and tokens.ndim == 3 and tokens.shape[1] > 1:
        options["class_tokens"] = "per_class"
    try:
        options["image_size"] = image_size_of(meta_network, state)
        with torch.device("meta"):
            build_model(name, **options)
    except (CheckpointError, UsageError, IndexError):
        options.pop("image_size", None)  # weights of another network: load_published lists what does not fit
    return load_published(build_model(name, **options), weights)


@dataclass(frozen=True)
class Converted:
    """Weights with the names of another library."""

    state: State
    use: str  # how the network is created there
    notes: tuple[str, ...] = ()  # remaining differences


def converted(network: Network, to: str) -> Converted:
    """Return the weights of `network` with the names of "timm", "torchvision" or the "authors".

    Raise UsageError if they have no such network.
    """
    if network.absorbed:
        raise UsageError("an absorbed network has no counterpart elsewhere; convert the network it was made from")
    if isinstance(network, PooledConvNet):
        return _convert_third_party(network, to)
    name, publishers = network.config.name, namings(network)
    publisher: Publisher | None = next((each for each in publishers if each == to), None)
    if publisher is None or (publisher == "timm" and name not in TIMM):
        raise UsageError(
            f"{to} does not publish {name}; {_elsewhere(name, [each for each in publishers if each != to])}"
        )
    notes = _check_options(network, publisher)
    state, unknown = named_as(network, publisher)
    if unknown:
        raise UsageError(f"{_owner(publisher)} {name} does not have {_some(unknown)}")
    if publisher == "authors":
        return Converted(state, f"{name} of its authors", notes)
    options: dict[str, Any] = {"num_classes": network.config.num_classes}
    height, width = network.config.image_size
    options["img_size"] = height if height == width else (height, width)
    return Converted(state, _fitting_timm(TIMM[name], options, state), notes)


def _check_options(network: Network, publisher: str) -> tuple[str, ...]:
    """Return notes on options that differ slightly. Raise UsageError for options that make another network."""
    own, published = asdict(network.config), default_options(network.config.name)
    differ = [key for key in own if key not in _FREE and own[key] != published[key]]
    notes: tuple[str, ...] = ()
    if "gelu" in own:  # the authors use the tanh approximation, timm the exact GELU
        differ = [key for key in differ if key != "gelu"]
        if own["gelu"] != {"authors": "tanh", "timm": "exact"}[publisher]:
            notes = (
                f"{_owner(publisher)} Mixer has another GELU than this one ({own['gelu']}): outputs differ slightly",
            )
    if "class_tokens" in differ and publisher == "authors":
        differ.remove("class_tokens")  # the authors' networks called `multi`
    if differ:
        listed = ", ".join(f"{key} {own[key]} (published: {published[key]})" for key in differ[:_MOST_LISTED])
        raise UsageError(f"{_owner(publisher)} {network.config.name} does not support these options: {listed}")
    return notes


def _fitting_timm(name: str, options: dict[str, Any], state: State) -> str:
    """Return the call that creates timm's network for these weights, after comparing names and shapes."""
    with torch.device("meta"):
        theirs = timm.create_model(name, **options).state_dict()
    _compare(theirs, state, f"timm's {name}")
    return f"timm.create_model({name!r}, {', '.join(f'{key}={value!r}' for key, value in options.items())})"


def _compare(theirs: State, state: State, network: str) -> None:
    differ = [key for key in {**theirs, **state} if key not in state or key not in theirs]
    differ += [key for key in state if key in theirs and state[key].shape != theirs[key].shape]
    if differ:
        raise UsageError(f"{network} of the installed version has other weights: {_some(differ)}")


# Networks of timm and torchvision -------------------------------------------------------------------------------------


def _convert_third_party(network: PooledConvNet, to: str) -> Converted:
    config = network.config
    library, _, name = config.backbone.rpartition(":")
    library = library or "timm"
    if to != library:
        raise UsageError(f"{to} has no {name} of {library}; convert it with --to {library}")
    if config.pool != "average" or config.projector != "none" or config.head != "linear" or config.small_stem:
        raise UsageError(
            f"{library}'s {name} does not support attention pooling, a projector, a classifier with several layers or "
            "a small stem"
        )
    theirs, head, use = (_as_timm if library == "timm" else _as_torchvision)(name, network)
    state: State = {}
    for key, tensor in network.state_dict().items():
        part, _, rest = key.partition(".")
        state[f"{head}.{rest}" if part == "classifier" else rest.removeprefix("net.")] = tensor.detach().clone()
    for key, tensor in state.items():
        if _is_same(tensor, theirs.get(key)):
            state[key] = tensor.reshape(theirs[key].shape)
    _compare(theirs, state, f"{library}'s {name}")
    return Converted(state, use)


def _as_timm(name: str, network: PooledConvNet) -> tuple[State, str, str]:
    with torch.device("meta"):
        theirs: Any = timm.create_model(name, num_classes=network.config.num_classes)
    head = theirs.pretrained_cfg.get("classifier", "")
    return dict(theirs.state_dict()), head, f"timm.create_model({name!r}, num_classes={network.config.num_classes})"


def _as_torchvision(name: str, network: PooledConvNet) -> tuple[State, str, str]:
    classes = network.config.num_classes
    with torch.device("meta"):
        theirs = create_classifier(name, network.config.image_size, num_classes=max(classes, 1))
        head = last_linear(theirs)
        if not classes:
            theirs.set_submodule(head, nn.Identity())
    return dict(theirs.state_dict()), head, f"torchvision.models.get_model({name!r}, num_classes={classes})"


def _is_same(tensor: torch.Tensor, theirs: torch.Tensor | None) -> bool:
    """Return whether shapes differ only by ones, as for a linear classifier that is a 1×1 convolution there."""
    return theirs is not None and [n for n in tensor.shape if n != 1] == [n for n in theirs.shape if n != 1]


def _owner(publisher: str) -> str:
    return "the authors'" if publisher == "authors" else f"{publisher}'s"


def _elsewhere(name: str, others: list[Publisher]) -> str:
    known = [each for each in others if each != "timm" or name in TIMM]
    return f"use --to {' or '.join(known)}" if known else "no other library has it"


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")
