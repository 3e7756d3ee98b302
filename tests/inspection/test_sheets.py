"""Positions on a sheet, and the colors of numbers."""

import numpy as np
import pytest
import torch
from PIL import Image

from patchloom.report.pictures.overlays import attention_overlay, attention_tile, evidence_overlay
from patchloom.report.pictures.sheets import (
    CIVIDIS,
    LABEL,
    MARGIN,
    PAGE,
    PAPER,
    SheetCell,
    SheetRow,
    displayed,
    grid_sheet,
    heat,
    numbers,
    sheet,
)
from patchloom.report.pictures.weights import FILTER, SPACE, filter_picture, mean_frequency
from patchloom_runtime.errors import NumericalError, UsageError
from tests.networks import small

RED, BLUE = (255, 0, 0), (0, 0, 255)


def block(color: tuple[int, int, int], width: int = 20, height: int = 10) -> Image.Image:
    return Image.new("RGB", (width, height), color)


def corner(picture: Image.Image, color: tuple[int, int, int]) -> tuple[int, int]:
    """Return top and left of the area with this color."""
    top, left = np.argwhere((np.asarray(picture) == color).all(axis=-1)).min(axis=0)
    return int(top), int(left)


def test_cells_are_in_columns_under_the_titles():
    picture = sheet(
        [
            SheetRow("first", [SheetCell(block(RED))]),
            SheetRow("", [SheetCell(block((0, 255, 0))), SheetCell(block(BLUE), "b")]),
        ]
    )
    assert corner(picture, RED) == (MARGIN + LABEL, MARGIN)
    assert corner(picture, (0, 255, 0)) == (MARGIN + LABEL + 10 + MARGIN, MARGIN)
    assert corner(picture, BLUE) == (MARGIN + LABEL + 10 + MARGIN, MARGIN + 20 + MARGIN)


def test_a_line_wider_than_the_page_goes_on_below():
    picture = sheet([SheetRow("", [SheetCell(block(PAPER, 400))] * 3 + [SheetCell(block(RED, 400))])])
    assert picture.width <= PAGE + MARGIN
    assert corner(picture, RED) == (MARGIN + 10 + MARGIN, MARGIN)


def test_a_long_title_has_room():
    short = sheet([SheetRow("a", [SheetCell(block(RED))])])
    long = sheet([SheetRow("a" * 80, [SheetCell(block(RED))])])
    ink = np.argwhere((np.asarray(long)[: MARGIN + LABEL] < 200).any(axis=-1))[:, 1].max()
    assert short.width < ink < long.width - MARGIN // 2


def test_a_grid_leaves_empty_places_empty():
    picture = grid_sheet(["", "head 1"], [("a", [block(RED), block(BLUE)]), ("b", [None, block((0, 255, 0))])])
    (red, left), (blue, right), (green, below) = (corner(picture, color) for color in (RED, BLUE, (0, 255, 0)))
    assert red == blue < green
    assert left < right == below
    assert tuple(np.asarray(picture)[green + 5, left + 10]) == PAPER


def test_heat_goes_from_dark_blue_to_yellow_and_is_matplotlibs():
    assert tuple(heat(np.array(0.0))) == tuple(CIVIDIS[0]) == (0, 34, 78)
    assert tuple(heat(np.array(1.0))) == tuple(CIVIDIS[-1]) == (254, 232, 56)
    brightness = heat(np.linspace(0, 1, 50)).astype(int).sum(axis=-1)
    assert np.all(np.diff(brightness) > 0)


def test_small_images_are_enlarged_crisply_and_large_ones_reduced():
    tiny = Image.fromarray(np.array([[[0, 0, 0], [255, 255, 255]]], np.uint8))
    assert displayed(tiny, 100).size == (100, 50)
    assert set(np.unique(np.asarray(displayed(tiny, 100)))) == {0, 255}
    assert displayed(Image.new("L", (400, 800)), 100).mode == "RGB"
    assert displayed(Image.new("L", (400, 800)), 100).size == (50, 100)


def test_numbers_that_are_not_finite_are_named():
    with pytest.raises(NumericalError, match="the attention"):
        numbers(torch.tensor([1.0, torch.inf]), "the attention")


def test_attention_is_yellow_where_the_map_is_strong():
    image = Image.new("RGB", (64, 64), (100, 100, 100))
    weights = np.full((4, 4), 0.02)
    weights[1, 2] = 0.7
    over = np.asarray(attention_overlay(image, weights, 64)).astype(int)
    yellow = over[..., 0] - over[..., 2]  # red less blue
    assert np.unravel_index(yellow.argmax(), yellow.shape)[0] // 16 == 1
    assert np.unravel_index(yellow.argmax(), yellow.shape)[1] // 16 == 2
    assert yellow[24, 40] > 40 > 0 > yellow[60, 4]
    assert tuple(over[60, 4]) == tuple(np.rint((100 + CIVIDIS[0]) / 2).astype(int))


