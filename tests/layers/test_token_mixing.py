"""Token mixing from the left, resampling, block-diagonal growth, folding and gradients of the new layers."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from patchloom.layers.attention import ClassAttention, TalkingHeadsAttention
from patchloom.layers.convolution import PatchConv, TokenConv
from patchloom.layers.mlp import MLP
from patchloom.layers.norms import Affine, BatchNorm, L2Norm, LayerNorm
from patchloom.layers.patches import ConvStem, PatchMerging, PatchProjection
from patchloom.layers.resample import downsampler, resample_columns, resample_rows, upsampler
from patchloom.layers.residual import Residual, drop_path, drop_path_rates, make_scale
from patchloom.layers.sparse_mlp import SparseMLP
from patchloom.layers.token_mixing import ClassMixing, TokenLinear, TokenMLP, UntiedTokenMLP
from tests.networks import images, small


def test_token_linear_is_the_papers_equation() -> None:
    layer, x = TokenLinear((2, 3)), torch.randn(4, 6, 5)
    transposed = torch.nn.functional.linear(x.transpose(1, 2), layer.weight, layer.bias).transpose(1, 2)
    torch.testing.assert_close(layer(x), transposed)


def test_untied_and_grouped_token_mlps_by_slow_reference() -> None:
    x = torch.randn(2, 6, 4)
    untied = UntiedTokenMLP((2, 3), 5, 4)
    for c in range(4):
        hidden = torch.nn.functional.gelu(x[:, :, c] @ untied.weight1[c].T + untied.bias1[c])
        expected = hidden @ untied.weight2[c].T + untied.bias2[c]
        torch.testing.assert_close(untied(x)[:, :, c], expected)
    grouped = TokenMLP((2, 3), 5, groups=2)
    for k in range(2):  # channels 2k and 2k+1 make one vector of 12
        joined = torch.cat([x[:, :, 2 * k], x[:, :, 2 * k + 1]], dim=1)
        hidden = torch.nn.functional.gelu(joined @ grouped.weight1.T + grouped.bias1)
        out = hidden @ grouped.weight2.T + grouped.bias2
        torch.testing.assert_close(grouped(x)[:, :, 2 * k], out[:, :6])
        torch.testing.assert_close(grouped(x)[:, :, 2 * k + 1], out[:, 6:])


def test_sparse_mlp_is_the_papers_equation() -> None:
    layer, x = SparseMLP(3, (2, 4)), torch.randn(2, 2, 4, 3)
    rows = torch.einsum("ow,bhwc->bhoc", layer.along_width.weight, x) + layer.along_width.bias[:, None]
    columns = torch.einsum("oh,bhwc->bowc", layer.along_height.weight, x) + layer.along_height.bias[:, None, None]
    torch.testing.assert_close(layer(x), layer.fuse(torch.cat([x, rows, columns], dim=-1)))


class Seen(TorchDispatchMode):
    """Records operations that move activations about."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        copies = name in ("clone", "copy_", "contiguous", "_to_copy", "cat", "stack")
        turns = name in ("transpose", "permute", "t", "mT") and args[0].ndim > 2
        if copies or turns:
            self.moves.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["resmlp_s12", "mixer_b16"])
def test_no_transposes_and_no_copies_in_a_block(name) -> None:
    network = small(name)
    with torch.no_grad():
        tokens = network.stem(images(network)).flatten(1, 2)
        with Seen() as seen:
            network.blocks[0](tokens)
    assert seen.moves == []
    with Seen() as control:
        tokens.transpose(1, 2).contiguous()
    assert control.moves == ["transpose", "clone"]


def perturbed(module: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5 + 0.1)
    return module


