"""Image transforms, and the deterministic one for evaluation and inference."""

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
    """Return (height, width) from one number or two."""
    return (image_size, image_size) if isinstance(image_size, int) else (image_size[0], image_size[1])


class ImageTransform(ABC):
    """A transform of an image and its masks and boxes: geometry first, then colors."""

    image_size: Size  # (H, W) of the result

    @abstractmethod
    def geometry(self, sample: Sample, rng: random.Random) -> Geometry:
        """Choose the geometry (crop, flip, size) of one view; random choices use `rng`."""

    def reduction(self, size: tuple[int, int]) -> int:  # noqa: ARG002
        """Return the factor by which an image of (width, height) may be decoded smaller."""
        return 1

    def resized(self, image: Image.Image, size: Size) -> np.ndarray:
        """Resize an image to (H, W, 3)."""
        return resize(image, size)

    def colored(self, pixels: np.ndarray, rng: random.Random) -> np.ndarray:  # noqa: ARG002
        """Change the colors of the cropped pixels. Nothing moves."""
        return pixels

    def __call__(self, image: Image.Image, rng: random.Random) -> np.ndarray:
        """Transform an RGB image of any size to (H, W, 3) uint8."""
        return self.arrays(Sample(image), rng)["image"]

    def arrays(self, sample: Sample, rng: random.Random) -> dict[str, np.ndarray]:
        """Return the view and its parts by name."""
        return self.applied(self.geometry(sample, rng), sample, rng)

    def applied(self, geometry: Geometry, sample: Sample, rng: random.Random) -> dict[str, np.ndarray]:
        """Apply a geometry to a sample, then the colors."""
        arrays = {"image": self.colored(geometry.apply_image(sample.image, self.resized, sample.whole), rng)}
        for name, layer in sample.layers.items():
            arrays[name] = geometry.apply_mask(layer.numbers, layer.outside)
        if sample.boxes is not None:
            arrays["boxes"] = geometry.apply_boxes(sample.boxes)
        return arrays

    def shapes(self, parts: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Return the fixed shapes of `arrays` for samples with these parts."""
        return {"image": (*self.image_size, 3)} | {name: self.image_size for name in parts if name in LAYERS}


@dataclass(frozen=True)
class EvaluationTransform(ImageTransform):
    """Resize, then crop the center. The crop covers `crop_ratio` of the short side, or of both sides."""

    image_size: Size
    crop_ratio: float = 1.0
    interpolation: str = "bicubic"
    resize: str = "short_side"  # or square: to the shape of the crop, whatever the shape of the image

    def geometry(self, sample: Sample, rng: random.Random) -> Geometry:  # noqa: ARG002
        """Return the center crop of the resized image."""
        size = sample.size
        target = enlarged(self.image_size, self.crop_ratio)
        scaled = target if self.resize == "square" else covering_size(size, target)
        return Geometry((0, 0, *size), scaled, self.image_size, middle_start(scaled, self.image_size))

    def resized(self, image: Image.Image, size: Size) -> np.ndarray:
        """Resize with Pillow, as the authors of published weights did."""
        return np.asarray(image.resize((size[1], size[0]), Image.Resampling[self.interpolation.upper()]))

    def __call__(self, image: Image.Image, rng: random.Random = NO_CHANCE) -> np.ndarray:
        """Transform an RGB image of any size to (H, W, 3) uint8."""
        return super().__call__(image, rng)


def test_transform(
    image_size: int | Size,
    crop_ratio: float = 1.0,  # noqa: PT028 - not a test
    interpolation: str = "bicubic",  # noqa: PT028
    resize: str = "short_side",  # noqa: PT028
) -> EvaluationTransform:
    """Return a transform that resizes the short side, or both, to image_size / crop_ratio and crops the center."""
    if not 0 < crop_ratio <= 1:
        raise UsageError(
            f"crop_ratio is {crop_ratio:g}; expected the share of the short side that the crop covers, 0…1."
        )
    return EvaluationTransform(as_size(image_size), crop_ratio, interpolation, resize)


test_transform.__test__ = False  # type: ignore[attr-defined]  # otherwise pytest collects it


def enlarged(size: Size, crop_ratio: float) -> Size:
    """Return the (height, width) of which `size` is the share `crop_ratio`."""
    return int(size[0] / crop_ratio), int(size[1] / crop_ratio)


def middle_start(scaled: Size, size: Size) -> tuple[int, int]:
    """Return top and left of a centered window of `size` in an image of `scaled`."""
    return round((scaled[0] - size[0]) / 2), round((scaled[1] - size[1]) / 2)


def covering_size(image: tuple[int, int], size: Size) -> Size:
    """Return the smallest (height, width) with the shape of an image of (width, height) that covers `size`."""
    height, width = size
    if height * image[0] >= width * image[1]:
        return height, int(height * image[0] / image[1])
    return int(width * image[1] / image[0]), width
