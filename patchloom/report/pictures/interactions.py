"""What the layers that mix patches have learned, as pictures: ResMLP's figures 2 and 3, Mixer's figures 4 and 5.

A row of ResMLP's matrix A says how much one patch takes from each of the h×w patches, so it is an image of h×w pixels;
so is a row of Mixer's first token-mixing matrix, which says what one hidden unit looks for. sMLPNet's matrices mix the
places of one row or one column, so they are shown whole.
Red is positive, blue negative, white zero; full colour is the largest weight shown of that layer, printed under it.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from markupsafe import Markup
from PIL import Image
from torch import Tensor, nn

from patchloom.layers.mlp import MLP
from patchloom.layers.residual import Block, Branch
from patchloom.layers.sparse_mlp import SparseMLP
from patchloom.layers.token_mixing import TokenLinear, TokenMLP
from patchloom.models.network import Network
from patchloom.report.charts import Series, line_chart
from patchloom.report.pictures.filters import mean_frequency
from patchloom.report.pictures.sheets import SheetCell, SheetRow, colored, enlarged, numbers, sheet, tiled
from patchloom_runtime.errors import UsageError

MATRIX = 84  # pixels of a whole matrix: 14 blocks fill a line
SMALL = 0.05  # of the largest weight: below counts as zero (ResMLP, section 3.3)

Mix = TypeVar("Mix", TokenLinear, TokenMLP)


class Sparsity(NamedTuple):
    """One point of figure 3."""

    layer: int  # from 1
    matrix: str  # A across patches; B and C, the first and second layer of the MLP
    share: float  # of the weights below 5 % of the largest, 0…1


def interaction_picture(network: nn.Module, *, central: int = 6, layers: Sequence[int] | None = None) -> Image.Image:
    """The rows of each layer's A for the `central`×`central` patches in the middle, placed as those patches lie.

    `layers` counts from 1; None is all of them.
    """
    blocks = []
    for number, mix in _chosen(_linear_mixers(network), layers).items():
        h, w = mix.grid
        rows = numbers(mix.weight).reshape(h, w, h, w)
        blocks.append((f"layer {number}", rows[_middle(h, central), _middle(w, central)]))
    return tiled(blocks)


def token_unit_picture(network: nn.Module, *, units: int = 64, layers: Sequence[int] | None = None) -> Image.Image:
    """Hidden units of Mixer's token MLPs as images, each before the one closest to its inverse, smooth ones first.

    `layers` counts from 1; None is the first three, the later ones have "no clearly identifiable structure".
    """
    mixers = _grid_mixers(network)
    if not mixers:
        raise UsageError(
            f"{type(network).__name__} has no MLP across its grid of patches. Give it a Mixer, such as mixer_s16."
        )
    blocks = []
    for number, mix in _chosen(mixers, list(mixers)[:3] if layers is None else layers).items():
        images = numbers(mix.weight1).reshape(-1, *mix.grid)
        order = opposite_pairs(images)[:units]
        columns = min(8, len(order))  # four pairs per line
        lines = len(order) // columns
        blocks.append((f"layer {number}", images[order[: lines * columns]].reshape(lines, columns, *mix.grid)))
    return tiled(blocks, group=2)


def row_column_picture(network: nn.Module) -> Image.Image:
    """sMLPNet's matrices, a line a stage: each block's along the width (W×W) above its along the height (H×H).

    Row i says what place i takes from each place of its row, or column: a diagonal is a place that keeps itself,
    stripes beside it a convolution.
    """
    stages = _sparse_mlps(network)
    if not any(stages):
        raise UsageError(
            f"{type(network).__name__} mixes no rows and columns. Give it an sMLPNet with global stages: smlpnet_t."
        )
    lines = []
    for number, units in enumerate(stages, 1):
        for direction, name in (("along_width", "rows"), ("along_height", "columns")):
            matrices = [numbers(getattr(unit, direction).weight) for unit in units]
            cells = [
                SheetCell(enlarged(colored(matrix), MATRIX), f"±{np.abs(matrix).max():.2g}") for matrix in matrices
            ]
            if cells:
                lines.append(SheetRow(f"stage {number}, {name}: {len(matrices[0])} places, {len(cells)} blocks", cells))
    return sheet(lines)


def sparsity(network: nn.Module) -> list[Sparsity]:
    """How much of A, B and C is next to nothing, layer by layer."""
    found = []
    blocks = _blocks(network)
    for number, mix in _linear_mixers(network).items():
        matrices: dict[str, Tensor] = {"A": mix.weight}
        channels = blocks[number - 1].channels
        if isinstance(channels, Branch) and isinstance(channels.mix, MLP):
            matrices |= {"B": channels.mix.fc1.weight, "C": channels.mix.fc2.weight}
        for name, weight in matrices.items():
            size = np.abs(numbers(weight))
            found.append(Sparsity(number, name, float(np.mean(size < SMALL * size.max()))))
    return found


def sparsity_chart(network: nn.Module) -> Markup:
    """Figure 3: a line a matrix, percent over layers."""
    found = sparsity(network)
    names = sorted({point.matrix for point in found})
    return line_chart(
        [
            Series(name, [(point.layer, 100 * point.share) for point in found if point.matrix == name], color)
            for color, name in enumerate(names)
        ],
        x_label="layer",
        from_zero=True,
    )


def has_patch_matrices(network: nn.Module) -> bool:
    """Whether `interaction_picture` and `sparsity` have something to show."""
    return bool(_mixers(network, TokenLinear))


def has_token_units(network: nn.Module) -> bool:
    """Whether `token_unit_picture` has something to show."""
    return bool(_grid_mixers(network))


def has_row_matrices(network: nn.Module) -> bool:
    """Whether `row_column_picture` has something to show."""
    return any(_sparse_mlps(network))


def opposite_pairs(images: np.ndarray) -> list[int]:
    """An order of images (U, h, w): the smoothest left, then the one closest to its inverse, until none is left."""
    flat = images.reshape(len(images), -1)
    flat = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-30)
    alike = flat @ flat.T
    left, order = list(np.argsort(mean_frequency(images), kind="stable")), []
    while left:
        order.append(int(left.pop(0)))
        if left:
            partner = min(left, key=lambda unit: alike[order[-1], unit])
            left.remove(partner)
            order.append(int(partner))
    return order


def _middle(length: int, count: int) -> slice:
    """The `count` places in the middle of `length`, or all of them."""
    start = max(0, (length - count) // 2)
    return slice(start, start + min(count, length))


def _blocks(network: nn.Module) -> list[Block]:
    return [module for module in network.modules() if isinstance(module, Block)]


def _sparse_mlps(network: nn.Module) -> list[list[SparseMLP]]:
    """Of each stage of a network that has stages."""
    stages = network.stages_in_order() if isinstance(network, Network) else []
    return [[unit for unit in stage.modules() if isinstance(unit, SparseMLP)] for stage in stages]


def _grid_mixers(network: nn.Module) -> dict[int, TokenMLP]:
    """Those that read a grid of patches: no joined channels, no MLP per channel, no tokens inside a pyramid."""
    shared = {number: mix for number, mix in _mixers(network, TokenMLP).items() if mix.weight1.ndim == 2}
    return {number: mix for number, mix in shared.items() if len(mix.axes) == 2}


def _mixers(network: nn.Module, kind: type[Mix]) -> dict[int, Mix]:
    """Layer number → its token mixer, of those layers that have one of this kind."""
    branches = {number: block.tokens for number, block in enumerate(_blocks(network), 1)}
    mixers = {number: branch.mix for number, branch in branches.items() if isinstance(branch, Branch)}
    return {number: mix for number, mix in mixers.items() if isinstance(mix, kind)}


def _linear_mixers(network: nn.Module) -> dict[int, TokenLinear]:
    mixers = _mixers(network, TokenLinear)
    if not mixers:
        raise UsageError(
            f"{type(network).__name__} has no matrix across all patches. Give it a ResMLP with "
            'communication="linear", such as resmlp_s12; token_unit_picture shows a Mixer.'
        )
    return mixers


def _chosen(mixers: dict[int, Mix], layers: Sequence[int] | None) -> dict[int, Mix]:
    if layers is None:
        return mixers
    if unknown := [number for number in layers if number not in mixers]:
        known = f"{min(mixers)} to {max(mixers)}"
        raise UsageError(f"The network has no such layer {', '.join(map(str, unknown))}. Its layers are {known}.")
    return {number: mixers[number] for number in layers}
