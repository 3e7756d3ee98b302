"""Norms of residual branches relative to their input, ‖scale · mix(norm(x))‖ / ‖x‖, layer by layer (thesis 3.6).

Norms are over all tokens and channels of an image, and the ratio is averaged over images. In a class-attention layer, x
is the class tokens only, because the layer changes nothing else.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from markupsafe import Markup
from torch import Tensor, nn

from patchloom.evaluation.classification import in_eval_mode
from patchloom.layers.residual import Block, Branch, ClassBlock, ClassResidual, Parallel, Residual
from patchloom.models.network import Network
from patchloom.report.charts import LINE_COLORS, Series, line_chart
from patchloom.runs.branch_norms import Norms
from patchloom_runtime.errors import UsageError

LEAST_OPACITY = 0.15  # of a run's first epochs


class BranchNorm(NamedTuple):
    """One point of figure 3.6."""

    layer: int  # from 1; class-attention layers are counted separately
    branch: str  # "tokens", "channels", "both" (PatchConvNet's block), "class tokens", "class channels"
    ratio: float


@torch.no_grad()
def branch_norms(network: Network, images: Tensor) -> list[BranchNorm]:
    """Return the ratio of every residual branch, in network order; `images` (B, channels, H, W) are normalized.

    Parallel branches (DeiT III) have the same layer and name.
    """
    branches = _residual_branches(network)
    ratios: dict[int, Tensor] = {}
    with _recording_ratios([branch for _, _, branch in branches], ratios), in_eval_mode(network):
        network.features(images)
    return [BranchNorm(layer, name, ratios[id(branch)].mean().item()) for layer, name, branch in branches]


def norms_by_layer(network: Network, images: Tensor) -> Norms:
    """Return kind of branch → ratio per layer (mean of parallel branches), without class-attention layers."""
    points = [point for point in branch_norms(network, images) if not point.branch.startswith("class")]
    if not points:
        raise UsageError(
            f"{type(network).__name__} has no residual branches of patchloom, so there are no norms to draw."
        )
    lines: dict[str, dict[int, list[float]]] = {}
    for point in points:
        lines.setdefault(point.branch, {}).setdefault(point.layer, []).append(point.ratio)
    means = {name: [sum(ratios) / len(ratios) for ratios in layers.values()] for name, layers in lines.items()}
    return {name: [ratio if math.isfinite(ratio) else None for ratio in ratios] for name, ratios in means.items()}


def branch_norm_chart(network: Network, images: Tensor) -> Markup:
    """Draw the ratios in percent over layers, one line per kind of branch."""
    norms = norms_by_layer(network, images)
    series = [Series(name, _percent(ratios), color) for color, (name, ratios) in enumerate(norms.items())]
    return line_chart(series, x_label="layer", y_label="branch / input, %", from_zero=True)


def branch_epoch_charts(runs: Mapping[str, Mapping[int, Norms]]) -> list[tuple[str, Markup]]:
    """Draw figure 3.6: one chart (kind of branch, SVG) of the ratios in percent over layers, one color per run.

    `runs` has the norms of some epochs of each run; later epochs are darker.
    """
    charts: dict[str, list[Series]] = {}
    for color, (run, epochs) in enumerate(runs.items()):
        for place, (epoch, norms) in enumerate(epochs.items(), start=1):
            strength = LEAST_OPACITY + (1 - LEAST_OPACITY) * place / len(epochs)
            for kind, ratios in norms.items():
                name = f"{run}, epoch {epoch}" if len(runs) > 1 else f"epoch {epoch}"
                listed = place == len(epochs) or (place == 1 and len(runs) == 1)
                line = Series(name, _percent(ratios), color % LINE_COLORS, strength, listed)
                charts.setdefault(kind, []).append(line)
    return [
        (kind, line_chart(lines, x_label="layer", y_label="branch / input, %", from_zero=True))
        for kind, lines in charts.items()
    ]


def _percent(ratios: Sequence[float | None]) -> list[tuple[float, float]]:
    return [(layer, math.nan if ratio is None else 100 * ratio) for layer, ratio in enumerate(ratios, start=1)]


def has_branches(network: nn.Module) -> bool:
    """Return whether the trunk has residual branches."""
    return any(not name.startswith("class") for _, name, _ in _residual_branches(network))


def _residual_branches(network: nn.Module) -> list[tuple[int, str, Branch]]:
    """Return (layer, name, branch) in network order."""
    branches: list[tuple[int, str, Branch]] = []
    layers, class_layers, known = 0, 0, set()
    for module in network.modules():
        if isinstance(module, Block):
            layers += 1
            parts = [("tokens", module.tokens), ("channels", module.channels)]
            branches += [(layers, name, branch) for name, part in parts for branch in _parallel(part)]
        elif isinstance(module, ClassBlock):
            class_layers += 1
            branches.append((class_layers, "class tokens", module.attend))
            branches.append((class_layers, "class channels", module.channels))
        elif isinstance(module, Residual | ClassResidual) and id(module) not in known:
            layers += 1
            branches.append((layers, "both", module))
        known = {id(branch) for _, _, branch in branches}
    return branches


def _parallel(part: nn.Module | None) -> list[Branch]:
    if isinstance(part, Parallel):
        return [branch for branch in part if isinstance(branch, Branch)]
    return [part] if isinstance(part, Residual) else []


@contextmanager
def _recording_ratios(branches: list[Branch], ratios: dict[int, Tensor]) -> Iterator[None]:
    """Record the ratios of each branch, one per image, under its id, in forward passes while open."""
    hooks: list[Any] = []
    inputs: dict[int, Tensor] = {}
    for branch in branches:
        hooks.append(branch.norm.register_forward_pre_hook(_keep_input(branch, inputs)))
        hooks.append(branch.mix.register_forward_hook(_divide(branch, inputs, ratios)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _keep_input(branch: Branch, inputs: dict[int, Tensor]) -> Callable[..., None]:
    def hook(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs[id(branch)] = arguments[0]

    return hook


def _divide(branch: Branch, inputs: dict[int, Tensor], ratios: dict[int, Tensor]) -> Callable[..., None]:
    """Measure in a hook, since the addition that follows may overwrite the branch."""

    def hook(_module: nn.Module, _arguments: tuple[Tensor, ...], mixed: Tensor) -> None:
        x = inputs.pop(id(branch))[:, : mixed.shape[1]]  # class tokens, which precede the patches
        added = mixed if branch.scale is None else mixed * branch.scale
        ratios[id(branch)] = added.flatten(1).float().norm(dim=1) / x.flatten(1).float().norm(dim=1).clamp(min=1e-30)

    return hook
