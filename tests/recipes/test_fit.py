"""Named recipes on data they were not made for: what is said, and what a fitted one becomes."""

import pytest

from patchloom.recipes import get_recipe, list_recipes, override
from patchloom.recipes.fit import Facts, advice, fitted, misfits, smaller_network
from tests.messages import missing

PHOTOS = Facts(images=2_936, image_size_median=300)
IMAGENET = Facts(images=1_281_167, image_size_median=400, device="cuda")
NAMES = [name for name in list_recipes() if get_recipe(name).objective.method != "translation"]


def test_too_few_updates_are_said_with_the_numbers_and_what_fitting_gives() -> None:
    overrides = {"schedule.epochs": 60}
    recipe = override(get_recipe("grafit"), overrides)
    on_gpu = Facts(PHOTOS.images, PHOTOS.image_size_median, "cuda")
    message = advice(recipe, on_gpu, overrides)
    assert missing(message, "grafit", "1.28", 120, 1024, 1000, 2936, "--fit", 2700, 64, 224) == []
    short = {"schedule.epochs": 2, "schedule.warmup_epochs": 1}
    message = advice(override(recipe, short), on_gpu, short)
    assert missing(message, "--fit", 90, 64, 224) == []
    remaining = {"optim.batch_size": 2_000}
    message = advice(override(get_recipe("grafit"), remaining), on_gpu, remaining)
    assert missing(message, "--fit", "optim.batch_size") == []


def test_a_batch_of_much_of_the_set_is_said() -> None:
    recipe = get_recipe("grafit")
    (misfit,) = misfits(recipe, PHOTOS)
    assert missing(misfit, 1024, 35, 2936) == []
    assert missing(advice(recipe, Facts(2_936, 300, "cuda"), {}), "--fit", 27_000, 64, 224) == []


@pytest.mark.parametrize("name", ["grafit", "grafit_fc", "dino"])
@pytest.mark.parametrize("facts", [PHOTOS, Facts(2_936, 300, "cuda"), Facts(2_000, 160, "cuda"), Facts(600, 28)])
def test_what_is_fitted_suits_the_data(name, facts) -> None:
    """Its slow copy forgets where it began, and no batch is much of the set."""
    recipe, _ = fitted(get_recipe(name), facts, {})
    assert misfits(recipe, facts) == []
    updates = facts.images // recipe.optim.batch_size * recipe.schedule.epochs
    decay = recipe.dino.teacher_momentum if name == "dino" else recipe.grafit.target_decay
    assert decay**updates < 0.001


def test_images_far_smaller_than_the_recipe_are_said() -> None:
    facts = Facts(images=1_000_000, image_size_median=32)
    (misfit,) = misfits(get_recipe("deit"), facts)
    assert missing(misfit, 224, 32) == []
    assert misfits(get_recipe("deit"), Facts(1_000_000, 32, pretrained=True)) == []
    assert misfits(get_recipe("small_images"), Facts(images=50_000, image_size_median=32)) == []


def test_a_recipe_on_its_own_data_is_left_alone() -> None:
    for name in ("deit", "resmlp", "dino", "grafit"):
        assert misfits(get_recipe(name), IMAGENET) == []
        assert advice(get_recipe(name), IMAGENET, {}) == ""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("facts", [PHOTOS, Facts(600, 28), Facts(50_000, 32, "cuda"), Facts(40, 100, "cuda")])
def test_every_recipe_can_be_fitted_and_every_change_has_a_reason(name, facts) -> None:
    recipe, reasons = fitted(get_recipe(name), facts, {})
    assert recipe.optim.batch_size <= max(16, facts.images // 4)
    assert recipe.objective.method == get_recipe(name).objective.method
    assert recipe.model.image_size <= max(32, facts.image_size_median)
    assert all(reason.why for reason in reasons)
    assert len({reason.field for reason in reasons}) == len(reasons)


def test_a_published_recipe_gets_updates_and_its_rate_follows_the_batch() -> None:
    recipe, reasons = fitted(get_recipe("grafit", "timm:resnet18"), PHOTOS, {})
    updates = 2_936 // recipe.optim.batch_size * recipe.schedule.epochs
    assert updates >= 1_000
    assert recipe.optim.peak_lr == pytest.approx(0.4 * recipe.optim.batch_size / 1024)  # SGD: linear
    assert {reason.field for reason in reasons} >= {"views.number", "grafit.instance_weight"}
    adam, _ = fitted(get_recipe("deit", "deit_ti"), PHOTOS, {})
    assert adam.optim.peak_lr == pytest.approx(1e-3 * (adam.optim.batch_size / 1024) ** 0.5, rel=0.05)
    assert (adam.augment.repeats, adam.model.drop_path) == (1, 0.0)


def test_dino_gets_prototypes_for_so_many_images_and_local_views_of_the_new_size() -> None:
    recipe, _ = fitted(get_recipe("dino"), Facts(50_000, 32, "cuda"), {})
    assert (recipe.dino.outputs, recipe.dino.batch_norm, recipe.augment.blur) == (4096, True, 0.0)
    assert recipe.model.image_size == 32
    assert recipe.views.local_size < 32
    assert recipe.views.local_size % recipe.model.options["patch_size"] == 0


def test_what_is_given_stays_and_the_rest_follows() -> None:
    overrides = {"optim.batch_size": "128", "schedule.epochs": 6, "views.number": 3, "grafit.target_decay": 0.5}
    recipe, reasons = fitted(get_recipe("grafit", "timm:resnet18"), PHOTOS, overrides)
    assert not {reason.field for reason in reasons} & overrides.keys()
    assert recipe.optim.lr == pytest.approx(0.05)
    assert recipe.schedule.warmup_steps == round(0.1 * 6 * (2_936 // 128))


def test_without_a_gpu_the_network_is_the_smallest_of_its_family() -> None:
    def smaller(recipe: str, model: str, facts: Facts = PHOTOS) -> dict[str, object]:
        return {r.field: r.value for r in smaller_network(get_recipe(recipe, model), facts)}

    assert smaller("deit", "deit_b") == {"model.name": "deit_ti"}
    assert smaller("grafit", "timm:resnet50") == {"model.name": "timm:resnet18"}
    assert smaller("deit", "deit_ti") == smaller("deit", "deit_b", IMAGENET) == {}
    narrow = {"model.options.depth": 6, "model.options.dim": 192}
    assert smaller("dino", "resmlp_s12") == narrow
    assert smaller("resmlp", "resmlp_s24") == {"model.name": "resmlp_s12"} | narrow


def test_a_recipe_in_steps_is_fitted_in_epochs() -> None:
    recipe = get_recipe("mixer_finetune")
    few, why = fitted(recipe, Facts(2_000, 224, "cpu", True), {})
    assert few.schedule.steps == 0
    assert 1 < few.schedule.epochs < 20_000 * 512 / 2_000
    updates = 2_000 // few.optim.batch_size * few.schedule.epochs
    assert few.schedule.warmup_steps == pytest.approx(500 * updates / 20_000, abs=1)
    assert any(missing(reason.why, updates, 20_000) == [] for reason in why)
    remaining, _ = fitted(recipe, Facts(2_000, 224, "cpu", True), {"schedule.steps": 100})
    assert remaining.schedule.steps == 20_000  # what the user gives is applied later
