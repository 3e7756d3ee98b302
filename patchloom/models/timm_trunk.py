"""timm's networks as trunks: what each gives for images of a size, found by trying it rather than by its attributes.

Letters: B images, N tokens, H×W positions, C channels. A trunk gives

map      (B, C, H, W) for images of any size, and timm's own head would only average it: patchloom pools it
nchw     (B, C, H, W)  }
nhwc     (B, H, W, C)  } which timm's own head (its norms, class tokens, attention) makes a vector of as many channels
tokens   (B, N, C)     }
vector   (B, C) alone: the head widens what it is given (MobileNetV3), or is given several maps (CrossViT)

Trying is done on the meta device, without weights, so it takes no memory and draws no random numbers.
"""

import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from patchloom.models.dense.pyramid import Level
from patchloom_runtime.errors import UsageError, nearest

Gives = Literal["map", "nchw", "nhwc", "tokens", "vector"]
PYRAMID_SIDE = 256  # pixels of the image by which strides are found: a multiple of all of them
OTHER_SIDE = 32  # pixels by which an image is made larger to see whether the size is fixed
# Sides to propose where the one asked for cannot be taken; multiples of 14 and 32 come first.
PROPOSED = (96, 128, 224, 256, 299)


@dataclass(frozen=True)
class TimmTrunk:
    """How timm's network is made for one image size, and what it then gives."""

    gives: Gives
    dim: int  # channels
    any_size: bool
    drops_paths: bool  # takes a rate of stochastic depth
    options: tuple[tuple[str, Any], ...]  # what timm is told besides


def make_trunk(backbone: str, trunk: TimmTrunk, *, channels: int, drop_path: float) -> nn.Module:
    """timm's network with random weights."""
    rate = {"drop_path_rate": drop_path} if trunk.drops_paths else {}
    return _made(backbone, num_classes=0, in_chans=channels, **dict(trunk.options), **rate)


@torch.no_grad()
def levels_of(trunk: Any, image_size: tuple[int, int], channels: int) -> dict[int, Level]:
    """Number of each map that timm's network, made on the meta device, gives on its way → stride and channels.

    None where timm cannot give them, or where they are no maps of the whole image.
    """
    with torch.device("meta"):
        try:
            maps = trunk.forward_intermediates(torch.zeros(2, channels, *image_size), intermediates_only=True)
        except Exception:  # whatever timm raises, it has none
            return {}
    if not all(isinstance(each, Tensor) and each.ndim == 4 for each in maps):
        return {}
    return {i: Level(round(image_size[0] / each.shape[2]), each.shape[1]) for i, each in enumerate(maps)}


def layers_of(trunk: Any) -> list[list[nn.Parameter]]:
    """The parameters of each stage of a convnet, of each block of a column, as timm groups them; without the stem."""
    from timm.models import group_parameters

    matcher = getattr(trunk, "group_matcher", None)
    if matcher is None:
        return [list(part.parameters()) for part in trunk.children()]
    named = dict(trunk.named_parameters())
    groups = group_parameters(trunk, matcher(coarse=True))
    return [[named[name] for name in groups[number]] for number in sorted(groups) if number]


@functools.cache
def trunk_of(backbone: str, image_size: tuple[int, int], channels: int, averaged: bool = True) -> TimmTrunk:
    """What timm's network gives for images of a size; a UsageError names one that gives nothing.

    Where its map is not `averaged`, a head that does more than that, such as a norm after the average, is no matter.
    """
    import timm

    if not timm.is_model(backbone):
        raise UsageError(f"timm has no network {backbone!r}.{nearest(backbone, timm.list_models())}")
    found, reason = _tried(backbone, image_size, channels, averaged)
    if found:
        return found
    height, width = image_size
    told = f"timm's {backbone} takes no images of {height}×{width} ({reason})"
    for side in _proposed(max(image_size)):
        if _tried(backbone, (side, side), channels, averaged)[0]:
            raise UsageError(f"{told}; it takes {side}×{side}: --size {side}")
    raise UsageError(f"{told}, nor of other sizes that were tried; choose another network")


