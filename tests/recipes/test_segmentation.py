"""The papers' recipes for UperNet, and rules of thumb for other masks."""

import pytest

from patchloom.recipes import get_recipe, override
from patchloom.recipes.choices import resolve_recipe
from patchloom.recipes.fit import Facts
from patchloom.recipes.schema import Recipe
from patchloom.recipes.segmentation import auto_segmentation, upernet_160k
from patchloom_runtime.errors import UsageError
from tests.messages import refused

CAMVID = Facts(367, 180, "cuda")


@pytest.mark.parametrize(
    ("model", "size", "channels"),
    [("deit3_t", 512, 192), ("deit3_s", 512, 384), ("deit3_b", 512, 512), ("patchconvnet_s60", 512, 512),
     ("resmlp_s24", 224, 512)],
)  # fmt: skip
def test_the_papers_recipe_is_xcits_with_their_widths(model: str, size: int, channels: int) -> None:
    recipe = get_recipe("upernet_160k", model)
    assert (recipe.model.image_size, recipe.segment.channels) == (size, channels)
    assert (recipe.schedule.steps, recipe.schedule.epochs, recipe.schedule.warmup_steps) == (160_000, 127, 1500)
    assert (recipe.schedule.decay, recipe.schedule.power, recipe.schedule.warmup_lr) == ("poly", 1.0, 6e-11)
    assert (recipe.optim.lr, recipe.optim.batch_size, recipe.optim.weight_decay) == (6e-5, 16, 0.01)
    augment = recipe.augment
    assert (augment.crop, augment.scale_min, augment.scale_max, augment.largest_class) == ("scaled", 0.5, 2.0, 0.75)
    assert (augment.short_side, recipe.segment.test_short_side, augment.policy) == (size, 512, "photometric")
    assert recipe.segment.auxiliary_weight == 0.4
    assert recipe.segment.reduce_zero_label


def test_beits_recipe_differs_in_rates() -> None:
    recipe = get_recipe("upernet_beit")
    assert (recipe.optim.lr, recipe.optim.layer_decay, recipe.segment.channels) == (3e-5, 0.9, 768)


@pytest.mark.parametrize("model", [None, "deit_s", "smlpnet_t", "resmlp_s12", "mixer_s16", "timm:resnet18"])
@pytest.mark.parametrize("facts", [CAMVID, Facts(2000, 64, "cpu"), Facts(20_000, 512, "cuda", True), Facts(8, 20)])
def test_every_choice_has_a_reason_and_what_is_given_stays(model: str | None, facts: Facts) -> None:
    recipe, reasons = auto_segmentation(facts, model, {"schedule.epochs": 7})
    assert recipe.objective.method == "segmentation"
    assert recipe.schedule.epochs == 7
    assert all(reason.why for reason in reasons)
    assert "schedule.epochs" not in [reason.field for reason in reasons]
    assert recipe.model.image_size % 32 == 0
    assert recipe.optim.batch_size >= 8
    assert model is None or recipe.model.name == model


def test_camvid_from_scratch_has_small_patches_and_many_updates() -> None:
    recipe, _ = auto_segmentation(CAMVID, "deit_s", {})
    assert (recipe.model.image_size, recipe.model.options["patch_size"]) == (160, 8)
    assert recipe.schedule.epochs * (367 // recipe.optim.batch_size) > 5_000
    assert recipe.optim.ema_decay == 0.999


def test_a_short_run_from_trained_weights_learns_faster_than_a_long_one() -> None:
    facts = Facts(300, 180, "cpu", True)
    short, long = (auto_segmentation(facts, None, {"schedule.epochs": epochs})[0] for epochs in (5, 200))
    assert (short.optim.lr, long.optim.lr) == (1e-3, 5e-5)  # batches of 16


def test_the_automatic_recipe_is_taken_where_none_is_named() -> None:
    recipe, choices = resolve_recipe(
        lambda: CAMVID, classes=11, recipe="auto", model=None, changes={"optim.lr": 0.5}, automatic=auto_segmentation
    )
    assert (recipe.name, recipe.optim.lr) == ("auto", 0.5)
    assert [choice.value for choice in choices if choice.key == "optim.lr"] == [0.5]


@pytest.mark.parametrize(
    ("recipe", "change", "instead"),
    [
        (upernet_160k(), {"model.trainable": "head"}, "model.freeze=backbone"),
        (get_recipe("mask_rcnn"), {"model.trainable": "head"}, "model.freeze=backbone"),
        (get_recipe("deit3"), {"model.freeze": "backbone"}, "model.trainable=head"),
    ],
)
def test_what_learns_is_said_in_one_way(recipe: Recipe, change: dict, instead: str) -> None:
    with refused(UsageError, *change, instead):
        override(recipe, change)
