"""CaiT: a deep ViT over patches alone, then a few layers in which a class token reads the frozen patches.

Letters: B images, N patches, C channels (48 a head). LayerScale on every branch makes depth trainable; talking heads in
the self-attention. (Touvron et al. 2021; thesis 3.5–3.7.)
Paper and code: table 3.16 gives XXS-36 ε = 1e-6, the published weights were made with 1e-5, as here. The class token is
among the keys (h×1×(p+1) weights, where eq. 3.11 says p); `class_in_keys=False` leaves it out. ReZero, Fixup and
T-Fixup keep LayerNorm and warm-up, as the thesis adapts them; `insert_class_at=k` lets the class token join the patches
before block k and be mixed by self-attention from there (table 3.13).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.errors import UsageError
from patchloom.layers.attention import Attention, ClassAttention, TalkingHeadsAttention
from patchloom.layers.init import truncated_normal_
from patchloom.layers.mlp import MLP
from patchloom.layers.norms import LayerNorm
from patchloom.layers.patches import LearnedTokens, PatchProjection, PositionEmbedding
from patchloom.layers.residual import (
    Block,
    ClassBlock,
    ClassResidual,
    Residual,
    ResidualWeight,
    make_scale,
)
from patchloom.layers.transformer_init import fixup_, tfixup_
from patchloom.models.network import Network, NetworkConfig
from patchloom.models.pyramid import Kept, Level, Taps
from patchloom.models.vit import check_heads


@dataclass(frozen=True, kw_only=True)
class CaiTConfig(NetworkConfig):
    """Options of CaiT; the ablations of thesis 3.5 and 3.6 are choices here."""

    depth: int = 24
    class_depth: int = 2
    dim: int = 384
    heads: int = 8
    patch_size: int = 16
    mlp_ratio: float = 4.0
    residual: ResidualWeight = "layerscale"
    scale_init: float = 1e-5  # ε; 0 for the zero start
    scale_uniform: bool = False  # LayerScale from U[0, 2ε]
    talking_heads: bool = True
    class_in_keys: bool = True
    insert_class_at: int | None = None  # None: the class token meets the patches in the class blocks alone

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self.dim, self.heads)
        if self.insert_class_at is None and self.class_depth == 0:
            raise UsageError("without class blocks the class token needs a place: set insert_class_at")
        if self.insert_class_at is not None and not 0 <= self.insert_class_at < self.depth:
            raise UsageError(f"insert_class_at is a block from 0 to {self.depth - 1}, given {self.insert_class_at}")


class CaiT(Network):
    """Patch projection, positions, self-attention blocks, class-attention blocks, LayerNorm, linear classifier."""

    Config = CaiTConfig
    config: CaiTConfig
    grid: tuple[int, int]
    has_class_attention = True

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__(config)
        c = config
        self.grid = c.grid(c.patch_size)
        self.stem = PatchProjection(c.channels, c.dim, c.patch_size)
        self.position = PositionEmbedding(self.grid, c.dim)
        self.class_token = LearnedTokens(1, c.dim)
        attention = TalkingHeadsAttention if c.talking_heads else Attention
        self.blocks = nn.ModuleList(
            Block(
                tokens=self._branch(Residual, attention(c.dim, c.heads), drop),
                channels=self._branch(Residual, self._mlp(), drop),
            )
            for drop in c.drop_rates(c.depth)
        )
        self.class_blocks = nn.ModuleList(
            ClassBlock(
                attend=self._branch(ClassResidual, ClassAttention(c.dim, c.heads, class_in_keys=c.class_in_keys)),
                channels=self._branch(Residual, self._mlp()),
            )
            for _ in range(c.class_depth)
        )
        self.norm = LayerNorm(c.dim, eps=1e-6)
        self.classifier = self.make_classifier(c.dim)
        truncated_normal_(self)
        self.projector = self.make_projector()
        if c.residual in ("fixup", "tfixup"):
            {"fixup": fixup_, "tfixup": tfixup_}[c.residual](self)

    def _branch(self, kind: type[Residual] | type[ClassResidual], mix: nn.Module, drop: float = 0.0) -> Any:
        c = self.config
        scale = make_scale(c.residual, c.dim, c.scale_init, uniform=c.scale_uniform)
        return kind(LayerNorm(c.dim, eps=1e-6), mix, scale, drop)

    def _mlp(self) -> MLP:
        return MLP(self.config.dim, int(self.config.mlp_ratio * self.config.dim))

    @property
    def feature_dim(self) -> int:
        """Channels of the features."""
        return self.config.dim

    def taps(self) -> Taps:
        """Every self-attention block, at the stride of the patches."""
        return dict.fromkeys(self.blocks, Level(self.config.patch_size, self.config.dim))

    def after_blocks(self) -> list[str]:
        """The class token is among them, unless it joins the blocks."""
        joined = self.config.insert_class_at is not None
        return [name for name in super().after_blocks() if not (joined and name == "class_token")]

    def run_blocks(self, images: Tensor, kept: Kept | None = None) -> Tensor:
        """(B, 3, H, W) → (B, N, C), before the class blocks; (B, 1+N, C) where the class token has joined."""
        self.check_images(images)
        tokens = self.position(self.stem(images).flatten(1, 2))  # (B, N, C)
        at = self.config.insert_class_at
        if at is None:
            return self.run_all(self.blocks, tokens, kept)
        tokens = self.run_all(self.blocks[:at], tokens, kept)
        tokens = torch.cat([self.class_token(tokens.shape[0]), tokens], dim=1)
        return self.run_all(self.blocks[at:], tokens, kept)

    def features(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) → (B, 1+N, C), class token first."""
        tokens = self.run_blocks(images)
        joined = self.config.insert_class_at is not None
        summary = tokens[:, :1] if joined else self.class_token(tokens.shape[0])  # (B, 1, C)
        patches = tokens[:, 1:] if joined else tokens
        for block in self.class_blocks:
            summary = self.run(block, summary, patches)
        return self.norm(torch.cat([summary, patches], dim=1))

    def pool(self, features: Tensor) -> Tensor:
        """The class token."""
        return features[:, 0]


def _variant(depth: int, dim: int, scale_init: float) -> dict[str, Any]:
    return {"depth": depth, "dim": dim, "heads": dim // 48, "scale_init": scale_init}


# Name → what differs from the defaults (thesis tables 3.15 and 3.16; B12 in table 3.20).
VARIANTS: dict[str, dict[str, Any]] = {
    "cait_xxs24": _variant(24, 192, 1e-5),
    "cait_xxs36": _variant(36, 192, 1e-5),
    "cait_xs24": _variant(24, 288, 1e-5),
    "cait_xs36": _variant(36, 288, 1e-6),
    "cait_s24": _variant(24, 384, 1e-5),
    "cait_s36": _variant(36, 384, 1e-6),
    "cait_s48": _variant(48, 384, 1e-6),
    "cait_m24": _variant(24, 768, 1e-5),
    "cait_m36": _variant(36, 768, 1e-6),
    "cait_m48": _variant(48, 768, 1e-6),
    "cait_b12": _variant(12, 768, 0.1),
}
