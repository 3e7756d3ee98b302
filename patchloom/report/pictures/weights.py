"""Pictures of weights: what mixes patches (ResMLP figures 2 and 3, Mixer figures 4 and 5), and the filters of the first
layer (Mixer figure 6).

A row of ResMLP's matrix A has the weights with which one patch takes from each of the h×w patches, so it is an image of
h×w pixels. So is a row of Mixer's first token-mixing matrix, which belongs to one hidden unit. sMLPNet's matrices mix
the places of one row or one column, so they are drawn whole. Red is positive, blue negative, white zero; full color is
the largest weight of the layer, printed below it.

A unit of the patch projection has one weight per pixel and channel of a patch, so with three channels it is a small
color image. Gray is zero, and since inputs are normalized, gray is also the mean color.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from markupsafe import Markup
from PIL import Image, ImageOps
from torch import Tensor, nn

from patchloom.layers.mlp import MLP
from patchloom.layers.patches import PatchProjection
from patchloom.layers.residual import Block, Branch
from patchloom.layers.sparse_mlp import SparseMLP
from patchloom.layers.token_mixing import TokenLinear, TokenMLP
from patchloom.models.network import Network
from patchloom.report.charts import Series, line_chart
from patchloom.report.pictures.sheets import (
    MARGIN,
    PAPER,
    SheetCell,
    SheetRow,
    colored,
    enlarged,
    joined,
    numbers,
    sheet,
    tiled,
)
from patchloom_runtime.errors import UsageError

MATRIX = 84  # pixels of a whole matrix; 14 blocks fill a line
SMALL = 0.05  # of the largest weight; smaller weights count as zero (ResMLP, section 3.3)
FILTER, SPACE = 48, 6  # pixels of a filter (enlarged by a whole factor), and between filters
FILTER_COLUMNS = 16

Mix = TypeVar("Mix", TokenLinear, TokenMLP)


class Sparsity(NamedTuple):
    """One point of ResMLP figure 3."""

    layer: int  # from 1
    matrix: str  # A across patches; B and C, the first and second layer of the MLP
    share: float  # of the weights below 5 % of the largest, 0…1


def interaction_picture(network: nn.Module, *, central: int = 6, layers: Sequence[int] | None = None) -> Image.Image:
    """Draw the rows of each layer's A for the `central`×`central` patches in the middle, in the order of the patches.

    `layers` counts from 1; None draws all.
    """
    blocks = []
    for number, mix in _chosen(_linear_mixers(network), layers).items():
        h, w = mix.grid
        rows = numbers(mix.weight).reshape(h, w, h, w)
        blocks.append((f"layer {number}", rows[_middle(h, central), _middle(w, central)]))
    return tiled(blocks)


def token_unit_picture(network: nn.Module, *, units: int = 64, layers: Sequence[int] | None = None) -> Image.Image:
    """Draw hidden units of Mixer's token MLPs, each followed by the one closest to its inverse, smooth ones first.

    `layers` counts from 1; None draws the first three, since later ones have "no clearly identifiable structure".
    """
    mixers = _grid_mixers(network)
    if not mixers:
        raise UsageError(
            f"{type(network).__name__} has no MLP across its grid of patches. Use a Mixer, such as mixer_s16."
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
    """Draw sMLPNet's matrices, one line per stage: those along the width (W×W) above those along the height (H×H).

    Row i has the weights with which place i takes from each place of its row or column: a diagonal keeps the place
    itself, and stripes next to it are a convolution.
    """
    stages = _sparse_mlps(network)
    if not any(stages):
        raise UsageError(
            f"{type(network).__name__} mixes no rows and columns. Use an sMLPNet with global stages, such as smlpnet_t."
        )
    rows = []
    for number, units in enumerate(stages, 1):
        for direction, name in (("along_width", "rows"), ("along_height", "columns")):
            matrices = [numbers(getattr(unit, direction).weight) for unit in units]
            cells = [
                SheetCell(enlarged(colored(matrix), MATRIX), f"±{np.abs(matrix).max():.2g}") for matrix in matrices
            ]
            if cells:
                rows.append(SheetRow(f"stage {number}, {name}: {len(matrices[0])} places, {len(cells)} blocks", cells))
    return sheet(rows)


def sparsity(network: nn.Module) -> list[Sparsity]:
    """Return the share of small weights of A, B and C, layer by layer."""
    points = []
    blocks = _blocks(network)
    for number, mix in _linear_mixers(network).items():
        matrices: dict[str, Tensor] = {"A": mix.weight}
        channels = blocks[number - 1].channels
        if isinstance(channels, Branch) and isinstance(channels.mix, MLP):
            matrices |= {"B": channels.mix.fc1.weight, "C": channels.mix.fc2.weight}
        for name, weight in matrices.items():
            size = np.abs(numbers(weight))
            points.append(Sparsity(number, name, float(np.mean(size < SMALL * size.max()))))
    return points


def sparsity_chart(network: nn.Module) -> Markup:
    """Draw ResMLP figure 3: the share of small weights in percent over layers, one line per matrix."""
    points = sparsity(network)
    names = sorted({point.matrix for point in points})
    return line_chart(
        [
            Series(name, [(point.layer, 100 * point.share) for point in points if point.matrix == name], color)
            for color, name in enumerate(names)
        ],
        x_label="layer",
        y_label="small weights, %",
        from_zero=True,
    )


def filter_picture(network: nn.Module, *, units: int = 128) -> Image.Image:
    """Draw the `units` strongest filters of the first layer, smooth ones first, each on its own scale."""
    layer = _first_layer(network)
    if layer is None:
        raise UsageError(f"{type(network).__name__} has no layer over pixels, so it has no filters. Use a network.")
    filters = numbers(layer.weight)  # (C, channels, h, w)
    strongest = np.argsort(-np.square(filters).sum(axis=(1, 2, 3)), kind="stable")[:units]
    chosen = filters[strongest]
    chosen = chosen[np.argsort(mean_frequency(chosen), kind="stable")]
    tiles = np.stack([_filter_colors(unit) for unit in chosen])  # (units, h, w, 3)
    columns = min(FILTER_COLUMNS, len(tiles))
    lines = len(tiles) // columns
    tiles = tiles[: lines * columns].reshape(lines, columns, *tiles.shape[1:])
    return ImageOps.expand(joined(tiles, FILTER, gap=SPACE, seam=PAPER), MARGIN, PAPER)


def has_patch_matrices(network: nn.Module) -> bool:
    """Return whether `interaction_picture` and `sparsity` apply."""
    return bool(_mixers(network, TokenLinear))


def has_token_units(network: nn.Module) -> bool:
    """Return whether `token_unit_picture` applies."""
    return bool(_grid_mixers(network))


def has_row_matrices(network: nn.Module) -> bool:
    """Return whether `row_column_picture` applies."""
    return any(_sparse_mlps(network))


def has_filters(network: nn.Module) -> bool:
    """Return whether `filter_picture` applies."""
    return _first_layer(network) is not None


def opposite_pairs(images: np.ndarray) -> list[int]:
    """Order images (U, h, w): the smoothest one left, then the one closest to its inverse, until none is left."""
    flat = images.reshape(len(images), -1)
    flat = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-30)
    cosines = flat @ flat.T
    left, order = list(np.argsort(mean_frequency(images), kind="stable")), []
    while left:
        order.append(int(left.pop(0)))
        if left:
            partner = min(left, key=lambda unit: cosines[order[-1], unit])
            left.remove(partner)
            order.append(int(partner))
    return order


def mean_frequency(images: np.ndarray) -> np.ndarray:
    """Return the mean frequency of images (U, ..., h, w), weighted by power, (U,); 0 for a constant image."""
    power = np.abs(np.fft.fft2(images)) ** 2
    radius = np.hypot(*np.meshgrid(*map(np.fft.fftfreq, images.shape[-2:]), indexing="ij"))
    axes = tuple(range(1, images.ndim))
    return np.asarray((power * radius).sum(axis=axes) / np.maximum(power.sum(axis=axes), 1e-30))


def _filter_colors(unit: np.ndarray) -> np.ndarray:
    """Return a filter (channels, h, w) as colors (h, w, 3); other than three channels are summed and drawn signed."""
    if len(unit) != 3:
        return colored(unit.sum(axis=0))
    level = 0.5 + 0.5 * unit / (np.abs(unit).max() or 1.0)
    return np.rint(255 * level.transpose(1, 2, 0)).astype(np.uint8)


def _first_layer(network: nn.Module) -> PatchProjection | nn.Conv2d | None:
    """Return the patch projection, or the first convolution of a stem."""
    for module in network.modules():
        if isinstance(module, PatchProjection | nn.Conv2d):
            return module
    return None


def _middle(length: int, count: int) -> slice:
    """Return the `count` places in the middle of `length`, or all."""
    start = max(0, (length - count) // 2)
    return slice(start, start + min(count, length))


def _blocks(network: nn.Module) -> list[Block]:
    return [module for module in network.modules() if isinstance(module, Block)]


def _sparse_mlps(network: nn.Module) -> list[list[SparseMLP]]:
    """Return the sparse MLPs of each stage, for a network with stages."""
    stages = network.stages_in_order() if isinstance(network, Network) else []
    return [[unit for unit in stage.modules() if isinstance(unit, SparseMLP)] for stage in stages]


def _grid_mixers(network: nn.Module) -> dict[int, TokenMLP]:
    """Return the token MLPs over a grid of patches: not over joined channels, per channel, or in a pyramid."""
    shared = {number: mix for number, mix in _mixers(network, TokenMLP).items() if mix.weight1.ndim == 2}
    return {number: mix for number, mix in shared.items() if len(mix.axes) == 2}


def _mixers(network: nn.Module, kind: type[Mix]) -> dict[int, Mix]:
    """Return layer number → token mixer, for the layers with one of this kind."""
    branches = {number: block.tokens for number, block in enumerate(_blocks(network), 1)}
    mixers = {number: branch.mix for number, branch in branches.items() if isinstance(branch, Branch)}
    return {number: mix for number, mix in mixers.items() if isinstance(mix, kind)}


def _linear_mixers(network: nn.Module) -> dict[int, TokenLinear]:
    mixers = _mixers(network, TokenLinear)
    if not mixers:
        raise UsageError(
            f"{type(network).__name__} has no matrix across all patches. Use a ResMLP with "
            'communication="linear", such as resmlp_s12; for a Mixer, use token_unit_picture.'
        )
    return mixers


def _chosen(mixers: dict[int, Mix], layers: Sequence[int] | None) -> dict[int, Mix]:
    if layers is None:
        return mixers
    if unknown := [number for number in layers if number not in mixers]:
        known = f"{min(mixers)} to {max(mixers)}"
        raise UsageError(f"the network has no layer {', '.join(map(str, unknown))}; its layers are {known}")
    return {number: mixers[number] for number in layers}