NEW_LAYERS = {
    "Affine": (Affine(3), (2, 4, 3)),
    "L2Norm": (L2Norm(3), (2, 4, 3)),
    "LayerNorm": (LayerNorm(3), (2, 4, 3)),
    "BatchNorm": (BatchNorm(3), (2, 4, 3)),
    "TokenLinear": (TokenLinear((2, 2)), (2, 4, 3)),
    "TokenMLP": (TokenMLP((2, 2), 3), (2, 4, 3)),
    "TokenMLP tanh": (TokenMLP((2, 2), 3, activation="gelu_tanh"), (2, 4, 3)),
    "TokenMLP of groups": (TokenMLP((2, 2), 3, groups=2), (2, 4, 4)),
    "UntiedTokenMLP": (UntiedTokenMLP((2, 2), 3, 3), (2, 4, 3)),
    "MLP": (MLP(3, 4), (2, 4, 3)),
    "SparseMLP": (SparseMLP(3, (2, 2)), (2, 2, 2, 3)),
    "SparseMLP weighted": (SparseMLP(3, (2, 2), fusion="weighted", sequential=True), (2, 2, 2, 3)),
    "TalkingHeads": (TalkingHeadsAttention(4, 2), (2, 3, 4)),
    "PatchConv": (PatchConv(4), (2, 2, 2, 4)),
    "TokenConv": (TokenConv(3, (2, 2), "separable"), (2, 4, 3)),
    "PatchProjection": (PatchProjection(2, 3, 2), (2, 2, 4, 2)),
    "PatchMerging": (PatchMerging(2, 3), (2, 2, 4, 2)),
    "ConvStem": (ConvStem(1, 8), (1, 1, 16, 16)),
    "Residual": (Residual(Affine(3), TokenLinear((2, 2)), make_scale("layerscale", 3, 0.5)), (2, 4, 3)),
}


@pytest.mark.parametrize("name", NEW_LAYERS)
def test_gradcheck(name) -> None:
    layer, shape = NEW_LAYERS[name]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    parameters = list(perturbed(layer).parameters())
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *parameters))


@pytest.mark.parametrize(
    "mix",
    [
        ClassAttention(4, 2),
        ClassAttention(4, 1, class_in_keys=False),
        ClassMixing((2, 2), extra=1, outputs=1),
    ],
)
def test_gradcheck_of_class_layers(mix) -> None:
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    parameters = list(perturbed(mix).parameters())
    assert torch.autograd.gradcheck(lambda x, *_: mix(x, 1), (x, *parameters))


FOLDED = {
    "Aff, matrix": lambda: Residual(Affine(3), TokenLinear((2, 2)), make_scale("layerscale", 3, 0.5)),
    "Aff, MLP": lambda: Residual(Affine(3), MLP(3, 4), make_scale("layerscale", 3, 0.5)),
    "LayerNorm, matrix": lambda: Residual(LayerNorm(3), TokenLinear((2, 2)), make_scale("layerscale", 3, 0.5)),
    "LayerNorm, MLP, scalar": lambda: Residual(LayerNorm(3), MLP(3, 4), make_scale("scalar", 3, 0.5)),
}


@pytest.mark.parametrize("name", FOLDED)
def test_folding_while_training_changes_neither_output_nor_gradients(name) -> None:
    branch = perturbed(FOLDED[name]()).train()
    x = torch.randn(9, 4, 3, dtype=torch.float64, requires_grad=True)
    assert branch._folding_pays(x)

    def run(folds: bool) -> list[torch.Tensor]:
        branch.foldable = folds
        out = branch(x)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *branch.parameters()])]

    for folded, plain in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(folded, plain)
    branch.foldable = True
    assert torch.autograd.gradcheck(lambda x, *_: branch(x), (x, *branch.parameters()))


def test_folding_while_training_keeps_dropout() -> None:
    branch = perturbed(Residual(Affine(3), MLP(3, 4, dropout=0.3), make_scale("layerscale", 3, 0.5))).train()
    x = torch.randn(9, 4, 3, dtype=torch.float64)
    assert branch._folding_pays(x)
    torch.manual_seed(0)
    folded = branch(x)
    branch.foldable = False
    torch.manual_seed(0)
    torch.testing.assert_close(folded, branch(x))
    assert (folded == x).any()  # what was dropped adds nothing


# Resolution ---------------------------------------------------------------------------------------------------------


def test_resampling_at_the_same_size_is_the_identity() -> None:
    layer, other = TokenLinear((3, 4)), TokenLinear((3, 4))
    other.load_state_dict(other.resampled_from(layer))
    assert torch.equal(other.weight, layer.weight)
    assert torch.equal(other.bias, layer.bias)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
