"""Recipes against the tables they come from, as printed there: the thesis' where no paper is named."""

import pytest
import torch

from patchloom.models.registry import create_model
from patchloom.recipes import difference, get_recipe, override, recipe_table
from patchloom.recipes.choices import with_steps

# Table 6.1, column by column. None: not in use; "any": the table only says that it is in use.
TABLE_6_1 = {
    "column": ["vit", "steiner", "deit", "wightman_a2", "deit3", "deit3_21k", "deit3_21k_to_1k"],
    "optim.batch_size": [4096, 4096, 1024, 2048, 2048, 2048, 2048],
    "optim.name": ["adamw", "adamw", "adamw", "lamb", "lamb", "lamb", "lamb"],
    "optim.peak_lr": [3e-3, 3e-3, 1e-3, 5e-3, 3e-3, 3e-3, 3e-4],
    "schedule.decay": ["cosine"] * 7,
    "optim.weight_decay": [0.1, 0.3, 0.05, 0.02, 0.02, 0.02, 0.02],
    "schedule.warmup_epochs": [4, 4, 5, 5, 5, 5, 5],
    "objective.smoothing": [0.1, 0.1, 0.1, None, None, 0.1, 0.1],
    "model.dropout": ["any", "any", None, None, None, None, None],
    "model.drop_path": [None, "any", "any", "any", "any", "any", "any"],
    "augment.repeats": [1, 1, 3, 3, 3, 1, 1],
    "optim.clip_norm": [1.0, 1.0, None, 1.0, 1.0, 1.0, 1.0],
    "augment.flip": [0.5] * 7,
    "augment.crop": ["random_resized"] * 5 + ["simple_random"] * 2,
    "augment.policy": ["none", "randaugment", "randaugment", "randaugment"] + ["three_augment"] * 3,
    "model.options.scale_init": [None, None, None, None, 1e-4, 1e-4, 1e-4],
    "augment.mixup": [None, "any", 0.8, 0.2, 0.8, None, None],
    "augment.cutmix": [None, None, 1.0, 1.0, 1.0, 1.0, 1.0],
    "augment.erasing": [None, None, 0.25, None, None, None, None],
    "augment.color_jitter": [None, None, None, None, 0.3, 0.3, 0.3],
    "test.crop_ratio": [0.875, 0.875, 0.875, 0.95, 1.0, 1.0, 1.0],
    "objective.loss": ["cross_entropy", "cross_entropy", "cross_entropy", "bce", "bce"] + ["cross_entropy"] * 2,
}


def value_of(recipe, key):
    value = recipe
    for name in key.split("."):
        value = value.get(name) if name == "scale_init" else getattr(value, name)
    return value


def matches(value, printed):
    if printed is None:
        return not value
    if printed == "any":
        return bool(value)
    return value == pytest.approx(printed) if isinstance(printed, float) else value == printed


def check(recipe, expected):
    wrong = {k: (value_of(recipe, k), v) for k, v in expected.items() if not matches(value_of(recipe, k), v)}
    assert not wrong, f"{recipe.name}: (recipe, document) differ: {wrong}"


@pytest.mark.parametrize("column", range(7), ids=TABLE_6_1["column"])
def test_table_6_1(column):
    expected = {key: values[column] for key, values in TABLE_6_1.items() if key != "column"}
    check(get_recipe(TABLE_6_1["column"][column]), expected)


def test_table_6_1_rand_augment():
    for name, magnitude, std in [("deit", 9, 0.5), ("wightman_a2", 7, 0.5)]:
        check(get_recipe(name), {"augment.policy_magnitude": magnitude, "augment.policy_magnitude_std": std})


def test_steiner_adapts_to_the_model():
    assert get_recipe("steiner", "deit_ti").augment.mixup == 0
    assert get_recipe("steiner", "deit_b").augment.mixup == 0.5


