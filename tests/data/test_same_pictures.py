"""Augmented batches are those of the versions before: a run that began with one of them goes on as it was.

`same_pictures.json` was written before there were parts beside pictures, by

    python -m tests.data.test_same_pictures

Digests hold where the processor and torch are those it was written with: another processor rounds otherwise. The mean
of each quarter of each picture holds everywhere.
"""

import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from patchloom.data.augmentation import augment as augmentation
from patchloom.data.batches.decoded_dataset import make_loader
from patchloom.data.batches.loader import Loader
from patchloom.data.batches.views import View, make_view_loader
from patchloom.data.datasets import ClassTable, LabeledImages
from patchloom.data.images.image_store import ArrayImages
from patchloom.recipes import get_recipe
from patchloom.recipes.parts import AugmentPart
from patchloom_runtime.images import evaluation_transform

FILE = Path(__file__).with_name("same_pictures.json")
SIZE = 16
Batches = Iterator[tuple[list[Tensor], Tensor]]  # views, each (B, 3, H, W), and places in the set


def photos(height: int = 24, width: int = 28) -> LabeledImages:
    coarse = np.random.default_rng(0).integers(0, 256, (8, 6, 7, 3), np.uint8)
    arrays = np.stack([np.asarray(Image.fromarray(one).resize((width, height), 3)) for one in coarse])
    return LabeledImages(ArrayImages(arrays, "photos"), np.arange(8), np.arange(8) % 3, ClassTable(tuple("abc")))


def of_recipe(name: str) -> AugmentPart:
    return replace(get_recipe(name).augment, repeats=1)


def by_workers(augment: AugmentPart) -> Batches:
    for batch in Loader(photos(), augmentation.train_transform(augment, SIZE), batch_size=4, seed=5).epoch(1):
        yield [batch.images], batch.index


def on_device(augment: AugmentPart) -> Batches:
    loader, note = make_loader(photos(16, 20), augment, SIZE, batch_size=4, seed=5, device="cpu")
    assert "stay decoded" in note
    for batch in loader.epoch(1):
        yield [batch.images], batch.index


def in_views(augment: AugmentPart, local: AugmentPart) -> Batches:
    views = [View(augment, SIZE), View(replace(augment, blur=0.1), SIZE), View(local, 8)]
    for batch in make_view_loader(photos(16, 16), views, batch_size=4, seed=5, device="cpu")[0].epoch(1):
        yield batch.views, batch.index


def evaluation() -> Batches:
    transform = evaluation_transform.test_transform(SIZE, 0.875)
    for batch in Loader(photos(), transform, batch_size=4, shuffle=False).epoch(0):
        yield [batch.images], batch.index


LOCAL = replace(of_recipe("dino"), crop_min_scale=0.05, crop_max_scale=0.4)
CASES: dict[str, Callable[[], Batches]] = {
    "evaluation": evaluation,
    "dino on the device": lambda: in_views(of_recipe("dino"), LOCAL),
    "dino by workers": lambda: in_views(replace(of_recipe("dino"), policy="trivial"), LOCAL),
    "grafit by workers": lambda: by_workers(of_recipe("grafit")),
    "grafit on the device": lambda: on_device(replace(of_recipe("grafit"), policy="three_augment")),
    "deit by workers": lambda: by_workers(of_recipe("deit")),
    "deit on the device": lambda: on_device(of_recipe("deit")),
    "deit3 by workers": lambda: by_workers(of_recipe("deit3")),
    "deit3 on the device": lambda: on_device(of_recipe("deit3")),
    "small_images by workers": lambda: by_workers(of_recipe("small_images")),
    "small_images on the device": lambda: on_device(of_recipe("small_images")),
    "pad by workers": lambda: by_workers(AugmentPart(crop="pad")),
    "pad on the device": lambda: on_device(AugmentPart(crop="pad")),
}


def machine() -> list[str]:
    return [torch.__version__.partition("+")[0], platform.machine(), torch.backends.cpu.get_cpu_capability()]


def taken(batches: Batches) -> dict[str, object]:
    digest, order, means = hashlib.sha256(), [], []
    for views, index in batches:
        order += index.tolist()
        for view in views:
            digest.update(view.contiguous().numpy().tobytes())
            means += torch.nn.functional.adaptive_avg_pool2d(view.float().mean(1), 2).flatten().round().int().tolist()
    return {"digest": digest.hexdigest()[:16], "order": order, "means": means}


@pytest.mark.parametrize("case", CASES)
def test_augmented_pictures_are_those_of_the_version_before(case):
    before = json.loads(FILE.read_text("utf-8"))
    now, then = taken(CASES[case]()), before["cases"][case]
    assert now["order"] == then["order"]
    assert np.abs(np.array(now["means"]) - then["means"]).max() <= 2
    if machine() == before["machine"]:
        assert now["digest"] == then["digest"]


if __name__ == "__main__":
    cases = {name: taken(make()) for name, make in CASES.items()}
    FILE.write_text(json.dumps({"machine": machine(), "cases": cases}) + "\n", "utf-8")
