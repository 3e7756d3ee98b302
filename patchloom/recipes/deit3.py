"""The columns of thesis table 6.1 except DeiT: ViT, Steiner et al., Wightman et al. (A1–A3) and DeiT III.

They form one lineage, DeiT → A2 → DeiT III, and each function is one step of it.
"""

from __future__ import annotations

import dataclasses

from patchloom.recipes.deit import deit, deit_finetune_384
from patchloom.recipes.parts import AugmentPart
from patchloom.recipes.registry import based_on, recipe
from patchloom.recipes.schema import Recipe

# Table 6.14: stochastic depth for 400 epochs on ImageNet-1k and for 90 on ImageNet-21k. M, H-52 and H-26×2
# are not in it: M takes S's value, the other two H's.
DROP_PATH_1K = {
    "deit3_t": 0.0,
    "deit3_s": 0.0,
    "deit3_m": 0.0,
    "deit3_b": 0.1,
    "deit3_l": 0.4,
    "deit3_h": 0.5,
    "deit3_h52": 0.5,
    "deit3_h26x2": 0.5,
}
DROP_PATH_21K = DROP_PATH_1K | {"deit3_l": 0.3}
# Table 6.6: the training size with the best accuracy at 224. Patches of 14 pixels need multiples of 14.
LOW_RESOLUTION = {"deit3_h": 154, "deit3_h52": 126, "deit3_h26x2": 126}
# Steiner et al., figure 4 as interpreted by their code: RandAugment magnitude and mixup, "light1" and "medium2".
STEINER_AUGMENT = {"deit_ti": (0, 0.0), "deit3_t": (0, 0.0)}


@recipe
def vit(model: str = "deit_b") -> Recipe:
    """ImageNet-1k from scratch as in the ViT paper: B 77.9 % at 384 pixels (thesis table 3.5)."""
    return based_on(
        deit(model),
        source="Thesis table 6.1, ViT (3.9 has weight decay 0.3, no smoothing); dropout of 3.9; warm-up 3-4.",
        model={"drop_path": 0.0, "dropout": 0.1},
        augment=AugmentPart(),
        optim={
            "lr": 3e-3,
            "lr_reference_batch": None,
            "batch_size": 4096,
            "weight_decay": 0.1,
            "clip_norm": 1.0,
        },
        schedule={"warmup_epochs": 4, "warmup_lr": 0.0, "min_lr": 0.0},
    )


@recipe
def steiner(model: str = "deit_b") -> Recipe:
    """How to train your ViT: augmentation and regularization adapted to the model's size."""
    magnitude, mixup = STEINER_AUGMENT.get(model, (15, 0.5))
    return based_on(
        vit(model),
        source="Thesis table 6.1, Steiner et al.; 'adapt.' and both drop rates from their paper and code.",
        model={"drop_path": 0.1, "drop_path_rule": "linear"},
        augment={"policy": "randaugment", "policy_magnitude": magnitude, "mixup": mixup},
        optim={"weight_decay": 0.3},
    )


@recipe
def wightman_a2(model: str = "timm:resnet50") -> Recipe:
    """ResNet strikes back, 300 epochs: ResNet-50 79.8 % top-1; column Wightman et al. of table 6.1."""
    return based_on(
        deit(model),
        source="Thesis table 6.1, Wightman et al.; epochs, drop path from ResNet strikes back, table 2.",
        model={"drop_path": 0.05},
        augment={"policy_magnitude": 7, "erasing": 0.0, "mixup": 0.2},
        objective={"loss": "bce", "smoothing": 0.0},
        optim={
            "name": "lamb",
            "lr": 5e-3,
            "lr_reference_batch": None,
            "batch_size": 2048,
            "weight_decay": 0.02,
            "clip_norm": 1.0,
        },
        test={"crop_ratio": 0.95},
    )


@recipe
def wightman_a1(model: str = "timm:resnet50") -> Recipe:
    """Procedure A1 of "ResNet strikes back", 600 epochs: ResNet-50 reaches 80.4 % top-1."""
    return based_on(
        wightman_a2(model),
        source="ResNet strikes back, table 2, but its smoothing 0.1: targets of BCE are set to 1.",
        optim={"weight_decay": 0.01},
        schedule={"epochs": 600},
    )


