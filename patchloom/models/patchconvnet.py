"""PatchConvNet: a convolutional stem, a column of convolutional blocks, and one class-attention layer that pools.

Letters: B images, H×W positions, N = H·W, T class tokens, C channels. A convnet with the shape of a ViT: constant
resolution, no positions, any image size; its pooling weights are the attention map. (Touvron et al. 2021; thesis
chapter 5.)
Paper and code: the stem has GELU between its convolutions only, the 3×3 of the trunk is depth-wise, the pooling's
feed-forward layer is 3 wide, and the class token is among the keys unless there is one per class, all as the authors'
code. LayerScale starts at 1e-6 (S60: 1e-4). Drop path per table 5.8 is the recipe's.
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
from patchloom.models.dense.pyramid import Kept, Level, Taps
from patchloom.models.network import Network, NetworkConfig
from patchloom.models.vit import check_heads
from patchloom_runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class AttentionPoolConfig(NetworkConfig):
    """Options of the attention pooling, on whatever convnet it stands."""

    pool: Literal["attention", "average"] = "attention"
    pool_heads: int = 1
    class_tokens: Literal["one", "per_class"] = "one"
    mlp_ratio: float = 3.0  # of the pooling's feed-forward layer
    scale_init: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class PatchConvNetConfig(AttentionPoolConfig):
    """Options of PatchConvNet; the ablations of table 5.7 are choices here."""

    depth: int = 60
    dim: int = 384
    norm: Literal["layer", "batch"] = "layer"
    stem: Literal["conv", "linear"] = "conv"
    patch_size: int = 16  # of the linear stem; the convolutional one has 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self.dim, self.pool_heads)


class AttentionPool(nn.Module):
    """One or many class tokens read the positions in a single softmax, then a feed-forward layer."""

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
        """(B, N, C) → (B, T+N, C), what was read first."""
        return torch.cat([self.block(self.token(positions.shape[0]), positions), positions], dim=1)


class PerClassLinear(nn.Linear):
    """A classifier that gives the k-th class token the k-th row of weights."""

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, K, C) → (B, K)."""
        return (tokens * self.weight).sum(dim=-1) + self.bias


class AttentionPooled(Network):
    """What PatchConvNet shares with another convnet under attention pooling."""

    config: AttentionPoolConfig
    any_resolution = True

    @property
    def averages_patches(self) -> bool:
        """Where the pooling is an average."""
        return self.config.pool == "average"

    @property
    def pools_by_attention(self) -> bool:
        """Where the pooling is no average."""
        return self.config.pool == "attention"

    @property
    def has_class_attention(self) -> bool:
        """In the pooling."""
        return self.pools_by_attention

    @property
    def has_token_per_class(self) -> bool:
        """As the config says."""
        return self.config.class_tokens == "per_class"

    def make_classifier(self, inputs: int) -> nn.Module:
        """A linear classifier, or one row per class token."""
        if self.config.class_tokens == "per_class" and self.config.num_classes:
            if self.config.head == "mlp":
                raise UsageError("head=mlp needs one vector per image; with class_tokens=per_class the head is linear")
            linear = PerClassLinear(inputs, self.config.num_classes)
            truncated_normal_(linear)
            return linear
        return super().make_classifier(inputs)

    def pool(self, features: Tensor) -> Tensor:
        """(B, T+N, C) → the class token (B, C), all of them (B, K, C), or the average of the positions."""
        if self.config.pool == "average":
            return features.mean(dim=1)
        return features[:, 0] if self.config.class_tokens == "one" else features[:, : self.config.num_classes]


class PatchConvNet(AttentionPooled):
    """Stem, trunk, attention pooling, norm, linear classifier."""

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
        """Channels of the features."""
        return self.config.dim

    def taps(self) -> Taps:
        """The last block alone, whose output is read at all levels (thesis 5.3.3)."""
        stride = 16 if self.config.stem == "conv" else self.config.patch_size
        return {self.blocks[-1]: Level(stride, self.config.dim)}

    def run_blocks(self, images: Tensor, kept: Kept | None = None) -> Tensor:
        """(B, 3, H, W), any size → (B, H/16, W/16, C), rounded up, before pooling and the last norm."""
        self.check_images(images)
        return self.run_all(self.blocks, self.stem(images), kept)

    def features(self, images: Tensor) -> Tensor:
        """(B, 3, H, W), any size → (B, T+N, C), class tokens first."""
        positions = self.run_blocks(images).flatten(1, 2)  # (B, N, C)
        if self.attention_pool is not None:
            positions = self.attention_pool(positions)
        return self.norm(positions)


_S = {"dim": 384}
_B = {"dim": 768}
_L = {"dim": 1024}

# Name → what differs from the defaults (thesis tables 5.1 and 5.8).
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
