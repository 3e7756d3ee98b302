import os
import random
import signal
import time
from dataclasses import dataclass
from queue import Empty

import numpy as np
import pytest
import torch
from PIL import Image

from patchloom.data.augmentation.augment import train_transform
from patchloom.data.batches import workers
from patchloom.data.batches.decoded_dataset import DeviceLoader, make_loader
from patchloom.data.batches.loader import Loader
from patchloom.data.batches.sampler import ClassSampling
from patchloom.data.datasets import ClassTable, LabeledImages
from patchloom.data.images.image_batch import normalize
from patchloom.data.images.image_store import ArrayImages
from patchloom.machine import cores
from patchloom.recipes.parts import AugmentPart
from patchloom_runtime.errors import DataError, ResourceError
from patchloom_runtime.images.evaluation_transform import ImageTransform
from patchloom_runtime.images.geometry import Geometry
from patchloom_runtime.images.samples import Sample
from tests.data.facts import facts, has_facts

AUGMENT = AugmentPart(policy="randaugment", policy_magnitude_std=0.5, color_jitter=0.3, erasing=0.3)


class Fragile(ArrayImages):
    """Pictures of which some cannot be read."""

    broken: tuple[int, ...] = ()

    def read(self, index: int) -> Image.Image:
        if index in self.broken:
            raise DataError(f"{self.where(index)}: ends after 3 bytes")
        return super().read(index)


def pictures(count: int = 50, broken: tuple[int, ...] = ()) -> LabeledImages:
    arrays = np.random.default_rng(0).integers(0, 256, (count, 20, 24, 3), np.uint8)
    source = Fragile(arrays, "noise")
    source.broken = broken
    return LabeledImages(source, np.arange(count), np.arange(count) % 7, ClassTable(tuple("abcdefg")))


def loader(dataset: LabeledImages | None = None, *, augment: AugmentPart = AUGMENT, **options: object) -> Loader:
    options = {"batch_size": 8, "seed": 3, **options}
    return Loader(dataset or pictures(), train_transform(augment, 16), **options)


def contents(batches) -> list[tuple[bytes, list[int], list[int]]]:
    return [(b.images.contiguous().numpy().tobytes(), b.labels.tolist(), b.index.tolist()) for b in batches]


@pytest.fixture(scope="module")
def reference() -> list[list[tuple[bytes, list[int], list[int]]]]:
    alone = loader(repeats=2, drop_last=False)
    return [contents(alone.epoch(epoch)) for epoch in range(2)]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_number_of_workers_changes_nothing(workers, reference):
    many = loader(repeats=2, drop_last=False, workers=workers)
    assert [contents(many.epoch(epoch)) for epoch in range(2)] == reference
    assert reference[0] != reference[1]
    many.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_can_start_anywhere_and_be_left_anywhere(workers, reference):
    some = loader(repeats=2, drop_last=False, workers=workers)
    left = some.epoch(0)
    next(left)
    assert contents(some.epoch(1, start_step=4)) == reference[1][4:]
    assert contents(some.epoch(0, start_step=2)) == reference[0][2:]
    assert contents(some.epoch(0, start_step=some.steps_per_epoch)) == []
    some.close()


def test_epochs_by_class_are_the_same_from_workers_and_from_decoded_images():
    dataset = pictures()
    sampling = ClassSampling(np.repeat([0, 1, 2], [40, 7, 3]), "balanced")
    alone = loader(dataset, repeats=2, sampling=sampling)
    reference = contents(alone.epoch(1))
    many = loader(dataset, repeats=2, sampling=sampling, workers=2)
    assert contents(many.epoch(1)) == reference
    assert contents(many.epoch(1, start_step=3)) == reference[3:]
    many.close()
    plain = AugmentPart(crop="pad", repeats=2)
    decoded, _ = make_loader(dataset, plain, 16, batch_size=8, seed=3, device="cpu", sampling=sampling)
    assert isinstance(decoded, DeviceLoader)
    assert [batch.index.tolist() for batch in decoded.epoch(1)] == [index for _, _, index in reference]
    views = decoded.showing((0, 1), plain, 16)
    assert [batch.index.tolist() for batch in views.epoch(1)] == [index for _, _, index in reference]


