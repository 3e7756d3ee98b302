"""The contract that every family of networks fulfills.

A network is features → pool → head:

    forward(images)                 logits (B, classes)
    features(images)                tokens (B, T+N, C), class tokens first, or a map (B, H', W', C), after the last norm
    head(features), vectors(features)   logits; one embedding per image
    pyramid(images, strides)        maps from blocks or stages, for segmentation and detection
    reset_head(classes)             a new classifier
    forward_features, forward_head, get_classifier, reset_classifier …   the same by timm's names
    at_resolution(size)             a copy for another image size
    parameter_groups, rate_scales   what an optimizer needs
    absorb(network)                 a faster copy for inference (RM-5)

A family defines `features`, `run_blocks`, `taps` and `feature_dim`, overrides what differs, and calls the helpers
`make_classifier`, `run_all` and `check_images`.

Letters: B images, N patches, T class tokens, C channels of the features, H×W pixels.
"""

import copy
import dataclasses
import typing
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from patchloom.layers.projector import HIDDEN_DIM, Projector
from patchloom.layers.resample import Resampled
from patchloom.layers.residual import Block, Branch, ClassBlock, drop_path_rates
from patchloom.models.dense.pyramid import STRIDES, BlockOutputs, Level, Taps, as_map, choose_taps
from patchloom_runtime.errors import UsageError