def _tried(backbone: str, image_size: tuple[int, int], channels: int, averaged: bool) -> tuple[TimmTrunk | None, str]:
    """The first way to make the network that works, or why the last did not."""
    reason = ""
    for options, drops_paths in _ways(image_size):
        try:
            found = _try(backbone, image_size, channels, options, drops_paths, averaged)
        except Exception as error:  # whatever timm raises, the network cannot be made in this way
            # That it takes no such option says less than why it did not work without.
            reason = reason if isinstance(error, TypeError) and reason else _first_line(error)
            continue
        if found:
            return found, ""
    return None, reason or "it gives no features"


def _ways(image_size: tuple[int, int]) -> Iterator[tuple[dict[str, Any], bool]]:
    """What timm may be told, from what is wanted most; some networks refuse a size, some stochastic depth."""
    height, width = image_size
    size = {"img_size": height if height == width else image_size}
    for options in ({"global_pool": ""}, size, {}):
        yield options, True
        yield options, False


@torch.no_grad()
def _try(
    backbone: str,
    image_size: tuple[int, int],
    channels: int,
    options: dict[str, Any],
    drops_paths: bool,
    averaged: bool,
) -> TimmTrunk | None:
    rate = {"drop_path_rate": 0.0} if drops_paths else {}
    with torch.device("meta"):
        trunk = _made(backbone, num_classes=0, in_chans=channels, **options, **rate).eval()
        reads = _map_of if "global_pool" in options else _features_of
        found = reads(trunk, torch.zeros(2, channels, *image_size))
        if found is None or (found[0] == "map" and averaged and _norms_after_average(trunk)):
            return None
        gives, dim = found
        try:
            any_size = reads(trunk, torch.zeros(2, channels, *(side + OTHER_SIDE for side in image_size))) == found
        except Exception:
            any_size = False
    if gives == "map" and not any_size:
        return None
    return TimmTrunk(gives, dim, any_size, drops_paths, tuple(options.items()))


def _map_of(trunk: Any, images: Tensor) -> tuple[Gives, int] | None:
    """Of a network made without its pooling."""
    features = trunk(images)
    is_map = isinstance(features, Tensor) and features.ndim == 4 and features.shape[1] == trunk.num_features
    return ("map", features.shape[1]) if is_map else None


def _norms_after_average(trunk: Any) -> bool:
    """Whether timm's head normalises the average, as ConvNeXt's does: the average of what is normalised is another."""
    return any(True for _ in getattr(getattr(trunk, "head", None), "norm", nn.Identity()).parameters())


def _features_of(trunk: Any, images: Tensor) -> tuple[Gives, int] | None:
    features = trunk.forward_features(images)
    vector = trunk.forward_head(features, pre_logits=True)
    if not isinstance(vector, Tensor) or vector.ndim != 2 or not vector.shape[1]:
        return None
    dim = vector.shape[1]
    if isinstance(features, Tensor) and features.ndim == 3 and features.shape[2] == dim:
        return "tokens", dim
    if isinstance(features, Tensor) and features.ndim == 4:
        last = getattr(trunk, "output_fmt", "") == "NHWC" or features.shape[1] != dim
        if features.shape[3 if last else 1] == dim:
            return ("nhwc" if last else "nchw"), dim
    return "vector", dim


def _made(backbone: str, **options: Any) -> nn.Module:
    import timm

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its authors to its authors
        return timm.create_model(backbone, **options)


def _proposed(side: int) -> list[int]:
    fitting = sorted({-(-side // 14) * 14, -(-side // 32) * 32} - {side})
    return [*fitting, *(each for each in PROPOSED if each > side)]


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if "meta" in text:
        return "it looks at the values of tensors, so it cannot be planned without weights"
    return text if len(text) <= 100 else f"{text[:99]}…"