def test_a_dark_object_with_attention_is_visible():
    weights = np.zeros((2, 2))
    weights[0, 0] = 1.0
    over = np.asarray(attention_overlay(Image.new("RGB", (32, 32)), weights, 32)).astype(int)
    assert over[4, 4].sum() > 3 * over[28, 28].sum()


def test_an_even_map_divides_by_nothing():
    over = np.asarray(attention_overlay(Image.new("RGB", (8, 8)), np.full((2, 2), 0.25), 8))
    assert len(np.unique(over.reshape(-1, 3), axis=0)) == 1


def test_evidence_is_red_for_and_blue_against():
    evidence = np.zeros((4, 4))
    evidence[0, 0], evidence[3, 3] = 2.0, -1.0
    over = np.asarray(evidence_overlay(Image.new("RGB", (64, 64), (128, 128, 128)), evidence, 64)).astype(int)
    red = over[..., 0] - over[..., 2]
    assert red[8, 8] > 60
    assert red[56, 56] < -20
    assert abs(red[8, 56]) <= 1


def test_a_tile_has_a_square_a_patch_on_its_own_scale():
    tile = np.asarray(attention_tile(np.array([[0.0, 0.1], [0.2, -0.3]]), 40))
    assert tuple(tile[5, 5]) == tuple(CIVIDIS[0])
    assert tuple(tile[25, 5]) == tuple(CIVIDIS[-1])
    assert tuple(tile[25, 25]) == tuple(CIVIDIS[0])  # a negative weight takes nothing
    assert tuple(tile[5, 25]) == tuple(heat(np.array(0.5)))
    assert attention_tile(np.ones((2, 4)), 40).size == (40, 20)


def filters_of(network, filters: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        network.stem.weight.zero_()
        network.stem.weight[: len(filters)] = filters
    return np.asarray(filter_picture(network, units=len(filters)))


def test_a_filter_is_the_color_it_answers_to_and_smooth_ones_come_first():
    network = small("resmlp_s12")
    stripes = torch.zeros(3, 8, 8)
    stripes[:, :, ::2], stripes[:, :, 1::2] = 1.0, -1.0
    red = torch.zeros(3, 8, 8)
    red[0] = 0.01  # each has its own scale
    picture = filters_of(network, torch.stack([stripes, red]))
    pixel = FILTER // 8
    assert tuple(picture[MARGIN + 5, MARGIN + 5]) == (255, 128, 128)
    second = MARGIN + 8 * pixel + SPACE
    assert tuple(picture[MARGIN + 5, second + 2]) == (255, 255, 255)
    assert tuple(picture[MARGIN + 5, second + pixel + 2]) == (0, 0, 0)


def test_the_strongest_filters_are_chosen():
    network = small("resmlp_s12")
    with torch.no_grad():
        network.stem.weight.fill_(1e-3)
        network.stem.weight[7, 2] = -5.0
    assert tuple(np.asarray(filter_picture(network, units=1))[MARGIN + 5, MARGIN + 5, :2]) == (128, 128)
    assert np.asarray(filter_picture(network, units=1))[MARGIN + 5, MARGIN + 5, 2] == 0


@pytest.mark.parametrize(("name", "side"), [("patchconvnet_s60", 3), ("cait_xxs24", 8), ("smlpnet_t", 4)])
def test_any_first_layer_has_filters(name, side):
    network = small(name)
    weight = network.stem.convs[0].weight if name == "patchconvnet_s60" else network.stem.weight
    factor = FILTER // side
    columns = min(16, len(weight))
    assert filter_picture(network).width == 2 * MARGIN + columns * (side * factor + SPACE) - SPACE


def test_one_channel_has_signs_for_colors_and_no_layer_is_one_line():
    network = small("resmlp_s12", channels=1)
    with torch.no_grad():
        network.stem.weight.fill_(1.0)
    assert tuple(np.asarray(filter_picture(network))[MARGIN + 5, MARGIN + 5]) == (178, 24, 43)
    with pytest.raises(UsageError, match="Linear"):
        filter_picture(torch.nn.Linear(2, 2))


def test_frequency_is_that_of_the_wave():
    x = np.arange(8)
    waves = np.stack([np.tile(np.cos(2 * np.pi * k * x / 8), (8, 1)) for k in (0, 1, 3)])
    assert mean_frequency(waves) == pytest.approx([0, 1 / 8, 3 / 8])
    assert mean_frequency(np.zeros((1, 3, 4, 4))) == pytest.approx([0])