def test_resnet_strikes_back_table_2():
    rows = {
        "key": ["wightman_a1", "wightman_a2", "wightman_a3"],
        "model.image_size": [224, 224, 160],
        "test.image_size": [None, None, 224],
        "schedule.epochs": [600, 300, 100],
        "optim.batch_size": [2048, 2048, 2048],
        "optim.lr": [5e-3, 5e-3, 8e-3],
        "optim.weight_decay": [0.01, 0.02, 0.02],
        "model.drop_path": [0.05, 0.05, None],
        "augment.repeats": [3, 3, 1],
        "augment.policy_magnitude": [7, 7, 6],
        "augment.mixup": [0.2, 0.2, 0.1],
        "augment.cutmix": [1.0, 1.0, 1.0],
        "test.crop_ratio": [0.95, 0.95, 0.95],
    }
    for column, name in enumerate(rows.pop("key")):
        check(get_recipe(name), {key: values[column] for key, values in rows.items()})


def test_table_3_9():
    check(
        get_recipe("deit"),
        {
            "schedule.epochs": 300,
            "optim.batch_size": 1024,
            "optim.name": "adamw",
            "optim.lr": 5e-4,
            "optim.lr_reference_batch": 512,
            "schedule.decay": "cosine",
            "optim.weight_decay": 0.05,
            "schedule.warmup_epochs": 5,
            "objective.smoothing": 0.1,
            "model.dropout": None,
            "model.drop_path": 0.1,
            "augment.repeats": 3,
            "optim.clip_norm": None,
            "augment.policy": "randaugment",
            "augment.policy_magnitude": 9,
            "augment.policy_magnitude_std": 0.5,
            "augment.mixup": 0.8,
            "augment.cutmix": 1.0,
            "augment.erasing": 0.25,
            "optim.ema_decay": None,
        },
    )


def test_deit_distillation_section_3_4_5():
    soft = get_recipe("deit_soft_distilled").objective
    assert (soft.distillation, soft.temperature, soft.distillation_weight) == ("soft", 3.0, 0.1)
    hard = get_recipe("deit_distilled").objective
    assert (hard.distillation, hard.distillation_weight) == ("hard", 0.5)
    assert "regnety_160" in hard.teacher


def test_deit_fine_tuning_keeps_the_teacher_of_a_distilled_network():
    assert get_recipe("deit_finetune_384", "deit_s").objective.distillation == "none"
    assert get_recipe("deit_finetune_384", "deit_s_distilled").objective.distillation == "hard"
    check(
        get_recipe("deit_finetune_384"),
        {
            "model.image_size": 384,
            "model.eval_mode": True,
            "optim.peak_lr": 5e-6,
            "schedule.min_lr": 5e-6,
            "optim.weight_decay": 1e-8,
            "schedule.epochs": 25,
        },
    )


# Table 3.16: drop rate and ε.
TABLE_3_16 = {
    "cait_xxs24": (0.05, 1e-5),
    "cait_xxs36": (0.1, 1e-6),
    "cait_xs24": (0.05, 1e-5),
    "cait_xs36": (0.1, 1e-6),
    "cait_s24": (0.1, 1e-5),
    "cait_s36": (0.2, 1e-6),
    "cait_s48": (0.3, 1e-6),
    "cait_m24": (0.2, 1e-5),
    "cait_m36": (0.3, 1e-6),
    "cait_m48": (0.4, 1e-6),
}


@pytest.mark.parametrize(("model", "printed"), TABLE_3_16.items())
def test_table_3_16(model, printed):
    check(
        get_recipe("cait", model),
        {
            "model.name": model,
            "model.drop_path": printed[0],
            "model.drop_path_rule": "uniform",
            "model.options.scale_init": printed[1],
            "optim.batch_size": 1024,
            "optim.peak_lr": 1e-3,
            "optim.weight_decay": 0.05,
            "schedule.epochs": 400,
            "schedule.warmup_epochs": 5,
            "augment.repeats": 3,
            "test.crop_ratio": 1.0,
        },
    )


