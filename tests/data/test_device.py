import dataclasses
import itertools
import random

import numpy as np
import pytest
import timm.data.auto_augment as timm_augment
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from patchloom.data.augmentation import batch_augment as batched
from patchloom.data.augmentation import policies
from patchloom.data.augmentation.augment import erase, random_crop_box, train_transform
from patchloom.data.augmentation.batch_augment import OPERATIONS, Draws, augment_batch, draw, operate
from patchloom.data.batches import decoded_dataset as device
from patchloom.data.batches.decoded_dataset import DeviceLoader, Store, decode_all, fits_in_memory, make_loader
from patchloom.data.batches.loader import Loader
from patchloom.data.batches.sampler import rank_positions
from patchloom.data.datasets import ClassTable, LabeledImages
from patchloom.data.images.image_store import ArrayImages
from patchloom.recipes.parts import AugmentPart
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.evaluation_transform import test_transform as evaluation
from tests.data.facts import has_facts

CPU = torch.device("cpu")
COLORS = {"color_jitter": 0.4, "saturation": 0.2, "hue": 0.1, "jitter_probability": 0.8, "grey": 0.2, "solarise": 0.2}
EVERYTHING = AugmentPart(policy="randaugment", policy_magnitude_std=0.5, blur=0.5, erasing=0.5, **COLORS)


def photos(count: int = 12, height: int = 24, width: int = 32) -> np.ndarray:
    """(count, h, w, 3): smooth colours with grain."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (count, 4, 6, 3), np.uint8)
    smooth = np.stack([np.asarray(Image.fromarray(c).resize((width, height), 3)) for c in coarse]).astype(int)
    return (smooth + rng.integers(-9, 10, smooth.shape)).clip(0, 255).astype(np.uint8)


def pictures(arrays: np.ndarray) -> LabeledImages:
    rows = np.arange(len(arrays))
    return LabeledImages(ArrayImages(arrays, "photos"), rows, rows % 5, ClassTable(tuple("abcde")))


def store(arrays: np.ndarray) -> Store:
    return Store(torch.from_numpy(arrays), torch.arange(len(arrays)) % 5)


def planes(arrays: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(arrays).permute(0, 3, 1, 2).float()


def as_pixels(batch: torch.Tensor) -> np.ndarray:
    return batch.permute(0, 2, 3, 1).numpy().astype(int)


def draws(count: int, seed: int = 0, size: tuple[int, int] = (24, 32)) -> Draws:
    return draw(count, AugmentPart(policy_layers=2, erasing=0.5), size, [seed], CPU)


def by_pillow(name: str, arrays: np.ndarray, level: float, sign: int, monkeypatch) -> np.ndarray:
    """timm's operation at a level of 0…1, its coin replaced by `sign`."""
    monkeypatch.setattr(timm_augment, "_randomly_negate", lambda value: sign * value)
    op = timm_augment.AugmentOp(
        name, 1.0, 10 * level, {"img_mean": policies.FILL_COLOR, "interpolation": Image.Resampling.BILINEAR}
    )
    if name.startswith("Posterize"):
        op.aug_fn = policies.posterize
    return np.stack([np.asarray(op(Image.fromarray(array))) for array in arrays]).astype(int)


def test_operations_are_timms_list():
    assert list(OPERATIONS) == timm_augment.rand_augment_choices("", increasing=True)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(("level", "sign"), [(0.9, 1), (0.9, -1), (0.25, 1), (1.0, -1), (0.0, 1)])
def test_operations_are_timms(name, level, sign, monkeypatch):
    arrays = photos()
    arrays[0] = 77  # one colour: nothing to stretch or equalise
    arrays[1, :, :16] = 250
    numbers = torch.full((len(arrays),), OPERATIONS.index(name))
    levels, signs = torch.full((12,), level), torch.full((12,), float(sign))
    ours = as_pixels(operate(planes(arrays), numbers, levels, signs))
    theirs = by_pillow(name, arrays, level, sign, monkeypatch)
    if name in ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel"):
        # At the border Pillow repeats the edge, here it fades into the fill colour.
        inner = np.abs(ours - theirs)[:, 4:-4, 4:-4]
        assert (inner <= 1).mean() > 0.93
        assert np.median(np.abs(ours - theirs)) <= 1
    else:
        assert np.abs(ours - theirs).max() <= (1 if "Increasing" in name else 0)
        assert (ours != theirs).mean() < 5e-3


