"""timm's networks as trunks. The layout of their outputs is determined by running them.

Letters: B images, N tokens, H×W positions, C channels. A trunk returns one of these:

map      (B, C, H, W) for images of any size, which timm's own head only averages: patchloom pools it
nchw     (B, C, H, W)  }
nhwc     (B, H, W, C)  } which timm's own head (norms, class tokens, attention) turns into a vector of C channels
tokens   (B, N, C)     }
vector   (B, C) only: the head changes the number of channels (MobileNetV3), or reads several maps (CrossViT)

Networks are run on the meta device, which takes no memory and draws no random numbers.
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
PYRAMID_SIDE = 256  # side of the image for measuring strides: a multiple of all of them
OTHER_SIDE = 32  # pixels added to the side to test whether the image size is fixed
# Sides to suggest instead of an unsupported one, after multiples of 14 and 32.
PROPOSED = (96, 128, 224, 256, 299)


@dataclass(frozen=True)
class TrunkLayout:
    """How to create a third-party network for an image size, and the layout of its output."""

    gives: Gives
    dim: int  # channels
    any_size: bool
    drops_paths: bool  # has stochastic depth
    options: tuple[tuple[str, Any], ...]  # further options of timm.create_model


def make_trunk(backbone: str, layout: TrunkLayout, *, channels: int, drop_path: float) -> nn.Module:
    """Create timm's network with random weights."""
    rate = {"drop_path_rate": drop_path} if layout.drops_paths else {}
    return _create(backbone, num_classes=0, in_chans=channels, **dict(layout.options), **rate)


@torch.no_grad()
def levels_of(trunk: Any, image_size: tuple[int, int], channels: int) -> dict[int, Level]:
    """Return stride and channels of the intermediate maps of a timm network on the meta device, by their number.

    Empty if timm does not provide them, or if they are not maps of the whole image.
    """
    with torch.device("meta"):
        try:
            maps = trunk.forward_intermediates(torch.zeros(2, channels, *image_size), intermediates_only=True)
        except Exception:  # timm raises various types
            return {}
    if not all(isinstance(each, Tensor) and each.ndim == 4 for each in maps):
        return {}
    return {i: Level(round(image_size[0] / each.shape[2]), each.shape[1]) for i, each in enumerate(maps)}


def layers_of(trunk: Any) -> list[list[nn.Parameter]]:
    """Return the parameters of each stage of a convnet or block of a column, as timm groups them, without the stem."""
    from timm.models import group_parameters

    matcher = getattr(trunk, "group_matcher", None)
    if matcher is None:
        return [list(part.parameters()) for part in trunk.children()]
    named = dict(trunk.named_parameters())
    groups = group_parameters(trunk, matcher(coarse=True))
    return [[named[name] for name in groups[number]] for number in sorted(groups) if number]


@functools.cache
def trunk_layout(backbone: str, image_size: tuple[int, int], channels: int, averaged: bool = True) -> TrunkLayout:
    """Return the layout of timm's network for an image size. Raise UsageError if it does not accept the size.

    If its map is not `averaged` but pooled otherwise, a norm after the average in timm's head does not matter.
    """
    import timm

    if not timm.is_model(backbone):
        raise UsageError(f"timm has no network {backbone!r}.{nearest(backbone, timm.list_models())}")
    layout, reason = _find_layout(backbone, image_size, channels, averaged)
    if layout:
        return layout
    height, width = image_size
    problem = f"timm's {backbone} does not accept {height}×{width} images ({reason})"
    for side in _suggested_sides(max(image_size)):
        if _find_layout(backbone, (side, side), channels, averaged)[0]:
            raise UsageError(f"{problem}, but {side}×{side}: use --size {side}")
    raise UsageError(f"{problem}, nor the other sizes that were tried; choose another network")


def _find_layout(
    backbone: str, image_size: tuple[int, int], channels: int, averaged: bool
) -> tuple[TrunkLayout | None, str]:
    """Return the first layout that works, or the reason why the last one did not."""
    reason = ""
    for options, drops_paths in _attempts(image_size):
        try:
            layout = _try(backbone, image_size, channels, options, drops_paths, averaged)
        except Exception as error:  # timm raises various types
            # An unknown option says less than the reason of an earlier failure.
            reason = reason if isinstance(error, TypeError) and reason else _first_line(error)
            continue
        if layout:
            return layout, ""
    return None, reason or "it returns no features"


def _attempts(image_size: tuple[int, int]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield options for timm, preferred ones first. Some networks reject a size, some stochastic depth."""
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
) -> TrunkLayout | None:
    rate = {"drop_path_rate": 0.0} if drops_paths else {}
    with torch.device("meta"):
        trunk = _create(backbone, num_classes=0, in_chans=channels, **options, **rate).eval()
        inspect = _map_output if "global_pool" in options else _features_output
        output = inspect(trunk, torch.zeros(2, channels, *image_size))
        if output is None or (output[0] == "map" and averaged and _norms_after_average(trunk)):
            return None
        gives, dim = output
        try:
            any_size = inspect(trunk, torch.zeros(2, channels, *(side + OTHER_SIDE for side in image_size))) == output
        except Exception:
            any_size = False
    if gives == "map" and not any_size:
        return None
    return TrunkLayout(gives, dim, any_size, drops_paths, tuple(options.items()))


def _map_output(trunk: Any, images: Tensor) -> tuple[Gives, int] | None:
    """Return layout and channels of a network without pooling, or None if it does not return a map."""
    features = trunk(images)
    is_map = isinstance(features, Tensor) and features.ndim == 4 and features.shape[1] == trunk.num_features
    return ("map", features.shape[1]) if is_map else None


def _norms_after_average(trunk: Any) -> bool:
    """Return whether timm's head normalizes the average, as ConvNeXt's: averaging normalized maps is different."""
    return any(True for _ in getattr(getattr(trunk, "head", None), "norm", nn.Identity()).parameters())


def _features_output(trunk: Any, images: Tensor) -> tuple[Gives, int] | None:
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


def _create(backbone: str, **options: Any) -> nn.Module:
    import timm

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for timm's developers
        return timm.create_model(backbone, **options)


def _suggested_sides(side: int) -> list[int]:
    fitting = sorted({-(-side // 14) * 14, -(-side // 32) * 32} - {side})
    return [*fitting, *(each for each in PROPOSED if each > side)]


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if "meta" in text:
        return "it reads tensor values, so it cannot be inspected without weights"
    return text if len(text) <= 100 else f"{text[:99]}…"