# Mixer, table 4: epochs, lr, weight decay, RandAugment, mixup, dropout, stochastic depth.
MIXER_TABLE_4 = [
    ("mixer_imagenet", "mixer_b16", 300, 0.001, 0.1, 15, 0.5, None, 0.1),
    ("mixer_imagenet", "mixer_l16", 300, 0.001, 0.1, 15, 0.5, None, 0.1),
    ("mixer_imagenet21k", "mixer_b16", 300, 0.001, 0.1, 10, 0.2, None, 0.1),
    ("mixer_imagenet21k", "mixer_l16", 300, 0.001, 0.1, 20, 0.5, None, 0.1),
    ("mixer_jft", "mixer_s16", 5, 0.003, 0.03, None, None, None, None),
    ("mixer_jft", "mixer_b32", 7, 0.003, 0.03, None, None, None, None),
    ("mixer_jft", "mixer_l32", 7, 0.001, 0.03, None, None, None, None),
    ("mixer_jft", "mixer_l16", 14, 0.001, 0.03, None, None, None, None),
    ("mixer_jft", "mixer_h14", 14, 0.001, 0.03, None, None, None, None),
]


@pytest.mark.parametrize("row", MIXER_TABLE_4, ids=lambda row: f"{row[0]}-{row[1]}")
def test_mixer_table_4(row):
    name, model, epochs, lr, decay, magnitude, mixup, dropout, drop_path = row
    recipe = get_recipe(name, model)
    check(
        recipe,
        {
            "schedule.epochs": epochs,
            "optim.peak_lr": lr,
            "optim.weight_decay": decay,
            "augment.policy": "randaugment" if magnitude else "none",
            "augment.mixup": mixup,
            "model.dropout": dropout,
            "model.drop_path": drop_path,
            "optim.batch_size": 4096,
            "optim.betas": (0.9, 0.999),
            "optim.clip_norm": 1.0,
            "schedule.warmup_steps": 10_000,
            "schedule.decay": "linear",
            "model.image_size": 224,
        },
    )
    if magnitude:
        check(recipe, {"augment.policy_magnitude": magnitude, "augment.policy_layers": 2})
        check(recipe, {"model.drop_path_rule": "linear"})


def test_mixer_fine_tuning_section_3():
    check(
        get_recipe("mixer_finetune"),
        {
            "optim.name": "sgd",
            "optim.momentum": 0.9,
            "optim.batch_size": 512,
            "optim.clip_norm": 1.0,
            "optim.weight_decay": None,
            "schedule.decay": "cosine",
            "schedule.warmup_steps": "any",
            "model.image_size": 224,
            "augment.crop": "square_random",  # A.2: no Inception crops, no mixup, no average of the weights
            "augment.mixup": None,
            "optim.ema_decay": None,
            "test.resize": "short_side",  # resmall-crop, table 3
            "test.crop_ratio": 224 / 256,
        },
    )
    check(get_recipe("mixer_finetune_448"), {"model.image_size": 448, "test.resize": "square"})  # resize-crop, table 2
    assert create_model("mixer_b16", depth=1, dropout=0.1).config.dropout == 0.1


