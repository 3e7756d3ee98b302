"""ResMLP: one linear layer mixes patches, an MLP mixes channels. No attention, no batch or channel statistics.

Letters: B images, N patches, C channels. Like ViT without attention and class token, or like Mixer without LayerNorm
and with a single matrix across patches. (Touvron et al. 2021; thesis chapter 4.)
Paper and code: the output Aff of eq. 2–3 is LayerScale without bias in the authors' code and pseudo-code, and here.
LayerScale of B24/8 starts at 1e-6 as published; the depth rule (0.1 up to 18 layers, 1e-5 at 24, 1e-6 deeper) would
give 1e-5. With communication "none" (table 3), the whole token branch is removed.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from patchloom.layers.convolution import TokenConv
from patchloom.layers.init import truncated_normal_
from patchloom.layers.mlp import MLP, ActivationName
from patchloom.layers.norms import NormName, make_norm
from patchloom.layers.patches import LearnedTokens, PatchProjection, PositionEmbedding
from patchloom.layers.residual import Block, Branch, ClassBlock, ClassResidual, PostNormResidual, Residual, make_scale
from patchloom.layers.token_mixing import ClassMixing, TokenLinear, TokenMLP, expansion_at
from patchloom.models.dense.pyramid import BlockOutputs, Level, Taps
from patchloom.models.network import Network, NetworkConfig


@dataclass(frozen=True, kw_only=True)
class ResMLPConfig(NetworkConfig):
    """Options of ResMLP, including the ablations of table 3 and arXiv appendix A."""

    depth: int = 12
    dim: int = 384
    patch_size: int = 16
    mlp_ratio: float = 4.0
    scale_init: float | None = None  # None: by depth, as in CaiT
    norm: NormName = "affine"
    norm_place: Literal["pre", "post"] = "pre"  # before the mixer, or after the sum (ResMLP 3.4)
    communication: Literal["linear", "none", "mlp", "conv", "depthwise", "separable"] = "linear"
    communication_expansion: float = 4.0  # for communication="mlp"
    pool: Literal["average", "class_mlp"] = "average"
    activation: ActivationName = "gelu"
    position: bool = False


class ResMLP(Network):
    """Patch projection, residual blocks, final norm, pooling, linear classifier."""

    Config = ResMLPConfig
    config: ResMLPConfig
    grid: tuple[int, int]

    def __init__(self, config: ResMLPConfig) -> None:
        super().__init__(config)
        c = config
        self.grid = c.grid(c.patch_size)
        self.stem = PatchProjection(c.channels, c.dim, c.patch_size)
        self.position = PositionEmbedding(self.grid, c.dim) if c.position else None
        self.blocks = nn.ModuleList(self._block(drop) for drop in c.drop_rates(c.depth))
        if c.pool == "class_mlp":
            self.class_token = LearnedTokens(1, c.dim)
            self.class_blocks = nn.ModuleList(self._class_block() for _ in range(2))
        self.norm = make_norm(c.norm, c.dim)
        self.classifier = self.make_classifier(c.dim)
        truncated_normal_(self)
        self.projector = self.make_projector()

    def _branch(self, kind: type[Branch], mix: nn.Module, drop: float = 0.0) -> Any:
        c = self.config
        init = depth_rule(c.depth) if c.scale_init is None else c.scale_init
        return kind(make_norm(c.norm, c.dim), mix, make_scale("layerscale", c.dim, init), drop)

    def _mlp(self) -> MLP:
        c = self.config
        return MLP(c.dim, int(c.mlp_ratio * c.dim), activation=c.activation)

    def _block(self, drop: float) -> Block:
        mix = self._communication()
        kind = Residual if self.config.norm_place == "pre" else PostNormResidual
        tokens = None if mix is None else self._branch(kind, mix, drop)
        return Block(tokens=tokens, channels=self._branch(kind, self._mlp(), drop))

    def _communication(self) -> nn.Module | None:
        c = self.config
        match c.communication:
            case "none":
                return None
            case "linear":
                return TokenLinear(self.grid)
            case "mlp":
                hidden = round(c.communication_expansion * self.grid[0] * self.grid[1])
                return TokenMLP(self.grid, hidden, activation=c.activation)
            case kind:
                return TokenConv(c.dim, self.grid, kind)

    def _class_block(self) -> ClassBlock:
        row = ClassMixing(self.grid, extra=1, outputs=1)
        return ClassBlock(attend=self._branch(ClassResidual, row), channels=self._branch(Residual, self._mlp()))

    @property
    def feature_dim(self) -> int:
        return self.config.dim

    @property
    def averages_patches(self) -> bool:
        return self.config.pool == "average"

    def taps(self) -> Taps:
        """Return every block, at the patch stride."""
        return dict.fromkeys(self.blocks, Level(self.config.patch_size, self.config.dim))

    def run_blocks(self, images: Tensor, outputs: BlockOutputs | None = None) -> Tensor:
        """(B, 3, H, W) → (B, N, C), before pooling and the last norm."""
        self.check_images(images)
        tokens = self.stem(images).flatten(1, 2)  # (B, N, C)
        if self.position is not None:
            tokens = self.position(tokens)
        return self.run_all(self.blocks, tokens, outputs)

    def features(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) → (B, N, C), or (B, 1+N, C) with class-MLP pooling."""
        tokens = self.run_blocks(images)
        if self.config.pool == "class_mlp":
            summary = self.class_token(tokens.shape[0])  # (B, 1, C)
            for block in self.class_blocks:
                summary = self.run(block, summary, tokens)
            tokens = torch.cat([summary, tokens], dim=1)
        return self.norm(tokens)

    def pool(self, features: Tensor) -> Tensor:
        """Features → mean of the patches or class token, (B, C)."""
        return features[:, 0] if self.config.pool == "class_mlp" else features.mean(dim=1)

    @classmethod
    def config_at(cls, config: ResMLPConfig, size: tuple[int, int]) -> ResMLPConfig:
        """Return the config for another size. Token MLPs keep their hidden units unless the grid grows by integers."""
        new = dataclasses.replace(config, image_size=size)
        expansion = expansion_at(
            config.communication_expansion, config.grid(config.patch_size), new.grid(new.patch_size)
        )
        return dataclasses.replace(new, communication_expansion=expansion)


def depth_rule(depth: int) -> float:
    """Return the initial LayerScale by depth (CaiT; thesis 3.5.1)."""
    return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6


# Name → options that differ from the defaults (NeurIPS version, tables 1 and 3).
VARIANTS: dict[str, dict[str, Any]] = {
    "resmlp_s12": {"depth": 12, "dim": 384},
    "resmlp_s24": {"depth": 24, "dim": 384},
    "resmlp_s36": {"depth": 36, "dim": 384},
    "resmlp_b24": {"depth": 24, "dim": 768, "scale_init": 1e-6},
    "resmlp_s12_14": {"depth": 12, "dim": 384, "patch_size": 14},
    "resmlp_s12_8": {"depth": 12, "dim": 384, "patch_size": 8},
    "resmlp_b24_8": {"depth": 24, "dim": 768, "patch_size": 8, "scale_init": 1e-6},
}
