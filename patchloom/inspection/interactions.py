"""What the layers that mix patches have learned, as pictures: ResMLP's figures 2 and 3, Mixer's figure 4.

A row of ResMLP's matrix A says how much one patch takes from each of the h×w patches, so it is an image of h×w pixels;
so is a row of Mixer's first token-mixing matrix, which says what one hidden unit looks for.
Red is positive, blue negative, white zero; full colour is the largest weight shown of that layer, printed under it.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from markupsafe import Markup
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from patchloom.errors import UsageError
from patchloom.inspection.charts import Series, line_chart
from patchloom.layers.mlp import MLP
from patchloom.layers.residual import Block, Branch
from patchloom.layers.token_mixing import TokenLinear, TokenMLP

NEGATIVE, POSITIVE = np.array([33, 102, 172]), np.array([178, 24, 43])
PAPER, SEAM, INK = (245, 245, 245), (110, 110, 110), (40, 40, 40)
TILE = 32  # pixels a small image is brought to, by a whole factor
GAP, MARGIN, LABEL = 2, 12, 22  # pixels between small images, around blocks, and for the text under a block
BLOCKS_A_LINE = 6
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
        rows = _numbers(mix.weight).reshape(h, w, h, w)
        blocks.append((f"layer {number}", rows[_middle(h, central), _middle(w, central)]))
    return tiled(blocks)


def token_unit_picture(network: nn.Module, *, units: int = 64, layers: Sequence[int] | None = None) -> Image.Image:
    """Hidden units of Mixer's token MLPs as images, each before the one closest to its inverse, smooth ones first.

    `layers` counts from 1; None is the first three, the later ones have "no clearly identifiable structure".
    """
    mixers = {number: mix for number, mix in _mixers(network, TokenMLP).items() if len(mix.grid) == 2}
    if not mixers:
        raise UsageError(
            f"{type(network).__name__} has no MLP across its grid of patches. Give it a Mixer, such as mixer_s16."
        )
    blocks = []
    for number, mix in _chosen(mixers, list(mixers)[:3] if layers is None else layers).items():
        images = _numbers(mix.weight1).reshape(-1, *mix.grid)
        order = opposite_pairs(images)[:units]
        columns = min(8, len(order))  # four pairs a line
        lines = len(order) // columns
        blocks.append((f"layer {number}", images[order[: lines * columns]].reshape(lines, columns, *mix.grid)))
    return tiled(blocks)


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
            size = np.abs(_numbers(weight))
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
    )


def opposite_pairs(images: np.ndarray) -> list[int]:
    """An order of images (U, h, w): the smoothest left, then the one closest to its inverse, until none is left."""
    power = np.abs(np.fft.fft2(images)) ** 2
    radius = np.hypot(*np.meshgrid(*map(np.fft.fftfreq, images.shape[1:]), indexing="ij"))
    frequency = (power * radius).sum(axis=(1, 2)) / np.maximum(power.sum(axis=(1, 2)), 1e-30)
    flat = images.reshape(len(images), -1)
    flat = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-30)
    alike = flat @ flat.T
    left, order = list(np.argsort(frequency, kind="stable")), []
    while left:
        order.append(int(left.pop(0)))
        if left:
            partner = min(left, key=lambda unit: alike[order[-1], unit])
            left.remove(partner)
            order.append(int(partner))
    return order


def tiled(blocks: Sequence[tuple[str, np.ndarray]]) -> Image.Image:
    """Labelled blocks of small images (lines, columns, h, w), six blocks a line, each coloured on its own scale."""
    pictures = [(f"{label}   ±{np.abs(tiles).max():.2g}", _block(tiles)) for label, tiles in blocks]
    across = min(BLOCKS_A_LINE, len(pictures))
    width = max(picture.width for _, picture in pictures) + MARGIN
    height = max(picture.height for _, picture in pictures) + LABEL + MARGIN
    lines = -(-len(pictures) // across)
    sheet = Image.new("RGB", (MARGIN + across * width, MARGIN + lines * height), PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for i, (label, picture) in enumerate(pictures):
        x, y = MARGIN + i % across * width, MARGIN + i // across * height
        sheet.paste(picture, (x, y))
        draw.text((x + picture.width / 2, y + picture.height + 4), label, fill=INK, font=font, anchor="ma")
    return sheet


def _block(tiles: np.ndarray) -> Image.Image:
    lines, columns, h, w = tiles.shape
    factor = max(1, TILE // max(h, w))
    size = (w * factor, h * factor)
    step = (size[0] + GAP, size[1] + GAP)
    block = Image.new("RGB", (columns * step[0] - GAP, lines * step[1] - GAP), SEAM)
    colors = _colored(tiles)
    for i in range(lines):
        for j in range(columns):
            small = Image.fromarray(colors[i, j]).resize(size, Image.Resampling.NEAREST)
            block.paste(small, (j * step[0], i * step[1]))
    return block


def _colored(values: np.ndarray) -> np.ndarray:
    """Any shape → that shape × 3 bytes, white at zero."""
    strength = (values / (np.abs(values).max() or 1.0))[..., None]
    full = np.where(strength < 0, NEGATIVE, POSITIVE)
    return np.rint(255 + np.abs(strength) * (full - 255)).astype(np.uint8)


def _middle(length: int, count: int) -> slice:
    """The `count` places in the middle of `length`, or all of them."""
    start = max(0, (length - count) // 2)
    return slice(start, start + min(count, length))


def _blocks(network: nn.Module) -> list[Block]:
    return [module for module in network.modules() if isinstance(module, Block)]


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


def _numbers(weight: Tensor) -> np.ndarray:
    return weight.detach().double().cpu().numpy()
