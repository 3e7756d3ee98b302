"""MLP-Mixer: LayerNorm, an MLP across patches, LayerNorm, an MLP across channels.

Letters: B images, N patches, C channels. ResMLP has one matrix across patches, Mixer has two with a GELU in between.
(Tolstikhin et al. 2021, eq. 1.)
Paper and code: the authors' Flax weights were made with the tanh approximation of GELU (`gelu="tanh"`, the default);
timm runs them with the exact one (`gelu="exact"`). Stochastic depth grows linearly (supplement B).
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from patchloom.layers.init import lecun_normal_
from patchloom.layers.mlp import MLP, ActivationName
from patchloom.layers.norms import LayerNorm
from patchloom.layers.patches import PatchProjection
from patchloom.layers.residual import Block, Branch, Residual
from patchloom.layers.token_mixing import TokenMLP, UntiedTokenMLP, integer_factor
from patchloom.models.dense.pyramid import BlockOutputs, Level, Taps
from patchloom.models.network import Network, NetworkConfig
from patchloom_runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class MixerConfig(NetworkConfig):
    """Options of MLP-Mixer. `untied`, `groups` and `pyramid` are those of appendix A and can be combined."""

    depth: int = 12
    dim: int = 768
    patch_size: int = 16
    token_dim: int = 384
    channel_dim: int | None = None  # None: mlp_ratio · dim
    mlp_ratio: float = 4.0
    gelu: Literal["tanh", "exact"] = "tanh"
    untied: bool = False  # one token MLP per channel or group of channels
    groups: int = 1  # neighboring channels that are mixed as one vector
    pyramid: tuple[str, ...] = ()  # "block:tokens after it", blocks counted from 0; also a mapping
    dropout: float = 0.0  # after both layers of every MLP
    copies: tuple[int, int] = (1, 1)  # of the smaller network it was grown from, down and across
    drop_path_rule: Literal["uniform", "linear"] = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "pyramid", _parse_pyramid(self.pyramid))
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout is {self.dropout}, expected a probability below 1")
        if self.dim % self.groups:
            raise UsageError(f"groups is {self.groups}, expected a divisor of dim {self.dim}")
        if any(block >= self.depth for block in self.tokens_after):
            raise UsageError(f"pyramid is {', '.join(self.pyramid)}, expected blocks 0 to {self.depth - 1}")

    @property
    def tokens_after(self) -> dict[int, int]:
        """Number of tokens after each block of the pyramid."""
        return {int(block): int(tokens) for block, _, tokens in (step.partition(":") for step in self.pyramid)}


def _parse_pyramid(value: Any) -> tuple[str, ...]:
    """Return the steps as "block:tokens", sorted by block, from a mapping, a string or a list of strings."""
    steps = [f"{block}:{tokens}" for block, tokens in value.items()] if isinstance(value, Mapping) else value
    steps = [steps] if isinstance(steps, str) else list(steps)
    pairs = [str(step).split(":") for step in steps]
    if any(len(pair) != 2 or not all(part.strip().isdecimal() for part in pair) for pair in pairs):
        raise UsageError(f"pyramid is {value!r}, expected block:tokens, such as 3:49,7:16")
    numbers = sorted((int(block), int(tokens)) for block, tokens in pairs)
    if len({block for block, _ in numbers}) < len(numbers) or any(tokens < 1 for _, tokens in numbers):
        raise UsageError(f"pyramid is {value!r}, expected one step per block with at least one token each")
    return tuple(f"{block}:{tokens}" for block, tokens in numbers)


class Reduce(Branch):
    """A token MLP to fewer tokens, a step of a pyramid. It has no residual sum, since the shapes differ."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) → (B, N', C)."""
        return self.mix(self.norm(x))


