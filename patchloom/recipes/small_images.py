"""patchloom's own recipe for sets of small pictures such as CIFAR, trained from scratch on one GPU in minutes."""

from __future__ import annotations

from patchloom.recipes.registry import recipe
from patchloom.recipes.schema import (
    AugmentPart,
    EvaluationPart,
    ModelPart,
    ObjectivePart,
    OptimPart,
    Recipe,
    SchedulePart,
)


@recipe
def small_images(model: str = "resmlp_s12") -> Recipe:
    """32-pixel pictures in patches of 4; the results and commands are in docs/results.md."""
    return Recipe(
        name="small_images",
        source="patchloom's own, after DeiT's augmentation; measured in docs/results.md.",
        model=ModelPart(name=model, image_size=32, drop_path=0.1, options={"patch_size": 4}),
        augment=AugmentPart(
            crop="pad",
            crop_padding=4,
            policy="randaugment",
            policy_magnitude=9,
            policy_magnitude_std=0.5,
            policy_layers=1,
            erasing=0.25,
            mixup=0.8,
            cutmix=1.0,
        ),
        objective=ObjectivePart(smoothing=0.1),
        optim=OptimPart(lr=2e-3, batch_size=1024, weight_decay=0.1, clip_norm=1.0, ema_decay=0.999),
        schedule=SchedulePart(epochs=160, warmup_epochs=8, min_lr=1e-5),
        test=EvaluationPart(crop_ratio=1.0),
    )
