"""A user's `nn.Module` as a network.

Its forward pass is the module's. The features are the input of the linear layer that returns the logits, found by
running the module once; a module without such a layer has no features, and cannot be embedded, searched or probed.
"""

import copy
import dataclasses
import inspect
from typing import Any, Self

import torch
from torch import Tensor, nn

from patchloom.models.network import Network, NetworkConfig, Size
from patchloom.plugins import MODULE, module_named
from patchloom_runtime.errors import UsageError, first_line

OTHER_SIDE = 32  # pixels added to the side to test whether the image size is fixed


class OwnModule(Network):
    """A network around the module that the user registered under the config's name."""

    Config = NetworkConfig

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__(config)
        self.module = _make(config)
        self.projector = nn.Identity()
        published: Any = getattr(self.module, "default_cfg", None)  # of timm's networks
        if isinstance(published, dict) and {"mean", "std"} <= published.keys():
            self.pixel_mean, self.pixel_std = tuple(published["mean"]), tuple(published["std"])
        self._linear: tuple[nn.Linear, ...] | None = None  # a tuple, so that it is not registered twice
        self._any_resolution: bool | None = None

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) → logits (B, classes)."""
        return self.module(images)

    def features(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) → (B, 1, C), the input of the classifier."""
        inputs: list[Tensor] = []
        handle = self.classifier.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
        try:
            self.module(images)
        finally:
            handle.remove()
        return inputs[0][:, None]

    @property
    def classifier(self) -> nn.Linear:  # type: ignore[override]
        """The linear layer that returns the logits. Raises UsageError if there is none."""
        if self._linear is None:
            self._linear = tuple(self._find_linear())
        if not self._linear:
            raise UsageError(
                f"the features of {self.label} are not known: its logits are not the output of a linear layer on one "
                "vector per image"
            )
        return self._linear[0]

    @property
    def feature_dim(self) -> int:
        """Inputs of the classifier."""
        return self.classifier.in_features

    def classifiers(self) -> dict[str, int]:
        """Return the path and the number of inputs of the classifier; nothing if it is not known."""
        try:
            layer = self.classifier
        except UsageError:
            return {}
        return {name: layer.in_features for name, part in self.named_modules() if part is layer}

    @property
    def label(self) -> str:
        """The name of the module, for messages."""
        return self.config.name.removeprefix(MODULE)

    @property
    def any_resolution(self) -> bool:  # type: ignore[override]
        """Whether the module accepts images of another size, found by running it."""
        if self._any_resolution is None:
            height, width = self.config.image_size
            try:
                self._run((height + OTHER_SIDE, width + OTHER_SIDE))
                self._any_resolution = True
            except Exception:  # code of the user
                self._any_resolution = False
        return self._any_resolution

    @property
    def resamples(self) -> bool:
        """Whether images of another size are accepted."""
        return self.any_resolution

    def at_resolution(self, size: Size) -> Self:
        """Return a copy for images of another size. Raise UsageError if the module does not accept them."""
        if not self.any_resolution:
            raise UsageError(f"{self.label} accepts images of {self.config.image_size} only; keep the size")
        new = copy.deepcopy(self)
        new.config = dataclasses.replace(self.config, image_size=size)  # type: ignore[arg-type]
        return new

    def reset_head(self, num_classes: int) -> Self:
        """Raise UsageError: the classifier is part of the user's module."""
        raise UsageError(f"{self.label} has {self.config.num_classes} outputs; create one with {num_classes}")

    def check(self) -> None:
        """Run the module once. Raise UsageError if it does not return one logit per class for images of its size."""
        height, width = self.config.image_size
        try:
            outputs = self._run((height, width))
        except Exception as error:  # code of the user
            raise UsageError(
                f"{self.label} fails on images of shape (2, {self.config.channels}, {height}, {width}): "
                f"{type(error).__name__}: {first_line(error)}. Pass the size that it accepts with size="
            ) from error
        expected = (2, self.config.num_classes)
        if not isinstance(outputs, Tensor) or tuple(outputs.shape) != expected:
            shape = (
                f"a tensor of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
            )
            raise UsageError(
                f"{self.label} returns {shape} for 2 images; expected {expected}, one logit per class of the data"
            )

    @torch.no_grad()
    def _run(self, size: tuple[int, int]) -> Any:
        weight = next(self.parameters())
        modes = [(part, part.training) for part in self.module.modules()]
        self.module.eval()
        try:
            return self.module(torch.zeros(2, self.config.channels, *size, device=weight.device, dtype=weight.dtype))
        finally:
            for part, was_training in modes:
                part.training = was_training

    def _find_linear(self) -> list[nn.Linear]:
        seen: list[tuple[nn.Linear, Tensor, Tensor]] = []

        def note(layer: nn.Module, inputs: Any, output: Tensor) -> None:
            assert isinstance(layer, nn.Linear)
            seen.append((layer, inputs[0], output))

        handles = [part.register_forward_hook(note) for part in self.module.modules() if isinstance(part, nn.Linear)]
        try:
            outputs = self._run(self.config.image_size)
        finally:
            for handle in handles:
                handle.remove()
        return [layer for layer, inputs, output in seen if output is outputs and inputs.ndim == 2]


def _make(config: NetworkConfig) -> nn.Module:
    """Return a copy of the registered module, or what the registered function makes for the classes and image size."""
    own = module_named(config.name)
    if isinstance(own, nn.Module):
        module = copy.deepcopy(own)
    else:
        offered = {"num_classes": config.num_classes, "image_size": config.image_size[0]}
        accepted = inspect.signature(own).parameters
        if any(each.kind is each.VAR_KEYWORD for each in accepted.values()):
            accepted = offered  # type: ignore[assignment]
        module = own(**{name: value for name, value in offered.items() if name in accepted})
    label = config.name.removeprefix(MODULE)
    if not isinstance(module, nn.Module):
        raise UsageError(f"{label} is a {type(module).__name__}; expected an nn.Module, or a function that returns one")
    if next(module.parameters(), None) is None:
        raise UsageError(f"{label} has no parameters, so there is nothing to train")
    return module
