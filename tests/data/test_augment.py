import dataclasses
import pickle
import random
from collections import Counter

import numpy as np
import pytest
import timm.data.auto_augment as timm_augment
import torch
from PIL import Image, ImageFilter, ImageOps
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation
from timm.data.transforms_factory import create_transform
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as tvf
from torchvision.transforms.autoaugment import TrivialAugmentWide

from patchloom.data.augmentation import batch_augment as whole_batches
from patchloom.data.augmentation import policies
from patchloom.data.augmentation.augment import erase, random_crop_box, random_start, train_transform
from patchloom.data.augmentation.policies import make_policy
from patchloom.data.images.image_batch import IMAGENET_MEAN, IMAGENET_STD
from patchloom.recipes.parts import AugmentPart
from patchloom_runtime.errors import UsageError
from patchloom_runtime.images import evaluation_transform
from patchloom_runtime.images.geometry import Geometry, resize
from tests.data.facts import facts

# DINO's second view, and its local ones.
SECOND = AugmentPart(
    crop_min_scale=0.4,
    color_jitter=0.4,
    saturation=0.2,
    hue=0.1,
    jitter_probability=0.8,
    grey=0.2,
    blur=0.1,
    solarise=0.2,
)
LOCAL = dataclasses.replace(SECOND, crop_min_scale=0.05, crop_max_scale=0.4, blur=0.5, solarise=0.0)
RANDAUGMENT = AugmentPart(policy="randaugment", policy_magnitude=9.0, policy_magnitude_std=0.5)


