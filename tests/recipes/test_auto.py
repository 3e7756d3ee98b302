import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchloom.recipes import Recipe, auto_recipe, flatten
from patchloom_runtime.errors import UsageError
from tests.messages import missing, refused


def choose(images=5_000, classes=10, image_size_median=32, **kwargs):
    recipe, reasons = auto_recipe(images=images, classes=classes, image_size_median=image_size_median, **kwargs)
    return recipe, {reason.field: reason for reason in reasons}


@pytest.mark.parametrize(
    ("median", "device", "image_size", "patch"),
    [(8, "cpu", 8, 1), (28, "cpu", 28, 4), (32, "cpu", 32, 4), (500, "cpu", 64, 8), (64, "cuda", 64, 8)],
)
def test_small_pictures_get_small_patches(median, device, image_size, patch):
    recipe, _ = choose(image_size_median=median, device=device, model="resmlp_s12")
    assert recipe.model.image_size == image_size
    assert recipe.model.options["patch_size"] == patch


def test_photographs_on_a_gpu_get_a_shallow_smlpnet_and_very_many_the_published_network():
    for images, options in ((1_000, {"dim": 64, "depths": (1, 2, 4, 1)}), (100_000, {})):
        recipe, _ = choose(images=images, image_size_median=500, device="cuda")
        assert (recipe.model.name, recipe.model.image_size) == ("smlpnet_t", 224)
        assert dict(recipe.model.options) == options


def test_the_reason_for_the_epochs_is_printable():
    _, reasons = choose(images=5_000)
    assert missing(reasons["schedule.epochs"].why, 5_000, 90, "450") == []


def test_digits_are_not_mirrored():
    assert choose(image_size_median=8)[0].augment.flip == 0
    assert choose(image_size_median=32)[0].augment.flip == 0.5


def test_an_average_of_weights_only_for_long_runs():
    assert choose(images=1_000)[0].optim.ema_decay is None
    assert choose(images=50_000, device="cuda")[0].optim.ema_decay == 0.999


@pytest.mark.parametrize(
    ("model", "median", "image_size", "options"),
    [
        ("deit3_h", 500, 224, {}),
        ("mixer_s32", 500, 224, {}),
        ("resmlp_s12_8", 500, 224, {}),
        ("cait_s48", 100, 96, {"patch_size": 8}),
        ("smlpnet_t", 40, 32, {"patch_size": 2, "depths": (2, 4, 4), "dim": 96, "global_stages": (1, 2, 3)}),
        ("patchconvnet_s20", 40, 32, {"patch_size": 4, "stem": "linear"}),
        ("timm:resnet18", 100, 96, {}),
        ("timm:resnet18", 40, 32, {"small_stem": True}),
        ("timm:regnety_002", 40, 32, {}),
    ],
)
def test_a_network_asked_for_is_kept(model, median, image_size, options):
    recipe, reasons = choose(model=model, image_size_median=median, device="cuda")
    assert recipe.model.name == model
    assert reasons["model.name"].why
    assert recipe.model.image_size == image_size
    assert dict(recipe.model.options) == options


def test_trained_weights_keep_their_size_and_train_gently():
    scratch, _ = choose(image_size_median=300, device="cuda")
    tuned, _ = choose(image_size_median=300, device="cuda", pretrained=True)
    assert (tuned.model.image_size, dict(tuned.model.options)) == (224, {})
    assert tuned.optim.lr < scratch.optim.lr
    assert tuned.schedule.epochs < scratch.schedule.epochs
    assert (tuned.model.fit_head, tuned.model.eval_mode, tuned.augment.mixup) == (True, True, 0)
    assert (scratch.model.fit_head, scratch.model.eval_mode) == (False, False)


def test_first_layers_of_a_trained_network_change_least():
    convnets, columns = (
        ("timm:mobilenetv2_100", "torchvision:mobilenet_v2"),
        ("resmlp_s24", "timm:deit_tiny_patch16_224"),
    )
    for model, decay in (*((name, 0.7) for name in convnets), *((name, 0.85) for name in columns)):
        recipe, _ = choose(image_size_median=300, device="cuda", pretrained=True, model=model)
        assert recipe.optim.layer_decay == decay
    assert choose()[0].optim.layer_decay == 1


def test_narrow_networks_learn_faster_and_small_batches_slower():
    assert choose(images=100_000)[0].optim.lr == 3e-3
    assert choose(images=600)[0].optim.lr == 1.5e-3
    assert choose(images=100_000, image_size_median=224, device="cuda")[0].optim.lr == 1e-3


