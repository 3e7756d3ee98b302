"""PatchConvNet: a convolutional stem, a column of convolutional blocks, and one class-attention layer as pooling.

Letters: B images, H×W pixels, N positions, T class tokens, K classes, C channels. A convnet with the shape of a ViT:
constant resolution, no position embeddings, any image size. Its pooling weights are the attention map. (Touvron et al.
2021; thesis chapter 5.)
Paper and code, as in the authors' code: the stem has GELU only between its convolutions, the 3×3 of the trunk is
depthwise, the MLP of the pooling expands by 3, and the class token is among the keys unless there is one per class.
LayerScale starts at 1e-6 (S60: 1e-4). Drop path of table 5.8 is in the recipes.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from patchloom.layers.attention import ClassAttention
from patchloom.layers.convolution import PatchConv
from patchloom.layers.init import truncated_normal_
from patchloom.layers.mlp import MLP
from patchloom.layers.norms import make_norm
from patchloom.layers.patches import ConvStem, LearnedTokens, PatchProjection
from patchloom.layers.residual import ClassBlock, ClassResidual, Residual, make_scale
from patchloom.models.dense.pyramid import BlockOutputs, Level, Taps
from patchloom.models.network import Network, NetworkConfig
from patchloom.models.vit import check_heads
from patchloom_runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class AttentionPoolConfig(NetworkConfig):
    """Options of attention pooling, for any convnet."""

    pool: Literal["attention", "average"] = "attention"
    pool_heads: int = 1
    class_tokens: Literal["one", "per_class"] = "one"
    mlp_ratio: float = 3.0  # of the MLP of the pooling
    scale_init: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class PatchConvNetConfig(AttentionPoolConfig):
    """Options of PatchConvNet, including the ablations of table 5.7."""

    depth: int = 60
    dim: int = 384
    norm: Literal["layer", "batch"] = "layer"
    stem: Literal["conv", "linear"] = "conv"
    patch_size: int = 16  # of the linear stem; the convolutional one has stride 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self.dim, self.pool_heads)


class AttentionPool(nn.Module):
    """Class tokens, one or one per class, attend to the positions, then pass through an MLP."""

    def __init__(self, config: AttentionPoolConfig, dim: int) -> None:
        super().__init__()
        c = config
        per_class = c.class_tokens == "per_class"
        self.token = LearnedTokens(c.num_classes if per_class else 1, dim)

        def branch(kind: type[Residual] | type[ClassResidual], mix: nn.Module) -> Any:
            return kind(make_norm("layer", dim), mix, make_scale("layerscale", dim, c.scale_init))

        attention = ClassAttention(dim, c.pool_heads, class_in_keys=not per_class)
        self.block = ClassBlock(
            attend=branch(ClassResidual, attention),
            channels=branch(Residual, MLP(dim, int(c.mlp_ratio * dim))),
        )
        truncated_normal_(self)

    def forward(self, positions: Tensor) -> Tensor:
        """(B, N, C) → (B, T+N, C), class tokens first."""
        return torch.cat([self.block(self.token(positions.shape[0]), positions), positions], dim=1)


class PerClassLinear(nn.Linear):
    """A classifier in which the k-th row of weights applies to the k-th class token."""

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, K, C) → (B, K)."""
        return (tokens * self.weight).sum(dim=-1) + self.bias


class AttentionPooled(Network):
    """Base of PatchConvNet and other convnets with attention pooling."""

    config: AttentionPoolConfig
    any_resolution = True

    @property
    def averages_patches(self) -> bool:
        return self.config.pool == "average"

    @property
    def pools_by_attention(self) -> bool:
        return self.config.pool == "attention"

    @property
    def has_class_attention(self) -> bool:
        return self.pools_by_attention

    @property
    def has_token_per_class(self) -> bool:
        return self.config.class_tokens == "per_class"

    def make_classifier(self, inputs: int) -> nn.Module:
        """Return a linear classifier, or one with a row per class token."""
        if self.config.class_tokens == "per_class" and self.config.num_classes:
            if self.config.head == "mlp":
                raise UsageError("head=mlp needs one vector per image; with class_tokens=per_class the head is linear")
            linear = PerClassLinear(inputs, self.config.num_classes)
            truncated_normal_(linear)
            return linear
        return super().make_classifier(inputs)

    def pool(self, features: Tensor) -> Tensor:
        """(B, T+N, C) → class token (B, C), all class tokens (B, K, C), or mean of the positions (B, C)."""
        if self.config.pool == "average":
            return features.mean(dim=1)
        return features[:, 0] if self.config.class_tokens == "one" else features[:, : self.config.num_classes]


class PatchConvNet(AttentionPooled):
    """PatchConvNet: stem, trunk, attention pooling, norm, linear classifier."""

    Config = PatchConvNetConfig
    config: PatchConvNetConfig
    kept_for_backward = 0.6

    def __init__(self, config: PatchConvNetConfig) -> None:
        super().__init__(config)
        c = config
        if c.stem == "conv":
            self.stem: nn.Module = ConvStem(c.channels, c.dim)
        else:
            self.stem = PatchProjection(c.channels, c.dim, c.patch_size)
        self.blocks = nn.ModuleList(
            Residual(
                make_norm(c.norm, c.dim),
                PatchConv(c.dim),
                make_scale("layerscale", c.dim, c.scale_init),
                drop,
            )
            for drop in c.drop_rates(c.depth)
        )
        self.attention_pool = AttentionPool(c, c.dim) if c.pool == "attention" else None
        self.norm = make_norm("layer", c.dim)
        self.classifier = self.make_classifier(c.dim)
        self.projector = self.make_projector()

    @property
    def feature_dim(self) -> int:
        return self.config.dim

    def taps(self) -> Taps:
        """Return the last block, whose output is used at all levels (thesis 5.3.3)."""
        stride = 16 if self.config.stem == "conv" else self.config.patch_size
        return {self.blocks[-1]: Level(stride, self.config.dim)}

    def run_blocks(self, images: Tensor, outputs: BlockOutputs | None = None) -> Tensor:
        """(B, 3, H, W), any size → (B, ⌈H/16⌉, ⌈W/16⌉, C), before pooling and the last norm."""
        self.check_images(images)
        return self.run_all(self.blocks, self.stem(images), outputs)

    def features(self, images: Tensor) -> Tensor:
        """(B, 3, H, W), any size → (B, T+N, C), class tokens first."""
        positions = self.run_blocks(images).flatten(1, 2)  # (B, N, C)
        if self.attention_pool is not None:
            positions = self.attention_pool(positions)
        return self.norm(positions)


_S = {"dim": 384}
_B = {"dim": 768}
_L = {"dim": 1024}

# Name → options that differ from the defaults (thesis tables 5.1 and 5.8).
VARIANTS: dict[str, dict[str, Any]] = {
    "patchconvnet_s20": _S | {"depth": 20},
    "patchconvnet_s36": _S | {"depth": 36},
    "patchconvnet_s60": _S | {"depth": 60, "scale_init": 1e-4},
    "patchconvnet_s120": _S | {"depth": 120},
    "patchconvnet_b36": _B | {"depth": 36},
    "patchconvnet_b60": _B | {"depth": 60},
    "patchconvnet_b120": _B | {"depth": 120},
    "patchconvnet_l60": _L | {"depth": 60},
    "patchconvnet_l120": _L | {"depth": 120},
}