def test_resampling_is_torchs(mode) -> None:
    grid = torch.randn(5, 12, dtype=torch.float64)  # five maps of 3×4
    expected = torch.nn.functional.interpolate(grid.view(5, 1, 3, 4), size=(6, 5), mode=mode).view(5, 30)
    torch.testing.assert_close(resample_rows(grid.T, (3, 4), (6, 5), mode), expected.T)


def test_bilinear_positions_lose_their_norm() -> None:
    """Thesis 3.4.5: the reason to resample bicubically."""

    def norm(interpolation) -> float:
        trained = small("deit_s", position_interpolation=interpolation)
        with torch.no_grad():
            torch.nn.init.normal_(trained.position.weight, generator=torch.Generator().manual_seed(0))
        side = trained.config.image_size[0] * 2
        return trained.at_resolution((side, side)).position.weight.detach().norm(dim=-1).mean().item()

    assert norm("bilinear") < 0.9 * norm("bicubic")


def test_sequential_mixing_in_either_order() -> None:
    rows_first = SparseMLP(2, (3, 4), sequential=True, identity=False, fusion="sum")
    columns_first = SparseMLP(2, (3, 4), sequential=True, identity=False, fusion="sum", columns_first=True)
    columns_first.load_state_dict(rows_first.state_dict())
    maps = torch.randn(1, 3, 4, 2)
    along_columns = columns_first.along_height(maps.reshape(1, 3, 8)).view(3, 4, 2)
    torch.testing.assert_close(columns_first(maps)[0], columns_first.along_width(along_columns))
    assert not torch.allclose(columns_first(maps), rows_first(maps))


