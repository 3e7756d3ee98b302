"""torchvision's classifiers as trunks, with the interface of timm's that `pooled_convnet` uses.

Networks that average their last map return it, and patchloom pools it (`map`). All others return the input of their
last linear layer (`vector`). Weights have torchvision's names, after `net.`; the classifier is patchloom's.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.models.dense.pyramid import Level
from patchloom.models.timm_trunk import OTHER_SIDE, TrunkLayout
from patchloom_runtime.errors import UsageError, nearest

PREFIX = "torchvision:"
# Networks whose classifier reads the mean of the map that these parts compute in sequence.
_AVERAGED = {
    "ResNet": ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4"),
    "MobileNetV2": ("features",),
    "EfficientNet": ("features",),
    "RegNet": ("stem", "trunk_output"),
    "ShuffleNetV2": ("conv1", "maxpool", "stage2", "stage3", "stage4", "conv5"),
}
# Also networks with further layers between the last map and the classifier.
_WITH_MAPS = {**_AVERAGED, "ConvNeXt": ("features",), "MobileNetV3": ("features",), "VGG": ("features",)}
# Prefix of a name → why such networks cannot be trained here.
_REFUSED = {
    "inception_v3": "is trained with auxiliary classifiers, which patchloom does not support; use timm:inception_v3",
    "googlenet": "is trained with auxiliary classifiers, which patchloom does not support",
    "mnasnet": "needs a version number in its weights, which plain files do not have; use timm:mnasnet_small",
    "squeezenet": "has no last linear layer and so no features",
}


class TorchvisionTrunk(nn.Module):
    """torchvision's network without its last linear layer."""

    def __init__(self, name: str, image_size: tuple[int, int], drop_path: float) -> None:
        super().__init__()
        self.net = create_classifier(name, image_size, num_classes=1)
        head = last_linear(self.net)
        classifier: Any = self.net.get_submodule(head)
        self.num_features: int = classifier.in_features
        self.net.set_submodule(head, nn.Identity())
        paths = _stochastic_depths(self.net)
        for i, path in enumerate(paths):
            path.p = drop_path * i / max(len(paths) - 1, 1)  # growing linearly, as in torchvision

    def forward(self, images: Tensor) -> Tensor:
        """Return the last map, for a network that averages it."""
        for part in _AVERAGED[type(self.net).__name__]:
            images = self.net.get_submodule(part)(images)
        return images

    def forward_features(self, images: Tensor) -> Tensor:
        """Return the input of the last linear layer."""
        return self.net(images)

    def forward_head(self, features: Tensor, pre_logits: bool = True) -> Tensor:  # noqa: ARG002
        """Return the features unchanged: the head is part of `forward_features`."""
        return features

    def forward_intermediates(
        self, images: Tensor, indices: list[int] | None = None, intermediates_only: bool = True
    ) -> list[Tensor]:
        """Return the last map of each size, or those at `indices`."""
        del intermediates_only
        maps: list[Tensor] = []
        for part in self._parts():
            after = part(images)
            if maps and after.shape[2] == maps[-1].shape[2]:
                maps.pop()
            maps.append(after)
            images = after
        return maps if indices is None else [maps[i] for i in indices]

    def layers_in_order(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each stage, which starts where maps shrink, or of each block of a ViT."""
        layers: list[list[nn.Parameter]] = []
        for part in _flat_children(self.net):
            if not layers or _starts_layer(part):
                layers.append([])
            layers[-1] += part.parameters()
        return [layer for layer in layers if layer]

    def _parts(self) -> list[nn.Module]:
        parts = [self.net.get_submodule(name) for name in _WITH_MAPS[type(self.net).__name__]]
        within = [list(part) if isinstance(part, nn.Sequential) else [part] for part in parts]
        return [each for some in within for each in some]


def create_classifier(name: str, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """Create torchvision's network with random weights."""
    from torchvision import models

    options: dict[str, Any] = {"image_size": image_size[0]} if name.startswith("vit_") else {}
    if name.startswith("regnet") and torch.get_default_device().type == "meta":
        # It computes its widths with tensors, which have no values on the meta device.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            return models.get_model(name, weights=None, num_classes=num_classes).to("meta")
    return models.get_model(name, weights=None, num_classes=num_classes, **options)


def last_linear(network: nn.Module) -> str:
    """Return the module path of the last linear layer, the classifier."""
    return [path for path, module in network.named_modules() if isinstance(module, nn.Linear)][-1]


def check_name(name: str) -> None:
    """Raise UsageError if torchvision has no such classifier, or it cannot be trained here."""
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise UsageError(f"torchvision has no classifier {name!r}.{nearest(name, known)}")
    for prefix, reason in _REFUSED.items():
        if name.startswith(prefix):
            raise UsageError(f"torchvision's {name} {reason}")


@functools.cache
@torch.no_grad()
def torchvision_trunk_layout(name: str, image_size: tuple[int, int], channels: int) -> TrunkLayout:
    """Return the layout of torchvision's network for an image size. Raise UsageError if it does not accept the size."""
    check_name(name)
    if channels != 3:
        raise UsageError(f"torchvision's {name} takes images of 3 channels, not {channels}; use timm's")
    with torch.device("meta"):
        try:
            trunk = TorchvisionTrunk(name, image_size, 0.0).eval()
            trunk.forward_features(torch.zeros(2, 3, *image_size))
        except UsageError:
            raise
        except Exception as error:  # torchvision raises various types
            height, width = image_size
            raise UsageError(
                f"torchvision's {name} does not accept {height}×{width} images: {' '.join(str(error).split())[:100]}; "
                "most networks accept --size 224"
            ) from error
        try:
            trunk.forward_features(torch.zeros(2, 3, *(side + OTHER_SIDE for side in image_size)))
            any_size = True
        except Exception:
            any_size = False
    gives: Any = "map" if type(trunk.net).__name__ in _AVERAGED and any_size else "vector"
    return TrunkLayout(gives, trunk.num_features, any_size, bool(_stochastic_depths(trunk.net)), ())


@torch.no_grad()
def torchvision_levels_of(name: str, image_size: tuple[int, int]) -> dict[int, Level]:
    """Return stride and channels of the intermediate maps of torchvision's network, by their number."""
    with torch.device("meta"):
        trunk = TorchvisionTrunk(name, image_size, 0.0).eval()
        if type(trunk.net).__name__ not in _WITH_MAPS:
            return {}
        maps = trunk.forward_intermediates(torch.zeros(2, 3, *image_size))
    return {i: Level(round(image_size[0] / each.shape[2]), each.shape[1]) for i, each in enumerate(maps)}


def _flat_children(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a network, and those of sequences one by one."""
    for part in network.children():
        if type(part) in (nn.Sequential, nn.ModuleList) or type(part).__name__ == "Encoder":  # a ViT's
            yield from _flat_children(part)
        else:
            yield part


def _starts_layer(part: nn.Module) -> bool:
    if type(part).__name__ in ("EncoderBlock", "PatchMerging", "PatchMergingV2"):
        return True
    strides = [m.stride for m in part.modules() if isinstance(m, nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d)]
    return any(max(stride) > 1 if isinstance(stride, tuple) else stride > 1 for stride in strides)


def _stochastic_depths(network: nn.Module) -> list[Any]:
    from torchvision.ops import StochasticDepth

    return [module for module in network.modules() if isinstance(module, StochasticDepth)]
