"""Layers of an absorbed network as operations of the page: one row of `LAYERS` per class.

A map of H×W positions and C channels is a value of H·W rows and C columns, so layers that mix neighbors also take the
grid (H, W).
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from patchloom.exporters.single_page.program import PageProgram, Value
from patchloom.layers.attention import Attention, ClassAttention, TalkingHeadsAttention
from patchloom.layers.convolution import Conv3x3, PatchConv, SqueezeExcite, TokenConv
from patchloom.layers.mlp import MLP
from patchloom.layers.norms import Affine, BatchNorm, L2Norm, LayerNorm, Length
from patchloom.layers.patches import ConvStem, PatchMerging, PatchProjection, PositionEmbedding
from patchloom.layers.residual import Block, Branch, Parallel, PostNormResidual, Residual
from patchloom.layers.sparse_mlp import MapMLP, NormActMix, NormActMixes, SparseMLP
from patchloom.layers.token_mixing import ClassMixing, TokenLinear, TokenMLP
from patchloom.models.mixer import Reduce
from patchloom_runtime.errors import UsageError

Grid = tuple[int, int]
Writer: TypeAlias = Callable[[PageProgram, Any, Value, Grid], Value]
_LENGTH_EPS = 1e-12  # of torch.nn.functional.normalize


def write(program: PageProgram, layer: nn.Module, x: Value, grid: Grid) -> Value:
    """Append the operations of `layer` on x, whose rows are the positions of `grid`. Returns the result."""
    return _row(layer)(program, layer, x, grid)


def check_layers(network: nn.Module) -> None:
    """Raise UsageError with the name of a layer that the page has no operation for."""
    for layer in network.modules():
        if isinstance(layer, Branch):
            if type(layer.mix) not in CLASS_READERS:
                _row(layer.mix)
            _row(layer.norm)


def _row(layer: nn.Module) -> Writer:
    try:
        return LAYERS[type(layer)]
    except KeyError:
        raise UsageError(
            f"a page has no operation for the layer {type(layer).__name__} of this network; it supports "
            "ResMLP, Mixer, sMLPNet, DeiT, DeiT III, CaiT, PatchConvNet and many convnets, without the rarer ablations"
        ) from None


# Parts ----------------------------------------------------------------------------------------------------------


def linear(program: PageProgram, x: Value, weight: Tensor, bias: Tensor | None, *, onto: Value | None = None) -> Value:
    """Multiply (N, C) by weightᵀ and add bias: (N, outputs). Adds to `onto` in place if it is passed."""
    out = onto or program.value(x.rows, weight.shape[0])
    settings = {"weight": program.matrix(weight), "onto": onto is not None}
    return program.run("linear", out, x, **settings, bias=None if bias is None else program.vector(bias))


def mix(program: PageProgram, x: Value, weight: Tensor, bias: Tensor, *, parts: int = 1) -> Value:
    """Multiply each of `parts` consecutive blocks (N, C) by weight (M, N) from the left, and add bias."""
    rows, inputs = weight.shape
    columns = x.rows * x.columns // (parts * inputs)
    out = program.value(parts * rows, columns)
    added = {"table": program.table(bias)} if bias.ndim == 2 else {"bias": program.vector(bias)}
    return program.run("mix", out, x, weight=program.matrix(weight), parts=parts, **added)


def activate(program: PageProgram, x: Value, kind: str) -> Value:
    """Apply gelu, gelu_tanh, silu, hardswish, relu or sigmoid."""
    return program.run("activate", program.value(x.rows, x.columns), x, kind=kind)


def affine(program: PageProgram, x: Value, weight: Tensor, bias: Tensor) -> Value:
    """Compute weight · x + bias per column."""
    out = program.value(x.rows, x.columns)
    return program.run("affine", out, x, weight=program.vector(weight), bias=program.vector(bias))


def add(program: PageProgram, x: Value, y: Value, scale: Tensor | None = None) -> Value:
    """Compute x + scale · y. The scale is one number, or one per column."""
    out = program.value(x.rows, x.columns)
    return program.run("add", out, x, y, scale=None if scale is None else program.vector(scale))


def constant(program: PageProgram, rows: Tensor) -> Value:
    """Return learned rows."""
    return program.run("constant", program.value(*rows.shape), table=program.table(rows))


def joined(program: PageProgram, x: Value, y: Value) -> Value:
    """Concatenate the rows of x and y."""
    return program.run("join", program.value(x.rows + y.rows, x.columns), x, y)


def rows_of(program: PageProgram, x: Value, start: int, count: int) -> Value:
    """Return `count` rows from `start` on."""
    return program.run("rows", program.value(count, x.columns), x, start=start)


def mean(program: PageProgram, x: Value) -> Value:
    """Average all rows to one."""
    return program.run("mean", program.value(1, x.columns), x)


def scores(program: PageProgram, q: Value, k: Value, heads: int, *, q_at: int = 0, k_at: int = 0, width: int) -> Value:
    """Compute Q·Kᵀ/√d per head, (heads, T·N). The heads of q and k start at columns q_at and k_at, `width` in all."""
    out = program.value(heads, q.rows * k.rows)
    return program.run("scores", out, q, k, heads=heads, q_at=q_at, k_at=k_at, width=width)


def softmax(program: PageProgram, x: Value, keys: int) -> Value:
    """Apply softmax to each group of `keys` consecutive entries."""
    return program.run("softmax", program.value(x.rows, x.columns), x, keys=keys)


def attend(program: PageProgram, weights: Value, v: Value, heads: int, *, v_at: int = 0, width: int) -> Value:
    """Multiply weights (heads, T·N) by values (N, …): (T, width)."""
    out = program.value(weights.columns // v.rows, width)
    return program.run("attend", out, weights, v, heads=heads, v_at=v_at)


# Layers ---------------------------------------------------------------------------------------------------------


def _identity(program: PageProgram, layer: nn.Identity, x: Value, grid: Grid) -> Value:  # noqa: ARG001
    return x


def _linear(program: PageProgram, layer: nn.Linear, x: Value, grid: Grid) -> Value:  # noqa: ARG001
    return linear(program, x, layer.weight, layer.bias)


def _layer_norm(program: PageProgram, layer: LayerNorm, x: Value, grid: Grid) -> Value:  # noqa: ARG001
    learned = {}
    if layer.elementwise_affine:
        learned = {"weight": program.vector(layer.weight), "bias": program.vector(layer.bias)}
    return program.run("layernorm", program.value(x.rows, x.columns), x, eps=layer.eps, **learned)


def _split_norm(program: PageProgram, layer: Affine | BatchNorm | L2Norm, x: Value, grid: Grid) -> Value:
    stays, weight, bias = layer.split()
    return affine(program, write(program, stays, x, grid), weight, bias)


def _length(program: PageProgram, layer: nn.Module, x: Value, grid: Grid) -> Value:  # noqa: ARG001
    return program.run("length", program.value(x.rows, x.columns), x, eps=_LENGTH_EPS)


def _batch_norm(program: PageProgram, layer: nn.BatchNorm1d, x: Value, grid: Grid) -> Value:  # noqa: ARG001
    assert layer.running_mean is not None
    assert layer.running_var is not None
    weight = layer.weight * torch.rsqrt(layer.running_var + layer.eps)
    return affine(program, x, weight, layer.bias - layer.running_mean * weight)


def _relu(program: PageProgram, layer: nn.ReLU, x: Value, grid: Grid) -> Value:  # noqa: ARG001
    return activate(program, x, "relu")


def _sequential(program: PageProgram, layer: nn.Sequential, x: Value, grid: Grid) -> Value:
    for one in layer:
        x = write(program, one, x, grid)
    return x


def _mlp(program: PageProgram, layer: MLP, x: Value, grid: Grid) -> Value:
    hidden = activate(program, write(program, layer.fc1, x, grid), layer.activation)
    return write(program, layer.fc2, hidden, grid)


def _token_linear(program: PageProgram, layer: TokenLinear, x: Value, grid: Grid) -> Value:  # noqa: ARG001
    return mix(program, x, layer.weight, layer.bias)


def _token_mlp(program: PageProgram, layer: TokenMLP, x: Value, grid: Grid) -> Value:  # noqa: ARG001
    if layer.groups > 1:
        raise UsageError("a page has no operation for the TokenMLP with groups of channels of this network")
    hidden = activate(program, mix(program, x, layer.weight1, layer.bias1), layer.activation)
    return mix(program, hidden, layer.weight2, layer.bias2)


def _conv3x3(program: PageProgram, layer: Conv3x3, x: Value, grid: Grid) -> Value:
    bias = None if layer.bias is None else layer.bias
    if layer.groups == 1:
        return convolution(program, x, grid, layer.weight, bias, stride=1)
    taps = layer.weight.flatten(1).T  # (9, C)
    added = None if bias is None else program.vector(bias)
    out = program.value(x.rows, x.columns)
    return program.run("depthwise", out, x, height=grid[0], width=grid[1], taps=program.table(taps), bias=added)


def convolution(
    program: PageProgram, x: Value, grid: Grid, weight: Tensor, bias: Tensor | None, *, stride: int
) -> Value:
    """Apply a 3×3 convolution with zero padding: collect the neighbors of each position in a row, then multiply."""
    height, width = (-(-side // stride) for side in grid)
    near = program.value(height * width, 9 * x.columns)
    program.run("neighbors", near, x, height=grid[0], width=grid[1], stride=stride)
    return linear(program, near, weight.permute(0, 2, 3, 1).flatten(1), bias)


def _token_conv(program: PageProgram, layer: TokenConv, x: Value, grid: Grid) -> Value:
    mixed = write(program, layer.spatial, x, grid)
    return mixed if layer.pointwise is None else write(program, layer.pointwise, mixed, grid)


def _squeeze_excite(program: PageProgram, layer: SqueezeExcite, x: Value, grid: Grid) -> Value:
    few = activate(program, write(program, layer.reduce, mean(program, x), grid), "relu")
    gate = activate(program, write(program, layer.expand, few, grid), "sigmoid")
    return program.run("multiply", program.value(x.rows, x.columns), x, gate)


def _patch_conv(program: PageProgram, layer: PatchConv, x: Value, grid: Grid) -> Value:
    first = activate(program, write(program, layer.first, x, grid), "gelu")
    spatial = activate(program, write(program, layer.spatial, first, grid), "gelu")
    return write(program, layer.last, write(program, layer.gate, spatial, grid), grid)


def _patches(program: PageProgram, layer: PatchProjection, x: Value, grid: Grid) -> Value:
    side = layer.patch_size
    height, width = grid[0] // side, grid[1] // side
    cut = program.value(height * width, side * side * x.columns)
    program.run("patches", cut, x, height=grid[0], width=grid[1], side=side)
    return linear(program, cut, layer.weight.permute(0, 2, 3, 1).flatten(1), layer.bias)


def _conv_stem(program: PageProgram, layer: ConvStem, x: Value, grid: Grid) -> Value:
    height, width = grid
    for number, conv in enumerate(layer.convs):
        assert isinstance(conv, nn.Conv2d)
        x = activate(program, x, "gelu") if number else x
        x = convolution(program, x, (height, width), conv.weight, None, stride=2)
        height, width = -(-height // 2), -(-width // 2)
    return x


def _positions(program: PageProgram, layer: PositionEmbedding, x: Value, grid: Grid) -> Value:  # noqa: ARG001
    return add(program, x, constant(program, layer.weight[0]))


def attention_parts(program: PageProgram, layer: Attention, x: Value) -> tuple[Value, Value]:
    """Return the weights of every head (heads, N·N), and queries, keys and values side by side (N, 3·C)."""
    qkv = linear(program, x, layer.qkv.weight, layer.qkv.bias)
    wide = x.columns
    weights = scores(program, qkv, qkv, layer.heads, k_at=wide, width=wide)
    if isinstance(layer, TalkingHeadsAttention):
        weights = mix(program, weights, layer.before.weight, layer.before.bias)
    weights = softmax(program, weights, x.rows)
    if isinstance(layer, TalkingHeadsAttention):
        weights = mix(program, weights, layer.after.weight, layer.after.bias)
    return weights, qkv


def _attention(program: PageProgram, layer: Attention, x: Value, grid: Grid) -> Value:
    weights, qkv = attention_parts(program, layer, x)
    wide = x.columns
    return write(program, layer.proj, attend(program, weights, qkv, layer.heads, v_at=2 * wide, width=wide), grid)


def _sparse_mlp(program: PageProgram, layer: SparseMLP, x: Value, grid: Grid) -> Value:
    def shaped(value: Value) -> Value:
        return program.view(value, x.rows, x.columns)

    rows = shaped(mix(program, x, layer.along_width.weight, layer.along_width.bias, parts=grid[0]))
    read = rows if layer.sequential else x
    columns = shaped(mix(program, read, layer.along_height.weight, layer.along_height.bias))
    branches = [columns] if layer.sequential else [rows, columns]
    branches = [x, *branches] if layer.identity else branches
    if layer.fuse is not None:
        parts = layer.fuse.weight.chunk(len(branches), dim=1)
        fused = linear(program, branches[0], parts[0], None)
        for branch, part in zip(branches[1:], parts[1:], strict=True):
            fused = linear(program, branch, part, None, onto=fused)
        return fused
    weights = list(layer.weights.weight) if layer.weights is not None else [None] * len(branches)
    fused = affine(program, branches[0], *_scaling(weights[0], x.columns))
    for branch, weight in zip(branches[1:], weights[1:], strict=True):
        fused = add(program, fused, branch, weight)
    return fused


def _scaling(weight: Tensor | None, columns: int) -> tuple[Tensor, Tensor]:
    return torch.ones(columns) if weight is None else weight, torch.zeros(columns)


def _norm_act_mix(program: PageProgram, layer: NormActMix, x: Value, grid: Grid) -> Value:
    return write(program, layer.mix, activate(program, write(program, layer.norm, x, grid), "gelu"), grid)


def _residual(program: PageProgram, layer: Residual, x: Value, grid: Grid) -> Value:
    return add(program, x, write(program, layer.mix, write(program, layer.norm, x, grid), grid), layer.scale)


def _post_norm_residual(program: PageProgram, layer: PostNormResidual, x: Value, grid: Grid) -> Value:
    return write(program, layer.norm, add(program, x, write(program, layer.mix, x, grid), layer.scale), grid)


def _reduce(program: PageProgram, layer: Reduce, x: Value, grid: Grid) -> Value:
    return write(program, layer.mix, write(program, layer.norm, x, grid), grid)


def _parallel(program: PageProgram, layer: Parallel, x: Value, grid: Grid) -> Value:
    out = x
    for branch in layer:
        assert isinstance(branch, Residual)
        out = add(program, out, write(program, branch.mix, write(program, branch.norm, x, grid), grid), branch.scale)
    return out


def _block(program: PageProgram, layer: Block, x: Value, grid: Grid) -> Value:
    for branch in (layer.tokens, layer.channels):
        x = x if branch is None else write(program, branch, x, grid)
    return x


LAYERS: dict[type[nn.Module], Writer] = {
    nn.Identity: _identity,
    nn.Linear: _linear,
    nn.Sequential: _sequential,
    nn.BatchNorm1d: _batch_norm,
    nn.ReLU: _relu,
    Affine: _split_norm,
    LayerNorm: _layer_norm,
    BatchNorm: _split_norm,
    L2Norm: _split_norm,
    Length: _length,
    MLP: _mlp,
    TokenLinear: _token_linear,
    TokenMLP: _token_mlp,
    MapMLP: _token_mlp,
    TokenConv: _token_conv,
    Conv3x3: _conv3x3,
    SqueezeExcite: _squeeze_excite,
    PatchConv: _patch_conv,
    PatchProjection: _patches,
    PatchMerging: _patches,
    ConvStem: _conv_stem,
    PositionEmbedding: _positions,
    Attention: _attention,
    TalkingHeadsAttention: _attention,
    SparseMLP: _sparse_mlp,
    NormActMix: _norm_act_mix,
    NormActMixes: _sequential,
    Residual: _residual,
    PostNormResidual: _post_norm_residual,
    Reduce: _reduce,
    Parallel: _parallel,
    Block: _block,
}
# Layers with two inputs, class tokens and patches; `networks.py` writes them.
CLASS_READERS: tuple[type[nn.Module], ...] = (ClassAttention, ClassMixing)
