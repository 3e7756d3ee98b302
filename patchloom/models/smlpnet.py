"""sMLPNet: four stages of depthwise convolution, sparse MLP (rows, columns, identity) and channel MLP.

Letters: B images, H×W pixels, C channels of the first stage; maps are (B, H', W', C'). A pyramid, unlike Mixer and
ResMLP. Its matrices mix one row or column, so they are small. (Tang et al. 2021.)
Paper and code: the text says only that BatchNorm and skips are "applied in a standard way". Here as in the authors'
code: BN → GELU → depthwise 3×3 → BN → GELU → sMLP in one residual branch, LayerNorm (ε 1e-5) → MLP in another, biases
in the row and column layers but not in the fusing layer, and a final BatchNorm.
"""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from patchloom.layers.convolution import Conv3x3
from patchloom.layers.mlp import MLP
from patchloom.layers.norms import BatchNorm, LayerNorm
from patchloom.layers.patches import PatchMerging, PatchProjection
from patchloom.layers.residual import Block, Residual
from patchloom.layers.sparse_mlp import Fusion, MapMLP, NormActMix, NormActMixes, SparseMLP
from patchloom.models.dense.pyramid import BlockOutputs, Level, Taps
from patchloom.models.network import Network, NetworkConfig
from patchloom_runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class SMLPNetConfig(NetworkConfig):
    """Options of sMLPNet, including the ablations of tables 1 to 5. Stages are numbered from 1."""

    depths: tuple[int, ...] = (2, 8, 14, 2)
    dim: int = 80  # of the first stage; each stage doubles it
    alpha: float = 3.0  # expansion of the channel MLP
    patch_size: int = 4
    local: bool = True  # the depthwise convolution before the sparse MLP
    global_stages: tuple[int, ...] = (1, 2, 3, 4)  # stages with a sparse MLP
    instead_of_global: Literal["conv", "nothing"] = "conv"  # in the other stages (tables 2 and 1)
    fusion: Fusion = "concat"
    sequential: bool = False
    columns_first: bool = False  # sequential: columns, then rows (table 4 has both orders)
    identity: bool = True
    token_mlp: tuple[int, ...] = ()  # stages with a dense token MLP instead (table 5)
    drop_path_rule: Literal["uniform", "linear"] = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.depths or min(self.depths) < 1:
            raise UsageError(f"depths is {self.depths}, expected one number of blocks per stage")
        if self.columns_first and not self.sequential:
            raise UsageError("columns_first sets the order of sequential mixing: add sequential=true")
        if not self.local and not self.mixes_globally(range(1, len(self.depths) + 1)):
            raise UsageError("local=False needs a sparse or token MLP in every stage: nothing else would mix tokens")

    def mixes_globally(self, stages: Any) -> bool:
        """Return whether all `stages` have a sparse or dense token MLP."""
        return all(stage in self.global_stages or stage in self.token_mlp for stage in stages)


class SMLPNet(Network):
    """Patch projection, stages with patch merging between them, BatchNorm, average pooling, linear classifier."""

    Config = SMLPNetConfig
    config: SMLPNetConfig
    averages_patches = True

    def __init__(self, config: SMLPNetConfig) -> None:
        super().__init__(config)
        c = config
        c.grid(c.patch_size * 2 ** (len(c.depths) - 1))  # every merge must divide the map evenly
        height, width = c.grid(c.patch_size)
        drops = iter(c.drop_rates(sum(c.depths)))
        self.stem = PatchProjection(c.channels, c.dim, c.patch_size, bias=False)
        self.merges = nn.ModuleList(PatchMerging(c.dim * 2**i, c.dim * 2 ** (i + 1)) for i in range(len(c.depths) - 1))
        self.stages = nn.ModuleList(
            nn.ModuleList(
                self._block(i + 1, c.dim * 2**i, (height >> i, width >> i), next(drops)) for _ in range(depth)
            )
            for i, depth in enumerate(c.depths)
        )
        self.norm = BatchNorm(self.feature_dim)
        self.classifier = self.make_classifier(self.feature_dim)
        self.projector = self.make_projector()

    def _block(self, stage: int, dim: int, grid: tuple[int, int], drop: float) -> Block:
        c = self.config
        mixes: list[nn.Module] = [Conv3x3(dim, depthwise=True, bias=False)] if c.local else []
        if stage in c.token_mlp:
            mixes.append(MapMLP(grid, grid[0] * grid[1]))
        elif stage in c.global_stages:
            mixes.append(
                SparseMLP(
                    dim,
                    grid,
                    fusion=c.fusion,
                    sequential=c.sequential,
                    identity=c.identity,
                    columns_first=c.columns_first,
                )
            )
        elif c.instead_of_global == "conv":
            mixes.append(Conv3x3(dim, depthwise=True, bias=False))
        units = NormActMixes(*(NormActMix(dim, mix) for mix in mixes))
        return Block(
            tokens=Residual(nn.Identity(), units, None, drop),
            channels=Residual(LayerNorm(dim, eps=1e-5), MLP(dim, int(c.alpha * dim)), None, drop),
        )

    def make_classifier(self, inputs: int) -> nn.Module:
        """Return a linear layer with PyTorch's initialization, as all layers of this family."""
        plain = self.config.num_classes and self.config.head == "linear"
        return nn.Linear(inputs, self.config.num_classes) if plain else super().make_classifier(inputs)

    @property
    def feature_dim(self) -> int:
        return self.config.dim * 2 ** (len(self.config.depths) - 1)

    def stages_in_order(self) -> list[nn.Module]:
        """Return the stages: the first at the patch stride, each further one at twice the stride."""
        return list(self.stages)

    def layers_in_order(self) -> list[list[nn.Parameter]]:
        """Return the parameters of the blocks of all stages. A merge belongs to the block after it."""
        layers: list[list[nn.Parameter]] = []
        for number, stage in enumerate(self.stages):
            merge = list(self.merges[number - 1].parameters()) if number else []
            first, *others = ([*block.parameters()] for block in stage.children())
            layers += [merge + first, *others]
        return layers

    def taps(self) -> Taps:
        """Return the last block of each stage, at strides 4, 8, 16 and 32."""
        c = self.config
        lasts = [list(stage.children())[-1] for stage in self.stages]
        return {block: Level(c.patch_size * 2**i, c.dim * 2**i) for i, block in enumerate(lasts)}

    def features(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) → map of the last stage (B, H/32, W/32, 8C)."""
        return self.norm(self.run_blocks(images))

    def run_blocks(self, images: Tensor, outputs: BlockOutputs | None = None) -> Tensor:
        """(B, 3, H, W) → (B, H/32, W/32, 8C), before the last norm."""
        self.check_images(images)
        maps = self.stem(images)  # (B, H/4, W/4, C)
        for i, stage in enumerate(self.stages):
            maps = self.run_all(stage, self.merges[i - 1](maps) if i else maps, outputs)  # type: ignore[arg-type]
        return maps


# Name → options that differ from the defaults (table 6; T* has α = 2).
VARIANTS: dict[str, dict[str, Any]] = {
    "smlpnet_t2": {"alpha": 2.0},
    "smlpnet_t": {},
    "smlpnet_s": {"dim": 96, "depths": (2, 10, 24, 2)},
    "smlpnet_b": {"dim": 112, "depths": (2, 10, 24, 2)},
}