@settings(deadline=None)
@given(
    images=st.integers(1, 20_000_000),
    classes=st.integers(2, 20_000),
    median=st.integers(1, 5_000),
    device=st.sampled_from(["cpu", "cuda"]),
    pretrained=st.booleans(),
)
def test_every_choice_has_a_reason_and_is_in_the_recipe(images, classes, median, device, pretrained):
    recipe, reasons = auto_recipe(
        images=images, classes=classes, image_size_median=median, device=device, pretrained=pretrained
    )
    flat = flatten(recipe)
    assert [flat[reason.field] for reason in reasons] == [reason.value for reason in reasons]
    assert all(reason.why for reason in reasons)
    assert len({reason.field for reason in reasons}) == len(reasons)
    assert recipe.model.image_size % recipe.model.options.get("patch_size", 16) == 0
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe


def test_more_images_are_seen_fewer_times():
    epochs = [choose(images=n, device="cuda")[0].schedule.epochs for n in (1_000, 100_000, 1_000_000)]
    assert epochs == [300, 100, 60]


def test_what_cannot_be_trained_on():
    with refused(UsageError, 5000, 32, 0):
        choose(classes=0)
    with refused(UsageError, "device", "tpu", "cpu", "cuda"):
        choose(device="tpu")


def test_what_is_given_decides_the_rest():
    """With six epochs auto kept Mixup 0.8, CutMix and a warm-up of whole epochs, which are for a hundred."""
    long, _ = choose(images=2_000, image_size_median=100)
    short, reasons = choose(images=2_000, image_size_median=100, overrides={"schedule.epochs": "6"})
    assert (long.schedule.epochs, long.augment.mixup, long.augment.cutmix) == (100, 0.8, 1.0)
    assert (short.schedule.epochs, short.augment.mixup, short.augment.cutmix) == (6, 0.0, 0.0)
    assert (short.schedule.warmup_epochs, short.schedule.warmup_steps) == (0, round(0.1 * 6 * (2_000 // 32)))
    assert "schedule.epochs" not in reasons
    assert missing(reasons["augment.mixup"].why, 6) == []


def test_a_batch_and_a_size_that_are_given_lead_to_their_rate_and_patch():
    recipe, _ = choose(images=100_000, overrides={"optim.batch_size": 16, "model.image_size": 24})
    assert recipe.optim.lr == 1.5e-3
    assert (recipe.model.image_size, recipe.model.options["patch_size"]) == (24, 2)
    wide, _ = choose(images=100_000, overrides={"model.options.dim": "384"})
    assert wide.optim.lr == 1e-3


def test_a_warm_up_that_is_given_is_the_only_one():
    for field in ("schedule.warmup_epochs", "schedule.warmup_steps"):
        recipe, reasons = choose(overrides={"schedule.epochs": 6, field: 2})
        assert not {"schedule.warmup_epochs", "schedule.warmup_steps"} & set(reasons)
        assert (recipe.schedule.warmup_epochs, recipe.schedule.warmup_steps) == (0, 0)


def test_the_average_follows_the_steps_that_are_given():
    assert choose(images=50_000, device="cuda", overrides={"schedule.epochs": 2})[0].optim.ema_decay is None
    assert choose(images=1_000, overrides={"schedule.epochs": 1_000})[0].optim.ema_decay == 0.999


def test_an_option_that_is_a_list_is_no_basis_and_no_error():
    """A run given as --init hands its network's options on, whatever they are."""
    recipe, reasons = choose(
        model="smlpnet_t", overrides={"model.options.patch_size": (4, 4), "model.options.dim": "a,b"}
    )
    assert recipe.model.name == "smlpnet_t"
    assert not {"model.options.patch_size", "model.options.dim"} & set(reasons)


def test_photos_get_a_narrow_smlpnet_unless_options_of_another_network_are_set():
    recipe, _ = choose(image_size_median=136, device="cpu")
    assert (recipe.model.name, recipe.model.options["dim"]) == ("smlpnet_t", 32)
    recipe, _ = choose(image_size_median=136, device="cpu", overrides={"model.options.depth": 4})
    assert recipe.model.name == "resmlp_s12"
    recipe, _ = choose(image_size_median=136, device="cuda")
    assert (recipe.model.name, recipe.model.options["dim"]) == ("smlpnet_t", 64)
