"""Pictures of weights: the position of each weight, and the sparsity of matrices."""

import numpy as np
import pytest
import torch

from patchloom import create_model
from patchloom.report.pictures.sheets import GAP, LABEL, MARGIN, NEGATIVE, POSITIVE, TILE, tiled
from patchloom.report.pictures.weights import (
    MATRIX,
    interaction_picture,
    opposite_pairs,
    row_column_picture,
    sparsity,
    sparsity_chart,
    token_unit_picture,
)
from patchloom_runtime.errors import NumericalError, UsageError

WHITE = (255, 255, 255)


def resmlp(grid: int, depth: int = 2, **options):
    return create_model("resmlp_s12", depth=depth, dim=8, image_size=4 * grid, patch_size=4, num_classes=3, **options)


def test_a_weight_is_where_its_two_patches_say():
    """One positive and one negative weight in 64×64; everything else is white."""
    network = resmlp(8, depth=1)
    weight = network.blocks[0].tokens.mix.weight
    with torch.no_grad():
        weight.zero_()
        weight[2 * 8 + 5, 6 * 8 + 1] = 2.0  # patch (2, 5) takes from patch (6, 1)
        weight[1 * 8 + 1, 0 * 8 + 7] = -1.0  # the first of the central 6×6 patches, half as much
    picture = np.asarray(interaction_picture(network))
    factor = TILE // 8
    step = 8 * factor + GAP
    assert picture.shape == (2 * MARGIN + 6 * step - GAP + LABEL, 2 * MARGIN + 6 * step - GAP, 3)

    def square(tile, pixel):
        top, left = (MARGIN + t * step + p * factor for t, p in zip(tile, pixel, strict=True))
        return picture[top : top + factor, left : left + factor].reshape(-1, 3)

    assert np.all(square((1, 4), (6, 1)) == POSITIVE)
    assert np.all(square((0, 0), (0, 7)) == np.rint((255 + NEGATIVE) / 2))
    in_tiles = [square((i, j), (h, w)) for i in range(6) for j in range(6) for h in range(8) for w in range(8)]
    assert sum(not np.all(pixels == WHITE) for pixels in in_tiles) == 2


def test_every_layer_is_colored_on_its_own_scale():
    network = resmlp(2, depth=2)
    with torch.no_grad():
        for block, size in zip(network.blocks, (0.001, 1000.0), strict=True):
            block.tokens.mix.weight.fill_(size)
    picture = np.asarray(interaction_picture(network))
    block = 2 * (TILE + GAP) - GAP
    for left in (MARGIN, MARGIN + block + MARGIN):
        assert tuple(picture[MARGIN, left]) == tuple(POSITIVE)


def test_a_small_grid_shows_all_patches_and_an_odd_one_its_middle():
    def side(grid, central):
        picture = interaction_picture(resmlp(grid, depth=1), central=central)
        return (picture.width - 2 * MARGIN + GAP) // (grid * (TILE // grid) + GAP)

    assert side(4, 6) == 4
    assert side(7, 6) == 6
    assert side(7, 1) == 1


def test_the_odd_middle_is_the_middle_patch():
    network = resmlp(7, depth=1)
    with torch.no_grad():
        network.blocks[0].tokens.mix.weight.copy_(torch.eye(49))
    picture = np.asarray(interaction_picture(network, central=1))
    factor = TILE // 7
    assert tuple(picture[MARGIN + 3 * factor, MARGIN + 3 * factor]) == tuple(POSITIVE)


def test_layers_are_chosen_by_number():
    network = resmlp(4, depth=3)
    picture = interaction_picture(network, layers=[3])
    with torch.no_grad():
        network.blocks[0].tokens.mix.weight.zero_()
    assert interaction_picture(network, layers=[3]).tobytes() == picture.tobytes()
    with torch.no_grad():
        network.blocks[2].tokens.mix.weight.zero_()
    assert interaction_picture(network, layers=[3]).tobytes() != picture.tobytes()
    with pytest.raises(UsageError) as error:
        interaction_picture(network, layers=[0, 2, 4])
    assert "0, 4" in str(error.value)
    assert "3" in str(error.value)


def test_seven_blocks_take_two_lines():
    one = tiled([("a", np.zeros((1, 1, 4, 4)))])
    seven = tiled([("a", np.zeros((1, 1, 4, 4)))] * 7)
    assert seven.height - one.height == TILE + LABEL + MARGIN
    assert seven.width - one.width == 5 * (TILE + MARGIN)


def test_sparsity_is_the_share_counted_one_by_one():
    network = resmlp(4, depth=2)
    torch.manual_seed(0)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter)
    result = sparsity(network)
    assert [(point.layer, point.matrix) for point in result] == [(n, m) for n in (1, 2) for m in "ABC"]
    for point in result:
        block = network.blocks[point.layer - 1]
        weights = {"A": block.tokens.mix.weight, "B": block.channels.mix.fc1.weight, "C": block.channels.mix.fc2.weight}
        values = [abs(value) for value in weights[point.matrix].flatten().tolist()]
        small = sum(1 for value in values if value < 0.05 * max(values))
        assert 0 < small < len(values)
        assert point.share == small / len(values)
    assert sparsity_chart(network).count("<circle") == len(result)


