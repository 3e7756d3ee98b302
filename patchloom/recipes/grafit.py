"""Grafit's supervised baseline and its transfer (thesis 2.4.3, 2.4.6, 2.5.1 and 2.5.4)."""

from __future__ import annotations

from patchloom.recipes.deit import deit
from patchloom.recipes.registry import based_on, recipe
from patchloom.recipes.schema import Recipe


@recipe
def grafit_supervised(model: str = "timm:resnet50") -> Recipe:
    """Cross-entropy on ImageNet-1k, the baseline Grafit is compared with: ResNet-50 79.3 % top-1.

    CIFAR-100 is trained at 32 pixels.
    """
    return based_on(
        deit(model),
        source="Thesis 2.5.1; unstated: RandAugment and erasing as DeiT, decay and warm-up as Goyal et al.",
        model={"drop_path": 0.0},
        augment={"mixup": 0.0, "cutmix": 0.0, "repeats": 1},
        objective={"smoothing": 0.0},
        optim={
            "name": "sgd",
            "lr": 0.1,
            "lr_reference_batch": 256,
            "weight_decay": 1e-4,
            "momentum": 0.9,
            "nesterov": True,
        },
        schedule={"epochs": 600, "warmup_lr": 0.0, "min_lr": 0.0},
    )


@recipe
def grafit_transfer(model: str = "timm:resnet50") -> Recipe:
    """Fine-tuning on a fine-grained set: Flowers 98.2, Cars 92.5, Food-101 89.5, iNat 69.8 (18), 75.9 % (19).

    Table 2.10 adds CutMix and trains longer: 1000 epochs for Flowers and Cars, 300 for the others.
    """
    return based_on(
        grafit_supervised(model),
        source="Thesis 2.4.6 and 2.5.4, rest as grafit_supervised, without warm-up.",
        optim={"lr": 0.01, "lr_reference_batch": None, "batch_size": 512},
        schedule={"epochs": 240, "warmup_epochs": 0},
    )