def views(batches) -> list[tuple[int, bytes]]:
    rows = [(int(i), image) for b in batches for i, image in zip(b.index, b.images, strict=True)]
    return sorted((i, image.numpy().tobytes()) for i, image in rows)


@pytest.mark.parametrize("world", [2, 4])
def test_several_processes_see_the_pictures_of_one(world):
    whole = list(loader(batch_size=16).epoch(2))
    shares = [list(loader(batch_size=16, rank=rank, world=world).epoch(2)) for rank in range(world)]
    for step, batch in enumerate(whole):
        assert views([share[step] for share in shares]) == views([batch])
        assert {len(share[step]) for share in shares} == {16 // world}


def test_batches_hold_what_they_say():
    dataset = pictures()
    for batch in loader(dataset, augment=AugmentPart(crop="resize", flip=0.0), drop_last=False).epoch(0):
        assert batch.images.shape == (len(batch), 3, 16, 16)
        assert batch.images.dtype == torch.uint8
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        assert batch.labels.tolist() == dataset.labels[batch.index].tolist()
        assert batch.to("meta").images.device.type == "meta"
    assert loader(dataset, drop_last=False).steps_per_epoch == 7
    assert loader(dataset).steps_per_epoch == 6


def test_batches_do_not_share_memory():
    kept = list(loader(workers=1).epoch(0))
    assert contents(kept) == contents(loader().epoch(0))


def test_repeated_pictures_get_different_augmentation():
    batch = next(loader(repeats=3, batch_size=6).epoch(0))
    assert batch.index.tolist() == [batch.index[0]] * 3 + [batch.index[3]] * 3
    assert len({image.numpy().tobytes() for image in batch.images}) == 6


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_picture_stops_the_epoch_by_name(workers):
    with pytest.raises(DataError, match=facts("noise", 5)):
        list(loader(pictures(broken=(5,)), workers=workers).epoch(0))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_picture_is_replaced_and_named(workers):
    dataset = pictures(broken=(5, 6, 49))
    tolerant = loader(dataset, workers=workers, skip_broken=True, drop_last=False)
    batches = list(tolerant.epoch(0))
    seen = [(int(i), int(n)) for b in batches for i, n in zip(b.index, b.labels, strict=True)]
    assert sorted(i for i, _ in seen) == sorted([*set(range(50)) - {5, 6, 49}, 7, 7, 0])
    assert all(label == index % 7 for index, label in seen)
    assert tolerant.broken == {i: f"noise, image {i}: ends after 3 bytes" for i in (5, 6, 49)}
    tolerant.close()


def test_a_set_of_broken_pictures_is_an_error_even_when_they_may_be_skipped():
    with pytest.raises(DataError, match=facts(20, "noise")):
        list(loader(pictures(broken=tuple(range(50))), skip_broken=True).epoch(0))


@dataclass(frozen=True)
class Deadly(ImageTransform):
    image_size: tuple[int, int] = (16, 16)

    def geometry(self, sample: Sample, rng: random.Random) -> Geometry:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_dead_worker_is_named_with_the_reason():
    with pytest.raises(ResourceError, match=r"\d+.*SIGKILL"):
        list(Loader(pictures(), Deadly(), batch_size=8, workers=1).epoch(0))


def test_a_worker_that_dies_while_nobody_waits_raises_only_at_the_next_wait():
    some = loader(workers=2)
    batches = some.epoch(0)
    next(batches)
    worker = some._pool._iterator._workers[1]
    worker.kill()
    worker.join()
    # torch's handler would have raised here, where an update of the weights may be half done.
    assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    with pytest.raises(ResourceError, match=facts(worker.pid, "SIGKILL")):
        list(batches)
    assert contents(some.epoch(0)) == contents(loader().epoch(0))  # with new workers
    some.close()


@pytest.mark.parametrize(
    ("code", "fact"),
    [(-signal.SIGBUS, "SIGBUS"), (-signal.SIGSEGV, "SIGSEGV"), (3, 3)],
)
def test_each_end_of_a_worker_has_its_words(code, fact):
    assert has_facts(workers._cause_of_death(77, code), 77, fact)


@dataclass(frozen=True)
class Stuck(ImageTransform):
    image_size: tuple[int, int] = (16, 16)

    def geometry(self, sample: Sample, rng: random.Random) -> Geometry:
        time.sleep(60)
        raise AssertionError


def test_a_stuck_worker_is_named_after_the_set_time():
    with pytest.raises(ResourceError, match=r"0\.2 s"):
        list(Loader(pictures(), Stuck(), batch_size=8, workers=1, timeout_s=0.2).epoch(0))


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_worker_is_the_one_that_is_named_and_does_not_stay(stopped):
    some = loader(workers=2, timeout_s=4)
    batches = some.epoch(0)
    next(batches)
    processes = list(some._pool._iterator._workers)
    os.kill(processes[stopped].pid, signal.SIGSTOP)
    with pytest.raises(ResourceError, match=facts(processes[stopped].pid, "4 s")):
        list(batches)
    assert not any(process.is_alive() for process in processes)


class StoppedForAnHour:
    """A queue whose first wait takes an hour, as when the process itself is stopped, and whose second has an answer."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.asked = clock, 0

    def get(self, timeout: float) -> str:
        self.asked += 1
        if self.asked == 1:
            self.clock[0] += 3600
            raise Empty
        return "a batch"


def test_a_process_that_was_stopped_itself_does_not_blame_its_workers(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(workers, "monotonic", lambda: clock[0])
    queue = StoppedForAnHour(clock)
    assert workers._WatchedQueue(queue, []).get(timeout=120) == "a batch"
    assert queue.asked == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_workers_outlive_a_signal_for_the_whole_group(number, reference):
    some = loader(repeats=2, drop_last=False, workers=2)
    batches = some.epoch(0)
    first = contents([next(batches)])
    processes = list(some._pool._iterator._workers)
    for process in processes:
        os.kill(process.pid, number)
    assert first + contents(batches) == reference[0]
    assert all(process.is_alive() for process in processes)
    some.close()
    assert not any(process.is_alive() for process in processes)


def test_a_second_sigterm_ends_a_worker():
    some = loader(workers=1)
    next(some.epoch(0))
    (worker,) = some._pool._iterator._workers
    while worker.is_alive():  # one that arrives before the first was handled is none
        worker.terminate()
        worker.join(0.2)
    assert worker.exitcode == -signal.SIGTERM
    some.close()


def test_more_workers_than_cores_is_one_line_of_our_own():
    many = cores() + 1
    _, note = make_loader(
        pictures(), AugmentPart(policy="autoaugment"), 16, batch_size=8, seed=0, device="cpu", workers=many
    )
    assert has_facts(note, many, cores())


def test_missing_shared_memory_is_said(monkeypatch):
    def refuse(tensor: torch.Tensor) -> None:
        raise RuntimeError("No space left on device")

    monkeypatch.setattr(torch.Tensor, "share_memory_", refuse)
    with pytest.raises(ResourceError, match=facts("0 MiB", "No space left on device")):
        loader(workers=1)


def test_closing_ends_the_workers_and_an_epoch_starts_new_ones():
    some = loader(workers=2)
    first = contents(some.epoch(0))
    processes = list(some._pool._iterator._workers)
    some.close()
    assert not any(process.is_alive() for process in processes)
    assert contents(some.epoch(0)) == first
    some.close()


def test_normalize_in_both_memory_layouts():
    images = torch.randint(0, 256, (2, 3, 5, 7), dtype=torch.uint8)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    expected = (images / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.testing.assert_close(normalize(images.contiguous(memory_format=layout), mean, std), expected)