def photo(height: int = 48, width: int = 64, seed: int = 0) -> Image.Image:
    """Smooth colours with some grain: something to interpolate."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8)).resize((width, height), 3)
    grain = rng.integers(-9, 10, (height, width, 3))
    return Image.fromarray((np.asarray(coarse).astype(int) + grain).clip(0, 255).astype(np.uint8))


def pixels(image: Image.Image | np.ndarray) -> np.ndarray:
    return np.asarray(image).astype(int)


@pytest.mark.parametrize("crop", ["random_resized", "simple_random", "pad", "resize", "square_random", "centre"])
@pytest.mark.parametrize("policy", ["none", "randaugment", "autoaugment", "three_augment", "trivial"])
def test_a_view_follows_from_its_seed_alone(crop, policy):
    part = AugmentPart(crop=crop, policy=policy, policy_magnitude_std=0.5, color_jitter=0.3, erasing=0.5)
    transform = train_transform(part, (24, 32))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    first = [transform(photo(), random.Random(seed)) for seed in range(6)]
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    for _ in range(3):
        random.random()
    again = [pickle.loads(pickle.dumps(transform))(photo(), random.Random(seed)) for seed in range(6)]
    random.seed(1)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    for one, two in zip(first, again, strict=True):
        assert one.shape == (24, 32, 3)
        assert one.dtype == np.uint8
        assert (one == two).all()
    assert len({view.tobytes() for view in first}) == 6


@pytest.mark.parametrize("scales", [(0.08, 1.0), (0.4, 1.0), (0.05, 0.4)])
@pytest.mark.parametrize("size", [(200, 300), (37, 400), (64, 64)])
def test_crop_boxes_are_timms(size, scales):
    image = Image.new("RGB", size)
    for seed in range(200):
        left, top, right, bottom = random_crop_box(size, scales, random.Random(seed))
        random.seed(seed)
        y, x, h, w = RandomResizedCropAndInterpolation.get_params(image, scales, (3 / 4, 4 / 3))
        assert (left, top, right, bottom) == (x, y, x + w, y + h)


def test_resize_is_close_to_pillow():
    for height, width in [(30, 40), (90, 70), (48, 64), (100, 200)]:
        image = photo(height, width)
        ours, theirs = pixels(resize(image, (48, 64))), pixels(image.resize((64, 48), 3))
        assert abs(ours - theirs).max() <= 1
        planes = torch.from_numpy(pixels(image)).permute(2, 0, 1)[None].float()
        exact = torch.nn.functional.interpolate(planes, (48, 64), mode="bicubic", antialias=True)
        exact = exact[0].permute(1, 2, 0).clamp(0, 255).numpy()
        assert abs(ours - exact).mean() <= abs(theirs - exact).mean() + 0.005


def shifted_crop(picture: np.ndarray, padding: int, rng: random.Random, *, reflect: bool) -> np.ndarray:
    """A square window as high as the picture, anywhere in it and its padding."""
    (height, width), side = picture.shape[:2], picture.shape[0]
    start = random_start((height, width), (side, side), padding, rng)
    geometry = Geometry((0, 0, width, height), (height, width), (side, side), start, reflect=reflect)
    return geometry.apply_image(Image.fromarray(picture))


def test_simple_random_crop_is_any_window_of_the_reflected_picture():
    picture = np.asarray(photo(32, 50))
    padded = np.pad(picture, ((4, 4), (4, 4), (0, 0)), mode="reflect")
    windows = {
        padded[y : y + 32, x : x + 32].tobytes(): (y, x)
        for y in range(padded.shape[0] - 31)
        for x in range(padded.shape[1] - 31)
    }
    found = {windows[shifted_crop(picture, 4, random.Random(seed), reflect=True).tobytes()] for seed in range(3000)}
    assert found == set(windows.values())


def test_simple_random_crop_first_fits_the_short_side():
    part = AugmentPart(crop="simple_random", flip=0.0)
    view = train_transform(part, 32)(photo(64, 100), random.Random(3))
    resized = resize(photo(64, 100), (32, 50))
    assert (view == shifted_crop(resized, 4, _after_flip(3), reflect=True)).all()


def _after_flip(seed: int) -> random.Random:
    rng = random.Random(seed)
    rng.random()
    return rng


def test_pad_crop_adds_black():
    picture = np.full((8, 8, 3), 200, np.uint8)
    seen = [shifted_crop(picture, 2, random.Random(seed), reflect=False) for seed in range(300)]
    kept = {(int((view[:, :, 0] > 0).any(1).sum()), int((view[:, :, 0] > 0).any(0).sum())) for view in seen}
    assert kept == {(h, w) for h in (6, 7, 8) for w in (6, 7, 8)}
    assert {int(value) for view in seen for value in np.unique(view)} == {0, 200}


def test_flip_has_its_probability():
    image = photo()
    transform = train_transform(AugmentPart(crop="resize", flip=0.3), (48, 64))
    views = [transform(image, random.Random(seed)) for seed in range(1000)]
    flipped = sum((view == pixels(ImageOps.mirror(image))).all() for view in views)
    assert flipped + sum((view == pixels(image)).all() for view in views) == 1000
    assert flipped / 1000 == pytest.approx(0.3, abs=0.05)


def test_erasing_has_timms_boxes_and_unit_noise():
    def ours(seed: int) -> np.ndarray:
        return (erase(np.zeros((32, 40, 3), np.uint8), random.Random(seed)) > 0).any(2)

    def theirs(seed: int) -> np.ndarray:
        random.seed(seed)
        image = torch.zeros(3, 32, 40)
        RandomErasing(1.0, mode="pixel", device="cpu")._erase(image, 3, 32, 40, torch.float32)
        return (image != 0).any(0).numpy()

    torch.manual_seed(0)
    shares = [np.array([box(seed).mean() for seed in range(600)]) for box in (ours, theirs)]
    assert shares[0].mean() == pytest.approx(shares[1].mean(), abs=0.01)
    assert shares[0].std() == pytest.approx(shares[1].std(), abs=0.01)

    grey = np.full((64, 64, 3), 7, np.uint8)
    views = [erase(grey, random.Random(seed)) for seed in range(60)]
    erased = np.concatenate([view[(view != 7).any(2)] for view in views])
    noise = (erased / 255 - np.array(IMAGENET_MEAN)) / np.array(IMAGENET_STD)
    assert abs(noise.mean(0)).max() < 0.03
    assert abs(noise.std(0) - 1).max() < 0.04  # a little below 1: values beyond black and white are cut


def test_randaugment_has_timms_operations_and_draws():
    policy = make_policy(RANDAUGMENT, (48, 64))
    ops, layers = policy.args
    reference = timm_augment.rand_augment_transform(
        "rand-m9-mstd0.5-inc1",
        {"translate_const": 21, "img_mean": (124, 116, 104), "interpolation": Image.Resampling.BICUBIC},
    )
    assert layers == reference.num_layers
    for field in ("name", "prob", "magnitude", "magnitude_std", "magnitude_max", "kwargs"):
        assert [getattr(op, field) for op in ops] == [getattr(op, field) for op in reference.ops]
    for op, expected in zip(ops, reference.ops, strict=True):
        for seed in range(12):
            views = []
            for one in (op, expected):
                random.seed(seed)
                try:
                    views.append(pixels(one(photo(seed=seed))))
                except ValueError:  # newer Pillows refuse the 0 bits of timm's Posterize
                    assert op.name == "PosterizeIncreasing"
            if len(views) == 2:
                difference = abs(views[0] - views[1])
                assert difference.max() <= 1, op.name
                assert (difference > 0).mean() < 5e-3, op.name


@pytest.mark.parametrize("bits", range(9))
def test_posterize_keeps_the_highest_bits(bits):
    expected = pixels(photo()) // 2 ** (8 - bits) * 2 ** (8 - bits)
    assert (pixels(policies.posterize(photo(), bits)) == expected).all()


@pytest.mark.parametrize("name", ["ShearX", "ShearY", "TranslateXRel", "TranslateYRel"])
@pytest.mark.parametrize("amount", [-1.3, -0.45, -0.2, -1 / 64, 0.0, 0.1, 0.299, 2.0])
def test_sliding_rows_is_pillows_affine_transform(name, amount):
    options = {"fillcolor": (1, 2, 3), "resample": Image.Resampling.BICUBIC}
    ours = pixels(policies._PIXEL_FUNCTIONS[name](photo(), amount, **options))
    theirs = pixels(timm_augment.NAME_TO_OP[name](photo(), amount, **dict(options)))
    assert abs(ours - theirs).max() <= 1
    # Where the exact value is a whole number, float32 may end just below it.
    assert (ours != theirs).mean() < 5e-3


def test_autoaugment_is_timms_policy():
    chains = make_policy(AugmentPart(policy="autoaugment"), (48, 64)).args[0]
    reference = timm_augment.auto_augment_policy("original")
    assert [[(op.name, op.prob, op.magnitude) for op in chain] for chain in chains] == [
        [(op.name, op.prob, op.magnitude) for op in chain] for chain in reference
    ]


def test_trivialaugment_is_torchvisions_table(monkeypatch):
    called = Counter()
    monkeypatch.setattr(
        "torchvision.transforms.autoaugment._apply_op",
        lambda image, name, magnitude, *_: called.update([(name, round(magnitude, 4))]) or image,
    )
    policy = make_policy(AugmentPart(policy="trivial"), (48, 64))
    image = photo()
    for seed in range(12_000):
        policy(image, random.Random(seed))
    expected = set()
    for name, (magnitudes, signed) in TrivialAugmentWide()._augmentation_space(31).items():
        values = {round(float(m), 4) for m in magnitudes} if magnitudes.ndim else {0.0}
        expected |= {(name, value) for value in values} | {(name, -value) for value in values if signed}
    assert set(called) == expected


def test_three_augment_chooses_one_of_three():
    image = photo()
    grey = np.asarray(image.convert("L").convert("RGB")).tobytes()
    solarised = ImageOps.solarize(image, 128).tobytes()
    kinds = Counter()
    three_augment = make_policy(AugmentPart(policy="three_augment"), image.size)
    for seed in range(900):
        view = three_augment(image, random.Random(seed)).tobytes()
        if view not in (grey, solarised):
            rng = random.Random(seed)
            rng.randrange(3)
            assert view == image.filter(ImageFilter.GaussianBlur(rng.uniform(0.1, 2.0))).tobytes()
        kinds[{grey: "grey", solarised: "solarised"}.get(view, "blurred")] += 1
    assert all(count == pytest.approx(300, abs=60) for count in kinds.values())
    assert len(kinds) == 3


@pytest.mark.parametrize("choices", [("grey",), ("blur", "grey"), ("solarise",)])
def test_the_components_of_three_augment_one_by_one(choices):
    """Thesis table 6.2; also of whole batches."""
    part, image = AugmentPart(policy="three_augment", policy_choices=choices, crop="resize", flip=0.0), photo(24, 24)
    made = {"grey": image.convert("L").convert("RGB"), "solarise": ImageOps.solarize(image, 128)}
    known = {np.asarray(view).tobytes(): name for name, view in made.items()}
    views = [train_transform(part, 24)(image, random.Random(seed)) for seed in range(30)]
    assert {known.get(view.tobytes(), "blur") for view in views} == set(choices)
    store, index = torch.from_numpy(np.array(image))[None], torch.zeros(60, dtype=torch.int64)
    draws = whole_batches.draw(60, part, (24, 24), [0], torch.device("cpu"))
    batch, _ = whole_batches.augment_batch(store, index, part, (24, 24), draws)
    solarised = (batch == torch.from_numpy(np.array(made["solarise"])).permute(2, 0, 1)).flatten(1).all(1)
    grey = (batch.int().diff(dim=1) == 0).flatten(1).all(1)
    assert (bool(grey.any()), bool(solarised.any())) == ("grey" in choices, "solarise" in choices)
    assert bool((~grey & ~solarised).any()) is ("blur" in choices)


def test_three_augment_of_nothing_is_refused():
    with pytest.raises(UsageError, match=r"augment\.policy"):
        AugmentPart(policy="three_augment", policy_choices=())


def jittered(image: Image.Image, turns: list[tuple[str, float, float]], rng: random.Random) -> Image.Image:
    """By torchvision: what is adjusted, from, to; in random order."""
    rng.shuffle(turns)
    for name, low, high in turns:
        image = getattr(tvf, f"adjust_{name}")(image, rng.uniform(low, high))
    return image


@pytest.mark.parametrize(
    ("jitters", "turns"),
    [
        ((0.3, 0.3, 0.3, 0.0), [("brightness", 0.7, 1.3), ("contrast", 0.7, 1.3), ("saturation", 0.7, 1.3)]),
        (
            (0.4, 1.5, 0.2, 0.5),
            [("brightness", 0.6, 1.4), ("contrast", 0.0, 2.5), ("saturation", 0.8, 1.2), ("hue", -0.5, 0.5)],
        ),
    ],
)
def test_color_jitter_is_torchvisions_in_any_order(jitters, turns):
    image = photo()
    for seed in range(40):
        ours = policies.jitter_colors(jitters, image, random.Random(seed))
        assert (pixels(ours) == pixels(jittered(image, list(turns), random.Random(seed)))).all()


@pytest.mark.parametrize(("part", "size"), [(SECOND, (40, 40)), (LOCAL, (16, 16))])
def test_a_view_of_dino_is_made_of_torchvisions_and_pillows_operations(part, size):
    image, happened = photo(), Counter()
    for seed in range(200):
        rng = random.Random(seed)

        def chance(name, probability, rng=rng):
            drawn = rng.random() < probability
            happened[name] += drawn
            return drawn

        view = image.crop(random_crop_box(image.size, (part.crop_min_scale, part.crop_max_scale), rng))
        if chance("flip", 0.5):
            view = ImageOps.mirror(view)
        view = Image.fromarray(resize(view, size))
        if chance("jitter", 0.8):
            turns = [("brightness", 0.6, 1.4), ("contrast", 0.6, 1.4), ("saturation", 0.8, 1.2), ("hue", -0.1, 0.1)]
            view = jittered(view, turns, rng)
        if chance("grey", 0.2):
            view = tvf.to_grayscale(view, 3)
        if chance("blur", part.blur):
            view = view.filter(ImageFilter.GaussianBlur(rng.uniform(0.1, 2.0)))
        if part.solarise and chance("solarise", 0.2):
            view = tvf.solarize(view, 128)
        assert (train_transform(part, size)(image, random.Random(seed)) == pixels(view)).all()
    assert len(happened) == (5 if part.solarise else 4)
    assert all(0 < count < 200 for count in happened.values())


def test_what_is_certain_draws_nothing():
    """Recipes without chances keep the pictures they had before there were any."""
    part = AugmentPart(crop="resize", flip=0.0, policy="three_augment", color_jitter=0.3)
    three_augment = make_policy(part, (48, 64))
    for seed in range(20):
        rng = _after_flip(seed)
        expected = policies.jitter_colors((0.3, 0.3, 0.3, 0.0), three_augment(photo(), rng), rng)
        assert (train_transform(part, (48, 64))(photo(), random.Random(seed)) == pixels(expected)).all()


@pytest.mark.parametrize(
    "part",
    [AugmentPart(saturation=0.5), AugmentPart(hue=0.2), AugmentPart(color_jitter=0.3), AugmentPart(grey=1, blur=1)],
)
def test_each_color_field_works_alone(part):
    plain = train_transform(AugmentPart(), 24)(photo(), random.Random(1))
    assert (train_transform(part, 24)(photo(), random.Random(1)) != plain).any()
    never = dataclasses.replace(part, jitter_probability=0.0, grey=0.0, blur=0.0)
    assert (train_transform(never, 24)(photo(), random.Random(1)) == plain).all()


@pytest.mark.parametrize("shape", [(50, 70), (71, 40), (64, 64), (33, 200)])
@pytest.mark.parametrize(("size", "ratio"), [(32, 0.875), (32, 1.0), (40, 0.9)])
def test_evaluation_is_timms(shape, size, ratio):
    image = photo(*shape)
    reference = create_transform(size, interpolation="bicubic", crop_pct=ratio, use_prefetcher=True)
    ours = evaluation_transform.test_transform(size, ratio)(image)
    assert (ours.transpose(2, 0, 1) == np.asarray(reference(image))).all()


def test_a_crop_larger_than_the_picture_is_refused():
    with pytest.raises(UsageError, match=facts("crop_ratio", "1.1")):
        evaluation_transform.test_transform(32, 1.1)


def test_evaluation_of_the_whole_picture_as_a_square():
    """Mixer's resize-crop: first 256×256, then 224×224 of it."""
    ours = evaluation_transform.test_transform(224, 0.875, resize="square")(photo(100, 180))
    resized = tvf.resize(photo(100, 180), [256, 256], InterpolationMode.BICUBIC)
    assert (ours == pixels(tvf.center_crop(resized, [224, 224]))).all()