def test_each_picture_gets_its_own_operation():
    arrays = photos(15)
    numbers = torch.arange(15)
    level, sign = torch.full((15,), 0.9), torch.ones(15)
    together = operate(planes(arrays), numbers, level, sign)
    for k in range(15):
        alone = operate(planes(arrays[k : k + 1]), numbers[k : k + 1], level[:1], sign[:1])
        assert torch.equal(together[k : k + 1], alone)
    untouched = operate(planes(arrays), torch.full((15,), -1), level, sign)
    assert torch.equal(untouched, planes(arrays))


def test_three_augment_is_pillows():
    arrays = photos()
    radius = torch.linspace(0.3, 2.0, 12)
    for choice in range(3):
        ours = as_pixels(batched.three_augment(planes(arrays), torch.full((12,), choice), radius))
        for k, array in enumerate(arrays):
            image = Image.fromarray(array)
            expected = [
                image.convert("L").convert("RGB"),
                ImageOps.solarize(image, 128),
                image.filter(ImageFilter.GaussianBlur(float(radius[k]))),
            ][choice]
            difference = np.abs(ours[k] - np.asarray(expected).astype(int))
            # Pillow's blur is made of three box blurs.
            assert difference.mean() < 1.2 if choice == 2 else difference.max() == 0


@pytest.mark.parametrize("size", [(32, 32), (16, 16), (5, 7)])
def test_blur_is_a_gaussian_on_small_pictures_and_near_pillows(size):
    arrays, radius = photos(12, *size), torch.linspace(0.1, 2.0, 12)
    ours = as_pixels(batched.blur(planes(arrays), radius))
    offsets = np.arange(-6, 7)
    for k, array in enumerate(arrays):
        weights = np.exp(-((offsets / float(radius[k])) ** 2) / 2)
        window = np.outer(weights, weights)[..., None] / weights.sum() ** 2  # (13, 13, 1)
        padded = np.pad(array, ((6, 6), (6, 6), (0, 0)), mode="edge")
        for y, x in itertools.product(range(size[0]), range(size[1])):
            exact = (window * padded[y : y + 13, x : x + 13]).sum((0, 1))
            assert (np.abs(ours[k, y, x] - exact) < 0.501).all()
        if min(size) >= 16:  # the smallest pictures are all noise, where three box blurs show
            theirs = np.asarray(Image.fromarray(array).filter(ImageFilter.GaussianBlur(float(radius[k])))).astype(int)
            assert np.abs(ours[k] - theirs).mean() < (1.2 if size == (32, 32) else 2.4)


def test_color_jitter_is_pillows():
    arrays = photos(6)
    enhancers = ["Brightness", "Contrast", "Color"]
    orders = torch.tensor([[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])
    factors = torch.tensor([[0.75, 1.25, 1.5]] * 6)
    ours = as_pixels(batched.jitter_colors(planes(arrays), orders, factors))
    for k, array in enumerate(arrays):
        image = Image.fromarray(array)
        for turn in range(3):
            image = getattr(ImageEnhance, enhancers[orders[k, turn]])(image).enhance(float(factors[k, turn]))
        assert (ours[k] == np.asarray(image)).all()


def test_hue_is_pillows():
    steps = np.array([0, 1, 2, 50, 85, 86, 127, 128, 170, 200, 254, 255], np.uint8)
    colors = np.stack(np.meshgrid(steps, steps, steps), -1).reshape(1, 36, 48, 3)
    colors = np.concatenate([colors, np.random.default_rng(0).integers(0, 256, (8, 36, 48, 3), np.uint8)])
    for share in (-0.5, -0.1, -0.001, 0.0, 0.004, 0.1, 0.3333, 0.5):
        ours = as_pixels(batched.turn_hue(planes(colors), torch.full((9,), share)))
        for k, color in enumerate(colors):
            assert (ours[k] == np.asarray(policies.Hue(Image.fromarray(color)).enhance(share))).all()


def test_color_jitter_with_hue_is_pillows():
    arrays = photos(24)
    orders = list(itertools.permutations(range(4)))
    amounts = [0.75, 1.25, 1.5, -0.125]  # of brightness, contrast, saturation, hue
    by_turn = torch.tensor([[amounts[kind] for kind in order] for order in orders])
    ours = as_pixels(batched.jitter_colors(planes(arrays), torch.tensor(orders), by_turn))
    changes = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color, policies.Hue]
    for k, order in enumerate(orders):
        image = Image.fromarray(arrays[k])
        for kind in order:
            image = changes[kind](image).enhance(amounts[kind])
        assert (ours[k] == np.asarray(image)).all()