@pytest.mark.parametrize("options", [{"communication": "none"}, {"communication": "mlp"}])
def test_the_error_without_a_matrix_names_networks_that_have_one(options):
    with pytest.raises(UsageError) as error:
        interaction_picture(resmlp(4, **options))
    assert "ResMLP" in str(error.value)
    assert "resmlp_s12" in str(error.value)


def test_row_and_column_matrices_are_no_patch_interactions():
    network = create_model("smlpnet_t", image_size=32, num_classes=3)
    with pytest.raises(UsageError, match="SMLPNet"):
        sparsity(network)


def test_units_are_next_to_their_inverse_and_smooth_ones_come_first():
    y, x = np.mgrid[:8, :8] / 8
    smooth, middle, rough = (np.cos(2 * np.pi * k * x) for k in (1, 2, 4))
    images = np.stack([rough, -middle, smooth, 3 * middle, -2 * smooth, -rough])
    order = opposite_pairs(images)
    assert [set(order[i : i + 2]) for i in (0, 2, 4)] == [{2, 4}, {1, 3}, {0, 5}]
    assert sorted(opposite_pairs(np.concatenate([images, y[None]]))) == list(range(7))


def test_mixer_units_fill_whole_lines_of_three_layers():
    network = create_model("mixer_s16", depth=4, dim=16, token_dim=20, channel_dim=16, image_size=64)
    picture = token_unit_picture(network)
    assert picture.width == MARGIN + 3 * (8 * (TILE + GAP) - GAP + 3 * 2 * GAP + MARGIN)  # with gaps between pairs
    assert picture.height == MARGIN + 2 * (TILE + GAP) - GAP + LABEL + MARGIN
    with pytest.raises(UsageError) as error:
        token_unit_picture(resmlp(4))
    assert "ResMLP" in str(error.value)
    assert "mixer_s16" in str(error.value)


def test_a_convolution_shows_shifted_copies():
    """A matrix that takes from the left neighbor: each central patch's image has one pixel, left of the patch."""
    network = resmlp(8, depth=1)
    weight = torch.zeros(8, 8, 8, 8)
    for i in range(8):
        for j in range(1, 8):
            weight[i, j, i, j - 1] = 1.0
    with torch.no_grad():
        network.blocks[0].tokens.mix.weight.copy_(weight.reshape(64, 64))
    picture = np.asarray(interaction_picture(network))
    factor, step = TILE // 8, TILE + GAP
    for i in range(6):
        for j in range(6):
            top, left = MARGIN + i * step, MARGIN + j * step
            tile = picture[top : top + TILE : factor, left : left + TILE : factor]
            red = np.argwhere((tile == POSITIVE).all(axis=-1))
            assert red.tolist() == [[i + 1, j]]  # the central 6×6 begin at patch (1, 1)


def test_row_and_column_matrices_are_drawn_whole_in_their_stage():
    network = create_model("smlpnet_t", image_size=64, dim=8, depths=(1, 2, 1, 1), num_classes=3)
    with torch.no_grad():
        for stage in network.stages:
            for block in stage:
                mix = block.tokens.mix[-1].mix
                mix.along_width.weight.zero_()
                mix.along_height.weight.zero_()
        second = network.stages[1][1].tokens.mix[-1].mix  # 8×8
        second.along_width.weight[2, 7] = 1.0
        second.along_height.weight[6, 1] = -3.0
    picture = np.asarray(row_column_picture(network))
    factor = MATRIX // 8
    for value, (row, column) in ((POSITIVE, (2, 7)), (NEGATIVE, (6, 1))):
        result = np.argwhere((picture == value).all(axis=-1))
        assert len(result) == factor**2
        top, left = result.min(axis=0)
        corner = (top - row * factor, left - column * factor)
        assert np.all(picture[corner[0], corner[1]] == 255)
        assert not np.all(picture[corner[0] - 1, corner[1]] == 255)  # the sheet begins above the matrix …
        assert not np.all(picture[corner[0], corner[1] - 1] == 255)  # … and left of it
    red, blue = (np.argwhere((picture == value).all(axis=-1)).min(axis=0) for value in (POSITIVE, NEGATIVE))
    assert red[0] < blue[0]  # rows stand above columns
    with pytest.raises(UsageError) as error:
        row_column_picture(resmlp(4))
    assert "ResMLP" in str(error.value)
    assert "smlpnet_t" in str(error.value)


def test_weights_that_are_not_finite_are_not_drawn():
    network = resmlp(4, depth=1)
    with torch.no_grad():
        network.blocks[0].tokens.mix.weight[0, 0] = torch.nan
    with pytest.raises(NumericalError):
        interaction_picture(network)