def test_square_random_crop_is_a_window_of_the_whole_picture_and_centre_the_one_that_is_tested():
    image = photo(64, 100)
    square = resize(image, (40, 40))
    windows = {square[y : y + 32, x : x + 32].tobytes() for y in range(9) for x in range(9)}
    part = AugmentPart(crop="square_random", crop_ratio=0.8, flip=0.0)
    seen = {train_transform(part, 32)(image, random.Random(seed)).tobytes() for seed in range(600)}
    assert seen == windows
    centre = train_transform(AugmentPart(crop="centre", crop_ratio=0.8, flip=0.0), 32)
    tested = evaluation_transform.test_transform(32, 0.8)
    assert np.abs(centre(image, random.Random(0)).astype(int) - tested(image)).max() <= 1  # torch's resize, Pillow's


def test_evaluation_of_other_shapes():
    ours = evaluation_transform.test_transform((32, 48), 0.8)(photo(100, 90))
    resized = tvf.resize(photo(100, 90), [66, 60], InterpolationMode.BICUBIC)
    assert (ours == pixels(tvf.center_crop(resized, [32, 48]))).all()


def test_photometric_distortion_changes_colors_and_no_place():
    from patchloom.data.augmentation.policies import photometric

    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:, :4], pixels[:, 4:] = (200, 60, 40), (90, 90, 90)
    seen = [np.asarray(photometric(Image.fromarray(pixels), random.Random(seed))) for seed in range(60)]
    assert all((view[:, :4] == view[0, 0]).all() and (view[:, 4:] == view[0, 4]).all() for view in seen)
    assert len({tuple(view[0, 0]) for view in seen}) > 40
    greys = [view[0, 4].astype(int) for view in seen]
    assert all(np.ptp(grey) <= 1 for grey in greys)  # hue and saturation leave grey as it is
    assert min(grey.mean() for grey in greys) < 50
    assert max(grey.mean() for grey in greys) > 120
    assert any((view == pixels).all() for view in seen)  # each change is made every second time
