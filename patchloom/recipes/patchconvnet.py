"""PatchConvNet: DeiT with LAMB, no erasing and no clipping (thesis 5.2.3 and table 5.8)."""

from __future__ import annotations

from patchloom.recipes.deit import deit
from patchloom.recipes.registry import based_on, recipe
from patchloom.recipes.schema import Recipe

# Table 5.8. The L models are not in it: they take the values of the B models of the same depth.
DROP_PATH = {
    "patchconvnet_s20": 0.0,
    "patchconvnet_s36": 0.05,
    "patchconvnet_s60": 0.15,
    "patchconvnet_s120": 0.2,
    "patchconvnet_b36": 0.2,
    "patchconvnet_b60": 0.3,
    "patchconvnet_b120": 0.4,
    "patchconvnet_l60": 0.3,
    "patchconvnet_l120": 0.4,
}


@recipe
def patchconvnet(model: str = "patchconvnet_s60") -> Recipe:
    """ImageNet-1k from scratch: S60 82.1, S120 83.2, B60 83.5, B120 84.1 % top-1."""
    wider = model.startswith(("patchconvnet_b", "patchconvnet_l"))
    return based_on(
        deit(model),
        source="Thesis 5.2.3 (RandAugment of Wightman et al.: A2's) and table 5.8, rest as DeiT; no clipping.",
        model={"drop_path": DROP_PATH.get(model, 0.1), "drop_path_rule": "uniform"},
        augment={"policy_magnitude": 7, "erasing": 0.0},
        optim={
            "name": "lamb",
            "lr": 3e-3,
            "lr_reference_batch": None,
            "batch_size": 2048,
            "weight_decay": 0.05 if wider else 0.01,
        },
        schedule={"epochs": 400},
        test={"crop_ratio": 1.0},
    )


@recipe
def patchconvnet_finetune(model: str = "patchconvnet_s60") -> Recipe:
    """From 224 to 384 pixels in 10 epochs."""
    return based_on(
        patchconvnet(model),
        source="Thesis 5.2.3 and 5.3.4: a fixed lr, drop path 0.1 below training, repeats only there.",
        model={"image_size": 384, "drop_path": _less_drop(model), "size_from": "recipe"},
        augment={"repeats": 1},
        optim={"lr": 1e-5, "batch_size": 1024, "weight_decay": 0.01},
        schedule={"epochs": 10, "warmup_epochs": 0, "decay": "constant"},
    )


@recipe
def patchconvnet_per_class(model: str = "patchconvnet_s60") -> Recipe:
    """One class token, hence one attention map, per class: with --init, each starts as a trained network's token."""
    return based_on(
        patchconvnet_finetune(model),
        source="Thesis 5.2.1: lower lr, smaller batch, without numbers: lr of the fine-tuning, half its batch.",
        model={"image_size": 224, "size_from": "start", "options": {"class_tokens": "per_class"}},
        optim={"batch_size": 512},
    )


@recipe
def patchconvnet_21k(model: str = "patchconvnet_b60") -> Recipe:
    """Pre-training on ImageNet-21k; with a batch of 4096 the learning rate is 4e-3."""
    return based_on(
        patchconvnet(model),
        source="Thesis 5.2.3, training on ImageNet-21k.",
        augment={"repeats": 1},
        optim={"weight_decay": 0.01},
        schedule={"epochs": 90},
    )


@recipe
def patchconvnet_21k_to_1k(model: str = "patchconvnet_b60") -> Recipe:
    """From ImageNet-21k to 1k at 224 pixels: S60 82.9, B60 85.0, L60 85.6, B120 86.0, L120 86.1 %."""
    return based_on(
        patchconvnet_21k(model),
        source="Thesis 5.2.3 and 5.3.4: drop path 0.1 below training; results of table 5.2.",
        model={"drop_path": _less_drop(model)},
        optim={"lr": 5e-4, "batch_size": 1024},
        schedule={"epochs": 100},
    )


def _less_drop(model: str) -> float:
    return round(max(0.0, patchconvnet(model).model.drop_path - 0.1), 2)
