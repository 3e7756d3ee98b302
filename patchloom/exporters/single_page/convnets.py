"""Trunks of timm and torchvision convnets as operations of the page, written from the nodes that torch.fx traces.

A feature map is a value of H·W rows and C columns, together with its grid (H, W).
"""

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from patchloom.exporters.single_page.layers import Grid, activate, add, affine, linear, mean
from patchloom.exporters.single_page.program import PageProgram, Value
from patchloom_runtime.errors import UsageError

ACTIVATIONS: dict[Any, str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.Hardswish: "hardswish",
    nn.Hardsigmoid: "hardsigmoid",
    nn.Sigmoid: "sigmoid",
    nn.GELU: "gelu",
    F.relu: "relu",
    torch.relu: "relu",
    F.relu6: "relu6",
    F.silu: "silu",
    F.hardswish: "hardswish",
    F.hardsigmoid: "hardsigmoid",
    torch.sigmoid: "sigmoid",
    F.gelu: "gelu",
}
NOTHING = (nn.Identity, nn.Dropout, nn.Dropout2d)
SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")
PRODUCTS = (operator.mul, operator.imul, torch.mul, "mul")


class FeatureMap(NamedTuple):
    """A value with the grid of its rows."""

    value: Value
    grid: Grid


def write_convnet(program: PageProgram, trunk: nn.Module, image: Value, size: Grid) -> tuple[Value, Grid]:
    """Write a trunk and return its last map. Raises UsageError for a layer that the page has no operation for."""
    try:
        graph = fx.symbolic_trace(trunk.eval()).graph
    except Exception as error:  # third-party networks may do anything with their inputs
        raise UsageError(f"a page cannot run this convnet: its graph cannot be traced ({error})") from error
    modules, known = dict(trunk.named_modules()), dict[fx.Node, FeatureMap]()
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = FeatureMap(image, size)
        elif node.op == "output":
            last = known[node.args[0]]
            return last.value, last.grid
        else:
            called = modules[str(node.target)] if node.op == "call_module" else node.target
            inputs = [known[one] for one in node.args if isinstance(one, fx.Node) and one in known]
            known[node] = _write_node(program, called, inputs, node)
    raise UsageError("a page cannot run this convnet: its graph has no output")


def _write_node(program: PageProgram, called: Any, inputs: list[FeatureMap], node: fx.Node) -> FeatureMap:
    kind = type(called) if isinstance(called, nn.Module) else called
    if not inputs:
        raise _unknown(kind)
    first, *others = inputs
    x, grid = first
    if isinstance(called, nn.Conv2d):
        return _convolution(program, called, first)
    if isinstance(called, nn.MaxPool2d | nn.AvgPool2d):
        return _pooled(program, called, first)
    if kind in ACTIVATIONS:
        return FeatureMap(activate(program, x, ACTIVATIONS[kind]), grid)
    if isinstance(called, nn.BatchNorm2d) and called.running_mean is not None and called.running_var is not None:
        weight = called.weight * torch.rsqrt(called.running_var + called.eps)
        return FeatureMap(affine(program, x, weight, called.bias - called.running_mean * weight), grid)
    if isinstance(called, NOTHING) or getattr(kind, "__name__", "") == "stochastic_depth":
        return first
    if _averages(called, node):
        return FeatureMap(mean(program, x), (1, 1))
    if kind in SUMS and len(others) == 1 and others[0].grid == grid:
        return FeatureMap(add(program, x, others[0].value), grid)
    if kind in PRODUCTS and len(others) == 1:
        large, gate = (first, others[0]) if x.rows >= others[0].value.rows else (others[0], first)
        if gate.grid == (1, 1):
            out = program.value(large.value.rows, large.value.columns)
            return FeatureMap(program.run("multiply", out, large.value, gate.value), large.grid)
    raise _unknown(kind)


def _averages(called: Any, node: fx.Node) -> bool:
    """Return whether this is the mean over all positions that keeps four dimensions."""
    if isinstance(called, nn.AdaptiveAvgPool2d):
        return called.output_size in (1, (1, 1))
    if called is F.adaptive_avg_pool2d:
        return node.args[1] in (1, (1, 1))
    return called == "mean" and node.args[1] in ((2, 3), [2, 3]) and bool(node.kwargs.get("keepdim"))


