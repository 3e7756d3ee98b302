"""patchloom's own recipe for datasets of small images such as CIFAR, trained from scratch on one GPU in minutes."""

from __future__ import annotations

import re
from typing import Any

from patchloom.plugins import MODULE
from patchloom.recipes.deit import deit
from patchloom.recipes.registry import based_on, recipe
from patchloom.recipes.schema import Recipe


@recipe
def small_images(model: str = "resmlp_s12") -> Recipe:
    """CIFAR-100 from scratch, with patches of 4: ResMLP-S12 75.4 % top-1."""
    return based_on(
        deit(model),
        source="patchloom's own, after DeiT's augmentation; measured in docs/results.md.",
        model={"image_size": 32, "drop_path_rule": "uniform", "options": fit_to_32_pixels(model)},
        augment={"crop": "pad", "crop_padding": 4, "policy_layers": 1, "repeats": 1},
        optim={
            "lr": 1.5e-3,
            "lr_reference_batch": None,
            "batch_size": 512,
            "weight_decay": 0.2,
            "clip_norm": 1.0,
            "ema_decay": 0.999,
        },
        schedule={"epochs": 220, "warmup_epochs": 8, "warmup_lr": 0.0},
        test={"crop_ratio": 1.0},
    )


def fit_to_32_pixels(model: str) -> dict[str, Any]:
    """Return options for small images: patches of 4, a pyramid of three maps, or a ResNet stem without downsampling."""
    if re.fullmatch(r"timm:resnet\d+(\..+)?|resnet50_attention_pool", model):
        return {"small_stem": True}
    if model.startswith(("timm:", "torchvision:", MODULE)):
        return {}
    if model.startswith("smlpnet"):  # 16, 8 and 4 patches per side
        return {"patch_size": 2, "depths": (2, 4, 4), "dim": 96, "global_stages": (1, 2, 3)}
    return {"patch_size": 4} | ({"stem": "linear"} if model.startswith("patchconvnet") else {})
