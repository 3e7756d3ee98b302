"""The contract every family keeps, written once.

A network is features → pool → head. `features(images)` gives the tokens after the last norm (class tokens first) or,
for pyramids, the last map; `head(features)` pools and classifies; `forward` does both. Resolution change, a new head,
gradient checkpointing, parameter groups, checks of the input and absorption work the same for all families.
`pyramid(images, strides)` gives maps from blocks or stages to tasks that answer at every place.
"""

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

from patchloom.layers.resample import Resampled
from patchloom.layers.residual import Block, Branch, ClassBlock, drop_path_rates
from patchloom.models.dense.pyramid import STRIDES, Kept, Level, Taps, as_map, chosen_taps
from patchloom_runtime.errors import UsageError

Size = int | tuple[int, int]
# Whole numbers of configs that may be 0, as a network without blocks is one; and those that say more of themselves.
_MAY_BE_0 = ("depth", "class_depth")
_CHECKED = ("num_classes", "image_size")
# What stands after the blocks, in families that have it; class tokens of the others are read by the blocks.
_AFTER_BLOCKS = ("class_token", "class_blocks", "attention_pool", "norm", "projector")
# Each block takes 10 ms to be made and counted: a recipe from elsewhere must not take for ever.
_BLOCKS, MOST_BLOCKS = ("depth", "class_depth", "depths", "layers", "parallel"), 512