def _convolution(program: PageProgram, layer: nn.Conv2d, x: FeatureMap) -> FeatureMap:
    (kernel, across), (stride, other), padding = layer.kernel_size, layer.stride, layer.padding
    weight, bias = layer.weight, layer.bias
    depthwise = layer.groups == layer.in_channels == layer.out_channels
    plain = isinstance(padding, tuple) and padding[0] == padding[1] and set(layer.dilation) == {1}
    if not plain or kernel != across or stride != other or layer.padding_mode != "zeros":
        raise UsageError(f"a page has no operation for the convolution {layer} of this network")
    if not depthwise and layer.groups > 1:
        weight, depthwise = _ungrouped(layer), False
    if kernel == 1 and stride == 1 and not depthwise:
        return FeatureMap(linear(program, x.value, weight.flatten(1), bias), x.grid)
    grid, settings = _window(x.grid, kernel, stride, int(padding[0]))
    rows = grid[0] * grid[1]
    if depthwise:
        taps = program.table(weight.flatten(1).T.contiguous())  # (kernel², C)
        added = None if bias is None else program.vector(bias)
        out = program.value(rows, x.value.columns)
        return FeatureMap(program.run("filtered", out, x.value, taps=taps, bias=added, **settings), grid)
    near = program.run("windows", program.value(rows, kernel * kernel * x.value.columns), x.value, **settings)
    return FeatureMap(linear(program, near, weight.permute(0, 2, 3, 1).flatten(1), bias), grid)


def _ungrouped(layer: nn.Conv2d) -> Tensor:
    """Return the weight of a grouped convolution as that of an ungrouped one, with zeros between groups."""
    whole = layer.weight.new_zeros(layer.out_channels, layer.in_channels, *layer.kernel_size)
    outputs, inputs = layer.out_channels // layer.groups, layer.in_channels // layer.groups
    for group in range(layer.groups):
        rows, columns = slice(group * outputs, (group + 1) * outputs), slice(group * inputs, (group + 1) * inputs)
        whole[rows, columns] = layer.weight[rows]
    return whole


def _pooled(program: PageProgram, layer: nn.MaxPool2d | nn.AvgPool2d, x: FeatureMap) -> FeatureMap:
    kernel, stride, padding = (_one(side) for side in (layer.kernel_size, layer.stride, layer.padding))
    fills = not layer.ceil_mode or all((side + 2 * padding - kernel) % max(1, stride) == 0 for side in x.grid)
    plain = layer.dilation == 1 if isinstance(layer, nn.MaxPool2d) else padding == 0
    if not fills or not plain or min(kernel, stride) < 1:
        raise UsageError(f"a page has no operation for {layer} of this network on a map of {x.grid}")
    grid, settings = _window(x.grid, kernel, stride, padding)
    out = program.value(grid[0] * grid[1], x.value.columns)
    if isinstance(layer, nn.MaxPool2d):
        return FeatureMap(program.run("largest", out, x.value, **settings), grid)
    shares = program.table(torch.full((kernel**2, x.value.columns), 1 / kernel**2))
    return FeatureMap(program.run("filtered", out, x.value, taps=shares, bias=None, **settings), grid)


def _one(side: Any) -> int:
    """Return a setting that is the same for both axes, or −1 if they differ."""
    sides = {side} if isinstance(side, int) else set(side)
    return int(sides.pop()) if len(sides) == 1 else -1


def _window(grid: Grid, kernel: int, stride: int, padding: int) -> tuple[Grid, dict[str, int]]:
    """Return the grid of windows over another grid, and the settings of an operation over them."""
    height, width = ((side + 2 * padding - kernel) // stride + 1 for side in grid)
    settings = {"height": grid[0], "width": grid[1], "kernel": kernel, "stride": stride, "padding": padding}
    return (height, width), settings


def _unknown(kind: Any) -> UsageError:
    name = getattr(kind, "__name__", str(kind))
    return UsageError(f"a page has no operation for {name} of this convnet; export it with --to onnx instead")
