"""Samples that are decoded once give the batches of those that are decoded every time."""

import io
import multiprocessing
import random
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from patchloom.data.augmentation.augment import train_transform
from patchloom.data.batches import sample_memory as module
from patchloom.data.batches.decoded_dataset import make_loader
from patchloom.data.batches.loader import Loader
from patchloom.data.batches.sample_memory import SampleMemory, decoded_bytes, sample_memory
from patchloom.data.batches.views import View, make_view_loader
from patchloom.data.datasets import ClassTable, LabeledImages
from patchloom.data.trees.tree import ImageFiles
from patchloom.recipes.parts import AugmentPart
from tests.data.facts import has_facts
from tests.data.painted import check_aligned, painted

CROP = AugmentPart(crop_min_scale=0.5, policy="trivial")
PARTS = ("mask", "instances", "boxes")


@pytest.fixture
def photos(tmp_path) -> LabeledImages:
    """Return 12 JPEG files of different sizes, three of which are decoded at an eighth for views of 16."""
    names, chance = [], np.random.default_rng(0)
    for number in range(12):
        width, height = (400, 300) if number % 4 == 0 else (30 + number, 40 - number)
        small = chance.integers(0, 256, (6, 8, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(small).resize((width, height)).save(file, "JPEG")
        names.append(f"{number}.jpg")
        (tmp_path / names[-1]).write_bytes(file.getvalue())
    return LabeledImages(ImageFiles(tmp_path, names), np.arange(12), np.arange(12) % 2, ClassTable(("a", "b")))


def loader(
    dataset: LabeledImages, memory: SampleMemory | None, workers: int = 0, augment: AugmentPart = CROP
) -> Loader:
    return Loader(dataset, train_transform(augment, 16), batch_size=4, seed=3, workers=workers, memory=memory)


def pixels(made, epochs: int = 2, start: int = 0) -> list[bytes]:
    taken = [batch.images.numpy().tobytes() for epoch in range(epochs) for batch in made.epoch(epoch, start)]
    made.close()
    return taken


def count_reads(monkeypatch) -> Counter:
    reads: Counter = Counter()
    sample = LabeledImages.sample
    monkeypatch.setattr(
        LabeledImages, "sample", lambda self, index, *more: reads.update([index]) or sample(self, index, *more)
    )
    return reads


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("augment", [CROP, AugmentPart(crop_min_scale=0.08), AugmentPart(crop="simple_random")])
def test_batches_are_those_without_the_memory(photos, workers, augment):
    memory = SampleMemory(photos, 10**6)
    assert pixels(loader(photos, memory, workers, augment)) == pixels(loader(photos, None, augment=augment))
    assert memory.left < 10**6


def test_each_image_is_decoded_once(photos, monkeypatch):
    reads = count_reads(monkeypatch)
    pixels(loader(photos, SampleMemory(photos, 10**6)), epochs=3)
    assert reads == Counter(range(12))


def test_workers_share_the_memory(photos, monkeypatch):
    memory = SampleMemory(photos, 10**6)
    pixels(loader(photos, memory, workers=2), epochs=1)
    reads = count_reads(monkeypatch)
    pixels(loader(photos, memory), epochs=1)
    assert not reads


def test_a_resumed_epoch_continues_with_the_same_batches(photos):
    whole = pixels(loader(photos, SampleMemory(photos, 10**6)), epochs=1)
    assert pixels(loader(photos, SampleMemory(photos, 10**6)), epochs=1, start=1) == whole[1:]


def test_a_full_memory_stores_no_more(photos):
    memory = SampleMemory(photos, 10_000)
    assert pixels(loader(photos, memory, workers=2)) == pixels(loader(photos, None))
    assert 0 <= memory.left < 10_000
    stored = [index for index in range(12) if memory.get(index)]
    assert 0 < len(stored) < 12


def test_masks_and_boxes_are_stored_with_their_image():
    dataset = painted(*PARTS, uneven=True)
    memory = SampleMemory(dataset, 10**7)
    first, again = dataset.sample(5), None
    memory.put(5, first)
    again = memory.get(5)
    assert again is not None
    assert again.image.tobytes() == first.image.tobytes()
    assert all(np.array_equal(again.layers[name].numbers, first.layers[name].numbers) for name in PARTS[:2])
    assert np.array_equal(again.boxes, first.boxes)
    made = Loader(dataset, train_transform(AugmentPart(crop_min_scale=0.5), 32), batch_size=4, memory=memory)
    for batch in [*made.epoch(0), *made.epoch(1)]:
        check_aligned(batch.images, batch.parts)


def test_an_image_that_was_decoded_smaller_keeps_its_original_size(photos):
    transform = train_transform(CROP, 16)
    sample = photos.sample(0, transform.reduction)
    assert sample.image.size == (50, 38)
    memory = SampleMemory(photos, 10**6)
    memory.put(0, sample)
    stored = memory.get(0)
    assert stored is not None
    assert stored.size == (400, 300)
    seen = [transform.arrays(each, random.Random(1))["image"] for each in (sample, stored)]
    assert np.array_equal(*seen)


@pytest.mark.parametrize(("share", "expected"), [(0.08, 4), (0.25, 8), (1.0, 8)])
def test_the_smallest_crop_limits_the_reduction(share, expected):
    assert train_transform(AugmentPart(crop_min_scale=share), 32).reduction((512, 512)) == expected


def test_the_bytes_are_estimated_from_decoded_sizes(photos):
    whole = sum(3 * np.prod(photos.read(index).size) for index in range(12))
    assert decoded_bytes(photos, None) == whole
    assert decoded_bytes(photos, train_transform(CROP, 16).reduction) < whole / 3


@pytest.mark.parametrize("available", [10**9, 40_000, None])
def test_the_memory_of_the_machine_decides(photos, monkeypatch, available):
    monkeypatch.setattr(module, "available_bytes", lambda: available)
    stores: dict = {}
    made, note = make_loader(photos, CROP, 16, batch_size=4, seed=3, device="cpu", stores=stores)
    fits = available == 10**9
    assert has_facts(note, "once" if fits else "every time")
    assert has_facts(note, *(["477 MiB"] if fits else []))
    assert bool(stores) == fits
    assert isinstance(made, Loader)
    assert (made._memory is not None) == fits
    again, _ = make_loader(photos, CROP, 16, batch_size=4, seed=3, device="cpu", stores=stores)
    assert again._memory is made._memory


def test_processes_share_the_memory_of_the_machine(photos, monkeypatch):
    monkeypatch.setattr(module, "available_bytes", lambda: 240_000)
    transform = train_transform(CROP, 16)
    assert sample_memory(photos, transform, {}, workers=0, world=1)[0] is not None
    assert sample_memory(photos, transform, {}, workers=0, world=4)[0] is None


def test_workers_that_are_not_forked_have_no_memory(photos, monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: "spawn")
    transform = train_transform(CROP, 16)
    assert sample_memory(photos, transform, {}, workers=2, world=1)[0] is None
    assert sample_memory(photos, transform, {}, workers=0, world=1)[0] is not None


def test_views_are_cut_from_the_memory(photos, monkeypatch):
    views = [View(CROP, 16), View(CROP, 8)]

    def batches() -> list[list[bytes]]:
        made, note = make_view_loader(photos, views, batch_size=4, seed=0, device="cpu")
        assert has_facts(note, "once" if fits else "every time")
        return [[view.numpy().tobytes() for view in b.views] for epoch in (0, 1) for b in made.epoch(epoch)]

    results = []
    for fits in (True, False):
        monkeypatch.setattr(module, "available_bytes", lambda fits=fits: 10**9 if fits else 0)
        results.append(batches())
    assert results[0] == results[1]
