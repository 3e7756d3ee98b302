"""Networks made of whatever weights a file has; and their weights under the names of those who published them."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from patchloom.models.network import Network
from patchloom.models.pooled_convnet import PooledConvNet
from patchloom.models.pretrained.names import Publisher, State, named_as, namings
from patchloom.models.pretrained.published import image_size_of, load_published, read_state, renamed_for
from patchloom.models.registry import build_model, default_options
from patchloom.models.torchvision_trunk import last_linear, made
from patchloom_runtime.errors import CheckpointError, UsageError

# What timm calls the networks that it has; the size in a name is that of its weights, and `img_size` changes it.
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
# Options that change no output of a trained network, or that are told on the way.
_FREE = ("name", "num_classes", "image_size", "drop_path", "drop_path_rule", "dropout", "scale_init", "scale_uniform")
_SHOWN = 4


def network_of(name: str, state_dict_or_path: Mapping[str, Any] | str | os.PathLike[str]) -> Network:
    """The network called `name` with published weights; its image size and number of classes are those of the weights.

    Weights without a classifier make a network without one.
    """
    given = read_state(state_dict_or_path)
    with torch.device("meta"):
        frame = build_model(name, num_classes=0)
    state = renamed_for(frame, given)
    head = state.get("classifier.weight")
    options: dict[str, Any] = {"num_classes": len(head) if head is not None and head.ndim else 0}
    tokens = state.get("attention_pool.token.weight")
    if tokens is not None and tokens.ndim == 3 and tokens.shape[1] > 1:
        options["class_tokens"] = "per_class"
    try:
        options["image_size"] = image_size_of(frame, state)
        with torch.device("meta"):
            build_model(name, **options)
    except (CheckpointError, UsageError, IndexError):
        options.pop("image_size", None)  # that of another network: what does not fit is listed below
    return load_published(build_model(name, **options), given)


@dataclass(frozen=True)
class Converted:
    """Weights for somebody else's code."""

    state: State
    use: str  # how the network is made there
    notes: tuple[str, ...] = ()  # in what it still differs there


def converted(network: Network, to: str) -> Converted:
    """The weights of `network` as "timm", "torchvision" or the "authors" name them; a UsageError where they cannot."""
    if network.absorbed:
        raise UsageError("an absorbed network has no names elsewhere; convert the one it was made of")
    if isinstance(network, PooledConvNet):
        return _given_back(network, to)
    name, publishers = network.config.name, namings(network)
    publisher: Publisher | None = next((each for each in publishers if each == to), None)
    if publisher is None or (publisher == "timm" and name not in TIMM):
        raise UsageError(f"{to} has no {name}; {_elsewhere(name, [each for each in publishers if each != to])}")
    notes = _checked_options(network, publisher)
    state, unknown = named_as(network, publisher)
    if unknown:
        raise UsageError(f"{_owner(publisher)} {name} has no counterpart of {_some(unknown)}")
    if publisher == "authors":
        return Converted(state, f"{name} of its authors", notes)
    options: dict[str, Any] = {"num_classes": network.config.num_classes}
    height, width = network.config.image_size
    options["img_size"] = height if height == width else (height, width)
    return Converted(state, _fitting_timm(TIMM[name], options, state), notes)


def _checked_options(network: Network, publisher: str) -> tuple[str, ...]:
    """What is said of options that differ there; a UsageError for those that make another network."""
    own, published = asdict(network.config), default_options(network.config.name)
    differ = [key for key in own if key not in _FREE and own[key] != published[key]]
    notes: tuple[str, ...] = ()
    if "gelu" in own:  # the authors' is tanh's, timm's the exact one
        differ = [key for key in differ if key != "gelu"]
        if own["gelu"] != {"authors": "tanh", "timm": "exact"}[publisher]:
            notes = (
                f"{_owner(publisher)} Mixer has another GELU than this one ({own['gelu']}): outputs differ slightly",
            )
    if "class_tokens" in differ and publisher == "authors":
        differ.remove("class_tokens")  # the authors' networks called `multi`
    if differ:
        said = ", ".join(f"{key} {own[key]} (published: {published[key]})" for key in differ[:_SHOWN])
        raise UsageError(f"{_owner(publisher)} {network.config.name} has no counterpart of this one's options: {said}")
    return notes


def _fitting_timm(name: str, options: dict[str, Any], state: State) -> str:
    """How timm makes the network that takes exactly these weights."""
    import timm

    with torch.device("meta"):
        theirs = timm.create_model(name, **options).state_dict()
    _compare(theirs, state, f"timm's {name}")
    return f"timm.create_model({name!r}, {', '.join(f'{key}={value!r}' for key, value in options.items())})"


def _compare(theirs: State, state: State, whose: str) -> None:
    differ = [key for key in {**theirs, **state} if key not in state or key not in theirs]
    differ += [key for key in state if key in theirs and state[key].shape != theirs[key].shape]
    if differ:
        raise UsageError(f"{whose} of the installed version has other weights: {_some(differ)}")


# Networks that are timm's or torchvision's own ------------------------------------------------------------------------


def _given_back(network: PooledConvNet, to: str) -> Converted:
    config = network.config
    library, _, name = config.backbone.rpartition(":")
    library = library or "timm"
    if to != library:
        raise UsageError(f"{to} has no {name} of {library}; convert it with --to {library}")
    if config.pool != "average" or config.projector != "none" or config.head != "linear" or config.small_stem:
        raise UsageError(
            f"{library}'s {name} has no counterpart of attention pooling, a projector, a classifier of several layers "
            "or a small stem"
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
    import timm

    with torch.device("meta"):
        found: Any = timm.create_model(name, num_classes=network.config.num_classes)
    head = found.pretrained_cfg.get("classifier", "")
    return dict(found.state_dict()), head, f"timm.create_model({name!r}, num_classes={network.config.num_classes})"


def _as_torchvision(name: str, network: PooledConvNet) -> tuple[State, str, str]:
    classes = network.config.num_classes
    with torch.device("meta"):
        found = made(name, network.config.image_size, num_classes=max(classes, 1))
        head = last_linear(found)
        if not classes:
            found.set_submodule(head, nn.Identity())
    return dict(found.state_dict()), head, f"torchvision.models.get_model({name!r}, num_classes={classes})"


def _is_same(tensor: torch.Tensor, theirs: torch.Tensor | None) -> bool:
    """Whether only ones in the shape differ: a linear classifier that is a convolution there."""
    return theirs is not None and [n for n in tensor.shape if n != 1] == [n for n in theirs.shape if n != 1]


def _owner(publisher: str) -> str:
    return "the authors'" if publisher == "authors" else f"{publisher}'s"


def _elsewhere(name: str, others: list[Publisher]) -> str:
    known = [each for each in others if each != "timm" or name in TIMM]
    return f"it can be had as --to {' or '.join(known)}" if known else "nobody else has it"


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
