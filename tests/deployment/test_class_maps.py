"""Pixel classes of images of any size: windows, whole images, several scales, and memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.tasks.segmentation import pixel_classes as class_maps
from patchloom.tasks.segmentation import windows
from patchloom.tasks.segmentation.pixel_classes import PixelClassifier, ViewSettings
from patchloom.tasks.segmentation.windows import SlidingWindows, resized_rows, starts, whole_logits

CLASSES = 3


class Colors(nn.Module):
    """Logits are the mean colors of 4×4 pixels and of the whole image, normalized."""

    any_resolution = True
    pixel_mean, pixel_std = (0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255)

    def __init__(self, size: tuple[int, int] = (32, 32)) -> None:
        super().__init__()
        self.image_size = size
        self.weight = nn.Parameter(torch.zeros(1))
        self.config = type("Config", (), {"num_classes": CLASSES})
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, images: Tensor) -> Tensor:
        self.shapes.append(tuple(images.shape))
        return F.avg_pool2d(images, 4) + 0.3 * images.mean((2, 3), keepdim=True)

    def at_resolution(self, size: tuple[int, int]) -> "Colors":
        return Colors(size)


class Fixed(Colors):
    any_resolution = False

    def forward(self, images: Tensor) -> Tensor:
        assert tuple(images.shape[2:]) == self.image_size
        return super().forward(images)


def samples(height: int, width: int, count: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(height * 1000 + width)
    coarse = torch.rand(count, 3, 5, 7, generator=generator) * 255
    return F.interpolate(coarse, (height, width), mode="bilinear").to(torch.uint8)


def slow_slide(network: Colors, images: Tensor, window: int, stride: int) -> Tensor:
    """mmsegmentation's slide_inference, pixel for pixel."""
    _, _, height, width = images.shape
    total, count = torch.zeros(len(images), CLASSES, height, width), torch.zeros(1, 1, height, width)
    rows = max(height - window + stride - 1, 0) // stride + 1
    columns = max(width - window + stride - 1, 0) // stride + 1
    for i in range(rows):
        for j in range(columns):
            bottom, right = min(i * stride + window, height), min(j * stride + window, width)
            top, left = max(bottom - window, 0), max(right - window, 0)
            logits = network(images[:, :, top:bottom, left:right].float())
            total[:, :, top:bottom, left:right] += F.interpolate(logits, (window, window), mode="bilinear")
            count[:, :, top:bottom, left:right] += 1
    assert (count > 0).all()
    return total / count