def test_jitter_draws_factors_then_an_order():
    """As it always did: runs that were begun before there was a hue go on as they were."""
    arrays = photos()
    part = AugmentPart(crop="resize", flip=0.0, color_jitter=0.3)
    ours = augment_batch(torch.from_numpy(arrays), torch.arange(12), part, (24, 32), draws(12))[0]
    numbers = torch.rand(12, 64, generator=torch.Generator().manual_seed(0))[:, 3:]  # after flip and place
    factors, order = 0.7 + 0.6 * numbers[:, :3], numbers[:, 3:6].argsort(1)
    assert (as_pixels(ours) == as_pixels(batched.jitter_colors(planes(arrays), order, factors))).all()


def test_each_picture_draws_jitter_grey_blur_and_solarising_in_this_order(monkeypatch):
    def stripes(pixels, radius):
        """In place of a blur, which is not Pillow's to the last value."""
        return torch.where(torch.arange(32) % 4 < 2, pixels, radius[:, None, None, None].mul(100).floor())

    monkeypatch.setattr(batched, "blur", stripes)
    arrays = photos(200)
    part = AugmentPart(crop="resize", flip=0.0, blur=0.5, **COLORS)
    ours = as_pixels(augment_batch(torch.from_numpy(arrays), torch.arange(200), part, (24, 32), draws(200))[0])
    numbers = draws(200)
    numbers.several(3)  # flip and place
    shares, order, jitter = numbers.several(4), numbers.several(4).argsort(1), numbers.one() < 0.8
    grey = numbers.one() < 0.2
    radius, blurred, solarised = 0.1 + 1.9 * numbers.one(), numbers.one() < 0.5, numbers.one() < 0.2
    lows, spans = torch.tensor([0.6, 0.6, 0.8, -0.1]), torch.tensor([0.8, 0.8, 0.4, 0.2])
    amounts = lows[order] + spans[order] * shares
    changes = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color, policies.Hue]
    for k, array in enumerate(arrays):
        image = Image.fromarray(array)
        if jitter[k]:
            for kind, amount in zip(order[k].tolist(), amounts[k].tolist(), strict=True):
                image = changes[kind](image).enhance(amount)
        if grey[k]:
            image = image.convert("L").convert("RGB")
        if blurred[k]:
            image = Image.fromarray(
                as_pixels(stripes(planes(np.array(image)[None]), radius[k : k + 1]))[0].astype("u1")
            )
        if solarised[k]:
            image = ImageOps.solarize(image, 128)
        assert (ours[k] == np.asarray(image)).all()


def test_a_certain_change_reaches_every_picture():
    arrays = photos()
    part = AugmentPart(crop="resize", flip=0.0, grey=1.0, blur=1.0)
    ours = augment_batch(torch.from_numpy(arrays), torch.arange(12), part, (24, 32), draws(12))[0]
    numbers = draws(12)
    numbers.several(3)
    grey = planes(np.stack([np.asarray(Image.fromarray(array).convert("L").convert("RGB")) for array in arrays]))
    assert torch.equal(ours.float(), batched.blur(grey, 0.1 + 1.9 * numbers.one()))


