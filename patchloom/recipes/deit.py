"""DeiT: data-efficient training of vision transformers, and distillation from a convnet (thesis chapter 3).

Most other recipes build on `deit`, as their papers do.
"""

from __future__ import annotations

from patchloom.recipes.parts import AugmentPart, EvaluationPart, ModelPart, ObjectivePart, OptimPart, SchedulePart
from patchloom.recipes.registry import based_on, recipe
from patchloom.recipes.schema import Recipe

# RegNetY-16GF trained by the authors with the recipe below, 82.9 % (thesis table 3.5).
TEACHER = "timm:regnety_160.deit_in1k"


@recipe
def deit(model: str = "deit_b") -> Recipe:
    """ImageNet-1k from scratch: Ti 72.2, S 79.8, B 81.8 % top-1. B took 53 hours on 8 V100 GPUs.

    From the authors' code, where the table gives no value: start and end of the learning rate, and stochastic
    depth that grows linearly with the layer.
    """
    return Recipe(
        name="deit",
        source="Thesis table 3.9, column DeiT-B; min_lr, warmup_lr and the linear drop path from the code.",
        model=ModelPart(name=model, drop_path=0.1, drop_path_rule="linear"),
        augment=AugmentPart(
            policy="randaugment",
            policy_magnitude=9,
            policy_magnitude_std=0.5,
            erasing=0.25,
            mixup=0.8,
            cutmix=1.0,
            repeats=3,
        ),
        objective=ObjectivePart(smoothing=0.1),
        optim=OptimPart(name="adamw", lr=5e-4, lr_reference_batch=512, batch_size=1024, weight_decay=0.05),
        schedule=SchedulePart(epochs=300, warmup_epochs=5, warmup_lr=1e-6, decay="cosine", min_lr=1e-5),
        test=EvaluationPart(crop_ratio=0.875),
    )


@recipe
def deit_distilled(model: str = "deit_b_distilled") -> Recipe:
    """Hard distillation through a token: Ti 74.5, S 81.2, B 83.4 %; with 1000 epochs 76.6, 82.6, 84.2 %."""
    return based_on(
        deit(model),
        source="Thesis 3.3 and table 3.5: label and teacher's decision count half each.",
        objective={"distillation": "hard", "distillation_weight": 0.5, "teacher": TEACHER},
    )


@recipe
def deit_two_tokens(model: str = "deit_b_distilled") -> Recipe:
    """The control of distillation: two class tokens with the same label converge to the same vector, without gain."""
    return based_on(
        deit(model), source="Thesis 3.3: two class tokens, no teacher.", objective={"distillation": "labels"}
    )


@recipe
def deit_soft_distilled(model: str = "deit_b") -> Recipe:
    """Soft distillation with the KL divergence: Ti 72.2, S 79.8, B 81.8 %, as without a teacher."""
    return based_on(
        deit(model),
        source="Thesis 3.4.5 and table 3.3: τ 3, λ 0.1. The code's defaults are τ 1 and 0.5.",
        objective={
            "distillation": "soft",
            "distillation_weight": 0.1,
            "temperature": 3.0,
            "teacher": TEACHER,
        },
    )


@recipe
def deit_finetune_384(model: str = "deit_b") -> Recipe:
    """From 224 to 384 pixels: B 83.1, B distilled 84.5 % (85.2 % after 1000 epochs of training).

    The network stays in evaluation mode, as in the authors' runs, so its stochastic depth is off. A distilled
    network keeps learning from the teacher.
    """
    trained = deit_distilled(model) if model.endswith("_distilled") else deit(model)
    return based_on(
        trained,
        source="Thesis 3.4.5: augmentation as in training, 25 epochs (code: 30); the rest from the code.",
        model={"image_size": 384, "eval_mode": True, "size_from": "recipe"},
        optim={"lr": 5e-6, "batch_size": 512, "weight_decay": 1e-8},
        schedule={"epochs": 25, "min_lr": 5e-6},
    )
