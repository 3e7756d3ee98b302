"""Network families as programs of the page: one row of `FAMILIES` per class.

A program ends in logits and, if the network allows it, in a map of what each patch contributes to each class. There are
three kinds of map, all computed by the same operations and without gradients:

evidence       the head is linear in the average of patches: the logits of each patch. Their mean is the logit.
contribution   a class token reads the patches: what each patch adds to it in the last layer that reads them, mapped to
               the logit through the last norm with its statistics held fixed. The feed-forward layer in between is
               left out.
attention      each class has its own token: the weights with which it reads the patches.

If matrices are int8, those of the stem and the classifier are still fp16: they are few, and their rounding changes the
prediction most (docs/single_page.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from patchloom.exporters.single_page.convnets import write_convnet
from patchloom.exporters.single_page.layers import (
    Grid,
    add,
    affine,
    attend,
    attention_parts,
    check_layers,
    constant,
    joined,
    linear,
    mean,
    mix,
    rows_of,
    scores,
    softmax,
    write,
)
from patchloom.exporters.single_page.program import PageProgram, Value, Weights
from patchloom.layers.attention import ClassAttention
from patchloom.layers.norms import LayerNorm, Length
from patchloom.layers.residual import Block, ClassBlock, Residual
from patchloom.models.cait import CaiT
from patchloom.models.mixer import Mixer
from patchloom.models.network import Network
from patchloom.models.patchconvnet import PatchConvNet, PerClassLinear
from patchloom.models.pooled_convnet import PooledConvNet
from patchloom.models.resmlp import ResMLP
from patchloom.models.smlpnet import SMLPNet
from patchloom.models.vit import ViT
from patchloom_runtime.errors import UsageError


@dataclass(frozen=True)
class ClassAttentionValues:
    """How class tokens read the patches in one layer: weights (heads, T·keys) over values (keys, …)."""

    weights: Value
    values: Value
    heads: int
    tokens: int  # T
    first: int  # key of the first patch
    v_at: int = 0  # column of `values` at which the values start
    project: Tensor | None = None  # (C, C), applied to the concatenated heads
    scale: Tensor | None = None  # (C,)


@dataclass(frozen=True)
class PageOutput:
    """The results of a program: logits and, for some networks, a map."""

    logits: Value  # (1, classes)
    map: Value | None  # (h·w, classes)
    kind: str  # of the map: evidence, contribution, attention, or "" for none
    grid: Grid  # h, w


@dataclass(frozen=True)
class TrunkOutput:
    """The result of a trunk, before the last norm."""

    x: Value  # (T+N, C), class tokens first
    grid: Grid
    tokens: int = 0  # T
    class_attention: tuple[ClassAttentionValues, ...] = ()  # of the last layer, one per branch


def write_network(network: Network, size: Grid, weights: Weights) -> tuple[PageProgram, Value, PageOutput]:
    """Return the program of an absorbed network for images of `size`, its input value (H·W, 3), and its output."""
    family = FAMILIES.get(type(network))
    if family is None:
        known = ", ".join(one.__name__ for one in FAMILIES)
        raise UsageError(
            f"a page supports networks of the classes {known}; {network.config.name} is a {type(network).__name__}"
        )
    if network.config.channels != 3:
        raise UsageError(
            f"a page supports images with 3 channels; {network.config.name} takes {network.config.channels}"
        )
    check_layers(network)
    program = PageProgram(weights)
    image = program.value(size[0] * size[1], 3)
    trunk = family(program, network, image, size)
    with program.half_precision():
        output = _output(program, network, trunk)
    program.keep(output.logits)
    if output.map is not None:
        program.keep(output.map)
    return program, image, output


# Trunks ---------------------------------------------------------------------------------------------------------


def _stem(program: PageProgram, network: Any, image: Value, size: Grid) -> tuple[Value, Grid]:
    with program.half_precision():
        x = write(program, network.stem, image, size)
    stride = next(stride for stride in range(1, size[0] + 1) if _rounded_up(size, stride) == x.rows)
    return x, (-(-size[0] // stride), -(-size[1] // stride))


def _rounded_up(size: Grid, stride: int) -> int:
    return -(-size[0] // stride) * -(-size[1] // stride)


def _all(program: PageProgram, blocks: Any, x: Value, grid: Grid) -> Value:
    for block in blocks:
        x = write(program, block, x, grid)
    return x


def _resmlp(program: PageProgram, network: ResMLP, image: Value, size: Grid) -> TrunkOutput:
    x, grid = _stem(program, network, image, size)
    if network.position is not None:
        x = write(program, network.position, x, grid)
    x = _all(program, network.blocks, x, grid)
    if network.config.pool != "class_mlp":
        return TrunkOutput(x, grid)
    return _with_class_blocks(program, constant(program, network.class_token.weight[0]), x, network.class_blocks, grid)


def _mixer(program: PageProgram, network: Mixer, image: Value, size: Grid) -> TrunkOutput:
    x, grid = _stem(program, network, image, size)
    return TrunkOutput(_all(program, network.blocks, x, grid), grid)


def _smlpnet(program: PageProgram, network: SMLPNet, image: Value, size: Grid) -> TrunkOutput:
    x, grid = _stem(program, network, image, size)
    for number, stage in enumerate(network.stages):
        if number:
            x = write(program, network.merges[number - 1], x, grid)
            grid = (grid[0] // 2, grid[1] // 2)
        x = _all(program, stage, x, grid)
    return TrunkOutput(x, grid)


def _vit(program: PageProgram, network: ViT, image: Value, size: Grid) -> TrunkOutput:
    x, grid = _stem(program, network, image, size)
    first, last = network.config.class_position, network.blocks[-1]
    assert isinstance(last, Block)
    x = x if first else write(program, network.position, x, grid)
    if network.class_tokens is not None:
        x = joined(program, constant(program, network.class_tokens.weight[0]), x)
    x = write(program, network.position, x, grid) if first else x
    tokens = 0 if network.class_tokens is None else network.class_tokens.weight.shape[1]
    x = _all(program, network.blocks[:-1], x, grid)
    x, attention = _last_block(program, last, x, tokens, grid)
    return TrunkOutput(x, grid, tokens, attention)


def _cait(program: PageProgram, network: CaiT, image: Value, size: Grid) -> TrunkOutput:
    x, grid = _stem(program, network, image, size)
    x = write(program, network.position, x, grid)
    at, token = network.config.insert_class_at, network.class_token.weight[0]
    if at is None:
        x = _all(program, network.blocks, x, grid)
        return _with_class_blocks(program, constant(program, token), x, network.class_blocks, grid)
    x = _all(program, network.blocks[:at], x, grid)
    x = _all(program, network.blocks[at:-1], joined(program, constant(program, token), x), grid)
    last = network.blocks[-1]
    assert isinstance(last, Block)
    count = network.class_token_count
    x, attention = _last_block(program, last, x, count, grid)
    if not len(network.class_blocks):
        return TrunkOutput(x, grid, count, attention)
    summary, patches = rows_of(program, x, 0, count), rows_of(program, x, count, x.rows - count)
    return _with_class_blocks(program, summary, patches, network.class_blocks, grid)


def _patchconvnet(program: PageProgram, network: PatchConvNet, image: Value, size: Grid) -> TrunkOutput:
    x, grid = _stem(program, network, image, size)
    x = _all(program, network.blocks, x, grid)
    pool = network.attention_pool
    if pool is None:
        return TrunkOutput(x, grid)
    return _with_class_blocks(program, constant(program, pool.token.weight[0]), x, [pool.block], grid)


def _pooled_convnet(program: PageProgram, network: PooledConvNet, image: Value, size: Grid) -> TrunkOutput:
    pool = network.attention_pool
    if pool is None and not network.averages_patches:
        raise UsageError(
            f"a page supports convnets whose last map is averaged; {network.config.backbone} has another head: "
            "export it with --to onnx instead"
        )
    x, grid = write_convnet(program, network.trunk, image, size)
    if pool is None:
        return TrunkOutput(x, grid)
    return _with_class_blocks(program, constant(program, pool.token.weight[0]), x, [pool.block], grid)


FAMILIES: dict[type[Network], Callable[[PageProgram, Any, Value, Grid], TrunkOutput]] = {
    ResMLP: _resmlp,
    Mixer: _mixer,
    SMLPNet: _smlpnet,
    ViT: _vit,
    CaiT: _cait,
    PatchConvNet: _patchconvnet,
    PooledConvNet: _pooled_convnet,
}


# Class tokens ---------------------------------------------------------------------------------------------------


def _last_block(
    program: PageProgram, block: Block, x: Value, tokens: int, grid: Grid
) -> tuple[Value, tuple[ClassAttentionValues, ...]]:
    """Write the last block with self-attention, and return how class tokens read the patches in it."""
    branches: Any = [block.tokens] if isinstance(block.tokens, Residual) else block.tokens
    out, attention = x, []
    for branch in branches:
        layer: Any = branch.mix
        weights, qkv = attention_parts(program, layer, write(program, branch.norm, x, grid))
        at = 2 * x.columns
        mixed = attend(program, weights, qkv, layer.heads, v_at=at, width=x.columns)
        out = add(program, out, write(program, layer.proj, mixed, grid), branch.scale)
        scale = branch.scale
        attention.append(ClassAttentionValues(weights, qkv, layer.heads, x.rows, tokens, at, layer.proj.weight, scale))
    assert block.channels is not None
    return write(program, block.channels, out, grid), tuple(attention)


def _with_class_blocks(program: PageProgram, tokens: Value, patches: Value, blocks: Any, grid: Grid) -> TrunkOutput:
    attention: tuple[ClassAttentionValues, ...] = ()  # of the last layer, one per branch
    for block in blocks:
        tokens, attention = _class_block(program, block, tokens, patches, grid)
    return TrunkOutput(joined(program, tokens, patches), grid, tokens.rows, attention)


def _class_block(
    program: PageProgram, block: ClassBlock, tokens: Value, patches: Value, grid: Grid
) -> tuple[Value, tuple[ClassAttentionValues, ...]]:
    """Write a block in which class tokens read the patches, and return how."""
    branch = block.attend
    both, layer = write(program, branch.norm, joined(program, tokens, patches), grid), branch.mix
    if isinstance(layer, ClassAttention):
        keys = both if layer.class_in_keys else rows_of(program, both, tokens.rows, patches.rows)
        wide = both.columns
        q = write(program, layer.q, rows_of(program, both, 0, tokens.rows), grid)
        k, v = (write(program, one, keys, grid) for one in (layer.k, layer.v))
        weights = softmax(program, scores(program, q, k, layer.heads, width=wide), keys.rows)
        read = write(program, layer.proj, attend(program, weights, v, layer.heads, width=wide), grid)
        first = tokens.rows if layer.class_in_keys else 0
        attention = ClassAttentionValues(
            weights, v, layer.heads, tokens.rows, first, project=layer.proj.weight, scale=branch.scale
        )
    else:  # class-MLP: one row of weights per token, the same for all images
        mixing: Any = layer
        read = mix(program, both, mixing.weight, mixing.bias)
        weights = program.view(constant(program, mixing.weight), 1, tokens.rows * both.rows)
        attention = ClassAttentionValues(weights, both, 1, tokens.rows, tokens.rows, scale=branch.scale)
    return write(program, block.channels, add(program, tokens, read, branch.scale), grid), (attention,)


# Heads ----------------------------------------------------------------------------------------------------------


def _output(program: PageProgram, network: Network, trunk: TrunkOutput) -> PageOutput:
    """Write the last norm, pooling and classifier, and the map."""
    grid, classifier = trunk.grid, network.classifier
    last_norm: Any = network.norm
    if not trunk.tokens:
        features = write(program, last_norm, trunk.x, grid)
        if network.averages_patches and type(classifier) is nn.Linear:
            evidence = write(program, classifier, features, grid)
            return PageOutput(mean(program, evidence), evidence, "evidence", grid)
        return PageOutput(write(program, classifier, mean(program, features), grid), None, "", grid)
    tokens = rows_of(program, trunk.x, 0, trunk.tokens)
    features = write(program, last_norm, tokens, grid)
    if isinstance(classifier, PerClassLinear):
        weight, bias = program.table(classifier.weight), program.vector(classifier.bias)
        logits = program.run("rowdot", program.value(1, trunk.tokens), features, weight=weight, bias=bias)
        return PageOutput(logits, _attention_map(program, trunk), "attention", grid)
    heads = _heads(network)
    each = [write(program, head, rows_of(program, features, token, 1), grid) for token, head in heads.items()]
    if len(each) == 1:
        logits = each[0]
    else:
        by_shares = getattr(network.config, "fusion", "") == "softmax"
        logits = program.run("fuse", program.value(1, each[0].columns), *each, shares=by_shares)
    if not all(type(head) is nn.Linear for head in heads.values()):
        return PageOutput(logits, None, "", grid)
    return PageOutput(logits, _contributions(program, trunk, tokens, last_norm, heads), "contribution", grid)


def _heads(network: Network) -> dict[int, nn.Module]:
    """Return the classifier of each class token, by number."""
    if not network.has_distillation_token:
        return {0: network.classifier}
    both = {0: network.classifier, 1: network.distillation_classifier}
    chosen = {"class": [0], "distillation": [1]}.get(network.config.fusion, [0, 1])  # type: ignore[attr-defined]
    return {token: both[token] for token in chosen}  # type: ignore[misc]


def _contributions(
    program: PageProgram, trunk: TrunkOutput, tokens: Value, last_norm: Any, heads: dict[int, nn.Module]
) -> Value:
    """Return (N, classes): what each patch contributes to the logits in the last layer that reads patches."""
    total: Value | None = None
    stays, weight, _ = last_norm.split()
    for number, head in heads.items():
        token = rows_of(program, tokens, number, 1)
        for attention in trunk.class_attention:
            added = _added_to_token(program, attention, number, trunk.grid)
            if isinstance(stays, LayerNorm | Length):
                settings = {"kind": "layer", "eps": stays.eps} if isinstance(stays, LayerNorm) else {"kind": "length"}
                added = program.run("held", program.value(added.rows, added.columns), added, token, **settings)
            assert isinstance(head, nn.Linear)
            total = linear(program, added, head.weight * weight / len(heads), None, onto=total)
    assert total is not None
    return total


def _added_to_token(program: PageProgram, attention: ClassAttentionValues, token: int, grid: Grid) -> Value:
    """Return (N, C): what each patch adds to a class token."""
    width = attention.project.shape[1] if attention.project is not None else attention.values.columns
    spread = program.value(grid[0] * grid[1], width)
    settings = {
        "heads": attention.heads,
        "tokens": attention.tokens,
        "token": token,
        "first": attention.first,
        "v_at": attention.v_at,
    }
    program.run("spread", spread, attention.weights, attention.values, **settings)
    added = spread if attention.project is None else linear(program, spread, attention.project, None)
    return added if attention.scale is None else affine(program, added, *_scaled(attention.scale, added.columns))


def _scaled(scale: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    return scale.expand(columns), scale.new_zeros(columns)


def _attention_map(program: PageProgram, trunk: TrunkOutput) -> Value:
    """Return (N, classes): the attention weights of each class token, averaged over heads."""
    (attention,) = trunk.class_attention
    keys = attention.weights.columns // attention.tokens
    average = program.view(mean(program, attention.weights), attention.tokens, keys)
    return program.run("transpose", program.value(keys, attention.tokens), average)
