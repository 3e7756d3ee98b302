"""Large JPEGs are decoded smaller where the crop leaves enough pixels; what is seen stays nearly the same."""

import io
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchloom.data.augmentation.augment import train_transform
from patchloom.data.batches.loader import Loader
from patchloom.data.datasets import ClassTable, LabeledImages
from patchloom.data.trees.tree import ImageFiles
from patchloom.recipes.parts import AugmentPart
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.decode import decode, decode_shrunk
from patchloom_runtime.images.evaluation_transform import test_transform
from patchloom_runtime.images.geometry import Geometry
from patchloom_runtime.images.samples import Sample
from tests.data.facts import facts


def smooth(width: int, height: int) -> Image.Image:
    """Colours that change from place to place, and no noise."""
    coarse = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def jpeg(picture: Image.Image, orientation: int = 1) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=95, exif=exif)
    return file.getvalue()


@pytest.mark.parametrize(
    ("box", "scaled", "expected"),
    [
        ((0, 0, 512, 512), (32, 32), 8),
        ((0, 0, 511, 512), (32, 32), 4),
        ((100, 50, 228, 178), (32, 32), 2),
        ((0, 0, 127, 400), (32, 32), 1),
        ((0, 0, 64, 64), (224, 224), 1),
    ],
)
def test_twice_the_pixels_that_are_seen_are_left(box, scaled, expected):
    assert Geometry(box, scaled, scaled).reduction == expected


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(640, 480), (641, 483)])
def test_a_crop_of_a_picture_decoded_smaller_is_nearly_that_of_the_whole(size, orientation):
    data = jpeg(smooth(*size), orientation)
    transform = train_transform(AugmentPart(crop_min_scale=0.5), 32)
    whole = decode(data, "a.jpg")
    for seed in range(3):
        seen = []
        for picture, full in (
            (whole, None),
            decode_shrunk(data, "a.jpg", transform.reduction),
        ):
            assert (full or picture.size) == whole.size
            seen.append(transform.arrays(Sample(picture, whole=full), random.Random(seed))["image"].astype(int))
        assert picture.size[0] * 4 <= whole.size[0] + 4, "decoded smaller"
        # A box may move by a quarter of a pixel, and neighbouring pixels differ by up to 45.
        assert np.abs(seen[0] - seen[1]).mean() < 6


def test_other_formats_and_evaluation_come_whole():
    file = io.BytesIO()
    smooth(640, 480).save(file, "PNG")
    picture, whole = decode_shrunk(file.getvalue(), "a.png", lambda size: 8)  # noqa: ARG005
    assert picture.size == whole == (640, 480)
    assert test_transform(32).reduction((6400, 4800)) == 1


def test_the_loader_decodes_smaller_and_names_what_is_damaged(tmp_path: Path, monkeypatch):
    for name in "abc":
        (tmp_path / f"{name}.jpg").write_bytes(jpeg(smooth(640, 480)))
    (tmp_path / "b.jpg").write_bytes((tmp_path / "b.jpg").read_bytes()[:3000])
    images = LabeledImages(
        ImageFiles(tmp_path, ["a.jpg", "b.jpg", "c.jpg"]), np.arange(3), np.zeros(3, int), ClassTable(("x",))
    )
    sizes = []
    apply = Geometry.apply_image
    monkeypatch.setattr(
        Geometry,
        "apply_image",
        lambda self, picture, *more: sizes.append(picture.size) or apply(self, picture, *more),
    )
    transform = train_transform(AugmentPart(crop_min_scale=0.9), 32)
    with pytest.raises(DataError, match=facts("b.jpg", 3000)):
        list(Loader(images, transform, batch_size=3).epoch(0))
    loader = Loader(images, transform, batch_size=3, skip_broken=True)
    (batch,) = loader.epoch(0)
    assert batch.images.shape == (3, 3, 32, 32)
    assert list(loader.broken) == [1]
    assert set(sizes) <= {(160, 120), (80, 60)}
