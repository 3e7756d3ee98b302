import numpy as np
import pytest
import timm.data.mixup as timm_mixup
import torch

from patchloom.data.augmentation.mixing import Blend, draw_blend
from patchloom.data.batches.sampler import rank_positions


def batch(size: int = 6, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, 3, 12, 16, generator=generator)
    return images, torch.randint(classes, (size,), generator=generator)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_equal_to_timm_given_the_same_draws(monkeypatch, mixup, cutmix, smoothing):
    for seed in range(8):
        images, labels = batch()
        blend = draw_blend(12, 16, mixup=mixup, cutmix=cutmix, seed=seed)
        reference = timm_mixup.Mixup(mixup_alpha=mixup, cutmix_alpha=cutmix, label_smoothing=smoothing, num_classes=5)
        monkeypatch.setattr(reference, "_params_per_batch", lambda: (blend.weight, blend.box is not None))  # noqa: B023
        monkeypatch.setattr(timm_mixup, "rand_bbox", lambda *_, **__: blend.box)  # noqa: B023
        expected_images, expected_targets = reference(images.clone(), labels)
        mixed, targets = blend.images(images), blend.targets(labels, 5, smoothing, torch.float32)
        torch.testing.assert_close(mixed, expected_images)
        torch.testing.assert_close(targets, expected_targets)
        assert not torch.equal(mixed, images)


def test_cutmix_boxes_are_those_of_the_reference(monkeypatch):
    """Size from λ, centre anywhere, cut off at the border; the label's share is the area that is left."""
    for seed in range(50):
        blend = draw_blend(20, 30, mixup=0.0, cutmix=1.0, seed=seed)
        rng = np.random.default_rng(seed)
        rng.random()
        side = np.sqrt(1 - rng.beta(1.0, 1.0))
        y, x = int(rng.integers(20)), int(rng.integers(30))
        inside = np.zeros((20, 30))
        height, width = int(20 * side), int(30 * side)
        for row in range(y - height // 2, y - height // 2 + height):
            for column in range(x - width // 2, x - width // 2 + width):
                if 0 <= row < 20 and 0 <= column < 30:
                    inside[row, column] = 1
        top, bottom, left, right = blend.box
        assert inside[top:bottom, left:right].sum() == inside.sum()
        assert blend.weight == pytest.approx(1 - inside.mean())


def test_draws_have_the_asked_frequencies():
    options = {"mixup": 0.8, "cutmix": 1.0, "probability": 0.6, "switch": 0.25}
    blends = [draw_blend(32, 32, **options, seed=seed) for seed in range(3000)]
    mixed = [blend for blend in blends if blend != Blend()]
    assert len(mixed) / 3000 == pytest.approx(0.6, abs=0.04)
    cut = [blend for blend in mixed if blend.box]
    assert len(cut) / len(mixed) == pytest.approx(0.25, abs=0.04)
    weights = np.array([blend.weight for blend in mixed if not blend.box])
    assert weights.mean() == pytest.approx(0.5, abs=0.03)
    assert weights.var() == pytest.approx(1 / (4 * (2 * 0.8 + 1)), abs=0.01)


def test_without_mixing_the_labels_are_only_smoothed():
    images, labels = batch()
    blend = draw_blend(12, 16, mixup=0.0, cutmix=0.0, seed=1)
    targets = blend.targets(labels, 5, 0.2, torch.float32)
    assert blend.images(images) is images
    assert torch.equal(targets.argmax(1), labels)
    torch.testing.assert_close(targets.sum(1), torch.ones(6))
    torch.testing.assert_close(targets.max(1).values, torch.full((6,), 0.8 + 0.2 / 5))


@pytest.mark.parametrize("world", [2, 4])
def test_several_processes_mix_as_one(world):
    images, labels = batch(size=16)
    for seed in range(4):
        blend = draw_blend(12, 16, mixup=0.8, cutmix=1.0, seed=seed)
        whole, whole_targets = blend.images(images), blend.targets(labels, 5, 0.0, torch.float32)
        for rank in range(world):
            rows = torch.from_numpy(rank_positions(16, rank, world))
            assert torch.equal(blend.images(images[rows]), whole[rows])
            assert torch.equal(blend.targets(labels[rows], 5, 0.0, torch.float32), whole_targets[rows])