@given(
    length=st.integers(8, 90), window=st.integers(4, 40), stride=st.integers(1, 40)
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_windows_cover_every_place_and_stay_inside(length: int, window: int, stride: int) -> None:
    window, stride = min(window, length), min(stride, window)
    begins = starts(length, window, stride)
    covered = {place for begin in begins for place in range(begin, begin + window)}
    assert covered == set(range(length))
    assert len(begins) == max(0, -(-(length - window) // stride)) + 1


@pytest.mark.parametrize("size", [(32, 32), (33, 47), (64, 40), (95, 100)])
@pytest.mark.parametrize("stride", [32, 21, 10])
def test_sliding_is_mmsegmentations(size: tuple[int, int], stride: int) -> None:
    network, images = Fixed(), samples(*size, count=2)
    slow = slow_slide(network, images, 32, stride)
    result = torch.full_like(slow, torch.nan)
    over = SlidingWindows((32, 32), (stride, stride), CLASSES, at_once=3)
    for tile in over.logits(lambda some: network(some.float()), images):
        result[:, :, tile.rows] = tile.logits
    assert torch.allclose(result, slow, atol=1e-3)


def test_tiles_of_a_few_rows_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    images, maps = samples(70, 95, count=2), PixelClassifier(Fixed(), ViewSettings("slide"))
    whole = maps(images)
    monkeypatch.setitem(windows.MOST_IN_TILE, "cpu", 2 * CLASSES * 95 * 3)
    assert torch.equal(maps(images), whole)


def test_windows_go_through_the_network_together() -> None:
    network, images = Fixed(), samples(64, 160)
    list(SlidingWindows((32, 32), (32, 32), CLASSES, at_once=4).logits(lambda some: network(some.float()), images))
    assert network.shapes == [(4, 3, 32, 32), (1, 3, 32, 32)] * 2


def test_an_image_of_the_window_size_is_the_same_whole_and_by_windows() -> None:
    images = samples(32, 32, count=3)
    whole, slid = (PixelClassifier(Colors(), ViewSettings(mode))(images) for mode in ("whole", "slide"))
    assert torch.equal(whole, slid)
    assert len(whole.unique()) == CLASSES


@given(height=st.integers(5, 70), width=st.integers(5, 70), top=st.integers(0, 30))
@settings(max_examples=40, deadline=None)
def test_rows_of_resized_logits_are_torchs(height: int, width: int, top: int) -> None:
    logits = torch.randn(2, 3, 6, 5, generator=torch.Generator().manual_seed(height))
    rows = slice(min(top, height - 1), height)
    whole = F.interpolate(logits, (height, width), mode="bilinear", align_corners=False)
    assert torch.allclose(resized_rows(logits, (height, width), rows), whole[:, :, rows], atol=1e-5)


@pytest.mark.parametrize("size", [(20, 90), (15, 9), (31, 33)])
def test_an_image_smaller_than_a_window_is_enlarged(size: tuple[int, int]) -> None:
    network, images = Fixed(), samples(*size)
    result = PixelClassifier(network, ViewSettings("slide"))(images)
    assert tuple(result.shape) == (1, *size)
    assert all(shape[2:] == (32, 32) for shape in network.shapes)
    enlarged = F.interpolate(images.float(), scale_factor=6, mode="bicubic").clamp(0, 255)
    likely = F.interpolate(enlarged, size, mode="area")
    assert (result[0] == likely[0].argmax(0)).float().mean() > 0.85


def test_whole_images_are_padded_to_a_multiple_of_the_maps() -> None:
    network, images = Colors(), samples(45, 70)
    tiles = list(whole_logits(lambda some: network(some.float()), images))
    assert network.shapes == [(1, 3, 64, 96)]
    assert [tile.logits.shape[3] for tile in tiles] == [70] * len(tiles)
    assert sum(tile.logits.shape[2] for tile in tiles) == 45


def test_a_network_of_one_size_processes_whole_images_once_resampled() -> None:
    images = samples(40, 64)
    maps = PixelClassifier(Fixed(), ViewSettings("whole"))
    assert torch.equal(maps(images), PixelClassifier(Colors(), ViewSettings("whole"))(images))
    assert list(maps._sized) == [(64, 64)]


def test_several_scales_average_probabilities() -> None:
    network, images = Colors(), samples(64, 96)
    how = ViewSettings("whole", scales=(0.5, 1.0, 1.5), flip=True)
    expected = torch.zeros(CLASSES, 64, 96)
    for scale in how.scales:
        one = PixelClassifier(network, ViewSettings("whole", scales=(scale,), flip=False))
        plain = (
            one.probabilities(images[0])
            if scale != 1
            else PixelClassifier(network, ViewSettings("whole")).probabilities(images[0])
        )
        mirrored = PixelClassifier(network, ViewSettings("whole", scales=(scale,), flip=False)).probabilities(
            images[0].flip(2)
        )
        expected += (plain + mirrored.flip(2)) / 6
    result = PixelClassifier(network, how).probabilities(images[0])
    assert torch.allclose(result, expected, atol=1e-5)
    assert torch.allclose(result.sum(0), torch.ones(64, 96), atol=1e-5)
    assert torch.equal(PixelClassifier(network, how)(images)[0].long(), result.argmax(0))


def test_several_scales_of_a_large_image_are_averaged_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    images = samples(90, 130)
    how = ViewSettings("slide", scales=(1.0, 1.5), flip=True)
    whole = PixelClassifier(Fixed(), how)(images)
    monkeypatch.setattr(class_maps, "MOST_AVERAGED", 1000)
    monkeypatch.setattr(class_maps, "LARGE_WINDOW", 64)
    blocks = PixelClassifier(Fixed(), how)(images)
    assert (whole == blocks).float().mean() > 0.9


def test_an_image_too_large_for_one_pass_is_processed_by_large_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_maps, "MOST_WHOLE", 64 * 64)
    monkeypatch.setattr(class_maps, "LARGE_WINDOW", 64)
    network, images = Colors(), samples(40, 300)
    result = PixelClassifier(network, ViewSettings("whole"))(images)
    assert {shape[2:] for shape in network.shapes} == {(64, 64)}
    assert tuple(result.shape) == (1, 40, 300)
    assert (result[0] == images[0].float().argmax(0)).float().mean() > 0.8


def test_a_short_side_is_resized_to_and_back() -> None:
    network, images = Colors(), samples(64, 128)
    result = PixelClassifier(network, ViewSettings("whole", short_side=32))(images)
    assert network.shapes == [(1, 3, 32, 64)]
    assert tuple(result.shape) == (1, 64, 128)


MEASURED = """
import resource, sys, torch
from tests.deployment.test_class_maps import Fixed
from patchloom.tasks.segmentation.pixel_classes import ClassMaps, Showing
from patchloom.models.dense.upernet import SegmentationConfig, SegmentationNetwork
torch.set_num_threads(2)
if sys.argv[1] == "windows":
    network = Fixed((512, 512))
    network.config.num_classes = 150
    network.forward = lambda images: torch.nn.functional.avg_pool2d(images, 4).repeat(1, 50, 1, 1)
else:
    backbone = {"num_classes": 0, "image_size": (224, 224), "depth": 1, "dim": 64}
    network = SegmentationNetwork(SegmentationConfig(
        name="patchconvnet_s20", num_classes=150, image_size=(224, 224), backbone=backbone, channels=64,
        auxiliary_channels=0)).eval()
images = torch.randint(0, 255, (1, 3, int(sys.argv[2]), 6000), dtype=torch.uint8)
assert ClassMaps(network, Showing())(images).shape == (1, int(sys.argv[2]), 6000)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 2**20)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seen", ["windows", "whole"])
def test_24_million_pixels_of_150_classes_take_less_than_2_gib(seen: str) -> None:
    """Only two rows of windows are held in memory, whatever the height."""
    root, height = Path(__file__).parent.parent.parent, 1400
    line = [sys.executable, "-c", MEASURED, seen, str(height)]
    done = subprocess.run(line, capture_output=True, text=True, check=True, cwd=root)
    more = (4000 - height) * 6000 * 5 / 2**30  # bytes of the image and of its prediction
    assert float(done.stdout) + more < 2.0


def test_the_pixels_per_pass_are_bounded() -> None:
    maps = PixelClassifier(Colors())
    assert [maps.images_at_once(size) for size in ((64, 64), (512, 512), (1024, 1024), (2048, 2048))] == [16, 4, 1, 1]
    network, images = Colors(), samples(1100, 1600)
    maps = PixelClassifier(network)
    assert tuple(maps(images).shape) == (1, 1100, 1600)
    assert {shape[0] for shape in network.shapes} == {1}
