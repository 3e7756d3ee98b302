"""The sheet of crops and augmented images before the first step."""

import random

import numpy as np
import pytest
from PIL import Image

from patchloom.data.augmentation.augment import TrainTransform
from patchloom.recipes.parts import AugmentPart
from patchloom.report.pictures.augmentation import SIDE, VIEWS, augmentation_sheet, crop_box, read_preview
from patchloom.tasks.plan import TrainingSettings
from patchloom.training.run import run_training
from patchloom_runtime.errors import UsageError
from patchloom_runtime.images.geometry import Geometry
from patchloom_runtime.images.samples import Sample
from tests.reliability.commands import class_folders
from tests.small_runs import CHANGES


def gradient() -> Image.Image:
    """Red is the column and green the row, so that a view tells where it is from."""
    rows, columns = np.mgrid[:100, :200]
    return Image.fromarray(np.stack([columns, rows, 0 * rows], axis=2).astype(np.uint8))


@pytest.mark.parametrize("crop", ["random_resized", "simple_random", "centre"])
@pytest.mark.parametrize("seed", range(4))
def test_a_box_is_where_the_view_comes_from(crop: str, seed: int) -> None:
    transform = TrainTransform(AugmentPart(crop=crop), (32, 32))
    rng, sample = random.Random(seed), Sample(gradient())
    geometry = transform.geometry(sample, rng)
    left, top, right, bottom = crop_box(geometry)
    view = transform.applied(geometry, sample, rng)["image"].astype(float)
    slack = 14 if crop == "simple_random" else 3  # its border is reflected
    assert view[16, 15:17, 0].mean() == pytest.approx((left + right) / 2, abs=slack)
    assert view[15:17, 16, 1].mean() == pytest.approx((top + bottom) / 2, abs=slack)
    assert right - left == pytest.approx(bottom - top) or crop == "random_resized"


def test_a_flipped_window_is_on_the_other_side() -> None:
    plain = Geometry((0, 0, 200, 100), (50, 100), (50, 50), start=(0, 10))
    flipped = Geometry((0, 0, 200, 100), (50, 100), (50, 50), start=(0, 10), flip=True)
    assert crop_box(plain) == (20, 0, 120, 100)
    assert crop_box(flipped) == (80, 0, 180, 100)


def test_a_sheet_has_every_view_and_follows_from_the_seed() -> None:
    augment = AugmentPart(policy="three_augment", color_jitter=0.3)
    drawn = augmentation_sheet([gradient()] * 2, augment, 32, seed=0)
    assert drawn.width > (VIEWS + 1) * SIDE
    assert drawn.height > 2 * SIDE
    assert drawn.tobytes() == augmentation_sheet([gradient()] * 2, augment, 32, seed=0).tobytes()
    assert drawn.tobytes() != augmentation_sheet([gradient()] * 2, augment, 32, seed=1).tobytes()


def test_a_training_draws_it_before_the_first_step_and_its_report_shows_it(tmp_path) -> None:
    settings = {"model": "resmlp_s12", "size": 16, "epochs": 1, "batch": 8, "workers": 0, "device": "cpu"}
    data = str(class_folders(tmp_path / "data", pictures=8))
    run_training(
        TrainingSettings(data=data, out=str(tmp_path / "run"), changes=CHANGES, preview=True, **settings), say=str
    )
    assert read_preview(tmp_path / "run")[0].image.width > SIDE
    assert "Augmented training images" in (tmp_path / "run" / "report.html").read_text("utf-8")
    with pytest.raises(UsageError, match="--preview"):
        run_training(TrainingSettings(data=data, preview=True, transform=np.asarray, **settings), say=str)
