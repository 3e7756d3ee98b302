"""CaiT: a deep ViT over patches only, then a few layers in which a class token attends to the fixed patches.

Letters: B images, N patches, T class tokens, C channels (48 per head). LayerScale on every branch makes deep networks
trainable; the self-attention has talking heads. (Touvron et al. 2021; thesis 3.5–3.7.)
Paper and code: table 3.16 gives ε = 1e-6 for XXS-36, but the published weights were trained with 1e-5, as here. The
class token is among the keys (h×1×(p+1) weights; eq. 3.11 says p); `class_in_keys=False` removes it. ReZero, Fixup and
T-Fixup keep LayerNorm, as in the thesis; `norm_place="none"` gives their original form (figure 3.4b). With
`insert_class_at=k`, the class token joins the patches before block k and takes part in self-attention from there
(table 3.13). `communication` and `class_communication` replace attention by MLPs step by step, the path from CaiT to
ResMLP (ResMLP, arXiv appendix A).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from patchloom.layers.attention import Attention, ClassAttention, TalkingHeadsAttention
from patchloom.layers.init import truncated_normal_
from patchloom.layers.mlp import MLP
from patchloom.layers.norms import LayerNorm
from patchloom.layers.patches import LearnedTokens, PatchProjection, PositionEmbedding
from patchloom.layers.resample import Interpolation
from patchloom.layers.residual import (
    Block,
    Branch,
    ClassBlock,
    ClassResidual,
    PostNormResidual,
    Residual,
    ResidualWeight,
    make_scale,
)
from patchloom.layers.token_mixing import ClassMixing, TokenLinear, TokenMLP, expansion_at
from patchloom.layers.transformer_init import fixup_, tfixup_
from patchloom.models.dense.pyramid import BlockOutputs, Level, Taps
from patchloom.models.distilled import DistilledConfig, DistilledNetwork
from patchloom.models.vit import check_heads
from patchloom_runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class CaiTConfig(DistilledConfig):
    """Options of CaiT, including the ablations of thesis 3.5 and 3.6."""

    depth: int = 24
    class_depth: int = 2
    dim: int = 384
    heads: int = 8
    patch_size: int = 16
    mlp_ratio: float = 4.0
    residual: ResidualWeight = "layerscale"
    scale_init: float = 1e-5  # ε; 0 to start from zero
    scale_uniform: bool = False  # LayerScale from U[0, 2ε]
    # of the blocks: before the mixer, after the sum, or no norm (thesis 3.5.1); class blocks have one before the mixer
    norm_place: Literal["pre", "post", "none"] = "pre"
    talking_heads: bool = True
    class_in_keys: bool = True
    class_scale: bool = True  # False: no scale in the class blocks (3.6.3)
    insert_class_at: int | None = None  # None: the class token is in the class blocks only
    communication: Literal["attention", "mlp", "linear"] = "attention"  # in the blocks; mlp, linear: across patches
    exchanged: tuple[
        int, ...
    ] = ()  # blocks that use an MLP instead of attention, or attention instead of MLP or linear
    communication_expansion: float = 4.0  # of the MLPs
    class_communication: Literal["attention", "mlp"] = "attention"  # in the class blocks; mlp: ResMLP's class-MLP
    position_interpolation: Interpolation = "bicubic"  # of the position embeddings, at another size (thesis 3.4.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self.dim, self.heads)
        if self.insert_class_at is None and self.class_depth == 0:
            raise UsageError("without class blocks, set insert_class_at: the class token must join the patches")
        if self.insert_class_at is not None and not 0 <= self.insert_class_at < self.depth:
            raise UsageError(f"insert_class_at is {self.insert_class_at}, expected a block from 0 to {self.depth - 1}")
        if any(block >= self.depth for block in self.exchanged):
            raise UsageError(f"exchanged is {list(self.exchanged)}, expected blocks 0 to {self.depth - 1}")
        if self.insert_class_at is not None and any(self.mixed_by_position[self.insert_class_at :]):
            raise UsageError(
                "a class token cannot join patches that are mixed by position: with communication mlp or linear, "
                "remove insert_class_at, or exchange the blocks from there on"
            )
        if self.residual in ("fixup", "tfixup") and (any(self.mixed_by_position) or self.class_communication == "mlp"):
            raise UsageError(f"residual {self.residual} initializes attention, but these options replace some of it")
        if self.class_communication == "mlp" and not self.class_in_keys:
            raise UsageError("class_in_keys applies to class attention: remove it with class_communication mlp")

    @property
    def mixed_by_position(self) -> list[bool]:
        """Whether each block mixes by a matrix or MLP across patches."""
        return [(self.communication != "attention") != (block in self.exchanged) for block in range(self.depth)]


class CaiT(DistilledNetwork):
    """Patch projection, positions, self-attention blocks, class-attention blocks, LayerNorm, linear classifier."""

    Config = CaiTConfig
    config: CaiTConfig
    grid: tuple[int, int]

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__(config)
        c = config
        self.grid = c.grid(c.patch_size)
        self.stem = PatchProjection(c.channels, c.dim, c.patch_size)
        self.position = PositionEmbedding(self.grid, c.dim, interpolation=c.position_interpolation)
        self.class_token = LearnedTokens(self.class_token_count, c.dim)
        kind = PostNormResidual if c.norm_place == "post" else Residual
        self.blocks = nn.ModuleList(
            Block(
                tokens=self._branch(kind, self._communication(by_position), drop=drop),
                channels=self._branch(kind, self._mlp(), drop=drop),
            )
            for by_position, drop in zip(c.mixed_by_position, c.drop_rates(c.depth), strict=True)
        )
        weight = c.residual if c.class_scale else "none"
        self.class_blocks = nn.ModuleList(
            ClassBlock(
                attend=self._branch(ClassResidual, self._class_communication(), weight, norm=True),
                channels=self._branch(Residual, self._mlp(), weight, norm=True),
            )
            for _ in range(c.class_depth)
        )
        self.norm = LayerNorm(c.dim, eps=1e-6)
        self._make_classifiers()
        truncated_normal_(self)
        self.projector = self.make_projector()
        if c.residual in ("fixup", "tfixup"):
            {"fixup": fixup_, "tfixup": tfixup_}[c.residual](self)
        if self.classifier_starts_at_zero:
            self._make_classifiers()

    def _make_classifiers(self) -> None:
        for name, inputs in self.classifiers().items():
            setattr(self, name, self.make_classifier(inputs))

    def _branch(
        self,
        kind: type[Branch],
        mix: nn.Module,
        weight: ResidualWeight | None = None,
        drop: float = 0.0,
        *,
        norm: bool = False,
    ) -> Any:
        c = self.config
        scale = make_scale(weight or c.residual, c.dim, c.scale_init, uniform=c.scale_uniform)
        has_norm = norm or c.norm_place != "none"
        return kind(LayerNorm(c.dim, eps=1e-6) if has_norm else nn.Identity(), mix, scale, drop)

    def _communication(self, by_position: bool) -> nn.Module:
        c = self.config
        if not by_position:
            return (TalkingHeadsAttention if c.talking_heads else Attention)(c.dim, c.heads)
        if c.communication == "linear":
            return TokenLinear(self.grid)
        return TokenMLP(self.grid, round(c.communication_expansion * self.grid[0] * self.grid[1]))

    def _class_communication(self) -> nn.Module:
        c = self.config
        if c.class_communication == "mlp":
            return ClassMixing(self.grid, extra=self.class_token_count, outputs=self.class_token_count)
        return ClassAttention(c.dim, c.heads, class_in_keys=c.class_in_keys)

    def _mlp(self) -> MLP:
        return MLP(self.config.dim, int(self.config.mlp_ratio * self.config.dim))

    @property
    def feature_dim(self) -> int:
        return self.config.dim

    @property
    def has_class_attention(self) -> bool:
        c = self.config
        return c.insert_class_at is not None or (c.class_communication == "attention" and c.class_depth > 0)

    @property
    def classifier_starts_at_zero(self) -> bool:
        return self.config.residual == "fixup"

    def taps(self) -> Taps:
        """Return every self-attention block, at the patch stride."""
        return dict.fromkeys(self.blocks, Level(self.config.patch_size, self.config.dim))

    def after_blocks(self) -> list[str]:
        """Return the attributes after the blocks, without the class token if it joins the blocks."""
        joined = self.config.insert_class_at is not None
        return [name for name in super().after_blocks() if not (joined and name == "class_token")]

    def run_blocks(self, images: Tensor, outputs: BlockOutputs | None = None) -> Tensor:
        """(B, 3, H, W) → (B, N, C), before the class blocks; (B, T+N, C) if the class tokens have joined."""
        self.check_images(images)
        tokens = self.position(self.stem(images).flatten(1, 2))  # (B, N, C)
        at = self.config.insert_class_at
        if at is None:
            return self.run_all(self.blocks, tokens, outputs)
        tokens = self.run_all(self.blocks[:at], tokens, outputs)
        tokens = torch.cat([self.class_token(tokens.shape[0]), tokens], dim=1)
        return self.run_all(self.blocks[at:], tokens, outputs)

    def features(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) → (B, T+N, C), class tokens first."""
        *_, summary, patches = self._summaries(self.run_blocks(images))
        return self.norm(torch.cat([summary, patches], dim=1))

    def _summaries(self, tokens: Tensor) -> list[Tensor]:
        """Return the class tokens (B, T, C) before and after every class block, then the patches (B, N, C)."""
        count, joined = self.class_token_count, self.config.insert_class_at is not None
        summaries = [tokens[:, :count] if joined else self.class_token(tokens.shape[0])]
        patches = tokens[:, count:] if joined else tokens
        for block in self.class_blocks:
            summaries.append(self.run(block, summaries[-1], patches))
        return [*summaries, patches]

    def class_token_path(self, images: Tensor) -> list[Tensor]:
        """Return the class tokens (B or 1, T, C) as learned, then after every block that changes them."""
        outputs: BlockOutputs = dict.fromkeys(self.blocks)
        at = self.config.insert_class_at
        tokens = self.run_blocks(images, outputs)
        joined = [] if at is None else [outputs[block] for block in self.blocks[at:]]
        return [self.class_token.weight, *joined, *self._summaries(tokens)[1:-1]]

    @classmethod
    def config_at(cls, config: CaiTConfig, size: tuple[int, int]) -> CaiTConfig:
        """Return the config for another size. Token MLPs keep their hidden units unless the grid grows by integers."""
        new = dataclasses.replace(config, image_size=size)
        expansion = expansion_at(
            config.communication_expansion, config.grid(config.patch_size), new.grid(new.patch_size)
        )
        return dataclasses.replace(new, communication_expansion=expansion)


def _variant(depth: int, dim: int, scale_init: float) -> dict[str, Any]:
    return {"depth": depth, "dim": dim, "heads": dim // 48, "scale_init": scale_init}


# Name → options that differ from the defaults (thesis tables 3.15 and 3.16; B12 in table 3.20).
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