def test_resampled_mixing_keeps_what_a_constant_image_gives() -> None:
    layer, other = TokenLinear((3, 4)), TokenLinear((7, 5))
    other.load_state_dict(other.resampled_from(layer))
    out, resized = layer(torch.ones(1, 12, 2)), other(torch.ones(1, 35, 2))
    expected = resample_rows(out[0].detach(), (3, 4), (7, 5))
    torch.testing.assert_close(resized[0], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(downsampler((3, 4), (7, 5)).sum(dim=1), torch.ones(12, dtype=torch.float64))
    torch.testing.assert_close(upsampler((3, 4), (7, 5)).sum(dim=1), torch.ones(35, dtype=torch.float64))
    assert resample_columns(layer.weight, (3, 4), (7, 5)).shape == (12, 35)


@pytest.mark.parametrize("factor", [(2, 2), (3, 3), (1, 2)])
def test_a_grown_mixer_computes_the_small_one_on_each_part(factor) -> None:
    """MX-4, as supplement C states it."""
    network = small("mixer_b16", gelu="exact")
    height, width = network.config.image_size
    down, across = factor
    grown = network.at_resolution((down * height, across * width))
    assert grown.config.token_dim == network.config.token_dim * down * across
    x = torch.randn(2, 3, down * height, across * width)
    rows, columns = network.grid
    with torch.no_grad():
        tokens = grown.features(x).unflatten(1, (down * rows, across * columns))
        for i in range(down):
            for j in range(across):
                part = x[:, :, i * height : (i + 1) * height, j * width : (j + 1) * width]
                mine = tokens[:, i * rows : (i + 1) * rows, j * columns : (j + 1) * columns].flatten(1, 2)
                torch.testing.assert_close(mine, network.features(part), rtol=1e-4, atol=1e-5)
    back = grown.at_resolution((height, width))
    for key, tensor in network.state_dict().items():
        torch.testing.assert_close(back.state_dict()[key], tensor)


def test_a_pretrained_mixer_made_smaller_keeps_its_hidden_units() -> None:
    network = small("mixer_b16", image_size=64)
    assert network.at_resolution(32).config.token_dim == network.config.token_dim


def test_non_square_networks() -> None:
    for name in ("resmlp_s12", "mixer_b16", "deit_s", "cait_xxs24"):
        network = small(name, image_size=(32, 48))
        assert network.grid == (4, 6)
        with torch.no_grad():
            assert network(images(network)).shape == (2, 5)
    network = small("smlpnet_t", image_size=(64, 96))
    with torch.no_grad():
        assert network(images(network)).shape == (2, 5)


# Residual weights and stochastic depth ------------------------------------------------------------------------------


def test_absorbing_is_refused_where_it_would_lose_digits() -> None:
    branch = Residual(Affine(3), TokenLinear((2, 2)), make_scale("layerscale", 3, 0.5))
    x = torch.randn(2, 4, 3)
    with torch.no_grad():
        branch.norm.weight[0] = 0.0
        branch.norm.bias.copy_(torch.randn(3))
        expected = branch(x)
        branch.absorb_()
        torch.testing.assert_close(branch(x), expected)
    assert isinstance(branch.norm, Affine)


def test_residual_weights_start_as_the_thesis_says() -> None:
    assert make_scale("none", 4, 0.1) is None
    assert make_scale("layerscale", 4, 1e-5).tolist() == pytest.approx([1e-5] * 4)
    assert make_scale("rezero", 4, 0.1).tolist() == [0.0]
    assert make_scale("fixup", 4, 0.1).tolist() == [1.0]
    assert make_scale("scalar", 4, 0.1).tolist() == pytest.approx([0.1])
    uniform = make_scale("layerscale", 10_000, 0.1, uniform=True)
    assert uniform.min() >= 0
    assert uniform.max() <= 0.2
    assert uniform.mean().item() == pytest.approx(0.1, abs=0.005)


def test_fixup_branches_start_at_zero() -> None:
    import patchloom

    network = patchloom.create_model(
        "cait_xxs24", residual="fixup", depth=2, dim=32, heads=2, image_size=32, patch_size=8
    )
    assert all(block.channels.mix.fc2.weight.abs().sum() == 0 for block in network.blocks)
    assert all(block.tokens.mix.proj.weight.abs().sum() == 0 for block in network.blocks)
    assert all(block.channels.mix.fc1.weight.abs().sum() > 0 for block in network.blocks)


def test_fixup_has_a_number_before_every_linear_layer_and_a_classifier_of_zeros() -> None:
    import patchloom

    network = patchloom.create_model("cait_xxs24", residual="fixup", depth=1, class_depth=1, image_size=32)
    shifted = {key.removesuffix(".shift") for key, _ in network.named_parameters() if key.endswith(".shift")}
    linear = {key for key, module in network.named_modules() if isinstance(module, torch.nn.Linear)}
    assert linear - shifted == {"classifier"}
    assert network.classifier.weight.abs().sum() == 0
    assert network.reset_head(7).classifier.weight.abs().sum() == 0
    layer, x = network.blocks[0].channels.mix.fc1, torch.randn(3, 192)
    with torch.no_grad():
        layer.shift.fill_(0.5)
        torch.testing.assert_close(layer(x), torch.nn.functional.linear(x + 0.5, layer.weight, layer.bias))


def test_t_fixup_draws_queries_keys_and_values_each_for_itself() -> None:
    import patchloom

    torch.manual_seed(0)
    network = patchloom.create_model("cait_xxs24", residual="tfixup", depth=24, image_size=32)
    q, k, v = network.blocks[0].tokens.mix.qkv.weight.chunk(3)
    alone = 192**-0.5  # Xavier's deviation of 192 inputs and as many outputs
    assert q.std().item() == pytest.approx(alone, rel=0.03)
    assert k.std().item() == pytest.approx(alone, rel=0.03)
    assert v.std().item() == pytest.approx(0.67 * 26**-0.25 * alone, rel=0.03)  # 0.0214


def test_drop_path_keeps_the_mean_and_drops_whole_samples() -> None:
    torch.manual_seed(0)
    x = drop_path(torch.ones(20_000, 2), 0.25)
    assert x.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert torch.equal(x[:, 0], x[:, 1])
    assert x.mean().item() == pytest.approx(1.0, abs=0.02)
    assert drop_path_rates(0.3, 4, "uniform") == [0.3] * 4
    assert drop_path_rates(0.3, 4, "linear") == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_resampling_is_marked_as_constant_as_the_compiler_marks_it() -> None:
    def function() -> None: ...

    marked = torch.compiler.assume_constant_result(function)
    assert vars(marked).items() <= vars(upsampler).items()
    assert vars(marked).items() <= vars(downsampler).items()
    assert vars(marked)