@pytest.mark.parametrize(("crop", "mode"), [("pad", "constant"), ("simple_random", "reflect")])
def test_shifted_crops_are_windows_of_the_padded_picture(crop, mode):
    arrays = photos(1, 10, 12)
    padded = np.pad(arrays[0], ((3, 3), (3, 3), (0, 0)), mode=mode)
    windows = {
        padded[y : y + 10, x : x + 10][:, ::step].tobytes() for y in range(7) for x in range(9) for step in (1, -1)
    }
    part = AugmentPart(crop=crop, crop_padding=3)
    index = torch.zeros(3000, dtype=torch.int64)
    views, _ = augment_batch(torch.from_numpy(arrays), index, part, (10, 10), draws(3000))
    assert {view.permute(1, 2, 0).numpy().tobytes() for view in views} == windows


@pytest.mark.parametrize("scales", [(0.2, 1.0), (0.05, 0.4)])
def test_resized_crops_cover_the_picture_like_the_workers_do(scales):
    """A picture whose colour is its place shows where each crop came from."""
    ramp = np.zeros((1, 32, 48, 3), np.uint8)
    ramp[0, :, :, 0] = np.arange(32)[:, None] * 7
    ramp[0, :, :, 1] = np.arange(48) * 5
    part = AugmentPart(crop="random_resized", crop_min_scale=scales[0], crop_max_scale=scales[1])
    index = torch.zeros(4000, dtype=torch.int64)
    views = augment_batch(torch.from_numpy(ramp), index, part, (16, 16), draws(4000))[0].float()

    def ends(channel: int, pixels_a_step: int, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
        line = views[:, channel].mean(2 - axis) / pixels_a_step  # (b, 16)
        middle, half = (line[:, 11] + line[:, 4]) / 2, (line[:, 11] - line[:, 4]).abs() / 7 * 8
        return middle, half

    (y, half_height), (x, half_width) = ends(0, 7, 0), ends(1, 5, 1)
    rng = random.Random(0)
    boxes = torch.tensor([random_crop_box((48, 32), scales, rng) for _ in range(4000)]).float()
    left, top, right, bottom = boxes.unbind(1)
    for ours, theirs in (
        (y, (top + bottom - 1) / 2),
        (x, (left + right - 1) / 2),
        (2 * half_height, bottom - top),
        (2 * half_width, right - left),
    ):
        assert ours.mean() == pytest.approx(theirs.mean(), abs=0.5)
        assert ours.std() == pytest.approx(theirs.std(), abs=0.5)
    flipped = (views[:, 1, :, -1] < views[:, 1, :, 0]).all(1).float().mean()
    assert flipped == pytest.approx(0.5, abs=0.03)


def test_a_whole_crop_is_the_picture():
    arrays = photos()
    part = AugmentPart(crop="random_resized", crop_min_scale=1.0, flip=0.0)
    square = np.ascontiguousarray(arrays[:, :, :24])

    no_chance = Draws(torch.full((12, 64), 0.5), torch.zeros(0))
    views, _ = augment_batch(torch.from_numpy(square), torch.arange(12), part, (24, 24), no_chance)
    assert (as_pixels(views) == square).all()


def test_erasing_has_the_boxes_of_the_workers():
    ours = batched.erase(torch.zeros(3000, 3, 32, 40), 0.4, draws(3000, size=(32, 40))).amax(1) > 0
    shares = ours.float().mean((1, 2))
    erased = shares[shares > 0]
    assert len(erased) / 3000 == pytest.approx(0.4, abs=0.03)
    black = np.zeros((32, 40, 3), np.uint8)
    theirs = np.array([(erase(black, random.Random(s)) > 0).any(2).mean() for s in range(1000)])
    assert erased.mean() == pytest.approx(theirs.mean(), abs=0.01)
    assert erased.std() == pytest.approx(theirs.std(), abs=0.01)


def test_draws_follow_the_recipe(monkeypatch):
    """Magnitudes are N(9, 0.5) cut at 10, half of the layers do nothing, all operations are as likely."""
    seen = []

    def record(pixels, operation, level, sign):
        seen.append((operation, level, sign))
        return pixels

    monkeypatch.setattr(batched, "operate", record)
    part = AugmentPart(crop="resize", policy="randaugment", policy_magnitude_std=0.5)
    black, index = torch.zeros(1, 4, 4, 3, dtype=torch.uint8), torch.zeros(6000, dtype=torch.int64)
    augment_batch(black, index, part, (4, 4), draws(6000))
    assert len(seen) == 2
    for operation, level, sign in seen:
        counts = torch.bincount(operation + 1, minlength=16) / 6000
        assert counts[0] == pytest.approx(0.5, abs=0.03)
        assert (counts[1:] - 0.5 / 15).abs().max() < 0.012
        assert level.median() == pytest.approx(0.9, abs=0.003)
        assert (level == 1).float().mean() == pytest.approx(0.0228, abs=0.008)
        assert sign.mean() == pytest.approx(0, abs=0.04)


def loader(**options: object) -> DeviceLoader:
    arrays = photos(50, 16, 16)
    return DeviceLoader(store(arrays), EVERYTHING, 16, **{"batch_size": 8, "seed": 4, **options})


def contents(batches) -> list[tuple[list, list[int], list[int]]]:
    return [(b.images.tolist(), b.labels.tolist(), b.index.tolist()) for b in batches]


def test_batches_repeat_and_start_anywhere():
    reference = contents(loader(repeats=2).epoch(3))
    assert contents(loader(repeats=2).epoch(3, start_step=2)) == reference[2:]
    assert contents(loader(repeats=2).epoch(4)) != reference
    batch = next(loader(drop_last=False).epoch(0))
    assert batch.images.dtype == torch.uint8
    assert batch.images.shape == (8, 3, 16, 16)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.labels.tolist() == [i % 5 for i in batch.index.tolist()]
    assert loader(drop_last=False).steps_per_epoch == 7


def test_no_two_steps_augment_alike():
    same = Store(torch.from_numpy(np.repeat(photos(1, 16, 16), 32, 0)), torch.zeros(32, dtype=torch.int64))
    views = [b.images for epoch in (0, 1) for b in DeviceLoader(same, EVERYTHING, 16, batch_size=8).epoch(epoch)]
    assert len({image.contiguous().numpy().tobytes() for images in views for image in images}) == 64


def test_order_is_that_of_the_workers():
    arrays = photos(50, 16, 16)
    workers = Loader(pictures(arrays), train_transform(EVERYTHING, 16), batch_size=8, seed=4, repeats=3)
    for ours, theirs in zip(loader(repeats=3).epoch(5), workers.epoch(5), strict=True):
        assert ours.index.tolist() == theirs.index.tolist()


def test_several_processes_see_the_pictures_of_one():
    whole = list(loader(batch_size=16).epoch(1))
    for rank in range(2):
        rows = torch.from_numpy(rank_positions(16, rank, 2))
        for part, batch in zip(loader(batch_size=16, rank=rank, world=2).epoch(1), whole, strict=True):
            assert part.index.tolist() == batch.index[rows].tolist()
            assert torch.equal(part.images, batch.images[rows])


def test_a_set_is_decoded_once_for_evaluation():
    arrays = photos(10)
    decoded = decode_all(pictures(arrays), evaluation(16, 0.8), "cpu", workers=1)
    batches = list(DeviceLoader(decoded, None, 16, batch_size=4, shuffle=False, drop_last=False).epoch(0))
    expected = Loader(pictures(arrays), evaluation(16, 0.8), batch_size=4, shuffle=False, drop_last=False)
    assert contents(batches) == contents(expected.epoch(0))


def test_memory_is_counted_in_bytes():
    assert fits_in_memory(100, (10, 20), 60_000)
    assert not fits_in_memory(100, (10, 20), 59_999)


class Mixed(ArrayImages):
    def read(self, index):
        return super().read(index).resize((32, 24 + index % 2))


def choose(augment: AugmentPart, dataset: LabeledImages | None = None, **options: object):
    chosen = {"batch_size": 4, "seed": 0, "device": "cpu", **options}
    return make_loader(dataset or pictures(photos()), augment, (24, 32), **chosen)


@pytest.mark.parametrize("crop", ["random_resized", "simple_random", "pad", "resize", "square_random", "centre"])
def test_the_device_is_taken_where_it_applies(crop):
    chosen, reason = choose(AugmentPart(crop=crop, policy="three_augment"))
    assert isinstance(chosen, DeviceLoader)
    assert has_facts(reason, "cpu", "0 MiB")
    assert next(chosen.epoch(0)).images.shape == (4, 3, 24, 32)


@pytest.mark.parametrize(
    ("augment", "options", "why"),
    [
        ({"policy": "autoaugment"}, {}, "augment.policy=autoaugment"),
        ({}, {"budget_bytes": 1000}, "0 MiB"),
        ({}, {"dataset": pictures(photos(3, 60, 60))}, "60×60"),
    ],
)
def test_workers_are_taken_where_it_does_not(augment, options, why):
    chosen, reason = choose(AugmentPart(**augment), **{"batch_size": 2, **options})
    assert isinstance(chosen, Loader)
    assert why in reason
    assert len(list(chosen.epoch(0))) == chosen.steps_per_epoch


def test_uneven_pictures_are_left_to_the_workers_unless_all_become_one_size():
    def mixed() -> LabeledImages:
        return LabeledImages(Mixed(photos(), "mixed"), np.arange(12), np.zeros(12, int), ClassTable(("a",)))

    chosen, reason = choose(AugmentPart(), mixed())
    assert isinstance(chosen, Loader)
    assert reason
    assert isinstance(choose(AugmentPart(crop="pad"), mixed())[0], DeviceLoader)


def test_a_policy_without_batched_version_is_refused():
    with pytest.raises(UsageError, match=r"augment\.policy=trivial"):
        DeviceLoader(store(photos()), AugmentPart(policy="trivial"), 16, batch_size=4)


@pytest.mark.parametrize("layers", [1, 7])
@pytest.mark.parametrize("policy", ["randaugment", "three_augment"])
def test_no_picture_runs_out_of_draws(layers, policy):
    most = dataclasses.replace(EVERYTHING, policy=policy, policy_layers=layers)
    used = draw(2, most, (24, 32), [0], CPU)
    augment_batch(torch.from_numpy(photos(2)), torch.arange(2), most, (24, 32), used)
    assert used._next <= used.values.shape[1]


def test_a_broken_picture_is_not_taken_for_an_uneven_one():
    class Broken(ArrayImages):
        def read(self, index):
            if index == 3:
                raise DataError("picture 3: ends after 3 bytes")
            return super().read(index)

    dataset = LabeledImages(Broken(photos(), "x"), np.arange(12), np.zeros(12, int), ClassTable(("a",)))
    with pytest.raises(DataError, match="picture 3"):
        choose(AugmentPart(), dataset)
    chosen, _ = choose(AugmentPart(), dataset, skip_broken=True)
    assert list(chosen.broken) == [3]
    assert "picture 3" in chosen.broken[3]


def test_a_large_batch_is_augmented_in_parts_on_a_cpu(monkeypatch) -> None:
    """Eight float32 copies of a whole batch of 1,024 × 4 views at 224 pixels are 18 GB."""
    store = Store(torch.randint(0, 256, (12, 16, 16, 3), dtype=torch.uint8), torch.arange(12))
    augment = AugmentPart(policy="randaugment", erasing=0.5, color_jitter=0.3)
    loader = DeviceLoader(store, augment, 16, batch_size=12, views=(0, 1))
    (whole,) = loader.epoch(0)
    sizes: list[int] = []
    each = DeviceLoader._augment_each
    monkeypatch.setattr(device, "MOST_VALUES_AT_ONCE", 5 * 3 * 16 * 16)
    monkeypatch.setattr(DeviceLoader, "_augment_each", lambda s, i, *a: sizes.append(len(i)) or each(s, i, *a))
    (parts,) = loader.epoch(0)
    assert sizes == [5, 5, 5, 5, 4]
    assert torch.equal(parts.images, whole.images)
