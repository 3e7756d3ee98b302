"""Feature distillation: learning the features of any other network from images without labels."""

from __future__ import annotations

from patchloom.recipes.deit import deit
from patchloom.recipes.parts import AugmentPart
from patchloom.recipes.registry import based_on, recipe
from patchloom.recipes.schema import Recipe


@recipe
def distill_features(model: str = "resmlp_s12") -> Recipe:
    """Any images without labels: learns the pooled features of --teacher, and those per position."""
    return based_on(
        deit(model),
        source="patchloom's own: mild augmentation and Mixup, so that the teacher sees likely images.",
        augment=AugmentPart(crop_min_scale=0.25, color_jitter=0.3, mixup=0.2, mix_probability=0.5),
        objective={"method": "distill_features", "smoothing": 0.0},
        optim={"lr": 1e-3, "lr_reference_batch": None, "batch_size": 256, "weight_decay": 0.05, "clip_norm": 1.0},
        schedule={"epochs": 100, "warmup_epochs": 5},
    )
