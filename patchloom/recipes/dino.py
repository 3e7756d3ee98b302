"""DINO: learning from images alone (arXiv 2104.14294; ResMLP 3.2)."""

from __future__ import annotations

from patchloom.recipes.deit import deit
from patchloom.recipes.parts import AugmentPart
from patchloom.recipes.registry import based_on, recipe
from patchloom.recipes.schema import Recipe
from patchloom.recipes.small_images import fit_to_32_pixels


@recipe
def dino(model: str = "resmlp_s12") -> Recipe:
    """ImageNet-1k without labels: ResMLP-S12 62.6 % with k-NN and 67.5 % with a linear classifier, S24 69.4, 72.8 %."""
    return based_on(
        deit(model),
        source="DINO's code with its defaults, 300 epochs as ResMLP 3.2, which states nothing else.",
        augment=AugmentPart(
            crop_min_scale=0.4,
            color_jitter=0.4,
            saturation=0.2,
            hue=0.1,
            jitter_probability=0.8,
            grey=0.2,
            blur=1.0,
        ),
        objective={"method": "dino", "smoothing": 0.0},
        views={"number": 2, "second_blur": 0.1, "second_solarise": 0.2, "local": 8},
        optim={"lr_reference_batch": 256, "weight_decay": 0.04, "weight_decay_end": 0.4, "clip_each": 3.0},
        schedule={"warmup_epochs": 10, "warmup_lr": 0.0, "min_lr": 1e-6},
    )


@recipe
def dino_small_images(model: str = "resmlp_s12") -> Recipe:
    """The same for small images such as CIFAR's, on one GPU in minutes."""
    return based_on(
        dino(model),
        source="patchloom's own: fewer outputs, BatchNorm in the head, milder views; measured in docs/results.md.",
        model={"image_size": 32, "drop_path": 0.0, "options": fit_to_32_pixels(model)},
        augment={"crop_min_scale": 0.3, "blur": 0.0},
        views={"second_blur": None, "local": 4, "local_size": 16, "local_min_scale": 0.15, "local_blur": 0.0},
        dino={"outputs": 4096, "batch_norm": True, "teacher_momentum": 0.99},
        optim={
            "lr": 1e-3,
            "lr_reference_batch": None,
            "batch_size": 512,
            "weight_decay": 0.04,
            "weight_decay_end": 0.1,
        },
        schedule={"epochs": 100, "warmup_epochs": 5},
        test={"crop_ratio": 1.0},
    )
