"""The loss of every labelled pixel against the equation, with the auxiliary head, and over processes."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.data.images.image_batch import ImageBatch
from patchloom.objectives.segmentation import SegmentationObjective, labeled

CLASSES, IGNORED = 3, 255


class Logits(nn.Module):
    """Gives what it was told, for each image by its first pixel."""

    def __init__(self, logits: Tensor, auxiliary: Tensor | None) -> None:
        super().__init__()
        self.logits, self.auxiliary = logits, auxiliary

    def forward(self, images: Tensor, *, auxiliary: bool) -> tuple[Tensor, Tensor | None]:
        assert auxiliary
        rows = images[:, 0, 0, 0].long()
        return self.logits[rows], None if self.auxiliary is None else self.auxiliary[rows]


def made(count: int = 4) -> tuple[Logits, ImageBatch]:
    torch.manual_seed(0)
    mask = torch.randint(0, CLASSES, (count, 8, 8), dtype=torch.uint8)
    mask[0, :5] = IGNORED
    mask[1, 2, 2] = 77  # no class
    images = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(count, 3, 8, 8)
    batch = ImageBatch(images, torch.full((count,), -1), torch.arange(count), {"mask": mask})
    return Logits(torch.randn(count, CLASSES, 2, 2), torch.randn(count, CLASSES, 4, 4)), batch


def objective(**more: object) -> SegmentationObjective:
    inputs = {"classes": CLASSES, "ignored": IGNORED, "auxiliary_weight": 0.4}
    return SegmentationObjective(**inputs | more, pixel_mean=(0.0,) * 3, pixel_std=(1 / 255,) * 3)


def slow(logits: Tensor, mask: Tensor) -> float:
    up = F.interpolate(logits, mask.shape[1:], mode="bilinear").log_softmax(1)
    losses = [
        -float(up[b, mask[b, y, x], y, x])
        for b in range(len(mask)) for y in range(8) for x in range(8)
        if mask[b, y, x] < CLASSES
    ]  # fmt: skip
    return sum(losses) / len(losses)


def test_the_loss_is_a_mean_over_labeled_pixels_and_the_auxiliary_heads_is_added() -> None:
    model, batch = made()
    result = objective()(model, batch, epoch=0, step=0)
    mask = batch.parts["mask"].long()
    assert float(result["head_loss"]) == pytest.approx(slow(model.logits, mask), rel=1e-5)
    assert float(result["auxiliary_loss"]) == pytest.approx(slow(model.auxiliary, mask), rel=1e-5)
    assert float(result["loss"]) == pytest.approx(float(result["head_loss"] + 0.4 * result["auxiliary_loss"]), rel=1e-6)


def test_processes_with_other_numbers_of_labeled_pixels_make_the_mean_of_one() -> None:
    model, batch = made()
    whole = float(objective()(model, batch, epoch=0, step=0)["loss"])
    halves = [ImageBatch(batch.images[rows], batch.labels[rows], batch.index[rows], {"mask": batch.parts["mask"][rows]})
              for rows in (slice(0, 1), slice(1, 4))]  # fmt: skip
    counts = [(labeled(half.parts["mask"], CLASSES, IGNORED) >= 0).sum().float() for half in halves]
    assert counts[0] != counts[1]
    total = torch.stack([counts[0] + counts[1], torch.tensor(2.0)])
    losses = [float(objective(add_up=lambda _: total)(model, half, epoch=0, step=0)["loss"]) for half in halves]
    assert sum(losses) / 2 == pytest.approx(whole, rel=1e-5)


def test_a_batch_without_a_label_has_no_loss() -> None:
    model, batch = made()
    batch.parts["mask"].fill_(IGNORED)
    result = objective()(model, batch, epoch=0, step=0)
    assert float(result["loss"]) == 0
    assert float(result["accuracy"]) == 0


def test_without_an_auxiliary_head_the_loss_is_the_heads() -> None:
    model, batch = made()
    model.auxiliary = None
    result = objective()(model, batch, epoch=0, step=0)
    assert set(result) == {"loss", "accuracy"}
    assert float(result["loss"]) == pytest.approx(slow(model.logits, batch.parts["mask"].long()), rel=1e-5)
