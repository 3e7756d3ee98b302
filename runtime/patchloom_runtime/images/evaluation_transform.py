"""A picture as it is shown when a network is judged or used: geometry alone, nothing random."""

import random
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from PIL import Image

from patchloom_runtime.errors import UsageError
from patchloom_runtime.images.geometry import Geometry, Size, resize
from patchloom_runtime.images.samples import LAYERS, Sample

NO_CHANCE = random.Random(0)  # for transforms that draw nothing


def as_size(image_size: int | Size) -> Size:
    """(height, width) from one number or two."""
    return (image_size, image_size) if isinstance(image_size, int) else (image_size[0], image_size[1])


class ImageTransform(ABC):
    """Geometry, then colours: what becomes of a picture and of the parts that were read with it."""

    image_size: Size  # (H, W) of what comes out

    @abstractmethod
    def geometry(self, sample: Sample, rng: random.Random) -> Geometry:
        """Where the view comes from."""

    def reduction(self, size: tuple[int, int], rng: random.Random) -> int:  # noqa: ARG002
        """How many times smaller a picture of (width, height) may be decoded; such an `rng` draws its geometry too."""
        return 1

    def resized(self, picture: Image.Image, size: Size) -> np.ndarray:
        """A picture at another size, (H, W, 3)."""
        return resize(picture, size)

    def colored(self, pixels: np.ndarray, rng: random.Random) -> np.ndarray:  # noqa: ARG002
        """What is done to the pixels after the crop; they stay where they are."""
        return pixels

    def __call__(self, picture: Image.Image, rng: random.Random) -> np.ndarray:
        """RGB picture of any size → (H, W, 3) uint8."""
        return self.arrays(Sample(picture), rng)["image"]

    def arrays(self, sample: Sample, rng: random.Random) -> dict[str, np.ndarray]:
        """The view and its parts, by name."""
        return self.applied(self.geometry(sample, rng), sample, rng)

    def applied(self, geometry: Geometry, sample: Sample, rng: random.Random) -> dict[str, np.ndarray]:
        """What a geometry shows of a sample, and what colours make of that."""
        made = {"image": self.colored(geometry.apply_picture(sample.picture, self.resized, sample.whole), rng)}
        for name, layer in sample.layers.items():
            made[name] = geometry.apply_mask(layer.numbers, layer.outside)
        if sample.boxes is not None:
            made["boxes"] = geometry.apply_boxes(sample.boxes)
        return made

    def shapes(self, parts: Collection[str]) -> dict[str, tuple[int, ...]]:
        """What `arrays` gives for samples with these parts, of fixed size."""
        return {"image": (*self.image_size, 3)} | {name: self.image_size for name in parts if name in LAYERS}


@dataclass(frozen=True)
class EvaluationTransform(ImageTransform):
    """Resize so that the centre crop is `crop_ratio` of the picture's short side, or of its sides; nothing random."""

    image_size: Size
    crop_ratio: float = 1.0
    interpolation: str = "bicubic"
    resize: str = "short_side"  # square: to the shape of the crop, whatever that of the picture

    def geometry(self, sample: Sample, rng: random.Random) -> Geometry:  # noqa: ARG002
        """The whole picture, made smaller or larger, and the middle of it."""
        size = sample.size
        target = enlarged(self.image_size, self.crop_ratio)
        scaled = target if self.resize == "square" else covering_size(size, target)
        return Geometry((0, 0, *size), scaled, self.image_size, middle_start(scaled, self.image_size))

    def resized(self, picture: Image.Image, size: Size) -> np.ndarray:
        """By Pillow, as those who published weights did."""
        return np.asarray(picture.resize((size[1], size[0]), Image.Resampling[self.interpolation.upper()]))

    def __call__(self, picture: Image.Image, rng: random.Random = NO_CHANCE) -> np.ndarray:
        """RGB picture of any size → (H, W, 3) uint8."""
        return super().__call__(picture, rng)


def test_transform(
    image_size: int | Size,
    crop_ratio: float = 1.0,  # noqa: PT028 - not a test
    interpolation: str = "bicubic",  # noqa: PT028
    resize: str = "short_side",  # noqa: PT028
) -> EvaluationTransform:
    """The evaluation of pictures: resize the short side, or both sides, to image_size / crop_ratio, centre crop."""
    if not 0 < crop_ratio <= 1:
        raise UsageError(f"crop_ratio is {crop_ratio:g}; it is the share of the short side that is kept, 0…1.")
    return EvaluationTransform(as_size(image_size), crop_ratio, interpolation, resize)


test_transform.__test__ = False  # type: ignore[attr-defined]  # or pytest takes it for a test where it is imported


def enlarged(size: Size, crop_ratio: float) -> Size:
    """(height, width) of which `size` is a share of `crop_ratio`."""
    return int(size[0] / crop_ratio), int(size[1] / crop_ratio)


def middle_start(scaled: Size, size: Size) -> tuple[int, int]:
    """Top and left of a window of `size` in the middle of a picture of `scaled`."""
    return round((scaled[0] - size[0]) / 2), round((scaled[1] - size[1]) / 2)


def covering_size(picture: tuple[int, int], size: Size) -> Size:
    """The smallest (height, width) of the shape of a picture of (width, height) that holds `size`."""
    height, width = size
    if height * picture[0] >= width * picture[1]:
        return height, int(height * picture[0] / picture[1])
    return int(width * picture[1] / picture[0]), width