@recipe
def wightman_a3(model: str = "timm:resnet50") -> Recipe:
    """ResNet strikes back, 100 epochs at 160 pixels, tested at 224: ResNet-50 78.1 % top-1."""
    return based_on(
        wightman_a2(model),
        source="ResNet strikes back, table 2.",
        model={"image_size": 160, "drop_path": 0.0},
        augment={"policy_magnitude": 6, "mixup": 0.1, "repeats": 1},
        optim={"lr": 8e-3},
        schedule={"epochs": 100},
        test={"image_size": 224},
    )


@recipe
def deit3(model: str = "deit3_b") -> Recipe:
    """ImageNet-1k from scratch, 400 epochs: S 80.4, B 83.1, L 84.2, H 84.8 % top-1."""
    return based_on(
        wightman_a2(model),
        source="Thesis table 6.1, ImNet-1k, and 6.14. The code trains S with lr 4e-3.",
        model={
            "drop_path": DROP_PATH_1K.get(model, 0.1),
            "drop_path_rule": "uniform",
            "options": {"scale_init": 1e-4} if model in DROP_PATH_1K else {},
        },
        augment={"policy": "three_augment", "color_jitter": 0.3, "mixup": 0.8},
        optim={"lr": 3e-3},
        schedule={"epochs": 400},
        test={"crop_ratio": 1.0},
    )


@recipe
def deit3_800(model: str = "deit3_b") -> Recipe:
    """ImageNet-1k from scratch, 800 epochs: S 81.4, B 83.7, L 84.5 % top-1."""
    shorter = deit3(model)
    return based_on(
        shorter,
        source="Thesis 6.4: weight decay 0.05, drop path +0.05 per 200 epochs (code: S 0.05, L 0.45).",
        model={"drop_path": round(shorter.model.drop_path + 0.1, 2)},
        optim={"weight_decay": 0.05},
        schedule={"epochs": 800},
    )


@recipe
def deit3_low_resolution(model: str = "deit3_b") -> Recipe:
    """Training at a smaller size, followed by `deit3_finetune`: B 83.5 (192), L 84.5 (192), H 85.1 % (154) at 224."""
    return based_on(
        deit3(model),
        source="Thesis 6.3.2.3 and table 6.6, which also tries 128 and 160 (126 and 182 for H).",
        model={"image_size": LOW_RESOLUTION.get(model, 192)},
    )


@recipe
def deit3_finetune(model: str = "deit3_b") -> Recipe:
    """20 epochs at the target size: 224 after `deit3_low_resolution`, or model.image_size 384 for ↑384.

    Unlike DeiT, the network is in training mode, as in the authors' code.
    """
    trained = deit3(model)
    return based_on(
        deit_finetune_384(model),
        source="Thesis 6.3.6, rest as DeiT's fine-tuning; the code erases nothing.",
        model=dataclasses.replace(trained.model, size_from="recipe"),
        augment={"repeats": 1},
        optim={"lr": 1e-5, "lr_reference_batch": None, "weight_decay": 0.1},
        schedule={"epochs": 20, "min_lr": 1e-5},
        test={"crop_ratio": 1.0},
    )


@recipe
def deit3_21k(model: str = "deit3_b") -> Recipe:
    """Pre-training on ImageNet-21k, 90 epochs; with 240, drop path is 0.05 higher (table 6.5)."""
    return based_on(
        deit3(model),
        source="Thesis table 6.1, ImNet-21k pretrain, and 6.14. The code's lr is 1e-3.",
        model={"drop_path": DROP_PATH_21K.get(model, 0.1)},
        augment={"crop": "simple_random", "crop_padding": 4, "mixup": 0.0, "repeats": 1},
        objective={"loss": "cross_entropy", "smoothing": 0.1},
        schedule={"epochs": 90},
    )


@recipe
def deit3_21k_to_1k(model: str = "deit3_b") -> Recipe:
    """From ImageNet-21k to ImageNet-1k, 50 epochs at 224 pixels: S 82.6, B 85.2, L 86.8 % top-1."""
    return based_on(
        deit3_21k(model),
        source="Thesis table 6.1, ImNet-21k finetune; drop path, 'marginally adapted', as in training.",
        optim={"lr": 3e-4},
        schedule={"epochs": 50},
    )
