"""A drawing of a network from its modules: what an image passes through, from the stem to the classifier.

A box per part of the network, in the order of its construction; equal blocks in a row are drawn once, with their
number. A residual branch is written as the sentence that it computes.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from markupsafe import Markup
from torch import nn

from patchloom.layers.residual import Branch, PostNormResidual
from patchloom.models.catalog import human
from patchloom.models.network import Network
from patchloom.report.charts.svg import LETTER, svg_box, svg_text

LINE, PADDING, ARROW, INDENT = 17, 10, 20, 14  # pixels
DEEPEST = 3  # levels of modules inside a part that are written


class DiagramPart(NamedTuple):
    """One box: its title and the lines inside, each with its depth."""

    title: str
    lines: tuple[tuple[int, str], ...] = ()


def network_diagram(network: Network) -> Markup:
    """Return the drawing of a network as SVG."""
    parts = diagram_parts(network)
    letters = max(len(text) + 2 * depth for part in parts for depth, text in ((0, part.title), *part.lines))
    width = 2 * PADDING + LETTER * letters + INDENT
    drawn, y = [], float(PADDING)
    for number, part in enumerate(parts):
        if number:
            middle = PADDING + width / 2
            drawn.append(svg_text(middle, y + ARROW - 6, "↓", "middle"))
            y += ARROW
        height = 2 * PADDING + LINE * len(part.lines) + 6
        drawn += [svg_box(PADDING, y, width, height, "track"), svg_text(2 * PADDING, y + LINE, part.title)]
        for line, (depth, text) in enumerate(part.lines, 2):
            drawn.append(svg_text(2 * PADDING + INDENT * (depth + 1), y + LINE * line, text))
        y += height
    frame = Markup('<svg viewBox="0 0 {0:.0f} {1:.0f}" width="{0:.0f}" role="img">')
    return frame.format(width + 2 * PADDING, y + PADDING) + Markup("").join(drawn) + Markup("</svg>")


def diagram_parts(network: Network) -> list[DiagramPart]:
    """Return the boxes of a network, from the image to the classes."""
    c = network.config
    parts = [DiagramPart(f"{c.name}: images of {c.channels}×{c.image_size[0]}×{c.image_size[1]}")]
    for name, child in network.named_children():
        if count := _parameters(child):
            lines = tuple(_inside(child, 0))
            head = f"{name}: {_title(child)}, {human(count)} parameters"
            parts.append(DiagramPart(head, lines))
    return [*parts, DiagramPart(f"{network.num_classes:,} classes" if network.num_classes else "features")]


def _inside(module: nn.Module, depth: int) -> Iterator[tuple[int, str]]:
    """Yield the lines of a module: its children, with equal neighbors of a list counted."""
    if depth >= DEEPEST or isinstance(module, Branch):
        return
    children = [(name, child) for name, child in module.named_children() if _parameters(child)]
    if not isinstance(module, nn.ModuleList):
        for name, child in children:
            yield depth, f"{name}: {_title(child)}"
            yield from _inside(child, depth + 1)
        return
    for _, group in groupby((child for _, child in children), key=lambda child: (type(child), _shapes(child))):
        equal = list(group)
        yield depth, f"{f'{len(equal)} × ' if len(equal) > 1 else ''}{_title(equal[0])}"
        yield from _inside(equal[0], depth + 1)


def _title(module: nn.Module) -> str:
    """Return the name of a module, or the sentence of a residual branch."""
    if isinstance(module, nn.ModuleList):
        return f"{len(module)} in a row"
    if not isinstance(module, Branch):
        return type(module).__name__
    scale = "scale · " if module.scale is not None else ""
    mix, norm = type(module.mix).__name__, type(module.norm).__name__
    if isinstance(module, PostNormResidual):
        return f"{norm}(x + {scale}{mix}(x))"
    return f"x + {scale}{mix}({'x' if isinstance(module.norm, nn.Identity) else f'{norm}(x)'})"


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shapes(module: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
