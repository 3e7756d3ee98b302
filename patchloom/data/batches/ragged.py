"""Boxes in batches: ragged (`Boxes`), or padded to one shape, as a device stores them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from patchloom_runtime.images.samples import BOX_VALUES


@dataclass(frozen=True)
class Boxes:
    """The boxes of a batch's images, concatenated."""

    values: Tensor  # (n, 6) float32
    splits: Tensor  # (B + 1,) int64, always on the host: image i has rows splits[i] to splits[i + 1]

    @classmethod
    def of(cls, each: Iterable[np.ndarray]) -> "Boxes":
        """Concatenate the boxes (n, 6) of each image."""
        arrays = [np.zeros((0, BOX_VALUES), np.float32), *each]
        splits = np.cumsum([len(array) for array in arrays])
        return cls(torch.from_numpy(np.concatenate(arrays)), torch.from_numpy(splits))

    @property
    def corners(self) -> Tensor:
        """Return (n, 4): x0, y0, x1, y1."""
        return self.values[:, :4]

    @property
    def categories(self) -> Tensor:
        """Return the classes (n,) int64."""
        return self.values[:, 4].long()

    @property
    def instances(self) -> Tensor:
        """Return the values (n,) int64 in the layer `instances`."""
        return self.values[:, 5].long()

    def each(self) -> list[Tensor]:
        """Return the boxes (n, 6) of every image."""
        return list(self.values.split(self.splits.diff().tolist()))

    def __len__(self) -> int:
        return len(self.splits) - 1

    def __getitem__(self, images: Tensor | slice) -> "Boxes":
        """Return the boxes of some images, in their order."""
        lengths, each = self.splits.diff(), self.each()
        chosen = torch.arange(len(self))[images.cpu() if isinstance(images, Tensor) else images]
        splits = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[chosen].cumsum(0)])
        return Boxes(torch.cat([self.values[:0], *(each[i] for i in chosen.tolist())]), splits)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Boxes":
        """Return the boxes with their values on another device."""
        return Boxes(self.values.to(device, non_blocking=non_blocking), self.splits)


Parts = dict[str, Tensor | Boxes]  # name → (B, H, W) of a layer, or boxes


def padded(boxes: Sequence[Boxes]) -> Tensor:
    """Return the boxes of several batches as one (N, most per image, 6), padded with NaN."""
    return pad_sequence([each for batch in boxes for each in batch.each()], batch_first=True, padding_value=torch.nan)


def ragged(boxes: Tensor) -> Boxes:
    """Drop the NaN rows of (B, k, 6). Waits for the device."""
    real = ~boxes[:, :, 0].isnan()
    counts = real.sum(1).cpu()
    return Boxes(boxes[real], torch.cat([counts.new_zeros(1), counts.cumsum(0)]))