@pytest.mark.parametrize(
    ("images", "steps", "epochs"), [(1_281_167, 20_000, 8), (50_000, 10_000, 103), (3_680, 500, 71)]
)
def test_mixer_is_fine_tuned_for_a_number_of_steps(images, steps, epochs):
    """Those of Dosovitskiy et al. 2021 for ImageNet, CIFAR and Pets, whatever the number of images."""
    recipe = get_recipe("transfer_pets" if steps == 500 else "mixer_finetune", "mixer_b16")
    recipe, _ = with_steps(override(recipe, {"schedule.steps": steps}), [], images, {})
    assert recipe.schedule.epochs == epochs
    assert abs(recipe.schedule.epochs * (images // 512) - steps) <= images // 512 / 2
    assert get_recipe("mixer_finetune").schedule.steps == 20_000
    assert get_recipe("transfer_pets").schedule.steps == 500


def test_controls_and_ablations_of_the_thesis():
    check(get_recipe("deit_two_tokens"), {"objective.distillation": "labels", "objective.teacher": None})
    assert get_recipe("deit_two_tokens").model.name == "deit_b_distilled"
    token = get_recipe("cait_distilled_token", "cait_m24")
    assert token.model.options == {**get_recipe("cait", "cait_m24").model.options, "distilled": True}
    assert difference(token, get_recipe("cait_distilled", "cait_m24")).keys() == {"model.options.distilled"}
    check(get_recipe("patchconvnet_per_class"), {"optim.lr": 1e-5, "optim.batch_size": 512})
    assert get_recipe("patchconvnet_per_class").model.options["class_tokens"] == "per_class"


def test_from_imagenet_21k_to_1k():
    check(get_recipe("resmlp_21k_to_1k"), {"schedule.epochs": 100, "optim.lr": 5e-4, "model.image_size": 224})
    assert not difference(get_recipe("mixer_21k_to_1k", "mixer_l16"), get_recipe("mixer_finetune", "mixer_l16"))


def test_fixres_learns_classifier_and_norm_on_pictures_as_they_are_tested():
    check(
        get_recipe("fixres"),
        {
            "model.trainable": "head_and_norm",
            "model.eval_mode": True,
            "model.size_from": "recipe",
            "augment.crop": "centre",
            "augment.crop_ratio": get_recipe("fixres").test.crop_ratio,
            "optim.peak_lr": 8e-3,
            "schedule.epochs": 56,
        },
    )


def test_transfer_of_grafit_sections_2_4_6_and_2_5_4():
    base, best = get_recipe("grafit_transfer", "timm:regnety_080"), get_recipe("grafit_transfer_cutmix")
    assert difference(base, best) == {"augment.cutmix": (0.0, 1.0), "schedule.epochs": (240, 1000)}
    check(get_recipe("transfer_food101"), {"schedule.epochs": 300, "optim.lr": 0.01})
    check(get_recipe("transfer_food101", "deit_b"), {"schedule.epochs": 300, "optim.lr": 5e-5})
    assert not difference(get_recipe("transfer_pets", "deit_b"), get_recipe("transfer_flowers", "deit_b"))


def test_resmlp_section_3_1():
    check(
        get_recipe("resmlp", "resmlp_s24"),
        {
            "optim.name": "lamb",
            "optim.peak_lr": 5e-3,
            "optim.weight_decay": 0.2,
            "schedule.epochs": 400,
            "schedule.warmup_epochs": 5,
            "augment.policy_magnitude": 9,
            "augment.erasing": 0.25,
            "augment.mixup": 0.8,
            "augment.cutmix": 1.0,
            "augment.repeats": 3,
            "objective.smoothing": 0.1,
        },
    )
    assert get_recipe("resmlp", "resmlp_s12").model.drop_path == 0.05
    assert get_recipe("resmlp", "resmlp_s24").model.drop_path == 0.1


def test_resmlp_old_fashioned_table_3():
    check(
        get_recipe("resmlp_old_fashioned"),
        {
            "optim.name": "sgd",
            "schedule.epochs": 90,
            "schedule.decay": "step",
            "schedule.step_epochs": (30, 60),
            "augment.policy": "none",
            "augment.mixup": None,
            "augment.cutmix": None,
            "augment.erasing": None,
            "augment.repeats": 1,
            "objective.smoothing": None,
            "model.drop_path": None,
        },
    )


@pytest.mark.parametrize(
    ("model", "drop_path"),
    [("smlpnet_t2", None), ("smlpnet_t", None), ("smlpnet_s", 0.2), ("smlpnet_b", 0.3)],
)
def test_smlpnet_experimental_setup(model, drop_path):
    check(
        get_recipe("smlpnet", model),
        {
            "model.drop_path": drop_path,
            "optim.name": "adamw",
            "optim.weight_decay": 0.05,
            "optim.batch_size": 1024,
            "optim.peak_lr": 1e-3,
            "schedule.min_lr": 1e-5,
            "schedule.epochs": 300,
            "schedule.decay": "cosine",
            "objective.smoothing": "any",
            "augment.policy": "randaugment",
            "augment.repeats": 3,
            "augment.mixup": "any",
            "augment.cutmix": "any",
            "augment.erasing": None,
        },
    )


# Table 5.8 and section 5.2.3: drop path, weight decay.
PATCHCONVNET = {
    "patchconvnet_s20": (None, 0.01),
    "patchconvnet_s36": (0.05, 0.01),
    "patchconvnet_s60": (0.15, 0.01),
    "patchconvnet_s120": (0.2, 0.01),
    "patchconvnet_b36": (0.2, 0.05),
    "patchconvnet_b60": (0.3, 0.05),
    "patchconvnet_b120": (0.4, 0.05),
}


@pytest.mark.parametrize(("model", "printed"), PATCHCONVNET.items())
def test_patchconvnet_table_5_8(model, printed):
    check(
        get_recipe("patchconvnet", model),
        {
            "model.drop_path": printed[0],
            "model.drop_path_rule": "uniform",
            "optim.weight_decay": printed[1],
            "optim.name": "lamb",
            "optim.peak_lr": 3e-3,
            "optim.batch_size": 2048,
            "optim.clip_norm": None,
            "optim.ema_decay": None,
            "schedule.epochs": 400,
            "augment.mixup": 0.8,
            "augment.cutmix": 1.0,
            "augment.erasing": None,
            "augment.repeats": 3,
            "objective.smoothing": "any",
            "objective.loss": "cross_entropy",
        },
    )


def test_patchconvnet_section_5_2_3():
    # drop path: 0.1 below training (5.3.4)
    columns = {
        "patchconvnet_finetune": (1024, 1e-5, 0.01, 10, 0.2, 384),
        "patchconvnet_21k": (2048, 3e-3, 0.01, 90, 0.3, 224),
        "patchconvnet_21k_to_1k": (1024, 5e-4, 0.01, 100, 0.2, 224),
    }
    for name, (batch, lr, decay, epochs, drop_path, size) in columns.items():
        check(
            get_recipe(name, "patchconvnet_b60"),
            {
                "optim.batch_size": batch,
                "optim.peak_lr": lr,
                "optim.weight_decay": decay,
                "schedule.epochs": epochs,
                "model.drop_path": drop_path,
                "model.image_size": size,
                "augment.repeats": 1,
            },
        )
    assert get_recipe("patchconvnet_finetune", "patchconvnet_s36").model.drop_path == 0
    for name in ("patchconvnet_finetune", "patchconvnet_per_class"):  # "we fix the learning rate"
        check(get_recipe(name), {"schedule.warmup_epochs": None, "schedule.decay": "constant"})
    # "the RandAugment variant by Wightman et al."
    check(get_recipe("patchconvnet"), {"augment.policy_magnitude": 7, "augment.policy_magnitude_std": 0.5})


# Table 6.14: stochastic depth on ImageNet-1k and ImageNet-21k.
TABLE_6_14 = {
    "deit3_t": (0.0, 0.0),
    "deit3_s": (0.0, 0.0),
    "deit3_b": (0.1, 0.1),
    "deit3_l": (0.4, 0.3),
    "deit3_h": (0.5, 0.5),
}


@pytest.mark.parametrize(("model", "printed"), TABLE_6_14.items())
def test_table_6_14(model, printed):
    assert get_recipe("deit3", model).model.drop_path == printed[0]
    assert get_recipe("deit3", model).schedule.epochs == 400
    assert get_recipe("deit3_21k", model).model.drop_path == printed[1]
    assert get_recipe("deit3_21k", model).schedule.epochs == 90


def test_deit3_longer_section_6_4():
    longer = get_recipe("deit3_800", "deit3_b")
    check(longer, {"schedule.epochs": 800, "optim.weight_decay": 0.05, "model.drop_path": 0.2})


def test_deit3_fine_tuning_section_6_3_6():
    for model, size in [("deit3_b", 192), ("deit3_l", 192), ("deit3_h", 154), ("deit3_h26x2", 126)]:
        assert get_recipe("deit3_low_resolution", model).model.image_size == size
    check(
        get_recipe("deit3_finetune", "deit3_l"),
        {
            "model.image_size": 224,
            "model.eval_mode": False,
            "model.drop_path": 0.4,
            "optim.name": "adamw",
            "optim.peak_lr": 1e-5,
            "optim.batch_size": 512,
            "optim.weight_decay": 0.1,
            "schedule.epochs": 20,
            "augment.repeats": 1,
            "augment.policy": "randaugment",
            "objective.loss": "cross_entropy",
            "objective.smoothing": 0.1,
        },
    )


# Section 3.7.1.3: what the learning rate of training is divided by, and epochs.
TRANSFER = {
    "transfer_cifar10": (100, 1000),
    "transfer_cifar100": (100, 1000),
    "transfer_flowers": (10, 1000),
    "transfer_cars": (10, 1000),
    "transfer_inat18": (10, 360),
    "transfer_inat19": (10, 360),
}


@pytest.mark.parametrize(("name", "printed"), TRANSFER.items())
@pytest.mark.parametrize(("model", "trained"), [("cait_s24", "cait"), ("resmlp_s24", "resmlp"), ("deit_b", "deit")])
def test_transfer_section_3_7_1_3(name, printed, model, trained):
    peak = get_recipe(trained, model).optim.peak_lr
    expected = {"optim.peak_lr": peak / printed[0], "schedule.epochs": printed[1], "model.name": model}
    check(get_recipe(name, model), expected | {"objective.distillation": "none", "test.crop_ratio": 0.875})


@pytest.mark.parametrize(
    ("name", "steps", "warmup"),
    [("cifar10", 10_000, 500), ("cifar100", 10_000, 500), ("flowers", 500, 100), ("pets", 500, 100)],
)
def test_transfer_of_mixer_sections_3_and_c(name, steps, warmup):
    expected = {"schedule.steps": steps, "schedule.warmup_steps": warmup, "schedule.decay": "cosine"}
    optimizer = {"optim.name": "sgd", "optim.batch_size": 512, "optim.clip_norm": 1.0, "optim.weight_decay": None}
    augmentation = {"augment.policy": "none", "augment.mixup": None, "model.name": "mixer_b16"}
    check(get_recipe(f"transfer_{name}", "mixer_b16"), expected | optimizer | augmentation)


def test_attention_only_section_6_3_5_1():
    recipe = get_recipe("transfer_flowers_attention")
    check(recipe, {"model.trainable": "attention", "test.crop_ratio": 1.0, "schedule.epochs": 1000})


def test_grafit_section_2_5():
    check(
        get_recipe("grafit_supervised"),
        {
            "optim.name": "sgd",
            "optim.nesterov": True,
            "optim.peak_lr": 0.4,
            "optim.batch_size": 1024,
            "schedule.epochs": 600,
            "schedule.decay": "cosine",
            "augment.policy": "randaugment",
            "augment.erasing": "any",
            "augment.mixup": None,
            "augment.cutmix": None,
        },
    )
    check(
        get_recipe("grafit_transfer"),
        {"optim.peak_lr": 0.01, "optim.batch_size": 512, "schedule.epochs": 240},
    )


@pytest.mark.parametrize("name", ["small_images", "dino_small_images", "grafit_small_images"])
def test_networks_are_fitted_to_small_pictures(name):
    def options(model):
        return dict(get_recipe(name, model=model).model.options)

    assert options("resmlp_s24") == {"patch_size": 4}
    for model, side in (("smlpnet_t", 4), ("patchconvnet_s20", 8), ("resnet50_attention_pool", 4)):
        network = create_model(model, image_size=32, num_classes=2, **options(model)).eval()
        patches = network.features(torch.zeros(1, 3, 32, 32)).flatten(1, -2).shape[1]
        assert patches == side**2 + (model != "smlpnet_t"), model  # and a class token
    assert options("timm:resnet18") == options("timm:resnet50.a1_in1k") == {"small_stem": True}
    assert options("timm:resnet50d") == options("timm:regnety_016") == {}


def test_recipe_table_prints_as_table_6_1():
    rows = recipe_table([get_recipe(name) for name in TABLE_6_1["column"]])
    printed = {row.key: row.values for row in rows}
    assert len(printed) == len(rows), "every row has its own key"
    assert printed["optim.lr"] == ("0.003", "0.003", "0.001", "0.005", "0.003", "0.003", "0.0003")
    assert printed["augment.policy_magnitude"] == ("×", "15/0", "9/0.5", "7/0.5", "×", "×", "×")
    assert printed["augment.policy_choices"] == ("×", "×", "×", "×", "✓", "✓", "✓")
    assert printed["augment.crop"] == ("✓", "✓", "✓", "✓", "✓", "×", "×")
    assert printed["optim.clip_norm"] == ("1", "1", "×", "1", "1", "1", "1")
    assert printed["schedule.warmup_epochs"][0] == "4"
    groups = [row.group for row in rows]
    assert groups == sorted(groups, key=groups.index)  # the rows of a group stand together
    assert len(set(groups)) == 5
    jft = {row.key: row.values for row in recipe_table([get_recipe("mixer_jft")])}
    assert jft["schedule.warmup_epochs"] == ("10,000 steps",)


def test_recipe_table_has_what_dino_adds():
    changes = {"augment.hue": 0.1, "augment.grey": 0.2, "augment.blur": 1}
    rows = recipe_table([get_recipe("deit"), override(get_recipe("deit"), changes)])
    differ = {row.key: row.values for row in rows if len(set(row.values)) == 2}
    assert differ == {"augment.hue": ("×", "0.1"), "augment.grey": ("×", "0.2 / 1 / 0")}


def test_translation_section_4_3_5():
    printed = {
        "optim.name": "adagrad",
        "optim.peak_lr": 0.2,
        "schedule.warmup_steps": 32_000,
        "schedule.decay": "constant",
        "objective.smoothing": 0.1,
        "model.dropout": 0.15,
        "text.beams": 4,
    }
    check(get_recipe("translation_resmlp", "translation_resmlp_12"), printed)
    twin = {
        "optim.name": "adam",
        "optim.betas": (0.9, 0.98),
        "optim.peak_lr": 5e-4,
        "schedule.warmup_steps": 4000,
        "schedule.decay": "inverse_sqrt",
    }
    check(get_recipe("translation_transformer"), twin)


def test_small_translation_twins_differ_in_their_network_alone():
    one, other = (get_recipe("translation_small", f"translation_{name}") for name in ("resmlp_6", "transformer_base"))
    assert difference(one, other) == {"model.name": ("translation_resmlp_6", "translation_transformer_base")}


def test_recipe_table_of_translation_has_no_images():
    rows = recipe_table([get_recipe("deit"), get_recipe("translation_small")])
    printed = {row.key: row.values for row in rows}
    assert printed["optim.batch_size"] == ("1,024", "8,192 tokens")
    assert printed["schedule.warmup_epochs"] == ("5", "400 steps")
    assert printed["text.vocabulary"] == ("×", "8,000")
    assert printed["model.image_size"] == ("224", "×")
    assert printed["test.crop_ratio"] == ("0.875", "×")
    (group,) = {row.group for row in rows if row.key == "augment.policy_magnitude"}
    assert {row.values[1] for row in rows if row.group == group} == {"×"}  # no augmentation