def check_types(config: Any) -> None:
    """Refuse values that the type hints of a config do not allow; lists become tuples, None the choice none."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if value is None and "none" in typing.get_args(hint):
            object.__setattr__(config, field.name, value := "none")  # what YAML and command lines make of none
        if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
            choices = ", ".join(map(str, typing.get_args(hint)))
            raise UsageError(f"{field.name} is one of {choices}; given {value!r}")
        if hint in (int, float, bool):
            fits = isinstance(value, bool) if hint is bool else isinstance(value, int | hint)
            if not fits or (hint is not bool and isinstance(value, bool)):
                kind = {int: "a whole number", float: "a number", bool: "true or false"}[hint]
                raise UsageError(f"{field.name} is {kind}; given {value!r}")
            if field.name in _BLOCKS and value > MOST_BLOCKS:
                raise UsageError(f"{field.name} is {value}, expected at most {MOST_BLOCKS}")
            if hint is int and value < (field.name not in _MAY_BE_0) and field.name not in _CHECKED:
                raise UsageError(f"{field.name} is {value}, expected at least {int(field.name not in _MAY_BE_0)}")
        if typing.get_origin(hint) is tuple and typing.get_args(hint)[0] is int:
            value = (value,) if type(value) is int else value  # what a command line makes of a list of one
            if not isinstance(value, list | tuple) or not all(type(each) is int for each in value):
                raise UsageError(f"{field.name} is whole numbers, such as 1,2; given {value!r}")
            if min(value, default=0) < 0 and field.name not in _CHECKED:
                raise UsageError(f"{field.name} is {value!r}, expected no negative number")
            if max(value, default=0) > MOST_BLOCKS and field.name in _BLOCKS:
                raise UsageError(f"{field.name} is {value!r}, expected at most {MOST_BLOCKS} each")
            object.__setattr__(config, field.name, tuple(value))


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """What all families can be asked for; each family adds its own. Frozen: a change makes another network."""

    name: str = ""
    num_classes: int = 1000  # 0: no classifier, the head returns the pooled features
    image_size: tuple[int, int] = (224, 224)  # height, width; an int means both
    channels: int = 3
    drop_path: float = 0.0
    drop_path_rule: Literal["uniform", "linear"] = "uniform"
    head: Literal["linear", "mlp"] = "linear"  # the classifier; mlp: Linear, BatchNorm, ReLU, Linear (thesis 2.4.6)
    projector: Literal["none", "fc", "mlp"] = "none"  # from the pooled features to what images are searched by

    def __post_init__(self) -> None:
        if isinstance(self.image_size, int):
            object.__setattr__(self, "image_size", (self.image_size, self.image_size))
        check_types(self)
        if min(self.image_size) < 1 or len(self.image_size) != 2:
            raise UsageError(f"image_size is a side or (height, width) in pixels, given {self.image_size!r}")
        if self.num_classes < 0:
            raise UsageError(f"num_classes is 0 (no classifier) or more, given {self.num_classes}")
        if not 0 <= self.drop_path < 1:
            raise UsageError(f"drop_path is a probability below 1, given {self.drop_path}")

    def drop_rates(self, depth: int) -> list[float]:
        """Stochastic depth of each block."""
        return drop_path_rates(self.drop_path, depth, self.drop_path_rule)

    def grid(self, patch_size: int) -> tuple[int, int]:
        """Patches down and across; a size that patches do not fill is an error."""
        height, width = self.image_size
        if height % patch_size or width % patch_size:
            below = [max(side // patch_size, 1) * patch_size for side in self.image_size]
            raise UsageError(
                f"{self.name or 'the network'}: images of {height}×{width} are not filled by {patch_size}×{patch_size} "
                f"patches; use a multiple of {patch_size}, such as {below[0]}×{below[1]}"
            )
        return height // patch_size, width // patch_size


class Network(nn.Module):
    """Base of all families."""

    Config: ClassVar[type[NetworkConfig]]
    any_resolution: bool = False  # True where nothing in the network depends on the image size
    grid: tuple[int, int] | None = None  # patches down and across, where the image size is fixed and one grid is kept
    notes: tuple[str, ...] = ()  # what was asked for and could not be had
    pixel_mean: tuple[float, ...] = (0.485, 0.456, 0.406)  # the family's; of a trained network those of its run
    pixel_std: tuple[float, ...] = (0.229, 0.224, 0.225)
    # The share that a compiled block keeps of its activations; the backward pass computes the rest again. Below 1, as
    # measured, where blocks have many maps that are cheap to compute.
    kept_for_backward: float = 1.0

    classifier: nn.Module
    projector: nn.Module

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.absorbed = False
        # Of forward_resampled: size → the config a frame was made from, and the frame.
        self._frames: dict[tuple[int, int], tuple[NetworkConfig, Network]] = {}

    # What a family writes ---------------------------------------------------------------------------------------

    def features(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) → tokens (B, T, C) or a map (B, H', W', C), after the last norm."""
        raise UsageError(
            f"{type(self).__name__} has no features for {tuple(images.shape)} images: a family defines them"
        )

    def run_blocks(self, images: Tensor, kept: Kept | None = None) -> Tensor:  # noqa: ARG002
        """Images through stem and blocks, without the last norm; what the blocks named in `kept` give is put there."""
        raise UsageError(f"{type(self).__name__} has no blocks for {tuple(images.shape)} images: a family defines them")

    def taps(self) -> Taps:
        """Block → stride and channels of what it gives, first to last; none where places of the image are lost."""
        return {}

    def pool(self, features: Tensor) -> Tensor:
        """Features → one vector per image, (B, C)."""
        return features.flatten(1, -2).mean(dim=1)

    def classifiers(self) -> dict[str, int]:
        """Attribute name of each classifier → its number of inputs."""
        return {"classifier": self.feature_dim}

    @property
    def feature_dim(self) -> int:
        """Channels of the features."""
        raise UsageError(f"{type(self).__name__} does not say how wide its features are")

    # What a family has, where others do not; asked instead of its class ---------------------------------------------

    @property
    def averages_patches(self) -> bool:
        """Whether the vector of an image is the average of its patches' features."""
        return False

    @property
    def has_class_attention(self) -> bool:
        """Whether class tokens read patches by attention."""
        return False

    @property
    def pools_by_attention(self) -> bool:
        """Whether class tokens read patches once, in the pooling, and nowhere before."""
        return False

    @property
    def has_token_per_class(self) -> bool:
        """Whether each class has a class token, and so an attention map, of its own."""
        return False

    @property
    def attends_in_every_block(self) -> bool:
        """Whether tokens are mixed by attention alone, so that it can be followed from the last block to the first."""
        return False

    @property
    def has_distillation_token(self) -> bool:
        """Whether a second token with a classifier of its own follows a teacher."""
        return False

    @property
    def classifier_starts_at_zero(self) -> bool:
        """Whether a fresh classifier of one layer answers 0 for every class."""
        return False

    def both_heads(self, features: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Logits of the class token and of the distillation token, where there is one."""
        raise UsageError(f"{self.config.name} has one head; create it with distilled=True for two")

    def stages_in_order(self) -> list[nn.Module]:
        """Parts that work at a stride of their own each; none where all blocks have the same."""
        return []

    @classmethod
    def config_at(cls, config: Any, size: tuple[int, int]) -> Any:
        """The config of the same network for another image size."""
        return dataclasses.replace(config, image_size=size)

    # What all share ---------------------------------------------------------------------------------------------

    def head(self, features: Tensor) -> Tensor:
        """Features → logits (B, classes)."""
        return self.classifier(self.pool(features))

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) → logits (B, classes)."""
        return self.head(self.features(images))

    def pyramid(self, images: Tensor, strides: Sequence[int] = STRIDES) -> list[Tensor]:
        """(B, channels, H, W) → one map per stride asked for, each (B, C, H/stride, W/stride), rounded up.

        A map has the stride nearest to the one asked for that the network has, as `pyramid_levels` says beforehand: a
        column of blocks gives all maps at its patches' stride, from blocks of growing depth, and the caller resizes
        them by layers of its own. Maps are as the blocks leave them, without the last norm, pooling or class tokens;
        they may be views of one another, so do not write into them.
        """
        taps, chosen = self._chosen(strides)
        kept: Kept = dict.fromkeys(chosen)
        self.run_blocks(images, kept)
        return [as_map(kept[block], taps[block].stride, images) for block in chosen]

    def pyramid_levels(self, strides: Sequence[int] = STRIDES) -> list[Level]:
        """Stride and channels of each map that `pyramid` gives for the same strides."""
        taps, chosen = self._chosen(strides)
        return [taps[block] for block in chosen]

    def _chosen(self, strides: Sequence[int]) -> tuple[Taps, list[Any]]:
        taps = self.taps()
        if not taps:
            name = self.config.name or type(self).__name__
            raise UsageError(f"{name} as it is configured gives no maps of an image; choose another network")
        return taps, chosen_taps(taps, strides)

    def after_blocks(self) -> list[str]:
        """Attributes that `pyramid` does not read: pooling, the last norm, what stands on them."""
        return [name for name in (*_AFTER_BLOCKS, *self.classifiers()) if getattr(self, name, None) is not None]

    def layers_in_order(self) -> list[list[nn.Parameter]]:
        """The parameters of each block, first to last; all others are of the stem, or in `after_blocks`."""
        blocks: Any = getattr(self, "blocks", ())
        return [list(block.parameters()) for block in blocks]

    def rate_scales(self, decay: float) -> dict[nn.Parameter, float]:
        """Parameter → what its learning rate is multiplied by, less the nearer it is to the image (BEiT).

        Block i of n has decay^(n − i), counted from 0; stem, tokens and positions have decay^(n + 1), the head 1.
        """
        layers = self.layers_in_order()
        scales = dict.fromkeys(self.parameters(), decay ** (len(layers) + 1))
        for number, parameters in enumerate(layers):
            scales |= dict.fromkeys(parameters, decay ** (len(layers) - number))
        for name in self.after_blocks():
            scales |= dict.fromkeys(getattr(self, name).parameters(), 1.0)
        return scales

    def make_classifier(self, inputs: int) -> nn.Module:
        """A fresh classifier for the config's number of classes."""
        if self.config.num_classes == 0:
            return nn.Identity()
        if self.config.head == "mlp":
            from patchloom.layers.projector import HIDDEN_DIM  # which most networks do without

            linear = _linear(HIDDEN_DIM, self.config.num_classes)
            return nn.Sequential(nn.Linear(inputs, HIDDEN_DIM), nn.BatchNorm1d(HIDDEN_DIM), nn.ReLU(), linear)
        linear = _linear(inputs, self.config.num_classes)
        if self.classifier_starts_at_zero:
            nn.init.zeros_(linear.weight)
        return linear

    def make_projector(self) -> nn.Module:
        """A fresh projector of the config's kind."""
        if self.config.projector == "none":
            return nn.Identity()
        from patchloom.layers.projector import Projector

        return Projector(self.config.projector, self.feature_dim)

    def drop_projector(self) -> Self:
        """Leave the projector out: images are then compared by the vectors it was given; in place, returns itself."""
        self.config = dataclasses.replace(self.config, projector="none")
        self.projector = self.make_projector()
        return self

    def reset_head(self, num_classes: int) -> Self:
        """Give this network a fresh classifier for `num_classes`; in place, returns itself."""
        self.config = dataclasses.replace(self.config, num_classes=num_classes)
        weight = next(self.parameters())
        for name, inputs in self.classifiers().items():
            setattr(self, name, self.make_classifier(inputs).to(weight.device, weight.dtype))
        return self

    def at_resolution(self, size: Size) -> Self:
        """A copy of this network for images of another size; whatever has one weight a position is resampled."""
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

    def forward_resampled(self, images: Tensor) -> Tensor:
        """What `at_resolution(size of the images)` gives, with gradients that reach the weights of this network.

        Running statistics are this network's own. Nothing is checkpointed: it would be recomputed with other weights.
        """
        size = (images.shape[2], images.shape[3])
        if self.any_resolution or size == self.config.image_size:
            return self(images)
        if self.absorbed:
            raise UsageError("an absorbed copy keeps its resolution: call at_resolution first, then absorb")
        frame = self._frame(size).train(self.training)
        return torch.func.functional_call(frame, self._weights_for(frame), images)

    def _frame(self, size: tuple[int, int]) -> "Network":
        """This network at another size without its weights: it takes no memory and draws no random numbers."""
        made_for, frame = self._frames.get(size, (None, None))
        if frame is None or made_for is not self.config:
            with torch.device("meta"):
                frame = type(self)(self.config_at(self.config, size))
            self._frames[size] = (self.config, frame)
        return frame

    def _weights_for(self, new: "Network") -> dict[str, Tensor]:
        """Name → weights and buffers of this network on the grids of `new`."""
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

    @property
    def resamples(self) -> bool:
        """Whether `forward_resampled` takes images of another size."""
        return True

    def vectors(self, features: Tensor) -> Tensor:
        """Features → what is compared between images, (B, C); of one token per class, their mean."""
        pooled = self.pool(features)
        return pooled if pooled.ndim == 2 else pooled.mean(dim=1)

    def for_images_of(self, size: Size) -> Self:
        """This network where it takes images of `size` as it is, otherwise a copy at that resolution."""
        wanted = (size, size) if isinstance(size, int) else tuple(size)
        return self if self.any_resolution or wanted == self.config.image_size else self.at_resolution(size)

    def train(self, mode: bool = True) -> Self:
        """As torch's; an absorbed copy refuses to train."""
        if mode and getattr(self, "absorbed", False):
            raise UsageError("an absorbed copy is for inference only: train the network it was made from")
        return super().train(mode)

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Two groups for an optimiser: no decay on norms, biases, scales, tokens and positions."""
        decayed: list[nn.Parameter] = []
        free: list[nn.Parameter] = []
        for module in self.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    decays = parameter.ndim > 1 and getattr(module, "decays", True)
                    (decayed if decays else free).append(parameter)
        return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]

    def run(self, block: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """block(*inputs); with gradient checkpointing its activations are recomputed in the backward pass."""
        if not (self.gradient_checkpointing and self.training):
            return block(*inputs)
        if torch.compiler.is_compiling():  # which recomputes operations alone, without what they note
            return checkpoint(block, *inputs, use_reentrant=False)
        module = block if isinstance(block, nn.Module) else self
        contexts = (nullcontext(), _StatisticsKept(module))
        return checkpoint(block, *inputs, use_reentrant=False, context_fn=lambda: contexts)

    def run_all(self, blocks: Iterable[nn.Module], x: Tensor, kept: Kept | None = None) -> Tensor:
        """The blocks one after the other; what those named in `kept` give is put there."""
        for block in blocks:
            x = self.run(block, x)
            if kept is not None and block in kept:
                kept[block] = x
        return x

    def repeated_blocks(self) -> list[nn.Module]:
        """The blocks that stand in a list: what they do is the same for many of them."""
        lists = [module for module in self.modules() if type(module) is nn.ModuleList]
        return [block for each in lists for block in each if isinstance(block, Block | ClassBlock | Branch)]

    def check_images(self, images: Tensor) -> None:
        """One clear line for images this network cannot take."""
        name, channels = self.config.name or type(self).__name__, self.config.channels
        if images.ndim != 4 or images.shape[1] != channels:
            raise UsageError(
                f"{name} takes images of shape (batch, {channels}, height, width), given {tuple(images.shape)}"
                + ("; add a batch dimension with images[None]" if images.ndim == 3 else "")
            )
        if not images.is_floating_point():
            raise UsageError(
                f"{name} takes normalised floating-point images, given {images.dtype}; "
                "divide by 255, subtract the mean and divide by the standard deviation first"
            )
        dtype = next(self.parameters()).dtype
        if images.dtype != dtype and not torch.is_autocast_enabled(images.device.type):
            raise UsageError(
                f"{name} has {dtype} weights, given {images.dtype} images; "
                f"use images.to({dtype}) or run under torch.autocast"
            )
        if not self.any_resolution and tuple(images.shape[2:]) != self.config.image_size:
            given = f"{images.shape[2]}×{images.shape[3]}"
            height, width = self.config.image_size
            wanted = str(images.shape[2]) if images.shape[2] == images.shape[3] else str(tuple(images.shape[2:]))
            raise UsageError(
                f"{name} was made for {height}×{width} images, given {given}; resize the images, or use "
                f"model.at_resolution({wanted}) or create_model(..., image_size={wanted})"
            )


def _linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.trunc_normal_(linear.weight, std=0.02)
    nn.init.zeros_(linear.bias)
    return linear


class _StatisticsKept:
    """While a forward pass is repeated for its gradients: the batch's statistics were noted the first time."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        norms = [norm for norm in self._module.modules() if isinstance(norm, _BatchNorm)]
        self._noted = [(norm, name, buffer) for norm in norms for name, buffer in norm.named_buffers(recurse=False)]
        for norm, name, buffer in self._noted:
            setattr(norm, name, buffer.clone())

    def __exit__(self, *_: object) -> None:
        for norm, name, buffer in self._noted:
            setattr(norm, name, buffer)
