"""torchvision's classifiers as trunks, with the methods by which `pooled_convnet` asks timm's.

Those that average a last map give it, and patchloom pools it (`map`); all others give what their own last linear layer
reads (`vector`). torchvision's names of weights are kept, after `net.`; the classifier is patchloom's.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.models.dense.pyramid import Level
from patchloom.models.timm_trunk import OTHER_SIDE, TimmTrunk
from patchloom_runtime.errors import UsageError, nearest

PREFIX = "torchvision:"
# Networks whose classifier reads the average of the map that these parts make one after the other.
_AVERAGED = {
    "ResNet": ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4"),
    "MobileNetV2": ("features",),
    "EfficientNet": ("features",),
    "RegNet": ("stem", "trunk_output"),
    "ShuffleNetV2": ("conv1", "maxpool", "stage2", "stage3", "stage4", "conv5"),
}
# Networks with a longer way from their last map to the classifier.
_WITH_MAPS = {**_AVERAGED, "ConvNeXt": ("features",), "MobileNetV3": ("features",), "VGG": ("features",)}
# What keeps networks whose names begin so from being trained here.
_REFUSED = {
    "inception_v3": "learns by auxiliary classifiers, which patchloom does not train; take timm:inception_v3",
    "googlenet": "learns by auxiliary classifiers, which patchloom does not train",
    "mnasnet": "reads its weights by a version that plain files do not keep; take timm's: timm:mnasnet_small",
    "squeezenet": "ends without a linear layer and gives no features",
}


class TorchvisionTrunk(nn.Module):
    """torchvision's network without its last linear layer."""

    def __init__(self, name: str, image_size: tuple[int, int], drop_path: float) -> None:
        super().__init__()
        self.net = made(name, image_size, num_classes=1)
        head = last_linear(self.net)
        classifier: Any = self.net.get_submodule(head)
        self.num_features: int = classifier.in_features
        self.net.set_submodule(head, nn.Identity())
        paths = _stochastic_depths(self.net)
        for i, path in enumerate(paths):
            path.p = drop_path * i / max(len(paths) - 1, 1)  # as torchvision itself: more the later

    def forward(self, images: Tensor) -> Tensor:
        """The last map, of a network that averages it."""
        for part in _AVERAGED[type(self.net).__name__]:
            images = self.net.get_submodule(part)(images)
        return images

    def forward_features(self, images: Tensor) -> Tensor:
        """What the last linear layer reads."""
        return self.net(images)

    def forward_head(self, features: Tensor, pre_logits: bool = True) -> Tensor:  # noqa: ARG002
        """The same."""
        return features

    def forward_intermediates(
        self, images: Tensor, indices: list[int] | None = None, intermediates_only: bool = True
    ) -> list[Tensor]:
        """The last map of each size, or those of the numbers given."""
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
        """The parameters of each stage, which begins where maps shrink, or of each block of a ViT."""
        layers: list[list[nn.Parameter]] = []
        for part in _one_after_another(self.net):
            if not layers or _begins_a_layer(part):
                layers.append([])
            layers[-1] += part.parameters()
        return [layer for layer in layers if layer]

    def _parts(self) -> list[nn.Module]:
        parts = [self.net.get_submodule(name) for name in _WITH_MAPS[type(self.net).__name__]]
        within = [list(part) if isinstance(part, nn.Sequential) else [part] for part in parts]
        return [each for some in within for each in some]


def made(name: str, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """torchvision's classifier with random weights."""
    from torchvision import models

    options: dict[str, Any] = {"image_size": image_size[0]} if name.startswith("vit_") else {}
    if name.startswith("regnet") and torch.get_default_device().type == "meta":
        # It computes its widths by tensors, which need values.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            return models.get_model(name, weights=None, num_classes=num_classes).to("meta")
    return models.get_model(name, weights=None, num_classes=num_classes, **options)


def last_linear(network: nn.Module) -> str:
    """Where the classifier of torchvision's network is."""
    return [where for where, module in network.named_modules() if isinstance(module, nn.Linear)][-1]


def check_name(name: str) -> None:
    """A UsageError for what is no classifier of torchvision, or one that cannot be trained here."""
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise UsageError(f"torchvision has no classifier {name!r}.{nearest(name, known)}")
    for beginning, reason in _REFUSED.items():
        if name.startswith(beginning):
            raise UsageError(f"torchvision's {name} {reason}")


@functools.cache
@torch.no_grad()
def torchvision_trunk_of(name: str, image_size: tuple[int, int], channels: int) -> TimmTrunk:
    """What torchvision's network gives for images of a size; a UsageError names one that gives nothing."""
    check_name(name)
    if channels != 3:
        raise UsageError(f"torchvision's {name} takes images of 3 channels, given {channels}; choose timm's")
    with torch.device("meta"):
        try:
            trunk = TorchvisionTrunk(name, image_size, 0.0).eval()
            trunk.forward_features(torch.zeros(2, 3, *image_size))
        except UsageError:
            raise
        except Exception as error:  # whatever torchvision raises, it does not take the size
            height, width = image_size
            raise UsageError(
                f"torchvision's {name} takes no images of {height}×{width}: {' '.join(str(error).split())[:100]}; "
                "--size 224 is what most take"
            ) from error
        try:
            trunk.forward_features(torch.zeros(2, 3, *(side + OTHER_SIDE for side in image_size)))
            any_size = True
        except Exception:
            any_size = False
    gives: Any = "map" if type(trunk.net).__name__ in _AVERAGED and any_size else "vector"
    return TimmTrunk(gives, trunk.num_features, any_size, bool(_stochastic_depths(trunk.net)), ())


@torch.no_grad()
def torchvision_levels_of(name: str, image_size: tuple[int, int]) -> dict[int, Level]:
    """Number of each map that torchvision's network gives on its way → stride and channels."""
    with torch.device("meta"):
        trunk = TorchvisionTrunk(name, image_size, 0.0).eval()
        if type(trunk.net).__name__ not in _WITH_MAPS:
            return {}
        maps = trunk.forward_intermediates(torch.zeros(2, 3, *image_size))
    return {i: Level(round(image_size[0] / each.shape[2]), each.shape[1]) for i, each in enumerate(maps)}


def _one_after_another(network: nn.Module) -> Iterator[nn.Module]:
    """The modules of a network, those of plain sequences one by one."""
    for part in network.children():
        if type(part) in (nn.Sequential, nn.ModuleList) or type(part).__name__ == "Encoder":  # a ViT's
            yield from _one_after_another(part)
        else:
            yield part


def _begins_a_layer(part: nn.Module) -> bool:
    if type(part).__name__ in ("EncoderBlock", "PatchMerging", "PatchMergingV2"):
        return True
    strides = [m.stride for m in part.modules() if isinstance(m, nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d)]
    return any(max(stride) > 1 if isinstance(stride, tuple) else stride > 1 for stride in strides)


def _stochastic_depths(network: nn.Module) -> list[Any]:
    from torchvision.ops import StochasticDepth

    return [module for module in network.modules() if isinstance(module, StochasticDepth)]