class Mixer(Network):
    """Patch projection, mixer blocks, LayerNorm, average pooling, linear classifier."""

    Config = MixerConfig
    config: MixerConfig
    grid: tuple[int, int]
    pixel_mean = (0.5, 0.5, 0.5)
    pixel_std = (0.5, 0.5, 0.5)

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        c = config
        self.grid = c.grid(c.patch_size)
        self.stem = PatchProjection(c.channels, c.dim, c.patch_size)
        blocks, shape = [], tuple(self.grid)
        for i, drop in enumerate(c.drop_rates(c.depth)):
            outputs = c.tokens_after.get(i)
            blocks.append(self._block(shape, drop, outputs))
            shape = shape if outputs is None else (outputs,)
        self.blocks = nn.ModuleList(blocks)
        self.norm = LayerNorm(c.dim, eps=1e-6)
        lecun_normal_(self)
        self.classifier = self.make_classifier(c.dim)
        self.projector = self.make_projector()

    def _block(self, shape: tuple[int, ...], drop: float, outputs: int | None) -> Block:
        c = self.config
        activation: ActivationName = "gelu_tanh" if c.gelu == "tanh" else "gelu"
        shared: dict[str, Any] = {"activation": activation, "dropout": c.dropout}
        token_options = {**shared, "outputs": outputs, "groups": c.groups}
        mix: TokenMLP
        if c.untied:
            mix = UntiedTokenMLP(shape, c.token_dim, c.dim, **token_options)
        else:
            mix = TokenMLP(shape, c.token_dim, **token_options)
        kind = Residual if outputs is None else Reduce
        hidden = int(c.mlp_ratio * c.dim) if c.channel_dim is None else c.channel_dim
        return Block(
            tokens=kind(LayerNorm(c.dim, eps=1e-6), mix, None, drop),
            channels=Residual(LayerNorm(c.dim, eps=1e-6), MLP(c.dim, hidden, **shared), None, drop),
        )

    @property
    def classifier_starts_at_zero(self) -> bool:
        return True  # as in the authors' code

    @property
    def feature_dim(self) -> int:
        return self.config.dim

    @property
    def averages_patches(self) -> bool:
        return not self.config.pyramid

    def taps(self) -> Taps:
        """Return every block, at the patch stride; none with a pyramid, whose tokens have no positions."""
        return {} if self.config.pyramid else dict.fromkeys(self.blocks, Level(self.config.patch_size, self.config.dim))

    def features(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) → (B, N, C)."""
        return self.norm(self.run_blocks(images))

    def run_blocks(self, images: Tensor, outputs: BlockOutputs | None = None) -> Tensor:
        """(B, 3, H, W) → (B, N, C), before the last norm."""
        self.check_images(images)
        return self.run_all(self.blocks, self.stem(images).flatten(1, 2), outputs)

    @classmethod
    def config_at(cls, config: MixerConfig, size: tuple[int, int]) -> MixerConfig:
        """Return the config for another size.

        If the grid grows by integer factors, the hidden units grow with it (supplement C), and shrink again on the way
        back. Otherwise their number stays, as it always does with untied MLPs and with a pyramid, whose later blocks
        read as many tokens as before.
        """
        new = dataclasses.replace(config, image_size=size)
        old_grid, new_grid = config.grid(config.patch_size), new.grid(new.patch_size)
        if config.untied or config.pyramid:
            return new
        if grown := integer_factor(old_grid, new_grid):
            copies = (config.copies[0] * grown[0], config.copies[1] * grown[1])
            return dataclasses.replace(new, token_dim=config.token_dim * math.prod(grown), copies=copies)
        shrunk = integer_factor(new_grid, old_grid)
        if shrunk and integer_factor(shrunk, config.copies):
            copies = (config.copies[0] // shrunk[0], config.copies[1] // shrunk[1])
            return dataclasses.replace(new, token_dim=config.token_dim // math.prod(shrunk), copies=copies)
        return new


# Name → options that differ from the defaults (table 1).
VARIANTS: dict[str, dict[str, Any]] = {
    "mixer_s32": {"depth": 8, "dim": 512, "token_dim": 256, "channel_dim": 2048, "patch_size": 32},
    "mixer_s16": {"depth": 8, "dim": 512, "token_dim": 256, "channel_dim": 2048},
    "mixer_b32": {"depth": 12, "dim": 768, "token_dim": 384, "channel_dim": 3072, "patch_size": 32},
    "mixer_b16": {"depth": 12, "dim": 768, "token_dim": 384, "channel_dim": 3072},
    "mixer_l32": {"depth": 24, "dim": 1024, "token_dim": 512, "channel_dim": 4096, "patch_size": 32},
    "mixer_l16": {"depth": 24, "dim": 1024, "token_dim": 512, "channel_dim": 4096},
    "mixer_h14": {"depth": 32, "dim": 1280, "token_dim": 640, "channel_dim": 5120, "patch_size": 14},
}
