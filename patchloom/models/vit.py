"""Vision transformers: DeiT, distilled DeiT and DeiT III.

Letters: B images, N patches, T class tokens, C channels. DeiT III adds LayerScale, position embeddings for patches
only, and blocks whose attentions (and MLPs) run in parallel. (Touvron et al.; thesis chapters 3 and 6.)
Paper and code: stochastic depth is linear in DeiT and uniform in DeiT III, whose LayerScale starts at 1e-4. The fusion
of the two classifiers of a distilled network is in `models/distilled.py`.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.layers.attention import Attention
from patchloom.layers.init import truncated_normal_
from patchloom.layers.mlp import MLP
from patchloom.layers.norms import LayerNorm
from patchloom.layers.patches import LearnedTokens, PatchProjection, PositionEmbedding
from patchloom.layers.resample import Interpolation
from patchloom.layers.residual import Block, Branch, Parallel, PostNormResidual, Residual, make_scale
from patchloom.models.dense.pyramid import BlockOutputs, Level, Taps
from patchloom.models.distilled import DistilledConfig, DistilledNetwork
from patchloom_runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ViTConfig(DistilledConfig):
    """Options of the vision transformers."""

    depth: int = 12
    dim: int = 384
    heads: int = 6
    patch_size: int = 16
    mlp_ratio: float = 4.0
    pool: Literal["class", "average"] = "class"
    parallel: int = 1  # parallel attentions, then parallel MLPs, per block
    norm_place: Literal["pre", "post"] = "pre"  # before the mixer, or after the sum (thesis figure 3.4)
    layer_scale: bool = False
    scale_init: float = 1e-4
    dropout: float = 0.0  # after positions, attention and both MLP layers (original ViT)
    class_position: bool = True  # class tokens have position embeddings (DeiT), or not (DeiT III)
    position_interpolation: Interpolation = "bicubic"  # of the position embeddings, at another size (thesis 3.4.5)
    drop_path_rule: Literal["uniform", "linear"] = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self.dim, self.heads)
        if self.norm_place == "post" and self.parallel > 1:
            raise UsageError("norm_place post needs parallel=1: parallel branches share one sum")
        if self.distilled and self.pool == "average":
            raise UsageError("a distilled network reads its class and distillation tokens: use pool='class'")


def check_heads(dim: int, heads: int) -> None:
    """Raise UsageError if the channels cannot be split evenly among the heads."""
    if heads < 1 or dim % heads:
        raise UsageError(f"heads must divide dim: {heads} heads cannot share {dim} channels evenly")


class ViT(DistilledNetwork):
    """Patch projection, class tokens, positions, blocks of attention and MLP, LayerNorm, linear classifiers."""

    Config = ViTConfig
    config: ViTConfig
    grid: tuple[int, int]
    attends_in_every_block = True

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        c = config
        self.grid = c.grid(c.patch_size)
        self.stem = PatchProjection(c.channels, c.dim, c.patch_size)
        extra = 0 if c.pool == "average" else self.class_token_count
        self.class_tokens = LearnedTokens(extra, c.dim) if extra else None
        self.position = PositionEmbedding(
            self.grid, c.dim, extra=extra if c.class_position else 0, interpolation=c.position_interpolation
        )
        self.blocks = nn.ModuleList(self._block(drop) for drop in c.drop_rates(c.depth))
        self.norm = LayerNorm(c.dim, eps=1e-6)
        for name, inputs in self.classifiers().items():
            setattr(self, name, self.make_classifier(inputs))
        truncated_normal_(self)
        self.projector = self.make_projector()

    def _block(self, drop: float) -> Block:
        c = self.config

        def branch(mix: nn.Module) -> Branch:
            scale = make_scale("layerscale" if c.layer_scale else "none", c.dim, c.scale_init)
            kind = Residual if c.norm_place == "pre" else PostNormResidual
            return kind(LayerNorm(c.dim, eps=1e-6), mix, scale, drop)

        def in_parallel(make: Any) -> nn.Module:
            branches = [branch(make()) for _ in range(c.parallel)]
            return branches[0] if c.parallel == 1 else Parallel(branches)

        return Block(
            tokens=in_parallel(lambda: Attention(c.dim, c.heads, dropout=c.dropout)),
            channels=in_parallel(lambda: MLP(c.dim, int(c.mlp_ratio * c.dim), dropout=c.dropout)),
        )

    @property
    def feature_dim(self) -> int:
        return self.config.dim

    @property
    def averages_patches(self) -> bool:
        return self.config.pool == "average"

    @property
    def has_class_attention(self) -> bool:
        return self.class_tokens is not None

    def taps(self) -> Taps:
        """Return every block, at the patch stride."""
        return dict.fromkeys(self.blocks, Level(self.config.patch_size, self.config.dim))

    def features(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) → (B, T+N, C), class tokens first."""
        return self.norm(self.run_blocks(images))

    def run_blocks(self, images: Tensor, outputs: BlockOutputs | None = None) -> Tensor:
        """(B, 3, H, W) → (B, T+N, C), class tokens first, before the last norm."""
        self.check_images(images)
        tokens = self.stem(images).flatten(1, 2)  # (B, N, C)
        if not self.config.class_position:
            tokens = self.position(tokens)
        if self.class_tokens is not None:
            tokens = torch.cat([self.class_tokens(tokens.shape[0]), tokens], dim=1)
        if self.config.class_position:
            tokens = self.position(tokens)
        if self.config.dropout and self.training:
            tokens = F.dropout(tokens, self.config.dropout)
        return self.run_all(self.blocks, tokens, outputs)

    def class_token_path(self, images: Tensor) -> list[Tensor]:
        """Return the class tokens as learned, then all tokens after every block, class tokens first."""
        assert self.class_tokens is not None  # distilled networks have two
        outputs: BlockOutputs = dict.fromkeys(self.blocks)
        self.run_blocks(images, outputs)
        return [self.class_tokens.weight, *outputs.values()]

    def pool(self, features: Tensor) -> Tensor:
        """Features → class token, mean of class and distillation token, or mean of the patches, (B, C)."""
        return features.mean(dim=1) if self.config.pool == "average" else super().pool(features)


_T = {"dim": 192, "heads": 3}
_S = {"dim": 384, "heads": 6}
_M = {"dim": 512, "heads": 8}
_B = {"dim": 768, "heads": 12}
_L = {"dim": 1024, "heads": 16, "depth": 24}
_H = {"dim": 1280, "heads": 16, "depth": 32, "patch_size": 14}
_DEIT3 = {"layer_scale": True, "class_position": False, "drop_path_rule": "uniform"}

# Name → options that differ from the defaults (thesis tables 3.1 and 6.7; H-52 and H-26×2 in section 6.3).
VARIANTS: dict[str, dict[str, Any]] = {
    "deit_ti": _T,
    "deit_s": _S,
    "deit_b": _B,
    "deit_ti_distilled": _T | {"distilled": True},
    "deit_s_distilled": _S | {"distilled": True},
    "deit_b_distilled": _B | {"distilled": True},
    "deit3_t": _T | _DEIT3,
    "deit3_s": _S | _DEIT3,
    "deit3_m": _M | _DEIT3,
    "deit3_b": _B | _DEIT3,
    "deit3_l": _L | _DEIT3,
    "deit3_h": _H | _DEIT3,
    "deit3_h52": _H | _DEIT3 | {"depth": 52},
    "deit3_h26x2": _H | _DEIT3 | {"depth": 26, "parallel": 2},
}