Size = int | tuple[int, int]
# Attributes after the blocks, in families that have them. Other families' class tokens are inputs of the blocks.
_AFTER_BLOCKS = ("class_token", "class_blocks", "attention_pool", "norm", "projector")


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Options of all families. Each family adds its own."""

    name: str = ""
    num_classes: int = 1000  # 0: no classifier; the head returns the pooled features
    image_size: tuple[int, int] = (224, 224)  # height, width; an int means both
    channels: int = 3
    drop_path: float = 0.0
    drop_path_rule: Literal["uniform", "linear"] = "uniform"
    head: Literal["linear", "mlp"] = "linear"  # the classifier; mlp: Linear, BatchNorm, ReLU, Linear (thesis 2.4.6)
    projector: Literal["none", "fc", "mlp"] = "none"  # from pooled features to the embedding for search

    def __post_init__(self) -> None:
        if isinstance(self.image_size, int):
            object.__setattr__(self, "image_size", (self.image_size, self.image_size))
        check_types(self)
        if min(self.image_size) < 1 or len(self.image_size) != 2:
            raise UsageError(f"image_size is {self.image_size!r}, expected a side or (height, width) in pixels")
        if self.num_classes < 0:
            raise UsageError(f"num_classes is {self.num_classes}, expected 0 (no classifier) or more")
        if not 0 <= self.drop_path < 1:
            raise UsageError(f"drop_path is {self.drop_path}, expected a probability below 1")

    def drop_rates(self, depth: int) -> list[float]:
        """Return the stochastic-depth rate of each block."""
        return drop_path_rates(self.drop_path, depth, self.drop_path_rule)

    def grid(self, patch_size: int) -> tuple[int, int]:
        """Return the number of patches down and across. Raise UsageError if patches do not fill the image."""
        height, width = self.image_size
        if height % patch_size or width % patch_size:
            below = [max(side // patch_size, 1) * patch_size for side in self.image_size]
            raise UsageError(
                f"{self.name or 'the network'}: {height}×{width} images cannot be divided into "
                f"{patch_size}×{patch_size} patches; use a multiple of {patch_size}, such as {below[0]}×{below[1]}"
            )
        return height // patch_size, width // patch_size


class Network(nn.Module):
    """Base class of all families. The module's docstring lists its methods."""

    Config: ClassVar[type[NetworkConfig]]
    any_resolution: bool = False  # True if nothing in the network depends on the image size
    grid: tuple[int, int] | None = None  # patches down and across, if the image size is fixed and there is one grid
    notes: tuple[str, ...] = ()  # options that have no effect
    pixel_mean: tuple[float, ...] = (0.485, 0.456, 0.406)  # of the family; for a trained network, of its run
    pixel_std: tuple[float, ...] = (0.229, 0.224, 0.225)
    # Share of the activations that a compiled block saves; the backward pass recomputes the others. Measured: below 1
    # pays for blocks with many maps that are cheap to compute.
    kept_for_backward: float = 1.0

    classifier: nn.Module
    projector: nn.Module

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.absorbed = False
        # For forward_resampled: size → the config of a meta copy, and the copy.
        self._meta_copies: dict[tuple[int, int], tuple[NetworkConfig, Network]] = {}

    # Forward pass -----------------------------------------------------------------------------------------------

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) → logits (B, classes)."""
        return self.head(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) → tokens (B, T+N, C) or a map (B, H', W', C), after the last norm."""
        raise UsageError(f"{type(self).__name__} does not define features for {tuple(images.shape)} images")

    def head(self, features: Tensor) -> Tensor:
        """Features → logits (B, classes)."""
        return self.classifier(self.pool(features))

    def pool(self, features: Tensor) -> Tensor:
        """Features → one vector per image (B, C), or one per class (B, classes, C)."""
        return features.flatten(1, -2).mean(dim=1)

    def vectors(self, features: Tensor) -> Tensor:
        """Features → embeddings (B, C). With one token per class, their mean."""
        pooled = self.pool(features)
        return pooled if pooled.ndim == 2 else pooled.mean(dim=1)

    def both_heads(self, features: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Features → logits of the class token and of the distillation token."""
        raise UsageError(f"{self.config.name} has one head; create it with distilled=True for two")

    def pyramid(self, images: Tensor, strides: Sequence[int] = STRIDES) -> list[Tensor]:
        """(B, channels, H, W) → one map per stride, (B, C, ⌈H/stride⌉, ⌈W/stride⌉).

        A map has the nearest stride that the network offers, see `pyramid_levels`. A network of constant resolution
        returns all maps at its patch stride, from blocks of growing depth, and the caller resizes them with layers of
        its own. Maps are outputs of blocks, without the last norm, pooling or class tokens. They may be views of each
        other, so do not modify them.
        """
        taps, blocks = self._choose_taps(strides)
        outputs: BlockOutputs = dict.fromkeys(blocks)
        self.run_blocks(images, outputs)
        return [as_map(outputs[block], taps[block].stride, images) for block in blocks]

    def pyramid_levels(self, strides: Sequence[int] = STRIDES) -> list[Level]:
        """Return stride and channels of each map that `pyramid` returns for these strides."""
        taps, blocks = self._choose_taps(strides)
        return [taps[block] for block in blocks]

    def _choose_taps(self, strides: Sequence[int]) -> tuple[Taps, list[Any]]:
        taps = self.taps()
        if not taps:
            name = self.config.name or type(self).__name__
            raise UsageError(f"{name} with these options has no maps of an image; choose another network")
        return taps, choose_taps(taps, strides)

    # Image size -------------------------------------------------------------------------------------------------

    def at_resolution(self, size: Size) -> Self:
        """Return a copy for images of another size. Weights per position are resampled."""
        if self.absorbed:
            raise UsageError("an absorbed copy keeps its resolution: call at_resolution first, then absorb")
        size = (size, size) if isinstance(size, int) else tuple(size)  # type: ignore[assignment]
        new = type(self)(self.config_at(self.config, size))  # type: ignore[arg-type]
        new.pixel_mean, new.pixel_std = self.pixel_mean, self.pixel_std
        weight = next(self.parameters())
        new.to(weight.device, weight.dtype).train(self.training)
        new.gradient_checkpointing = self.gradient_checkpointing
        with torch.no_grad():
            weights = self._weights_for(new)
            for name, tensor in (*new.named_parameters(), *new.named_buffers()):
                tensor.copy_(weights[name])
        return new

    def for_images_of(self, size: Size) -> Self:
        """Return this network if it accepts images of `size`, otherwise a copy at that resolution."""
        wanted = (size, size) if isinstance(size, int) else tuple(size)
        return self if self.any_resolution or wanted == self.config.image_size else self.at_resolution(size)

    def forward_resampled(self, images: Tensor) -> Tensor:
        """Return the output of `at_resolution(image size)`, with gradients that reach the weights of this network.

        Running statistics are those of this network. Gradient checkpointing is not applied.
        """
        size = (images.shape[2], images.shape[3])
        if self.any_resolution or size == self.config.image_size:
            return self(images)
        if self.absorbed:
            raise UsageError("an absorbed copy keeps its resolution: call at_resolution first, then absorb")
        meta_copy = self._meta_copy(size).train(self.training)
        return torch.func.functional_call(meta_copy, self._weights_for(meta_copy), images)

    @property
    def resamples(self) -> bool:
        """Whether `forward_resampled` accepts images of another size."""
        return True

    @classmethod
    def config_at(cls, config: Any, size: tuple[int, int]) -> Any:
        """Return the config of the same network for another image size."""
        return dataclasses.replace(config, image_size=size)

    def _meta_copy(self, size: tuple[int, int]) -> "Network":
        """Return a copy at another size without weights, which takes no memory and draws no random numbers."""
        config, network = self._meta_copies.get(size, (None, None))
        if network is None or config is not self.config:
            with torch.device("meta"):
                network = type(self)(self.config_at(self.config, size))
            self._meta_copies[size] = (self.config, network)
        return network

    def _weights_for(self, new: "Network") -> dict[str, Tensor]:
        """Return the weights and buffers of this network by name, resampled to the grids of `new`."""
        weights: dict[str, Tensor] = {}
        old_modules = dict(self.named_modules())
        for path, module in new.named_modules():
            old, prefix = old_modules[path], f"{path}." if path else ""
            if isinstance(module, Resampled):
                weights |= {prefix + key: tensor for key, tensor in module.resampled_from(old).items()}
                continue
            own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            weights |= {prefix + key: getattr(old, key) for key, _ in own}
        return weights

    # Classifier and projector -----------------------------------------------------------------------------------

    def reset_head(self, num_classes: int) -> Self:
        """Replace the classifier by a new one for `num_classes`, in place. Returns the network."""
        self.config = dataclasses.replace(self.config, num_classes=num_classes)
        weight = next(self.parameters())
        for name, inputs in self.classifiers().items():
            setattr(self, name, self.make_classifier(inputs).to(weight.device, weight.dtype))
        return self

    def drop_projector(self) -> Self:
        """Remove the projector, so that embeddings are the pooled features, in place. Returns the network."""
        self.config = dataclasses.replace(self.config, projector="none")
        self.projector = self.make_projector()
        return self

    def classifiers(self) -> dict[str, int]:
        """Return the attribute name and the number of inputs of each classifier."""
        return {"classifier": self.feature_dim}

    def make_classifier(self, inputs: int) -> nn.Module:
        """Return a new classifier for the config's number of classes."""
        if self.config.num_classes == 0:
            return nn.Identity()
        if self.config.head == "mlp":
            linear = _linear(HIDDEN_DIM, self.config.num_classes)
            return nn.Sequential(nn.Linear(inputs, HIDDEN_DIM), nn.BatchNorm1d(HIDDEN_DIM), nn.ReLU(), linear)
        linear = _linear(inputs, self.config.num_classes)
        if self.classifier_starts_at_zero:
            nn.init.zeros_(linear.weight)
        return linear

    def make_projector(self) -> nn.Module:
        """Return a new projector of the config's kind."""
        if self.config.projector == "none":
            return nn.Identity()
        return Projector(self.config.projector, self.feature_dim)

    # timm's names ------------------------------------------------------------------------------------------------

    @property
    def num_classes(self) -> int:
        """Classes of the classifier; 0 without one."""
        return self.config.num_classes

    @property
    def num_features(self) -> int:
        """Channels of the features."""
        return self.feature_dim

    @property
    def head_hidden_size(self) -> int:
        """Inputs of the classifier."""
        return self.feature_dim

    def forward_features(self, x: Tensor) -> Tensor:
        """Return `features`."""
        return self.features(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits of features, or with `pre_logits` the pooled features."""
        return self.pool(x) if pre_logits else self.head(x)

    def get_classifier(self) -> nn.Module:
        """Return the classifier."""
        return self.classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier, as `reset_head` does. The pooling is part of the network and cannot be changed."""
        if global_pool not in (None, ""):
            raise UsageError(f"{self.config.name} has its own pooling; drop global_pool={global_pool!r}")
        self.reset_head(num_classes)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute activations in the backward pass instead of storing them."""
        self.gradient_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Return the parameters without weight decay that have more than one dimension."""
        return {f"{name}.weight" for name, module in self.named_modules() if not getattr(module, "decays", True)}

    # Training ---------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Set training mode. An absorbed copy raises UsageError."""
        if mode and getattr(self, "absorbed", False):
            raise UsageError("an absorbed copy is for inference only: train the network it was made from")
        return super().train(mode)

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Return two groups for an optimizer. Norms, biases, scales, tokens and positions have no weight decay."""
        decayed: list[nn.Parameter] = []
        free: list[nn.Parameter] = []
        for module in self.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    decays = parameter.ndim > 1 and getattr(module, "decays", True)
                    (decayed if decays else free).append(parameter)
        return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]

    def rate_scales(self, decay: float) -> dict[nn.Parameter, float]:
        """Return the learning-rate factor of each parameter for layer-wise decay (BEiT).

        Block i of n has decay^(n − i), counted from 0; stem, tokens and positions have decay^(n + 1), the head 1.
        """
        layers = self.layers_in_order()
        scales = dict.fromkeys(self.parameters(), decay ** (len(layers) + 1))
        for number, parameters in enumerate(layers):
            scales |= dict.fromkeys(parameters, decay ** (len(layers) - number))
        for name in self.after_blocks():
            scales |= dict.fromkeys(getattr(self, name).parameters(), 1.0)
        return scales

    # Defined by a family ----------------------------------------------------------------------------------------

    @property
    def feature_dim(self) -> int:
        """Channels of the features."""
        raise UsageError(f"{type(self).__name__} does not define feature_dim")

    def run_blocks(self, images: Tensor, outputs: BlockOutputs | None = None) -> Tensor:  # noqa: ARG002
        """Run stem and blocks, without the last norm. The outputs of blocks that are keys of `outputs` are stored."""
        raise UsageError(f"{type(self).__name__} does not define run_blocks for {tuple(images.shape)} images")

    def taps(self) -> Taps:
        """Return stride and channels of each block's output, in order. Empty if positions are lost."""
        return {}

    def stages_in_order(self) -> list[nn.Module]:
        """Return the stages, each with a stride of its own. Empty if all blocks have the same stride."""
        return []

    def layers_in_order(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each block, in order. The others belong to the stem or to `after_blocks`."""
        blocks: Any = getattr(self, "blocks", ())
        return [list(block.parameters()) for block in blocks]

    def after_blocks(self) -> list[str]:
        """Return the attributes that `pyramid` does not use: pooling, the last norm, projector and classifiers."""
        return [name for name in (*_AFTER_BLOCKS, *self.classifiers()) if getattr(self, name, None) is not None]

    # Properties of a family, which callers check instead of its class

    @property
    def averages_patches(self) -> bool:
        """Whether the embedding of an image is the mean of its patch features."""
        return False

    @property
    def has_class_attention(self) -> bool:
        """Whether class tokens attend to patches."""
        return False

    @property
    def pools_by_attention(self) -> bool:
        """Whether class tokens attend to patches only in the pooling."""
        return False

    @property
    def has_token_per_class(self) -> bool:
        """Whether each class has its own class token, and so its own attention map."""
        return False

    @property
    def attends_in_every_block(self) -> bool:
        """Whether tokens are mixed by attention alone, so that it can be traced from the last block to the first."""
        return False

    @property
    def has_distillation_token(self) -> bool:
        """Whether the network has a distillation token: a second class token with its own classifier."""
        return False

    @property
    def classifier_starts_at_zero(self) -> bool:
        """Whether the weights of a new linear classifier are 0."""
        return False

    # Helpers for families ---------------------------------------------------------------------------------------

    def run(self, block: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return block(*inputs). With gradient checkpointing, the backward pass recomputes its activations."""
        if not (self.gradient_checkpointing and self.training):
            return block(*inputs)
        if torch.compiler.is_compiling():  # recomputes operations only, not updates of statistics
            return checkpoint(block, *inputs, use_reentrant=False)
        module = block if isinstance(block, nn.Module) else self
        contexts = (nullcontext(), _FrozenStatistics(module))
        return checkpoint(block, *inputs, use_reentrant=False, context_fn=lambda: contexts)

    def run_all(self, blocks: Iterable[nn.Module], x: Tensor, outputs: BlockOutputs | None = None) -> Tensor:
        """Run blocks in sequence. The outputs of blocks that are keys of `outputs` are stored."""
        for block in blocks:
            x = self.run(block, x)
            if outputs is not None and block in outputs:
                outputs[block] = x
        return x

    def repeated_blocks(self) -> list[nn.Module]:
        """Return the blocks in module lists, many of which are alike."""
        lists = [module for module in self.modules() if type(module) is nn.ModuleList]
        return [block for each in lists for block in each if isinstance(block, Block | ClassBlock | Branch)]

    def check_images(self, images: Tensor) -> None:
        """Raise UsageError if the network does not accept images of this shape or dtype."""
        name, channels = self.config.name or type(self).__name__, self.config.channels
        if images.ndim != 4 or images.shape[1] != channels:
            raise UsageError(
                f"{name} takes images of shape (batch, {channels}, height, width), not {tuple(images.shape)}"
                + ("; add a batch dimension with images[None]" if images.ndim == 3 else "")
            )
        if not images.is_floating_point():
            raise UsageError(
                f"{name} takes normalized floating-point images, not {images.dtype}; "
                "divide by 255, subtract the mean and divide by the standard deviation first"
            )
        dtype = next(self.parameters()).dtype
        if images.dtype != dtype and not torch.is_autocast_enabled(images.device.type):
            raise UsageError(
                f"{name} has {dtype} weights, but the images are {images.dtype}; "
                f"use images.to({dtype}) or run under torch.autocast"
            )
        if not self.any_resolution and tuple(images.shape[2:]) != self.config.image_size:
            actual = f"{images.shape[2]}×{images.shape[3]}"
            height, width = self.config.image_size
            wanted = str(images.shape[2]) if images.shape[2] == images.shape[3] else str(tuple(images.shape[2:]))
            raise UsageError(
                f"{name} was made for {height}×{width} images, not {actual}; resize the images, or use "
                f"model.at_resolution({wanted}) or create_model(..., image_size={wanted})"
            )


class FeatureMaps(nn.Module):
    """A network without its head: images (B, channels, H, W) → one map (B, C, H', W') per stride, finest first."""

    def __init__(self, network: Network, strides: Sequence[int] = STRIDES) -> None:
        super().__init__()
        self.network, self.strides = network, tuple(strides)
        self.levels = network.pyramid_levels(strides)  # stride and channels of each map

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return the maps."""
        return self.network.pyramid(images, self.strides)


def absorb(model: Network) -> Network:
    """Return an inference-only copy with the same features and outputs and fewer operations (RM-5).

    Affine, LayerScale, BatchNorm, and weight and bias of LayerNorm are folded into the adjacent linear layer or
    convolution. `model` is not changed.
    """
    if not isinstance(model, Network):
        raise UsageError(f"absorb takes a network of patchloom, not {type(model).__name__}")
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    for module in reversed(list(copied.modules())):  # children before their parents
        fold = getattr(module, "absorb_", None)
        if fold is not None:
            fold()
    copied.requires_grad_(False)
    copied.absorbed = True
    return copied


def _linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.trunc_normal_(linear.weight, std=0.02)
    nn.init.zeros_(linear.bias)
    return linear


class _FrozenStatistics:
    """Restores running statistics after a recomputed forward pass, which must not update them a second time."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        norms = [norm for norm in self._module.modules() if isinstance(norm, _BatchNorm)]
        self._saved = [(norm, name, buffer) for norm in norms for name, buffer in norm.named_buffers(recurse=False)]
        for norm, name, buffer in self._saved:
            setattr(norm, name, buffer.clone())

    def __exit__(self, *_: object) -> None:
        for norm, name, buffer in self._saved:
            setattr(norm, name, buffer)


# Integers that may be 0, and fields that the config class checks itself.
_MAY_BE_0 = ("depth", "class_depth")
_CHECKED = ("num_classes", "image_size")
# Making and counting a block takes 10 ms, so an untrusted recipe must not request millions.
_BLOCKS, MOST_BLOCKS = ("depth", "class_depth", "depths", "layers", "parallel"), 512


def check_types(config: Any) -> None:
    """Raise UsageError if a field of a config does not match its type hint. Lists become tuples, None "none"."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if value is None and "none" in typing.get_args(hint):
            object.__setattr__(config, field.name, value := "none")  # YAML and command lines turn none into None
        if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
            choices = ", ".join(map(str, typing.get_args(hint)))
            raise UsageError(f"{field.name} is {value!r}, expected one of {choices}")
        if hint in (int, float, bool):
            _check_number(field.name, value, hint)
        if typing.get_origin(hint) is tuple and typing.get_args(hint)[0] is int:
            object.__setattr__(config, field.name, _checked_integers(field.name, value))


def _check_number(name: str, value: Any, hint: Any) -> None:
    fits = isinstance(value, bool) if hint is bool else isinstance(value, int | hint)
    if not fits or (hint is not bool and isinstance(value, bool)):
        kind = {int: "a whole number", float: "a number", bool: "true or false"}[hint]
        raise UsageError(f"{name} is {value!r}, expected {kind}")
    if name in _BLOCKS and value > MOST_BLOCKS:
        raise UsageError(f"{name} is {value}, expected at most {MOST_BLOCKS}")
    if hint is int and value < (name not in _MAY_BE_0) and name not in _CHECKED:
        raise UsageError(f"{name} is {value}, expected at least {int(name not in _MAY_BE_0)}")


def _checked_integers(name: str, value: Any) -> tuple[int, ...]:
    value = (value,) if type(value) is int else value  # a command line turns a list of one into a number
    if not isinstance(value, list | tuple) or not all(type(each) is int for each in value):
        raise UsageError(f"{name} is {value!r}, expected whole numbers, such as 1,2")
    if min(value, default=0) < 0 and name not in _CHECKED:
        raise UsageError(f"{name} is {value!r}, expected no negative number")
    if max(value, default=0) > MOST_BLOCKS and name in _BLOCKS:
        raise UsageError(f"{name} is {value!r}, expected at most {MOST_BLOCKS} each")
    return tuple(value)
