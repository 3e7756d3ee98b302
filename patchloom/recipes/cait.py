"""CaiT: DeiT for deeper networks; stochastic depth and LayerScale's initial value depend on the model (thesis 3.7)."""

from __future__ import annotations

from patchloom.recipes.deit import TEACHER, deit
from patchloom.recipes.registry import based_on, recipe
from patchloom.recipes.schema import Recipe

# Table 3.16: drop path and ε. The code initializes XXS-36 with 1e-5. B12 is not in the table: ε by its depth (3.5.1).
DROP_PATH_AND_SCALE = {
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
    "cait_b12": (0.0, 0.1),
}


@recipe
def cait(model: str = "cait_s24") -> Recipe:
    """ImageNet-1k from scratch: XXS-24 77.6, XS-24 81.8, S-24 82.7, S-36 83.3, M-36 83.8 % top-1."""
    drop_path, scale_init = DROP_PATH_AND_SCALE.get(model, (0.1, None))
    return based_on(
        deit(model),
        source="Thesis 3.7 and table 3.16, rest as DeiT.",
        model={
            "drop_path": drop_path,
            "drop_path_rule": "uniform",
            "options": {"scale_init": scale_init} if scale_init else {},
        },
        optim={"lr": 1e-3, "lr_reference_batch": None},
        schedule={"epochs": 400},
        test={"crop_ratio": 1.0},
    )


@recipe
def cait_distilled(model: str = "cait_s24") -> Recipe:
    """Hard distillation without a token: XXS-24 78.4, XS-24 82.0, S-24 83.5, S-36 84.0, M-36 85.1 %."""
    return based_on(
        cait(model),
        source="Thesis 3.6.3 and 3.7: hard distillation from RegNetY-16GF.",
        objective={"distillation": "hard", "distillation_weight": 0.5, "teacher": TEACHER},
    )


@recipe
def cait_distilled_token(model: str = "cait_xxs24") -> Recipe:
    """Hard distillation with a token in the class attention: XXS-24 78.5, M-24 84.7 %, equal to no token."""
    plain = cait_distilled(model)
    return based_on(
        plain,
        source="Thesis table 3.14, as cait_distilled.",
        model={"options": {**plain.model.options, "distilled": True}},
    )


@recipe
def cait_finetune_384(model: str = "cait_s24") -> Recipe:
    """From 224 to 384 pixels: S-24 84.3, S-36 85.0, M-36 84.9 %; M-48 is fine-tuned at 448 pixels."""
    largest = model == "cait_m48"
    trained = cait(model)
    return based_on(
        trained,
        source="Thesis 3.7, without numbers: lr, batch, epochs, M-48's drop path from issue 108 of the code.",
        model={
            "image_size": 448 if largest else 384,
            "size_from": "recipe",
            "drop_path": 0.3 if largest else trained.model.drop_path,
        },
        optim={"lr": 5e-6, "batch_size": 256},
        schedule={"epochs": 60, "min_lr": 5e-6},
    )
