"""ResMLP: DeiT with LAMB, and an old-fashioned ResNet recipe (NeurIPS submission 3.1, table 3)."""

from __future__ import annotations

from patchloom.recipes.deit import TEACHER, deit
from patchloom.recipes.parts import AugmentPart, ObjectivePart, OptimPart, SchedulePart
from patchloom.recipes.registry import based_on, recipe
from patchloom.recipes.schema import Recipe

# Stated by an author for S12 (facebookresearch/deit issue 106); the others keep the 0.1 of DeiT.
DROP_PATH = {"resmlp_s12": 0.05, "resmlp_s12_14": 0.05, "resmlp_s12_8": 0.05}


@recipe
def resmlp(model: str = "resmlp_s12") -> Recipe:
    """ImageNet-1k from scratch: S12 76.6, S24 79.4, B24 81.0 % top-1; two days on 8 V100 GPUs for most.

    LayerScale is initialized by depth, which the network knows. The learning rate is for a batch of 2048. Training ran
    in fp32: half precision (fp16) overflows.
    """
    return based_on(
        deit(model),
        source="ResMLP 3.1, table 3, rest as DeiT; batch, S12's drop path, fp32: issue 106; crop: code.",
        precision="fp32",
        model={"drop_path": DROP_PATH.get(model, 0.1), "drop_path_rule": "uniform"},
        optim={
            "name": "lamb",
            "lr": 5e-3,
            "lr_reference_batch": None,
            "batch_size": 2048,
            "weight_decay": 0.2,
        },
        schedule={"epochs": 400},
        test={"crop_ratio": 0.9},
    )


@recipe
def resmlp_distilled(model: str = "resmlp_s12") -> Recipe:
    """Hard distillation without a token: S12 77.8, S24 80.8, B24/8 83.6 %."""
    return based_on(
        resmlp(model),
        source="ResMLP 3.1 and table 3 (distillation): RegNetY-16GF as in DeiT, same schedule.",
        objective={"distillation": "hard", "distillation_weight": 0.5, "teacher": TEACHER},
    )


@recipe
def resmlp_21k(model: str = "resmlp_b24_8") -> Recipe:
    """Pre-training on ImageNet-21k: B24/8 84.4 % on ImageNet-1k once fine-tuned."""
    return based_on(
        resmlp(model),
        source="ResMLP table 3 (60 epochs on ImageNet-21k); nothing else is stated, so it is as `resmlp`.",
        schedule={"epochs": 60},
    )


@recipe
def resmlp_21k_to_1k(model: str = "resmlp_b24_8") -> Recipe:
    """From ImageNet-21k to ImageNet-1k at 224 pixels: B24/8 84.4 %."""
    return based_on(
        resmlp_21k(model),
        source="ResMLP table 3, which states nothing: lr, batch and epochs as PatchConvNet (thesis 5.2.3).",
        augment={"repeats": 1},
        optim={"lr": 5e-4, "batch_size": 1024},
        schedule={"epochs": 100},
    )


@recipe
def resmlp_old_fashioned(model: str = "resmlp_s12") -> Recipe:
    """A ResNet recipe of 2015: S12 69.2 %. Kept to measure the gain of a modern recipe (7.4 points)."""
    return based_on(
        resmlp(model),
        source="ResMLP table 3 (SGD, 90 epochs, waterfall); numbers of ResNet (He et al. 2016).",
        model={"drop_path": 0.0},
        augment=AugmentPart(),
        objective=ObjectivePart(),
        optim=OptimPart(name="sgd", lr=0.1, lr_reference_batch=256, batch_size=256, weight_decay=1e-4, momentum=0.9),
        schedule=SchedulePart(epochs=90, decay="step", step_epochs=(30, 60), step_factor=0.1),
    )
