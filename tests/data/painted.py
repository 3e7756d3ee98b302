"""Pictures painted by their own masks: whatever is done to a picture must show in its mask and boxes."""

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from patchloom.data.batches.ragged import Boxes
from patchloom.data.datasets import ClassTable, LabeledImages
from patchloom.data.images.image_store import ImageStore, Mask
from patchloom_runtime.errors import DataError

OUTSIDE = 255
# The colour of each class; black stands for outside.
PALETTE = np.zeros((256, 3), np.uint8)
PALETTE[:4] = (90, 90, 90), (230, 30, 30), (30, 230, 30), (30, 30, 230)
HEIGHT, WIDTH = 48, 54


class Painted(ImageStore):
    """Rectangles, one to three per picture, in the colour of their class; objects are numbered as their boxes."""

    object_names = ("red", "green", "blue")
    mask_names = ("ground", *object_names)
    mask_ignore = OUTSIDE
    tells_objects_apart = True

    def __init__(self, count: int = 12, broken: tuple[int, ...] = (), uneven: bool = False) -> None:
        self._count, self._broken, self._uneven = count, broken, uneven

    def __len__(self) -> int:
        return self._count

    def where(self, index: int) -> str:
        return f"painted {index}"

    def boxes(self, index: int) -> np.ndarray:
        rng = np.random.default_rng(index)
        thirds = [(left, left + WIDTH // 3) for left in range(0, WIDTH - 2, WIDTH // 3)]
        found = []
        for left, right in thirds[: 1 + index % 3]:
            x, y = int(rng.integers(left, left + 4)), int(rng.integers(2, 14))
            found.append((x, y, int(rng.integers(right - 6, right)), int(rng.integers(26, 46)), int(rng.integers(3))))
        return np.array(found, np.int64)

    def mask(self, index: int) -> Mask:
        if index in self._broken and index % 2:
            raise DataError(f"{self.where(index)}, mask: ends after 3 bytes")
        return self._drawn(index)

    def read(self, index: int) -> Image.Image:
        if index in self._broken and not index % 2:
            raise DataError(f"{self.where(index)}: ends after 3 bytes")
        return Image.fromarray(PALETTE[self._drawn(index).classes])

    def _drawn(self, index: int) -> Mask:
        classes, instances = np.zeros((2, HEIGHT + self._uneven * (index % 2), WIDTH), np.uint8)
        for number, (x0, y0, x1, y1, category) in enumerate(self.boxes(index), start=1):
            classes[y0:y1, x0:x1], instances[y0:y1, x0:x1] = category + 1, number
        return Mask(classes, instances)


def painted(*parts: str, **options: object) -> LabeledImages:
    """The set, of which `parts` are read."""
    images = Painted(**options)
    rows = np.arange(len(images))
    return LabeledImages(images, rows, rows % 3, ClassTable(tuple("abc"))).with_parts(*parts)


def check_aligned(images: Tensor, parts: dict[str, Tensor | Boxes], reach: int = 4) -> tuple[int, int]:
    """Raise unless pictures (B, 3, H, W), masks, instances and boxes show the same; pixels and boxes compared.

    Colours are compared where the mask is even for `reach` pixels around, since a picture's edges are smoothed.
    """
    compared = boxes_seen = 0
    masks, instances, boxes = parts["mask"], parts["instances"], parts["boxes"]
    assert masks.shape == instances.shape == (len(images), *images.shape[2:])
    assert len(boxes) == len(images)
    for image, mask, objects, of in zip(images, masks, instances, boxes.each(), strict=True):
        numbers = F.pad(mask.float(), (reach,) * 4, value=-1)[None]  # what is beyond the border is not known
        even = F.max_pool2d(numbers, 2 * reach + 1, 1)[0] == -F.max_pool2d(-numbers, 2 * reach + 1, 1)[0]
        assert torch.equal(image.permute(1, 2, 0)[even], torch.from_numpy(PALETTE)[mask[even].long()])
        compared += int(even.sum())
        for x0, y0, x1, y1, category, number in of.tolist():
            rows, columns = torch.nonzero(objects == number, as_tuple=True)
            listed = [int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1]
            assert all(abs(a - b) <= 1 for a, b in zip((x0, y0, x1, y1), listed, strict=True)), (listed, x0, y0, x1, y1)
            assert torch.equal(mask[rows, columns].unique(), torch.tensor([category + 1], dtype=mask.dtype))
            boxes_seen += 1
        for number in set(objects.unique().tolist()) - {0, *of[:, 5].long().tolist()}:
            rows, columns = torch.nonzero(objects == number, as_tuple=True)
            assert min(rows.max() - rows.min(), columns.max() - columns.min()) < 2  # less is no loss
    return compared, boxes_seen
